//! Counts the threads that NCCL would start too: those of background groups, and of jobs that run in parallel. Threads
//! that only the simulation needs (see `hub`) are not counted.

use crate::abi::Code;
use crate::fault::{Fault, Outcome};
use crate::report::report;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

static STARTED: AtomicU64 = AtomicU64::new(0);
static JOINED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static STARTED_HERE: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of threads started in calls of this thread.
pub(crate) fn started_here() -> u64 {
    STARTED_HERE.get()
}

/// Returns the number of threads started so far.
pub(crate) fn started() -> u64 {
    STARTED.load(Ordering::SeqCst)
}

/// Returns the number of threads that no call has joined yet.
pub(crate) fn unjoined() -> usize {
    started().saturating_sub(JOINED.load(Ordering::SeqCst)) as usize
}

pub(crate) struct Thread(JoinHandle<()>);

pub(crate) fn start(work: impl FnOnce() + Send + 'static) -> Outcome<Thread> {
    let refused = |error| Fault::new(Code::SYSTEM_ERROR, format!("a thread could not be started: {error}"));
    let handle = std::thread::Builder::new().spawn(work).map_err(refused)?;
    STARTED.fetch_add(1, Ordering::SeqCst);
    STARTED_HERE.set(STARTED_HERE.get() + 1);
    Ok(Thread(handle))
}

impl Thread {
    pub(crate) fn join(self) {
        if self.0.join().is_err() {
            report("the simulated NCCL failed: a thread panicked");
        }
        JOINED.fetch_add(1, Ordering::SeqCst);
    }
}
