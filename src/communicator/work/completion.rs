//! The end of a background call: its outcome, and the listeners that are notified.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use crate::base::event;
use crate::communicator::work::message::Received;
use crate::error::Result;

/// The state that a background call shares with its handle.
pub(in crate::communicator) struct State {
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

/// What a successful call leaves behind.
pub(in crate::communicator) struct Finished {
    /// The buffer that the call worked on.
    pub(in crate::communicator) buffer: Box<dyn Any + Send>,
    /// For a receive: what was received.
    pub(in crate::communicator) received: Option<Received>,
}

thread_local! {
    static IS_WAKING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is waking a task: some executors poll the task inside its waker.
pub(in crate::communicator) fn is_waking() -> bool {
    IS_WAKING.get()
}

/// Marks the thread as waking a task while this value lives; dropping it restores the earlier state.
struct Waking(bool);

impl Drop for Waking {
    fn drop(&mut self) {
        IS_WAKING.set(self.0);
    }
}

/// The listeners to notify when a call ends.
#[derive(Default)]
struct Listeners {
    /// The waker of the task that awaits the call: a future has one owner.
    task: Option<Waker>,
    /// The wakers of threads that wait for this call and others at once; each thread is listed once.
    threads: Vec<Waker>,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl Listeners {
    /// Notifies the listeners, outside of all locks.
    fn tell(self) {
        let Self { task, threads, callbacks } = self;
        threads.into_iter().for_each(Waker::wake);
        if let Some(waker) = task {
            event::tell("the waker of a task", move || {
                let _waking = Waking(IS_WAKING.replace(true));
                waker.wake();
            });
        }
        callbacks.into_iter().for_each(|callback| event::tell("a callback", callback));
    }
}

/// The state of a call's outcome.
enum Outcome {
    Pending(Listeners),
    Ended(Result<Finished>),
    Taken,
}

impl State {
    /// Makes a pending state.
    pub(in crate::communicator) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: Mutex::new(Outcome::Pending(Listeners::default())), ended: Condvar::new() })
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the call has ended.
    pub(in crate::communicator) fn has_ended(&self) -> bool {
        !matches!(*self.outcome(), Outcome::Pending(_))
    }

    /// Waits until the call ends, for at most `limit`.
    pub(in crate::communicator) fn wait_pending(&self, limit: Duration) {
        // A clock cannot be set arbitrarily far ahead, so one wait is one slice at most.
        let slice = limit.min(Duration::from_secs(3600));
        let outcome = self.outcome();
        drop(self.ended.wait_timeout_while(outcome, slice, |outcome| matches!(outcome, Outcome::Pending(_))));
    }

    /// Registers a thread to be woken at the end, by a waker of this crate. Does nothing if the call has ended.
    pub(in crate::communicator) fn wake_thread(&self, waker: &Waker) {
        if let Outcome::Pending(listeners) = &mut *self.outcome()
            && !listeners.threads.iter().any(|known| known.will_wake(waker))
        {
            listeners.threads.push(waker.clone());
        }
    }

    /// Registers a task to be woken at the end, in place of the previous one. Does nothing if the call has ended.
    pub(in crate::communicator) fn wake(&self, waker: &Waker) {
        // Cloned and dropped outside of the lock: both run the executor's code.
        let mut waker = Some(waker.clone());
        if let Outcome::Pending(listeners) = &mut *self.outcome() {
            std::mem::swap(&mut listeners.task, &mut waker);
        }
        event::caught("the destructor of a waker", || drop(waker));
    }

    /// Runs `callback` when the call ends, or now if it has ended.
    pub(in crate::communicator) fn on_end(&self, callback: Box<dyn FnOnce() + Send>) {
        if let Outcome::Pending(listeners) = &mut *self.outcome() {
            return listeners.callbacks.push(callback);
        }
        event::tell("a callback", callback);
    }

    /// Records the outcome and notifies the listeners; the first outcome wins.
    pub(in crate::communicator) fn end(&self, result: Result<Finished>) {
        let mut outcome = self.outcome();
        let listeners = match &mut *outcome {
            Outcome::Pending(listeners) => std::mem::take(listeners),
            Outcome::Ended(_) | Outcome::Taken => return,
        };
        *outcome = Outcome::Ended(result);
        self.ended.notify_all();
        drop(outcome);
        listeners.tell();
    }

    /// Takes the outcome. Returns `None` if it was taken before, or if the call has not ended.
    pub(in crate::communicator) fn take(&self) -> Option<Result<Finished>> {
        let mut outcome = self.outcome();
        match std::mem::replace(&mut *outcome, Outcome::Taken) {
            Outcome::Ended(result) => Some(result),
            Outcome::Taken => None,
            pending @ Outcome::Pending(_) => {
                *outcome = pending;
                None
            }
        }
    }
}
