//! Standard input from the launcher that started this one: one byte for each signal to pass on. End of input means that
//! it is gone.

use std::io::{self, Read};
use std::sync::mpsc::Sender;
use std::thread;

use super::event::Event;

/// Sends each signal to `events`, from a separate thread.
pub(super) fn listen(events: &Sender<Event>) -> io::Result<()> {
    let events = events.clone();
    thread::Builder::new().name("control".into()).spawn(move || {
        for signal in io::stdin().lock().bytes().map_while(Result::ok) {
            if events.send(Event::Signal(signal.into())).is_err() {
                return;
            }
        }
        let _ = events.send(Event::Orphaned);
    })?;
    Ok(())
}
