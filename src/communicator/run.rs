//! Runs checked calls: on this thread, on the worker thread, or on a device.

use std::sync::Arc;

use crate::base::deadline::Deadline;
use crate::call::Call;
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::device::Queued;
use crate::communicator::handle::worker::{Started, Worker};
#[cfg(feature = "cuda")]
use crate::communicator::prepare::device_call::Hold;
use crate::communicator::prepare::prepared::Prepared;
use crate::communicator::work::completion::State;
use crate::communicator::work::pinned::PinnedBuffer;
use crate::communicator::work::{Turns, Work};
use crate::error::Result;
use crate::host::backend::{HostBackend, Job, Jobs};
use crate::host::health::forked;

/// A background call: jobs for the worker, or a call queued on a device.
enum Launched {
    Host(Jobs),
    #[cfg(feature = "cuda")]
    Device(Queued),
}

impl Communicator {
    /// Runs a checked call at once on the host, or queues it on a device. The call is used in place, because moving it
    /// would cost more than passing a flag between two cores.
    #[inline]
    pub(super) fn execute(&self, mut prepared: Result<Prepared<'_>>) -> Result<()> {
        match &mut prepared {
            Ok(Prepared::Host(job, _)) => return self.run(job),
            #[cfg(feature = "cuda")]
            Ok(Prepared::Device(call)) => return self.queue(call, Hold::Borrowed),
            _ => {}
        }
        match prepared? {
            Prepared::Host(job, _) => self.run(&job),
            Prepared::HostMany(jobs, _) => self.run_all(&jobs),
            #[cfg(feature = "cuda")]
            Prepared::Device(mut call) => self.queue(&mut call, Hold::Borrowed),
            #[cfg(feature = "cuda")]
            Prepared::DeviceMany(calls) => self.queue_batch(calls.into(), Hold::Borrowed),
        }
    }

    /// Runs a checked job of the host backend on this thread, after the background calls.
    #[inline]
    pub(super) fn run(&self, job: &Job) -> Result<()> {
        self.in_turn(&job.call, |backend, deadline| backend.run(job, deadline))
    }

    /// Runs one call on several buffers on this thread, in one turn.
    #[inline(never)]
    pub(super) fn run_all(&self, jobs: &Jobs) -> Result<()> {
        self.in_turn(jobs.call(), |backend, deadline| backend.run_all(jobs, deadline))
    }

    #[inline(always)]
    fn in_turn(&self, call: &Call, run: impl FnOnce(&mut HostBackend, &Deadline) -> Result<()>) -> Result<()> {
        if self.core.shared.config.check_threads { self.in_checked_turn(call, run) } else { self.in_unchecked_turn(call, run) }
    }

    #[inline(always)]
    fn in_unchecked_turn(&self, call: &Call, run: impl FnOnce(&mut HostBackend, &Deadline) -> Result<()>) -> Result<()> {
        let timeout = self.timeout();
        let entered = self.core.shared.backend.with(timeout, |backend| run(backend, &Deadline::lazily(timeout)));
        let result = entered.unwrap_or_else(|why| Err(self.no_turn(call.name(), why)));
        result.inspect_err(|error| self.core.shared.after_failure(error))
    }

    /// Runs a call in its turn like [`Communicator::in_unchecked_turn`], and checks that no other thread is in a collective.
    #[inline(never)]
    fn in_checked_turn(&self, call: &Call, run: impl FnOnce(&mut HostBackend, &Deadline) -> Result<()>) -> Result<()> {
        let in_collective = self.in_collective(|| call.name())?;
        self.in_unchecked_turn(call, |backend, deadline| {
            // Ends before the turn passes on: the next thread is not in a collective at the same time.
            let _in_collective = in_collective;
            run(backend, deadline)
        })
    }

    /// Starts a call on the worker or on the device. The call owns its buffers until it has ended.
    pub(super) fn start<B, P>(&self, buffers: B, prepare: P) -> Result<Work<B>>
    where
        B: Send + 'static,
        P: for<'a> FnOnce(&'a mut B) -> Result<Prepared<'a>>,
    {
        let mut buffers = PinnedBuffer::new(buffers);
        let launched = match prepare(buffers.value())? {
            Prepared::Host(job, _) => Launched::Host(job.into()),
            Prepared::HostMany(jobs, _) => Launched::Host(jobs),
            #[cfg(feature = "cuda")]
            Prepared::Device(mut call) => Launched::Device(self.queue_and_mark(&mut call)?),
            #[cfg(feature = "cuda")]
            Prepared::DeviceMany(calls) => Launched::Device(self.queue_all_and_mark(calls)?),
        };
        match launched {
            Launched::Host(jobs) => self.start_jobs(jobs, buffers),
            #[cfg(feature = "cuda")]
            Launched::Device(queued) => Ok(queued.into_work(buffers)),
        }
    }

    /// Passes the jobs of one call, and the buffers that they point into, to the worker.
    fn start_jobs<B: Send + 'static>(&self, jobs: Jobs, buffers: PinnedBuffer<B>) -> Result<Work<B>> {
        if self.core.shared.health.is_foreign() {
            // The worker thread exists only in the parent process.
            return Err(forked(format!("starting {}", jobs.call())));
        }
        let state = State::new();
        let started = Started { jobs, buffers: Box::new(buffers), state: Arc::clone(&state), timeout: self.timeout() };
        self.core.worker.get_or_init(Worker::default).submit(started, &self.core.shared)?;
        let shared: Arc<dyn Turns> = Arc::clone(&self.core.shared) as Arc<dyn Turns>;
        Ok(Work::new(state, None).taking_turns(Arc::downgrade(&shared)))
    }
}
