//! The thread that runs a communicator's started collectives.

#![expect(unsafe_code, reason = "the worker's side of the hand-off")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::pinned::ErasedBuffer;
use super::state::Shared;
use super::work::{Finished, State};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::event;
use crate::host::abort_reason::AbortReason;
use crate::host::plane::{HostPlane, Job, op_panicked};

/// How long a dropped communicator waits for calls that were started and not waited for.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A started call: what to run, what it owns, whom to tell.
pub(super) struct Started {
    pub(super) job: Job,
    pub(super) buffers: Box<dyn ErasedBuffer>,
    pub(super) state: Arc<State>,
    pub(super) timeout: Duration,
}

/// What is left of a started call that has ended.
struct Left {
    /// Of one that failed.
    buffers: Option<Box<dyn ErasedBuffer>>,
    state: Arc<State>,
}

impl Started {
    /// Runs it, and tells its end to whoever waits for it; nothing of the program's can keep that from being told.
    fn run(self, plane: &mut HostPlane, shared: &Shared) -> Left {
        let Self { job, buffers, state, timeout } = self;
        shared.recorder.take_up();
        let result = event::caught("a custom op", || plane.run(&job, &Deadline::after(timeout))).unwrap_or_else(|| Err(op_panicked()));
        event::caught("the drop of a custom op", || drop(job));
        if let Err(error) = &result {
            shared.after_failure(error);
        }
        // Before the caller gets the plane back: whoever waited for it finds this call ended.
        let buffers = match result {
            Ok(()) => {
                state.end(Ok(Finished { buffer: buffers.release(), received: None }));
                None
            }
            Err(error) => {
                state.end(Err(error));
                Some(buffers)
            }
        };
        Left { buffers, state }
    }
}

impl Left {
    /// Frees what nobody else holds: how a buffer is freed is the program's. Each by itself, as two panics at once end the process.
    fn free(self) {
        let Self { buffers, state } = self;
        event::caught("the drop of a buffer", || drop(buffers));
        event::caught("the drop of a buffer", || drop(state));
    }
}

/// The thread that runs started collectives, and the way to it.
pub(super) struct Worker {
    jobs: Sender<Started>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// Starts the thread.
    pub(super) fn spawn(shared: &Arc<Shared>) -> Result<Self> {
        let (jobs, queue) = channel::<Started>();
        let (end, ended) = channel();
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new()
            .name(format!("collectives {}", shared.rank))
            .spawn(move || {
                for started in queue {
                    // SAFETY: this is the one worker, since a communicator makes one and keeps it (`Communicator::start_job`, the only
                    // caller), and each job in the queue was counted in once, by `submit`, and comes out of it once.
                    let left = unsafe { shared.plane.as_worker(|plane: &mut HostPlane| started.run(plane, &shared)) };
                    left.free();
                }
                drop(end);
            })
            .map_err(|error| Error::io("starting the worker thread of a communicator", error))?;
        Ok(Self { jobs, ended, thread })
    }

    /// Hands a call and the buffers it points into to the worker.
    pub(super) fn submit(&self, started: Started, shared: &Shared) -> Result<()> {
        shared.recorder.queue(&started.job.call);
        // From here to the queue nothing can unwind: a job that is counted in has to get there.
        shared.plane.submit();
        if self.jobs.send(started).is_err() {
            // Cannot be while this lives: the thread ends when its queue is dropped, and catches panics.
            shared.plane.withdraw();
            return Err(Error::argument("start", "the worker thread of this communicator is gone"));
        }
        Ok(())
    }

    /// Waits a while for what was started, then ends the communicator, and the thread with it.
    pub(super) fn stop(self, shared: &Shared) {
        drop(self.jobs);
        if shared.plane.is_worker() {
            // Dropped by a custom op, on that very thread: it ends by itself when it has run what is queued.
            return;
        }
        if self.ended.recv_timeout(DROP_PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            shared.health.end(AbortReason::Aborted { by: shared.rank as u32 });
        }
        let _ = self.thread.join();
    }
}
