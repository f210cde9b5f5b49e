//! One NCCL communicator: made, used, split and ended without ever blocking for longer than a deadline.
//!
//! All calls into NCCL are made in the non-blocking way, under the lock of the device, for no longer than NCCL takes to answer; a call that is
//! still in progress is looked at again and again, and the lock is free between two looks. So ranks of one process never wait for each
//! other with a lock held, and whoever aborts finds a moment to.

#![expect(unsafe_code, reason = "NCCL is C")]

mod calls;
mod init;
mod lock;
mod state;
mod stream_tracker;
mod teardown;
#[cfg(test)]
mod tests;
mod watchdog_check;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use nccl_sys::{Library, Version, ncclComm_t};

pub(crate) use self::calls::{Part, grouped};
pub(crate) use self::init::{Setup, join, unique_id};
pub(in crate::device) use self::lock::BackOff;
use self::state::ABORT_PATIENCE;
pub(in crate::device) use self::state::Inner;
use crate::call::Call;
use crate::deadline::Deadline;
use crate::device::liveness::LivenessProbe;
use crate::device::nccl::{Raw, Refusal};
use crate::error::{Error, Result};
use crate::flight::Flight;

/// How long a communicator that is merely dropped may take to finish what was begun.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A communicator of NCCL. Any thread may use it; one call is made at a time.
///
/// An error other than a wrong argument ends it: it is aborted, so that work on streams which waits for other ranks returns, and all
/// later calls are refused with the first error as the cause.
#[derive(Debug)]
pub(crate) struct NcclComm {
    inner: Arc<Inner>,
}

impl NcclComm {
    pub(crate) fn rank(&self) -> usize {
        self.inner.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.inner.world_size
    }

    /// The library that it belongs to.
    pub(crate) fn library(&self) -> &'static Library {
        self.inner.library
    }

    /// The release of the library.
    pub(crate) fn version(&self) -> Version {
        self.inner.library.version()
    }

    /// The context in which it uses its device.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// NCCL's own handle; null once it has ended.
    pub(crate) fn handle(&self) -> ncclComm_t {
        self.inner.handle.load(Ordering::Acquire)
    }

    /// What later calls would give as the cause of their refusal; nothing where they would not be refused.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.inner.is_over().then(|| (*self.inner.cause()).clone())
    }

    /// Has the progress of calls recorded there.
    pub(crate) fn record_in(&self, flight: &Arc<Flight>) {
        self.inner.record_in(flight);
    }

    /// By what the recorder knows the stream of the last call.
    #[inline]
    pub(crate) fn last_tracker(&self) -> u8 {
        self.inner.last_tracker()
    }

    /// How many calls are on record.
    pub(in crate::device) fn calls_noted(&self) -> u64 {
        self.inner.flight().map_or(0, |flight| flight.device_calls_noted())
    }

    /// Notes that a stream has done what it was given of the first so many calls on record.
    pub(in crate::device) fn has_done(&self, stream: &CudaStream, noted: u64) {
        if let (Some(flight), Some(tracker)) = (self.inner.flight(), self.inner.known_tracker(stream)) {
            flight.device_has_done(tracker, noted);
        }
    }

    /// Sets the liveness probe, which knows more about the other ranks than NCCL does.
    pub(crate) fn set_liveness_probe(&self, liveness_probe: Arc<dyn LivenessProbe>) {
        self.inner.set_liveness_probe(liveness_probe);
    }

    /// Asks NCCL whether something went wrong in the background. Where it did, the communicator is ended, and this is why.
    pub(crate) fn async_error(&self) -> Option<Error> {
        self.inner.look();
        self.failure()
    }

    /// Remembers what is being done, for the watchdog's words, which it may have to find long after the call.
    #[inline]
    pub(crate) fn label(&self, call: &Call) {
        self.inner.label(call.fingerprint());
    }

    /// Waits for an event, which was recorded behind this communicator's work. A deadline that passes ends the communicator, so that the
    /// stream comes free.
    ///
    /// # Errors
    ///
    /// `Timeout` when the deadline passes; `Poisoned` when the communicator ends first; `Cuda`.
    pub(crate) fn wait(&self, event: &CudaEvent, deadline: &Deadline) -> Result<()> {
        let doing = || format!("waiting on the device for {}", self.inner.last_call());
        let mut back_off = lock::BackOff::default();
        loop {
            let complete = crate::device::driver::is_complete(event);
            match (complete, self.failure()) {
                (_, Some(_)) => return Err(self.inner.refuse(&doing)),
                (Ok(true), None) => return Ok(()),
                (Ok(false), None) if deadline.has_passed() => return Err(self.time_out(&doing, deadline)),
                (Ok(false), None) => back_off.rest(),
                (Err(error), None) => return Err(crate::device::driver::cuda_error(doing(), error)),
            }
        }
    }

    /// Ends the communicator because somebody's deadline passed, and says so.
    pub(crate) fn time_out(&self, doing: &dyn Fn() -> String, deadline: &Deadline) -> Error {
        self.inner.expire(doing, deadline.elapsed())
    }

    /// Ends the communicator because others count on what this rank has not queued.
    pub(crate) fn fail(&self, error: &Error) {
        self.inner.fail(error.clone(), ABORT_PATIENCE);
    }

    /// Waits until the device has done all calls that were made; `false` where the deadline passed first. A communicator that has ended
    /// has nothing to wait for.
    pub(in crate::device) fn quiesce(&self, deadline: &Deadline) -> std::result::Result<bool, DriverError> {
        self.inner.quiesce(deadline)
    }

    /// Makes a call that puts nothing on a stream, and waits for its end.
    pub(in crate::device) fn manage(
        &self,
        doing: &dyn Fn() -> String,
        deadline: &Deadline,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        let _gate = self.inner.enter(doing, deadline.remaining())?;
        self.inner.inside(doing, deadline.remaining(), work)?;
        self.inner.settled(doing, deadline)
    }

    pub(in crate::device) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if self.handle().is_null() {
            return;
        }
        let deadline = Deadline::after(DROP_PATIENCE);
        let healthy = !self.inner.is_ended() && matches!(self.quiesce(&deadline), Ok(true));
        if !(healthy && self.finalize(&deadline).is_ok()) {
            if !self.inner.is_ended() {
                crate::event::error!(
                    rank = self.rank(),
                    "dropped with calls that other ranks have not made: it is aborted, their results are worth nothing"
                );
            }
            self.abort();
        }
    }
}
