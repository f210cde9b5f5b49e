//! Collectives that go on in the background, on one worker thread of the communicator, in the order in which they were started.

#![expect(unsafe_code, reason = "the worker's side of the hand-off")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::pinned::{ErasedBuffer, PinnedBuffer};
use super::prepare::{Prepared, Source};
use super::work::{Finished, OwnedBuffer, State, Work};
use super::{Communicator, Shared};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::event;
use crate::host::abort_reason::AbortReason;
use crate::host::health::forked;
use crate::host::plane::{HostPlane, Job, op_panicked};
use crate::op::Reduction;

/// How long a dropped communicator waits for calls that were started and not waited for.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A started call: what to run, what it owns, whom to tell.
struct Started {
    job: Job,
    buffers: Box<dyn ErasedBuffer>,
    state: Arc<State>,
    timeout: Duration,
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
        shared.health.flight().take_up();
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
    fn spawn(shared: &Arc<Shared>) -> Result<Self> {
        let (jobs, queue) = channel::<Started>();
        let (end, ended) = channel();
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new()
            .name(format!("collectives {}", shared.rank))
            .spawn(move || {
                for started in queue {
                    // SAFETY: this is the one worker, since `start_job` makes one for a communicator and keeps it, and each job in the queue
                    // was submitted once, by `start_job`, and comes out of it once.
                    let left = unsafe { shared.plane.as_worker(|plane: &mut HostPlane| started.run(plane, &shared)) };
                    left.free();
                }
                drop(end);
            })
            .map_err(|error| Error::io("starting the worker thread of a communicator", error))?;
        Ok(Self { jobs, ended, thread })
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

/// What a started call became.
enum Launched {
    Host(Job),
    #[cfg(feature = "cuda")]
    Device(super::device::Queued),
}

impl Communicator {
    /// Starts a call on buffers that it owns until it has ended: on the worker, or on the device.
    fn start<B, P>(&self, buffers: B, prepare: P) -> Result<Work<B>>
    where
        B: Send + 'static,
        P: for<'a> FnOnce(&'a mut B) -> Result<Prepared<'a>>,
    {
        let mut buffers = PinnedBuffer::new(buffers);
        let launched = match prepare(buffers.value())? {
            Prepared::Host(job, _) => Launched::Host(job),
            #[cfg(feature = "cuda")]
            Prepared::Device(call) => Launched::Device(self.queue_and_mark(call)?),
        };
        match launched {
            Launched::Host(job) => self.start_job(job, buffers),
            #[cfg(feature = "cuda")]
            Launched::Device(queued) => Ok(queued.into_work(buffers)),
        }
    }

    /// Hands a job and the buffers it points into to the worker.
    fn start_job<B: Send + 'static>(&self, job: Job, buffers: PinnedBuffer<B>) -> Result<Work<B>> {
        if self.core.shared.health.is_foreign() {
            // The worker is the parent's.
            return Err(forked(format!("starting {}", job.call)));
        }
        let worker = match self.core.worker.get() {
            Some(worker) => worker,
            None => {
                let worker = Worker::spawn(&self.core.shared)?;
                self.core.worker.get_or_init(|| worker)
            }
        };
        let state = State::new();
        let started = Started { job, buffers: Box::new(buffers), state: Arc::clone(&state), timeout: self.timeout() };
        self.core.shared.health.flight().queue(&started.job.call);
        // From here to the queue nothing can unwind: a job that is counted in has to get there.
        self.core.shared.plane.submit();
        if worker.jobs.send(started).is_err() {
            // Cannot be while `self.core.worker` lives: the thread ends when its queue is dropped, and catches panics.
            self.core.shared.plane.withdraw();
            return Err(Error::argument("start", "the worker thread of this communicator is gone"));
        }
        Ok(Work::new(state, None))
    }
}

/// # Started collectives
///
/// Each takes its buffers, returns at once, and gives them back through the [`Work`]. Started calls run one after another in
/// the order in which they were started, on every rank; a blocking collective waits for them first. Arguments are checked
/// before anything is started.
///
/// ```
/// # use collectives::{Communicator, ReduceOp};
/// let results = Communicator::run_local(2, |comm| {
///     let first = comm.start_all_reduce(vec![1.0f32; 1000], ReduceOp::Sum)?;
///     let second = comm.start_broadcast(vec![comm.rank() as u8], 1)?;
///     // … compute …
///     Ok((first.wait()?[0], second.wait()?[0]))
/// })?;
/// assert_eq!(results, [(2.0, 1); 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
impl Communicator {
    /// Starts an [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let got = Communicator::run_local(2, |comm| {
    ///     let work = comm.start_all_reduce(vec![1.0f32; 1000], ReduceOp::Sum)?;
    ///     // … something else …
    ///     let gradient = work.wait()?;
    ///     Ok(gradient[999])
    /// })?;
    /// assert_eq!(got, [2.0, 2.0]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported` here; the rest through the [`Work`].
    pub fn start_all_reduce<B: OwnedBuffer>(&self, buffer: B, op: impl Into<Reduction<B::Element>>) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_reduce(Source::InPlace, buffer.memory_mut(), &op.into()))
    }

    /// Starts a [`reduce`](Self::reduce).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported` here; the rest through the [`Work`].
    pub fn start_reduce<B: OwnedBuffer>(&self, buffer: B, root: usize, op: impl Into<Reduction<B::Element>>) -> Result<Work<B>> {
        let op = op.into();
        self.start(buffer, |buffer| {
            let buffer = buffer.memory_mut();
            let count = buffer.len();
            self.prepare_reduce(Source::InPlace, Some(buffer), count, root, &op)
        })
    }

    /// Starts a [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` here; the rest through the [`Work`].
    pub fn start_broadcast<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        let source = if self.rank() == root { Source::InPlace } else { Source::Nothing };
        self.start(buffer, |buffer| self.prepare_broadcast(source, buffer.memory_mut(), root))
    }

    /// Starts an [`all_gather`](Self::all_gather), in place.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` here; the rest through the [`Work`].
    pub fn start_all_gather<B: OwnedBuffer>(&self, buffer: B) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_gather(None, buffer.memory_mut()))
    }

    /// Starts an [`all_gather_into`](Self::all_gather_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` here; the rest through the [`Work`].
    pub fn start_all_gather_into<S, D>(&self, source: S, destination: D) -> Result<Work<(S, D)>>
    where
        S: OwnedBuffer,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| self.prepare_all_gather(Some(source.memory()), destination.memory_mut()))
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter), in place.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported` here; the rest through the [`Work`].
    pub fn start_reduce_scatter<B: OwnedBuffer>(&self, buffer: B, op: impl Into<Reduction<B::Element>>) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_reduce_scatter(None, buffer.memory_mut(), &op.into()))
    }

    /// Starts a [`reduce_scatter_into`](Self::reduce_scatter_into).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` and `Unsupported` here; the rest through the [`Work`].
    pub fn start_reduce_scatter_into<S, D>(&self, source: S, destination: D, op: impl Into<Reduction<S::Element>>) -> Result<Work<(S, D)>>
    where
        S: OwnedBuffer,
        D: OwnedBuffer<Element = S::Element>,
    {
        self.start((source, destination), |(source, destination)| {
            self.prepare_reduce_scatter(Some(source.memory()), destination.memory_mut(), &op.into())
        })
    }

    /// Starts an [`all_to_all`](Self::all_to_all), in place.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` here; the rest through the [`Work`].
    pub fn start_all_to_all<B: OwnedBuffer>(&self, buffer: B) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_all_to_all(Source::InPlace, buffer.memory_mut()))
    }

    /// Starts a [`gather_in_place`](Self::gather_in_place).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` here; the rest through the [`Work`].
    pub fn start_gather<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_gather_in_place(buffer, root))
    }

    /// Starts a [`scatter_in_place`](Self::scatter_in_place).
    ///
    /// # Errors
    ///
    /// `InvalidArgument` here; the rest through the [`Work`].
    pub fn start_scatter<B: OwnedBuffer>(&self, buffer: B, root: usize) -> Result<Work<B>> {
        self.start(buffer, |buffer| self.prepare_scatter_in_place(buffer.memory_mut(), root))
    }

    /// Starts a [`barrier`](Self::barrier).
    ///
    /// # Errors
    ///
    /// Those of the barrier come through the [`Work`].
    pub fn start_barrier(&self) -> Result<Work<()>> {
        self.start((), |()| self.prepare_barrier())
    }
}
