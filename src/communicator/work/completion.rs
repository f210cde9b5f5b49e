//! How a call that goes on in the background ends: what it leaves, and who is told.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use crate::base::event;
use crate::communicator::work::message::Received;
use crate::error::Result;

/// What the background and the handle share.
pub(in crate::communicator) struct State {
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

/// What a call that went well leaves behind.
pub(in crate::communicator) struct Finished {
    /// The buffer it worked on.
    pub(in crate::communicator) buffer: Box<dyn Any + Send>,
    /// For a receive: what came.
    pub(in crate::communicator) received: Option<Received>,
}

thread_local! {
    static IS_WAKING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is waking a task at the moment: some executors poll it there.
pub(in crate::communicator) fn is_waking() -> bool {
    IS_WAKING.get()
}

/// As long as it lives the thread is waking a task; then it is as before.
struct Waking(bool);

impl Drop for Waking {
    fn drop(&mut self) {
        IS_WAKING.set(self.0);
    }
}

/// Whoever is to be told of the end.
#[derive(Default)]
struct Listeners {
    /// Of the task that awaits it: a future has one owner.
    task: Option<Waker>,
    /// Of threads that wait for it among others, each once.
    threads: Vec<Waker>,
    callbacks: Vec<Box<dyn FnOnce() + Send>>,
}

impl Listeners {
    /// Tells them, outside of all locks.
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

/// How far it is.
enum Outcome {
    Pending(Listeners),
    Ended(Result<Finished>),
    Taken,
}

impl State {
    /// Still pending.
    pub(in crate::communicator) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: Mutex::new(Outcome::Pending(Listeners::default())), ended: Condvar::new() })
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has ended.
    pub(in crate::communicator) fn has_ended(&self) -> bool {
        !matches!(*self.outcome(), Outcome::Pending(_))
    }

    /// Waits for the end, for at most `limit`.
    pub(in crate::communicator) fn wait_pending(&self, limit: Duration) {
        // A clock cannot be set arbitrarily far ahead: wait in slices.
        let slice = limit.min(Duration::from_secs(3600));
        let outcome = self.outcome();
        drop(self.ended.wait_timeout_while(outcome, slice, |outcome| matches!(outcome, Outcome::Pending(_))));
    }

    /// Has a thread woken at the end, by a waker of this crate's. Nobody, where it has ended.
    pub(in crate::communicator) fn wake_thread(&self, waker: &Waker) {
        if let Outcome::Pending(listeners) = &mut *self.outcome()
            && !listeners.threads.iter().any(|known| known.will_wake(waker))
        {
            listeners.threads.push(waker.clone());
        }
    }

    /// Has a task woken at the end, in place of the one before. Nobody, where it has ended.
    pub(in crate::communicator) fn wake(&self, waker: &Waker) {
        // Cloned and dropped outside of the lock: both are the executor's code.
        let mut waker = Some(waker.clone());
        if let Outcome::Pending(listeners) = &mut *self.outcome() {
            std::mem::swap(&mut listeners.task, &mut waker);
        }
        event::caught("the drop of a waker", || drop(waker));
    }

    /// Has somebody called at the end, or now where it has ended.
    pub(in crate::communicator) fn on_end(&self, callback: Box<dyn FnOnce() + Send>) {
        if let Outcome::Pending(listeners) = &mut *self.outcome() {
            return listeners.callbacks.push(callback);
        }
        event::tell("a callback", callback);
    }

    /// Records how it ended and tells who waits; the first outcome wins.
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

    /// Takes how it ended; `None` where that was taken before, or it has not.
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
