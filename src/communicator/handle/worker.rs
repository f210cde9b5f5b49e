//! The thread that runs a communicator's background collectives.

use std::cell::Cell;
use std::sync::mpsc::{SendError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::own_thread::{OwnThread, is_own};
use crate::base::ticket_lock::{NoTurn, Ticket};
use crate::base::tuning::own_thread::LAST;
use crate::communicator::handle::state::Shared;
use crate::communicator::work::Turns;
use crate::communicator::work::completion::{Finished, State};
use crate::communicator::work::pinned::ErasedBuffer;
use crate::communicator::work::thread;
use crate::error::{Error, Result};
use crate::host::abort_reason::AbortReason;
use crate::host::backend::{HostBackend, Jobs};

/// How long a dropped communicator waits for calls that were started and not waited for.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// The largest number of calls that one turn makes, each of which may take its full timeout. The collectives on objects
/// make this many.
const CALLS_OF_A_TURN: u32 = 4;

/// A background call: its jobs, its buffers, and the state that reports its end.
pub(in crate::communicator) struct Started {
    pub(in crate::communicator) jobs: Jobs,
    pub(in crate::communicator) buffers: Box<dyn ErasedBuffer>,
    pub(in crate::communicator) state: Arc<State>,
    pub(in crate::communicator) timeout: Duration,
}

/// The remains of a background call that has ended.
struct Left {
    /// The buffers of a call that failed.
    buffers: Option<Box<dyn ErasedBuffer>>,
    state: Arc<State>,
}

impl Started {
    /// Takes the call's turn, runs it there, and frees what remains.
    fn take_turn(self, ticket: Ticket, shared: &Shared) {
        // Only the program's code in a call can take longer: for example, an op that waits for a call started behind
        // it.
        let limit = shared.longest_timeout().saturating_mul(CALLS_OF_A_TURN);
        let limit = if shared.health.has_ended() { Duration::ZERO } else { limit };
        let mut started = Some(self);
        // Freeing happens in the turn, too. A buffer whose drop calls this communicator is then refused, instead of
        // waiting for calls that only this thread can run.
        let turn = shared.backend.with_ticket(ticket, limit, |backend| started.take().map(|started| started.run(backend, shared).free()));
        if let (Err(why), Some(started)) = (turn, started) {
            started.refuse(why, limit, shared).free();
        }
    }

    /// Ends the call with the error that its turn did not come, and ends the communicator. The call has a place in the
    /// order of all ranks, and the next call must not take that place.
    #[cold]
    fn refuse(self, why: NoTurn, limit: Duration, shared: &Shared) -> Left {
        let Self { jobs, buffers, state, .. } = self;
        shared.recorder.take_up();
        let refused = shared.health.refusal(|| jobs.call().name().to_owned(), &shared.peers);
        let error = refused.unwrap_or_else(|| {
            let error = shared.no_turn(jobs.call().name(), why, limit, || shared.under_way());
            let me = shared.rank as u32;
            shared.health.keep_cause(&error);
            shared.health.end(AbortReason::TimedOut { waiting: me, missing: me });
            error
        });
        event::caught("the destructor of a custom op", || drop(jobs));
        shared.after_failure(&error);
        state.end(Err(error));
        Left { buffers: Some(buffers), state }
    }

    /// Runs the call, and reports its end to the waiting threads. No code of the program can prevent that report.
    fn run(self, backend: &mut HostBackend, shared: &Shared) -> Left {
        let Self { jobs, buffers, state, timeout } = self;
        shared.recorder.take_up();
        let result = event::caught("a custom op", || backend.run_all(&jobs, &Deadline::after(timeout)))
            .unwrap_or_else(|| Err(Error::OpPanicked { call: jobs.name() }));
        event::caught("the destructor of a custom op", || drop(jobs));
        if let Err(error) = &result {
            shared.after_failure(error);
        }
        // Before the turn ends: a thread that waited for the turn then finds this call ended.
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
    /// Drops what no other owner holds. The drops may run the program's code. Panics are caught in each drop
    /// separately, because two panics at once end the process.
    fn free(self) {
        let Self { buffers, state } = self;
        event::caught("the destructor of a buffer", || drop(buffers));
        event::caught("the destructor of a buffer", || drop(state));
    }
}

thread_local! {
    /// The address of the state whose calls this worker thread runs; 0 on other threads.
    static SERVED: Cell<usize> = const { Cell::new(0) };
}

impl Turns for Shared {
    fn would_wait_for_itself(&self) -> bool {
        self.backend.is_inside() || SERVED.get() == std::ptr::from_ref(self).addr()
    }
}

/// The thread that runs background collectives, and the channel to it.
#[derive(Default)]
pub(in crate::communicator) struct Worker {
    thread: Mutex<Option<Thread>>,
}

/// A worker's thread.
struct Thread {
    jobs: Sender<(Ticket, Started)>,
    own: OwnThread,
}

impl Thread {
    fn spawn(shared: &Arc<Shared>) -> Result<Self> {
        let (jobs, queue) = channel::<(Ticket, Started)>();
        let (shared, name) = (Arc::clone(shared), format!("collectives {}", shared.rank));
        let own = thread::spawn(name, "the worker thread of a communicator", move || {
            SERVED.set(Arc::as_ptr(&shared).addr());
            queue.into_iter().for_each(|(ticket, started)| started.take_turn(ticket, &shared));
        })?;
        Ok(Self { jobs, own })
    }
}

impl Worker {
    /// Gives a call its place in the order of calls, and sends it to the worker, which the first call starts.
    pub(in crate::communicator) fn submit(&self, started: Started, shared: &Arc<Shared>) -> Result<()> {
        // Held until the call is in the queue, so that tickets are queued in their order.
        let mut held = event::lock(&self.thread);
        if held.is_none() {
            *held = Some(Thread::spawn(shared)?);
        }
        let Some(thread) = &*held else { return Err(gone()) };
        shared.recorder.queue(started.jobs.call());
        // From here to the queue nothing can unwind: a drawn ticket has to get there.
        let sent = thread.jobs.send((shared.backend.draw(), started));
        // The lock is released before a call that was not sent is dropped, because that drop may run the program's
        // code.
        drop(held);
        sent.map_err(|SendError((ticket, _))| {
            // Cannot happen while this lives: the thread ends when its queue is dropped, and catches panics.
            shared.backend.give_up(ticket);
            gone()
        })
    }

    /// Waits a while for background calls, then ends the communicator and its thread.
    pub(in crate::communicator) fn stop(&self, shared: &Shared) {
        let Some(Thread { jobs, own }) = event::lock(&self.thread).take() else { return };
        drop(jobs);
        // The drop may run inside a custom op, a buffer or a callback of this communicator or another one. Then the
        // thread ends by itself once it has run what is queued.
        if is_own() || own.wait(DROP_PATIENCE) {
            return;
        }
        shared.health.end(AbortReason::Aborted { by: shared.rank as u32 });
        if !own.wait(LAST) {
            event::warn!(
                rank = shared.rank,
                "a custom op or a callback of a background call has not returned: the thread that runs it is abandoned"
            );
        }
    }
}

/// Returns the error of a call that no worker can run.
fn gone() -> Error {
    let reason = std::io::Error::other("it has ended unexpectedly; please report this as a bug in collectives");
    Error::io("passing a call to the background thread of this communicator", reason)
}
