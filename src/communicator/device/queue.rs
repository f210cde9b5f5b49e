//! Queues checked calls: the steps before every call on the device, and the obligations of a rank once others rely on
//! its calls.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed, or owned by a work, are handed to the device backend")]

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream};

use super::headers::awaited_header;
use super::started::Queued;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::ticket_lock::{NoTurn, Turn};
use crate::communicator::Communicator;
use crate::communicator::prepare::device_call::{DeviceCall, Guards, Hold, ordered};
use crate::device::{self, DeviceBackend};
use crate::error::{Error, Result};
use crate::flight;
use crate::host::abort_reason::AbortReason;
use crate::host::backend::HostBackend;
use crate::host::health::forked;
use crate::observe::{Moved, Track};

/// The most bytes of an error that a rank sends to the others: a compiler's error can be long.
const LONGEST_REASON: usize = 4096;

/// Ensures that calls on which other ranks rely are queued. If they are not, for whatever reason, the device
/// backend ends: NCCL would match the others' calls with later ones of this rank, perhaps of other lengths.
pub(super) struct CommitGuard<'a> {
    backend: &'a DeviceBackend,
    /// Whether other ranks were notified of these calls by headers; otherwise all ranks have compared them.
    has_told: bool,
    is_kept: bool,
}

impl<'a> CommitGuard<'a> {
    /// Makes the guard. `is_captured` says whether the others were notified of a capture, if they were notified at all.
    pub(super) fn new(backend: &'a DeviceBackend, has_told: bool, is_captured: Option<bool>) -> Self {
        backend.comm().announce_capture(is_captured);
        Self { backend, has_told, is_kept: false }
    }

    /// Takes the outcome of queueing. If calls were compared, a refusal before anything is queued happens on every
    /// rank, because all made the same call.
    pub(super) fn settle(mut self, queued: &Result<()>) {
        self.is_kept = true;
        let everywhere = |error: &Error| !self.has_told && matches!(error, Error::InvalidArgument { .. } | Error::Unsupported { .. });
        if let Err(error) = queued
            && !everywhere(error)
        {
            self.backend.comm().fail(error);
        }
    }
}

impl Drop for CommitGuard<'_> {
    fn drop(&mut self) {
        self.backend.comm().announce_capture(None);
        if !self.is_kept {
            self.backend.comm().abort();
        }
    }
}

impl Communicator {
    /// Returns the device backend.
    pub(in crate::communicator) fn backend(&self, call: &str) -> Result<&DeviceBackend> {
        match self.core.device.get() {
            Some(Ok(device)) => Ok(device.backend()),
            Some(Err(reason)) => Err(Error::NoDevice { call: call.to_owned(), reason: reason.clone() }),
            None => {
                let reason = "none was requested: create the communicator with Communicator::builder().device(…)".to_owned();
                Err(Error::NoDevice { call: call.to_owned(), reason })
            }
        }
    }

    /// Takes a turn at the device backend, if there is one. Inside a call on the host the turn is refused: the thread
    /// that holds it may wait for that call.
    pub(in crate::communicator) fn device_turn(&self, call: &'static str) -> Result<Option<Turn<'_, ()>>> {
        let Some(Ok(device)) = self.core.device.get() else { return Ok(None) };
        if self.core.shared.backend.is_used_here() {
            return Err(self.no_turn(call, NoTurn::Inside));
        }
        let shared = &self.core.shared;
        let entered = device.backend().enter_call(self.timeout()).map(Some);
        entered.map_err(|why| self.no_turn_behind(call, why, || awaited_header(shared).or_else(|| shared.under_way())))
    }

    /// Refuses a call in a forked child, because the CUDA driver does not work there. Other crates that use the device
    /// can call this method before they use the driver.
    ///
    /// # Errors
    ///
    /// `Unsupported` in a forked child.
    pub fn refuse_forked(&self, call: &str) -> Result<()> {
        if self.core.shared.health.is_foreign() { Err(forked(call.to_owned())) } else { Ok(()) }
    }

    /// Returns the stream that device calls are queued on.
    pub(super) fn device_stream<'a>(&'a self, backend: &'a DeviceBackend) -> &'a Arc<CudaStream> {
        self.stream.as_ref().unwrap_or_else(|| backend.stream())
    }

    /// Refuses a buffer or a stream of a device other than the backend's.
    pub(super) fn same_device(backend: &DeviceBackend, call: &'static str, what: &str, context: &Arc<CudaContext>) -> Result<()> {
        let own = &backend.gpu().context;
        if Arc::ptr_eq(own, context) || own.cu_ctx() == context.cu_ctx() {
            return Ok(());
        }
        let reason = match (own.ordinal(), context.ordinal()) {
            (own, other) if own == other => {
                format!("{what} belongs to another context of device {own}: use the primary context, which CudaContext::new returns")
            }
            (own, other) => format!("{what} is on device {other}, but this communicator is on device {own}"),
        };
        Err(Error::argument(call, reason))
    }

    /// Refuses a stream of another device.
    pub(super) fn check_stream(&self, backend: &DeviceBackend, call: &'static str) -> Result<()> {
        self.stream.as_ref().map_or(Ok(()), |stream| Self::same_device(backend, call, "the stream", stream.context()))
    }

    /// Checks everything that can be checked before a call is queued.
    pub(super) fn check_call(&self, backend: &DeviceBackend, call: &DeviceCall<'_>) -> Result<()> {
        let kind = call.job.call.kind;
        self.check_stream(backend, kind.name())?;
        for (what, context) in call.contexts() {
            Self::same_device(backend, kind.name(), what, context)?;
        }
        let shared = &self.core.shared;
        if let Some(refusal) = shared.health.refusal(|| call.job.call.to_string(), &shared.peers) {
            return Err(refusal);
        }
        Ok(())
    }

    /// Makes the ranks agree, over the host backend, before the calls of a batch are queued. Does nothing unless calls
    /// are to be compared, or a custom kernel is used for the first time. If calls were compared, returns whether they
    /// are captured, as this rank reported to the others.
    pub(super) fn agree_on_calls<'a>(
        &self,
        backend: &DeviceBackend,
        jobs: impl Iterator<Item = &'a device::Job> + Clone,
    ) -> Result<Option<bool>> {
        if self.compared(jobs.clone()).is_none() && !jobs.clone().any(|job| backend.first_use(job).is_any()) {
            return Ok(None);
        }
        // Several collectives: no other thread's call comes in between.
        self.composite("comparing calls on devices", || {
            let is_captured = self.compare(backend, jobs.clone())?;
            jobs.into_iter().try_for_each(|job| self.prepare_kernel(backend, job))?;
            Ok(is_captured)
        })
    }

    /// Loads the custom kernel that a job needs, and allocates memory for it, at the first use.
    fn prepare_kernel(&self, backend: &DeviceBackend, job: &device::Job) -> Result<()> {
        let first_use = backend.first_use(job);
        if !first_use.is_any() {
            return Ok(());
        }
        // A rank that cannot load the kernel must not leave the others waiting on their devices.
        let mine = backend.load(job, self.device_stream(backend));
        let mut reason = mine.as_ref().map_or_else(|error| error.to_string().into_bytes(), |()| Vec::new());
        reason.truncate(LONGEST_REASON);
        let reasons = self.all_gather_blobs(&reason).inspect_err(|_| backend.unload(job, first_use))?;
        let Some(failed) = reasons.iter().position(|reason| !reason.is_empty()) else { return mine };
        backend.unload(job, first_use);
        mine?;
        let reason = format!("{}: {}", self.peers()[failed], String::from_utf8_lossy(&reasons[failed]));
        Err(Error::unsupported(job.call.to_string(), format!("not every rank can run the call: {reason}")))
    }

    /// Ends the communicator because of a device call, and notifies the other ranks, which may have queued their part
    /// of it.
    #[cold]
    pub(super) fn end_by_device_call(&self, backend: &DeviceBackend, error: &Error) {
        let shared = &self.core.shared;
        backend.comm().fail(error);
        shared.health.keep_cause(error);
        shared.health.end(AbortReason::Failed { rank: self.rank() as u32 });
        shared.announce_end();
        let _ = self.with_backend(HostBackend::propagate);
    }

    /// Queues a checked call on the stream of this handle, and notifies the observers.
    pub(in crate::communicator) fn queue(&self, call: &mut DeviceCall<'_>, hold: Hold<'_>) -> Result<()> {
        let kind = call.job.call.kind;
        let backend = self.backend(kind.name())?;
        let _turn = self.device_turn(kind.name())?;
        // Observers get the number, too.
        backend.number([&mut call.job]);
        let Some(watch) = self.core.shared.observers.watch() else { return self.queue_unwatched(call, hold) };
        let moved = Moved { bytes: call.job.bytes(), algorithm: None };
        let report = watch.call(&call.job.call, flight::Backend::Device, moved);
        watch.around(report, Track::Device, || self.queue_unwatched(call, hold))
    }

    fn queue_unwatched(&self, call: &mut DeviceCall<'_>, hold: Hold<'_>) -> Result<()> {
        let kind = call.job.call.kind;
        let backend = self.backend(kind.name())?;
        let stream = self.device_stream(backend);
        self.check_call(backend, call)?;
        hold.refuse_if_over(backend, &|| call.job.call.to_string())?;
        let mut guards = Guards::new(hold);
        ordered(call, &backend.gpu().context, stream, &mut guards)?;
        let job = &call.job;
        // This comes after all checks: if only this rank refuses the call, the others wait here, on the host, and
        // not on their devices.
        let is_captured = self.agree_on_calls(backend, std::iter::once(job))?;
        let commit = CommitGuard::new(backend, false, is_captured);
        // SAFETY: - the addresses are those of buffers that are borrowed by the call (or owned by a work until it has
        //   ended), as long as their lengths state, on the backend's device (checked in `admit`); they are the same or
        //   apart (checked);
        // - their events make later users, and the thread that frees them, wait for what is queued here: the guards
        //   are dropped after it (cudarc's protocol; a caller who disabled it did so by an `unsafe` call, and is
        //   responsible for the order);
        // - all ranks make this call, with these lengths and this type: compared by `agree_on_calls`, or promised by
        //   the caller who disabled the comparison (`CheckDeviceCalls::unchecked_after`). So what NCCL writes here is
        //   as long as the destination, and values of its type, or bytes that the plan turns into truth values.
        let queued = unsafe { backend.enqueue(job, stream, self.timeout()) };
        hold.note(backend, &queued);
        commit.settle(&queued);
        let flight = &self.core.shared.recorder;
        // A call with wrong arguments gets no record: the other ranks may have none of it either.
        if !matches!(queued, Err(Error::InvalidArgument { .. })) {
            flight.note_device_call(&job.call, backend.comm().last_tracker(), queued.as_ref().err());
        }
        let queued = queued.and(Self::release(guards, backend, stream, self.timeout()));
        queued.inspect_err(|error| flight.after_error(error))
    }

    /// Releases the buffers of a call that is on the stream. If the driver cannot make later users of them wait for
    /// the call, this thread waits instead: the call itself is intact.
    pub(super) fn release(guards: Guards<'_>, backend: &DeviceBackend, stream: &Arc<CudaStream>, limit: Duration) -> Result<()> {
        let Err(error) = guards.release(&backend.gpu().context, stream) else { return Ok(()) };
        if device::is_capturing(stream) {
            return Err(device::cuda_error("making later uses of buffers wait for a call that is captured into a graph", error));
        }
        event::warn!(?error, "the driver could not make later work wait for a call, so this thread waits for the call");
        backend.comm().outlast(stream, &Deadline::after(limit))
    }
}

impl Communicator {
    /// Queues a call for a work that owns its buffers.
    pub(in crate::communicator) fn queue_and_mark(&self, call: &mut DeviceCall<'_>) -> Result<Queued> {
        let doing = call.job.call.to_string();
        self.and_mark(call.job.call.kind.name(), doing, |hold| self.queue(call, hold))
    }

    /// Marks the end of the work that `queue` queues. If nothing is on the stream, returns an error. Otherwise returns
    /// a handle, even after a failure: it keeps the memory that the device may use, and reports the error.
    pub(super) fn and_mark(&self, call: &str, doing: String, queue: impl FnOnce(Hold<'_>) -> Result<()>) -> Result<Queued> {
        let backend = self.backend(call)?;
        self.refuse_forked(call)?;
        let stream = self.device_stream(backend);
        if device::is_capturing(stream) {
            let reason = "the end of the call cannot be queried inside a graph; use the form that returns no Work: it does not wait for \
                          the device either";
            return Err(Error::unsupported(format!("starting {doing} in the background while a graph is captured"), reason));
        }
        let may_run = Cell::new(false);
        let failure = match queue(Hold::Owned(&may_run)) {
            Err(error) if !may_run.get() => return Err(error),
            queued => queued.err(),
        };
        // The time limit begins here: the time in which other threads held their turns does not count for this
        // call.
        Ok(Queued::new(backend.comm(), stream, doing, self.timeout(), failure))
    }
}
