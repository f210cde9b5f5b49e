//! A call that was started, as Python sees it.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use collectives::Error;
use pyo3::prelude::*;

use crate::completion;
use crate::error::exception;
use crate::group::UnderWay;

type Started = collectives::Work<Box<dyn Any + Send>>;

/// How long a wait goes on before it looks whether the user has asked for an end.
const SLICE: Duration = Duration::from_millis(200);

/// A call under way.
#[pyclass(frozen, module = "collectives_torch._core")]
pub(crate) struct Work {
    state: Mutex<State>,
}

enum State {
    Started(Started),
    /// The rank whose message came, for a receive.
    Done(Option<usize>),
    Failed(Error),
}

impl State {
    /// What became of a call. A receive gives its source.
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
    /// The handle of a started call, which keeps `owner` until it has ended, and is under way so long.
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

    /// Waits for the end for at most `limit`; whether it has come.
    fn wait_within(&self, limit: Duration) -> bool {
        let mut state = self.lock();
        let State::Started(started) = &mut *state else { return true };
        let ended = match started.wait_deadline(limit) {
            Ok(None) => return false,
            Ok(Some(given_back)) => Ok(given_back),
            Err(error) => Err(error),
        };
        *state = State::of(ended);
        true
    }

    /// Looks at the state, without Python's lock: somebody may be waiting with the state's.
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
    /// Waits for the end of the call, for so many seconds where a limit is given; whether it has come. Raises what the call met.
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

    /// Whether the call has ended, well or not.
    fn is_done(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => !matches!(&*state, State::Started(started) if !started.is_done()),
            // Somebody waits for it.
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Poisoned(_)) => true,
        }
    }

    /// The exception that the call ended with, where it has ended so.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        if self.is_done() {
            py.detach(|| self.wait_within(Duration::ZERO));
        }
        self.outcome(py).err()
    }

    /// The rank whose message a receive got.
    fn source(&self, py: Python<'_>) -> Option<usize> {
        self.look(py, |state| match state {
            State::Done(source) => *source,
            State::Started(_) | State::Failed(_) => None,
        })
    }

    /// Has `callback` called without arguments when the call has ended, on the one thread that does so.
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
