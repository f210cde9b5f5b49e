//! Runs checked calls: on this thread, on the worker, or on a device.

use std::sync::Arc;

use super::Communicator;
use super::completion::State;
#[cfg(feature = "cuda")]
use super::device::{Hold, Queued};
use super::pinned::PinnedBuffer;
use super::prepare::Prepared;
use super::work::{Turns, Work};
use super::worker::{Started, Worker};
use crate::deadline::Deadline;
use crate::error::Result;
use crate::host::health::forked;
use crate::host::plane::Job;

/// What a started call became.
enum Launched {
    Host(Job),
    #[cfg(feature = "cuda")]
    Device(Queued),
}

impl Communicator {
    /// Runs a checked call: on the host at once, on a device by queueing it. The call is taken as it was made, since moving it about would
    /// cost more than a flag between two cores.
    #[inline]
    pub(super) fn execute(&self, prepared: Result<Prepared<'_>>) -> Result<()> {
        if let Ok(Prepared::Host(job, _)) = &prepared {
            return self.run(job);
        }
        match prepared? {
            Prepared::Host(job, _) => self.run(&job),
            #[cfg(feature = "cuda")]
            Prepared::Device(call) => self.queue(call, Hold::Borrowed),
        }
    }

    /// Runs a checked job of the host plane on this thread, after the started ones.
    #[inline]
    pub(super) fn run(&self, job: &Job) -> Result<()> {
        let timeout = self.timeout();
        let entered = self.core.shared.plane.with(timeout, |plane| plane.run(job, &Deadline::lazily(timeout)));
        let result = entered.unwrap_or_else(|why| Err(self.no_turn(job.call.kind.name(), why)));
        result.inspect_err(|error| self.core.shared.after_failure(error))
    }

    /// Starts a call on buffers that it owns until it has ended: on the worker, or on the device.
    pub(super) fn start<B, P>(&self, buffers: B, prepare: P) -> Result<Work<B>>
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
        let state = State::new();
        let started = Started { job, buffers: Box::new(buffers), state: Arc::clone(&state), timeout: self.timeout() };
        self.core.worker.get_or_init(Worker::default).submit(started, &self.core.shared)?;
        let shared: Arc<dyn Turns> = Arc::clone(&self.core.shared) as Arc<dyn Turns>;
        Ok(Work::new(state, None).taking_turns(Arc::downgrade(&shared)))
    }
}
