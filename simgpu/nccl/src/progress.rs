//! A group that runs in the background, as of 2.23.4: on its own thread, which the first poll that sees its end joins.
//! Up to 2.26 the group lives in the local storage of the calling thread.

use crate::abi::Code;
use crate::fault::{Fault, Outcome};
use crate::report::{lock, report};
use crate::threads::{self, Thread};
use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

pub(crate) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
    thread: Mutex<Option<Thread>>,
}

struct State {
    /// The number of polls that still get the answer "in progress", in any case.
    polls: u32,
    abandoned: bool,
    outcome: Option<Outcome<()>>,
}

impl Progress {
    /// Begins work on its own thread.
    pub(crate) fn start(polls: u32, work: impl FnOnce(&Progress) -> Outcome<()> + Send + 'static) -> Outcome<Arc<Progress>> {
        let state = State { polls, abandoned: false, outcome: None };
        let progress = Arc::new(Progress { state: Mutex::new(state), changed: Condvar::new(), thread: Mutex::default() });
        let working = progress.clone();
        let run = move || {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(&working)));
            let outcome = caught.unwrap_or_else(|_| Err(Fault::new(Code::INTERNAL_ERROR, "a group panicked")));
            lock(&working.state).outcome = Some(outcome);
        };
        let mut thread = lock(&progress.thread);
        *thread = Some(threads::start(run)?);
        drop(thread);
        Ok(progress)
    }

    /// Waits until the number of polls that a test set is answered. Fails if the communicator is aborted in the
    /// meantime.
    pub(crate) fn await_polls(&self) -> Outcome<()> {
        let mut state = lock(&self.state);
        while state.polls > 0 && !state.abandoned {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.abandoned { Err(Fault::new(Code::INTERNAL_ERROR, "the communicator was aborted")) } else { Ok(()) }
    }

    /// Returns the group's outcome, if it has ended.
    pub(crate) fn poll(&self, counts: bool) -> Option<Outcome<()>> {
        let mut state = lock(&self.state);
        if state.polls == 0 {
            return state.outcome.clone();
        }
        state.polls -= u32::from(counts);
        self.changed.notify_all();
        None
    }

    /// Joins the thread, unless it is joined already.
    pub(crate) fn join(&self) {
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            thread.join();
        }
    }

    /// Ends its wait for polls, and joins it.
    pub(crate) fn abandon(&self) {
        lock(&self.state).abandoned = true;
        self.changed.notify_all();
        self.join();
    }

    fn is_joined(&self) -> bool {
        lock(&self.thread).is_none()
    }
}

/// The last background group in a thread's local storage.
struct Last(Weak<Progress>);

impl Last {
    fn is_alive(&self) -> bool {
        self.0.upgrade().is_some_and(|last| !last.is_joined())
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        if self.is_alive() {
            report("a thread ended before the group that it began was joined: up to 2.26 the group lives in that thread's local storage");
        }
    }
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Begins a group in the local storage of its thread, which is not allowed while the thread's last group is not
/// joined.
pub(crate) fn occupy_local_storage(progress: Option<&Arc<Progress>>) {
    LAST.with_borrow_mut(|last| {
        if last.as_ref().is_some_and(Last::is_alive) {
            report("a thread began a group before its last one was joined: up to 2.26 both live in one place of its local storage");
            // Its end needs no second report.
            std::mem::forget(last.take());
        }
        if let Some(progress) = progress {
            *last = Some(Last(Arc::downgrade(progress)));
        }
    });
}
