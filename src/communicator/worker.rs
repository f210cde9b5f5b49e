//! The thread that runs a communicator's started collectives.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::completion::{Finished, State};
use super::pinned::ErasedBuffer;
use super::state::Shared;
use super::thread;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::event;
use crate::host::abort_reason::AbortReason;
use crate::host::plane::{HostPlane, Jobs, op_panicked};
use crate::ticket_lock::Ticket;

/// How long a dropped communicator waits for calls that were started and not waited for.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A started call: what to run, what it owns, whom to tell.
pub(super) struct Started {
    pub(super) jobs: Jobs,
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
        let Self { jobs, buffers, state, timeout } = self;
        shared.recorder.take_up();
        let result = event::caught("a custom op", || plane.run_all(&jobs, &Deadline::after(timeout))).unwrap_or_else(|| Err(op_panicked()));
        event::caught("the drop of a custom op", || drop(jobs));
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
#[derive(Default)]
pub(super) struct Worker {
    thread: Mutex<Option<Thread>>,
}

/// A worker's thread.
struct Thread {
    jobs: Sender<(Ticket, Started)>,
    ended: Receiver<()>,
    handle: JoinHandle<()>,
}

impl Thread {
    fn spawn(shared: &Arc<Shared>) -> Result<Self> {
        let (jobs, queue) = channel::<(Ticket, Started)>();
        let (end, ended) = channel();
        let (shared, name) = (Arc::clone(shared), format!("collectives {}", shared.rank));
        let run = move || {
            for (ticket, started) in queue {
                // Each call before this one is bounded, so the wait for this one's turn is.
                // What is left is freed in the turn, too: a buffer whose drop calls this communicator is refused, and does not wait for
                // calls that only this thread can run.
                let _ = shared.plane.with_ticket(ticket, Duration::MAX, |plane| started.run(plane, &shared).free());
            }
            drop(end);
        };
        let handle = thread::spawn(name, "the worker thread of a communicator", run)?;
        Ok(Self { jobs, ended, handle })
    }
}

impl Worker {
    /// Gives a call its place in the order of calls, and hands it to the worker, which is started by the first one.
    pub(super) fn submit(&self, started: Started, shared: &Arc<Shared>) -> Result<()> {
        // Held until the call is in the queue: tickets stand there in their order.
        let mut thread = event::lock(&self.thread);
        if thread.is_none() {
            *thread = Some(Thread::spawn(shared)?);
        }
        let Some(thread) = &*thread else { return Err(gone()) };
        shared.recorder.queue(started.jobs.call());
        // From here to the queue nothing can unwind: a ticket that was drawn has to get there.
        if let Err(SendError((ticket, _))) = thread.jobs.send((shared.plane.draw(), started)) {
            // Cannot be while this lives: the thread ends when its queue is dropped, and catches panics.
            shared.plane.give_up(ticket);
            return Err(gone());
        }
        Ok(())
    }

    /// Waits a while for what was started, then ends the communicator, and the thread with it.
    pub(super) fn stop(&self, shared: &Shared) {
        let Some(Thread { jobs, ended, handle }) = event::lock(&self.thread).take() else { return };
        drop(jobs);
        if handle.thread().id() == std::thread::current().id() {
            // The last communicator was dropped on that very thread, by a custom op or with a buffer: it ends by itself when it has run
            // what is queued.
            return;
        }
        if ended.recv_timeout(DROP_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            shared.health.end(AbortReason::Aborted { by: shared.rank as u32 });
        }
        let _ = handle.join();
    }
}

/// What a call gets that no worker can run.
fn gone() -> Error {
    Error::argument("start", "the worker thread of this communicator is gone")
}
