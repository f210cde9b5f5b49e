//! Ends a program whose output no process reads any more, as in `collperf … | head`. All its ranks end too, and no
//! messages are printed.

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
/// The exit code that shells report for a death by SIGPIPE.
const CODE: i32 = 128 + SIGPIPE;

/// Ends this process because no process reads its output any more. `is_rank` says whether this process is a rank that
/// writes to its launcher's standard output. Such a rank first asks the launcher to end all ranks immediately.
/// Otherwise the other ranks would report that this rank is lost.
pub fn end_unread(is_rank: bool) -> ! {
    if let Some(launcher) = getppid().filter(|_| is_rank) {
        // If the launcher is gone, the kernel kills this rank.
        let _ = kill_process(launcher, Signal::PIPE);
        // Not `park`: it returns at once if a wait in the library has left a token.
        thread::sleep(PATIENCE);
    }
    let _ = emulate_default_handler(SIGPIPE);
    exit(CODE)
}

/// Sends [`Event::Unread`] when a rank reports that its output is not read, from a separate thread.
pub(super) fn listen(events: &Sender<Event>) -> io::Result<()> {
    // Rust ignores this signal in every program, even if the parent did not.
    let (mut signals, events) = (Signals::new([SIGPIPE])?, events.clone());
    thread::Builder::new().name("broken pipe".into()).spawn(move || {
        if signals.forever().next().is_some() {
            let _ = events.send(Event::Unread);
        }
    })?;
    Ok(())
}
