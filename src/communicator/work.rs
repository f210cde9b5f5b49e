//! Handles of calls that go on in the background.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::message::Received;
use crate::Result;
use crate::deadline::Deadline;
use crate::fork::Process;
use crate::host::health::forked;

/// A call that was started and goes on in the background, with the buffer it works on.
///
/// [`Work::wait`] gives the buffer back; where the call failed, its error comes instead and the buffer is freed. Dropping the handle lets the call go on and frees the buffer when it has ended;
/// leaking it leaks the buffer and nothing worse.
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// let got = Communicator::run_local(2, |comm| {
///     let mut work = comm.start_all_reduce(vec![1u32; 64], ReduceOp::Sum)?;
///     while work.wait_deadline(std::time::Duration::from_millis(1))?.is_none() {
///         // … something else …
///     }
///     Ok(work.is_done())
/// })?;
/// assert_eq!(got, [true, true]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[must_use = "the call's outcome and its buffer come back through `wait`"]
pub struct Work<B> {
    state: Arc<State>,
    /// Takes the buffer out of its box.
    unpack: fn(Finished) -> Option<B>,
    /// For messages: what moves them on while someone waits. Collectives have a thread of their own.
    driver: Option<Arc<dyn Drive>>,
    /// Children of this process have nobody who moves the call on.
    process: Process,
}

/// How long a waiter leaves another thread to move messages on before it tries to do so itself.
const OTHERS_TURN: Duration = Duration::from_micros(50);

/// Moves background calls on from the thread that waits for them.
pub(super) trait Drive: Send + Sync {
    /// Moves what can move; where nothing can, waits for at most `limit`. `false` where another thread does so.
    fn drive(&self, limit: Duration) -> bool;

    /// Looks, without waiting, whether the call has ended where nobody else does; whether it has.
    fn poll(&self) -> bool {
        false
    }
}

/// What the background and the handle share.
pub(super) struct State {
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

/// What a call that went well leaves behind.
pub(super) struct Finished {
    /// The buffer it worked on.
    pub(super) buffer: Box<dyn Any + Send>,
    /// For a receive: what came.
    pub(super) received: Option<Received>,
}

/// How far it is.
enum Outcome {
    Pending,
    Ended(Result<Finished>),
    Taken,
}

impl State {
    /// Still pending.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: Mutex::new(Outcome::Pending), ended: Condvar::new() })
    }

    /// Waits for the end, for at most `limit`.
    fn wait_pending(&self, limit: Duration) {
        // A clock cannot be set arbitrarily far ahead: wait in slices.
        let slice = limit.min(Duration::from_secs(3600));
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.ended.wait_timeout_while(outcome, slice, |outcome| matches!(outcome, Outcome::Pending)));
    }

    /// Records how it ended and wakes who waits; the first outcome wins.
    pub(super) fn end(&self, result: Result<Finished>) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*outcome, Outcome::Pending) {
            *outcome = Outcome::Ended(result);
        }
        self.ended.notify_all();
    }
}

impl<B: Send + 'static> Work<B> {
    /// The handle of a call whose end is told to `state` with a boxed `B`.
    pub(super) fn new(state: Arc<State>, driver: Option<Arc<dyn Drive>>) -> Self {
        let unpack = |finished: Finished| finished.buffer.downcast::<B>().ok().map(|buffer| *buffer);
        Self { state, unpack, driver, process: Process::this() }
    }

    /// The handle of a receive into a `B`.
    pub(super) fn receiving(state: Arc<State>, driver: Option<Arc<dyn Drive>>) -> Work<(B, Received)> {
        let unpack = |finished: Finished| Some((*finished.buffer.downcast::<B>().ok()?, finished.received?));
        Work { state, unpack, driver, process: Process::this() }
    }

    /// Whether the call has ended, well or not. Never blocks. Always true in a forked child, where [`wait`](Self::wait) says why.
    #[must_use]
    pub fn is_done(&self) -> bool {
        if self.process.is_foreign() {
            return true;
        }
        if let Some(driver) = &self.driver {
            driver.poll();
        }
        !matches!(*self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner), Outcome::Pending)
    }

    /// Waits for the end of the call and gives the buffer back.
    ///
    /// # Errors
    ///
    /// Those of the call itself. The call is bounded by the communicator's timeout, so this is too. `Unsupported` in a forked child.
    pub fn wait(mut self) -> Result<B> {
        loop {
            if let Some(buffer) = self.wait_deadline(Duration::MAX)? {
                return Ok(buffer);
            }
        }
    }

    /// Waits for the end of the call for at most `limit`: the buffer, or `None` where it has not ended by then (the call goes on).
    ///
    /// # Errors
    ///
    /// Those of the call itself; `Unsupported` in a forked child, and `InvalidArgument` once the buffer has been given back.
    pub fn wait_deadline(&mut self, limit: Duration) -> Result<Option<B>> {
        if self.process.is_foreign() {
            // Nor is the lock touched: it may have been taken for good when this process was forked.
            return Err(forked("waiting for a started call".to_owned()));
        }
        let deadline = Deadline::after(limit);
        while !self.is_done() {
            let left = deadline.remaining();
            if left.is_zero() {
                return Ok(None);
            }
            match &self.driver {
                Some(driver) if driver.drive(left) => {}
                Some(_) => self.state.wait_pending(left.min(OTHERS_TURN)),
                None => self.state.wait_pending(left),
            }
        }
        let mut outcome = self.state.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *outcome, Outcome::Taken) {
            Outcome::Ended(result) => Ok((self.unpack)(result?)),
            Outcome::Pending | Outcome::Taken => {
                Err(crate::Error::argument("wait_deadline", "the buffer of this work has been given back already"))
            }
        }
    }
}

impl<B> Drop for Work<B> {
    fn drop(&mut self) {
        if self.process.is_foreign() {
            // Buffers and an event of a device would be freed by a driver that does not know this process.
            std::mem::forget((self.driver.take(), Arc::clone(&self.state)));
        }
    }
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// A buffer that a background call can own.
pub trait OwnedBuffer: crate::buffer::BufferMut + Send + 'static {}

impl<B: crate::buffer::BufferMut + Send + 'static> OwnedBuffer for B {}
