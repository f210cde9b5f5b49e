//! Tells Python of the ends of calls: one thread for all of them, whatever their number.
//!
//! A call ends on a thread of the communicator's, which must not wait: neither for Python's lock, which a long computation may hold, nor for what a
//! callback of the program does. So ends are handed to this thread. Where the interpreter is ending, or in a forked child, nobody is told any more.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

/// What is done at the end of a call, with Python's lock.
type Finish = Box<dyn FnOnce(Python<'_>) + Send>;

struct Teller {
    process: u32,
    sender: Sender<Finish>,
}

static TELLER: Mutex<Option<Teller>> = Mutex::new(None);

/// Has `finish` run soon, on the one thread that does so. Where none can be started, it is dropped.
pub(crate) fn tell(finish: Finish) {
    let mut teller = TELLER.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    let known = teller.take().filter(|known| known.process == process);
    *teller = known.or_else(|| start(process));
    if let Some(teller) = &*teller
        && let Err(unsent) = teller.sender.send(finish)
    {
        // It holds references that only somebody with Python's lock may let go.
        std::mem::forget(unsent.0);
    }
}

fn start(process: u32) -> Option<Teller> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("collectives-torch".to_owned());
    thread.spawn(move || run(&receiver)).ok()?;
    Some(Teller { process, sender })
}

fn run(receiver: &Receiver<Finish>) {
    while let Ok(first) = receiver.recv() {
        let mut first = Some(first);
        // What has come meanwhile is told under the same lock.
        let told = Python::try_attach(|py| {
            let waiting = first.take().into_iter().chain(receiver.try_iter().take(64));
            waiting.for_each(|finish| finish(py));
        });
        if told.is_none() {
            // The interpreter is ending: references to its objects cannot be let go any more.
            std::mem::forget(first);
            return;
        }
    }
}
