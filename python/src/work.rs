//! Background calls, as Python sees them.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use collectives::Error;
use pyo3::prelude::*;

use crate::completion;
use crate::error::exception;
use crate::group::UnderWay;

type Started = collectives::Work<Box<dyn Any + Send>>;

/// How long a wait lasts before it checks for signals, such as an interrupt by the user.
const SLICE: Duration = Duration::from_millis(200);

/// A background call.
#[pyclass(frozen, module = "collectives_torch._core")]
pub(crate) struct Work {
    state: Mutex<State>,
}

enum State {
    Started(Started),
    /// The call is done. If the call was a receive, the value is the rank that sent the message.
    Done(Option<usize>),
    Failed(Error),
}

impl State {
    /// Returns the state of an ended call, with the source of a receive.
    fn of(ended: Result<Box<dyn Any + Send>, Error>) -> Self {
        match ended {
            Ok(given_back) => {
                Self::Done(given_back.downcast_ref::<(crate::buffer::Buffer, collectives::Received)>().map(|(_, received)| received.source))
            }
            Err(error) => Self::Failed(error),
        }
    }
}

impl Work {
    /// Wraps a background call, which keeps `owner` and counts as running until it ends.
    pub(crate) fn new(started: Started, owner: Py<PyAny>, under_way: UnderWay) -> Self {
        started.on_end(move || {
            drop(under_way);
            completion::tell(Box::new(move |py| owner.drop_ref(py)));
        });
        Self { state: Mutex::new(State::Started(started)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits at most `limit` for the end of the call, and returns whether it has ended.
    fn wait_within(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        let State::Started(started) = &mut *state else { return true };
        let ended = match started.wait_timeout(limit) {
            Ok(None) => return false,
            Ok(Some(given_back)) => Ok(given_back),
            Err(error) => Err(error),
        };
        *state = State::of(ended);
        true
    }

    /// Reads the state without Python's lock, because a waiting thread may hold the state's lock.
    fn look<R: Send>(&self, py: Python<'_>, look: impl FnOnce(&State) -> R + Send) -> R {
        py.detach(|| look(&self.lock()))
    }

    fn outcome(&self, py: Python<'_>) -> PyResult<()> {
        let failed = self.look(py, |state| match state {
            State::Failed(error) => Some(error.clone()),
            State::Started(_) | State::Done(_) => None,
        });
        failed.map_or(Ok(()), |error| Err(exception(py, &error)))
    }
}

#[pymethods]
impl Work {
    /// Waits for the call's end, at most `seconds` if given. Returns whether it has ended; raises its error.
    #[pyo3(signature = (seconds = None))]
    fn wait(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        let limit = seconds.map_or(Duration::MAX, |seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
        let began = Instant::now();
        loop {
            let left = limit.saturating_sub(began.elapsed());
            if py.detach(|| self.wait_within(left.min(SLICE))) {
                return self.outcome(py).map(|()| true);
            }
            if left <= SLICE && limit.saturating_sub(began.elapsed()).is_zero() {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// Returns whether the call has ended, with or without an error.
    fn is_done(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => !matches!(&*state, State::Started(started) if !started.is_done()),
            // Another thread is waiting for the call.
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Poisoned(_)) => true,
        }
    }

    /// Returns the exception that the call ended with, if any.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        if self.is_done() {
            py.detach(|| self.wait_within(Duration::ZERO));
        }
        self.outcome(py).err()
    }

    /// Returns the rank whose message a receive got.
    fn source(&self, py: Python<'_>) -> Option<usize> {
        self.look(py, |state| match state {
            State::Done(source) => *source,
            State::Started(_) | State::Failed(_) => None,
        })
    }

    /// Calls `callback` without arguments when the call has ended, on the notification thread.
    fn on_end(&self, py: Python<'_>, callback: Py<PyAny>) {
        let tell = move || {
            completion::tell(Box::new(move |py| {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            }));
        };
        self.look(py, |state| match state {
            State::Started(started) => started.on_end(tell),
            State::Done(_) | State::Failed(_) => tell(),
        });
    }
}
