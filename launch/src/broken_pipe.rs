//! The end of a program whose output nobody reads any more, as of `collperf … | head`: quiet, and with all its ranks.

use std::io;
use std::process::exit;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getppid, kill_process};
use signal_hook::consts::SIGPIPE;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::event::Event;

/// How long a rank waits for its launcher to end it.
const PATIENCE: Duration = Duration::from_secs(5);
/// As shells number a death of SIGPIPE.
const CODE: i32 = 128 + SIGPIPE;

/// Ends this process, since nobody reads what it writes. A rank that writes to its launcher's standard output (`is_rank`) has the launcher end all
/// ranks at once: those that lost it would complain.
pub fn end_unread(is_rank: bool) -> ! {
    if let Some(launcher) = getppid().filter(|_| is_rank) {
        // A launcher that is gone takes this rank along.
        let _ = kill_process(launcher, Signal::PIPE);
        // No park: it ends at once where a wait of the library has left its token.
        thread::sleep(PATIENCE);
    }
    let _ = emulate_default_handler(SIGPIPE);
    exit(CODE)
}

/// Sends it to `events` when a rank finds that nobody reads, from a thread of its own.
pub(super) fn listen(events: &Sender<Event>) -> io::Result<()> {
    // The signal is ignored in every program of Rust's, whoever started it.
    let (mut signals, events) = (Signals::new([SIGPIPE])?, events.clone());
    thread::Builder::new().name("broken pipe".into()).spawn(move || {
        if signals.forever().next().is_some() {
            let _ = events.send(Event::Unread);
        }
    })?;
    Ok(())
}
