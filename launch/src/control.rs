//! What the launcher that started this one says on standard input: signals to pass on, a byte each. The end of it means that it is gone.

use std::io::{self, Read};
use std::sync::mpsc::Sender;
use std::thread;

use super::event::Event;

/// Sends what is said to `events`, from a thread of its own.
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
