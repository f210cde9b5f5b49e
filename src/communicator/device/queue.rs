//! Queues checked calls: what precedes every call on the device, and what a rank owes once others count on its calls.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed, or owned by a work, are handed to the device plane")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use super::call::{DeviceCall, overlap, resolve};
use super::guards::{Guards, Hold};
use crate::communicator::Communicator;
use crate::device::{self, DevicePlane};
use crate::error::{Error, Result};
use crate::flight::FlightPlane;
use crate::host::abort_reason::AbortReason;
use crate::host::health::forked;
use crate::host::plane::HostPlane;
use crate::observe::{Moved, Track};

/// How much of an error a rank tells the others, in bytes: a compiler's can be long.
const LONGEST_REASON: usize = 4096;

/// What this rank owes from the moment when others may count on its calls: that they are queued. Where they are not, by whichever way that
/// comes about, the device plane ends: NCCL would match the others' calls with later ones of this rank, of other lengths perhaps.
pub(super) struct Pledge<'a> {
    plane: &'a DevicePlane,
    /// Whether other ranks were told of these calls by headers; else all have compared them.
    has_told: bool,
    is_kept: bool,
}

impl<'a> Pledge<'a> {
    pub(super) fn new(plane: &'a DevicePlane, has_told: bool) -> Self {
        Self { plane, has_told, is_kept: false }
    }

    /// How queueing went. Compared calls that are refused before anything is queued are refused on all ranks, which made the same.
    pub(super) fn settle(mut self, queued: &Result<()>) {
        self.is_kept = true;
        let everywhere = |error: &Error| !self.has_told && matches!(error, Error::InvalidArgument { .. } | Error::Unsupported { .. });
        if let Err(error) = queued
            && !everywhere(error)
        {
            self.plane.comm().fail(error);
        }
    }
}

impl Drop for Pledge<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.plane.comm().abort();
        }
    }
}

impl Communicator {
    /// The device plane.
    pub(in crate::communicator) fn plane(&self, call: &str) -> Result<&DevicePlane> {
        match self.core.device.get() {
            Some(Ok(device)) => Ok(device.plane()),
            Some(Err(reason)) => Err(Error::NoDevice { call: call.to_owned(), reason: reason.clone() }),
            None => {
                let reason = "none was asked for: make the communicator with Communicator::builder().device(…)".to_owned();
                Err(Error::NoDevice { call: call.to_owned(), reason })
            }
        }
    }

    /// Refuses what would ask the driver in a process that was forked from the communicator's.
    pub(crate) fn refuse_forked(&self, call: &str) -> Result<()> {
        if self.core.shared.health.is_foreign() { Err(forked(call.to_owned())) } else { Ok(()) }
    }

    /// The stream that device calls are queued on.
    pub(super) fn device_stream<'a>(&'a self, plane: &'a DevicePlane) -> &'a Arc<CudaStream> {
        self.stream.as_ref().unwrap_or_else(|| plane.stream())
    }

    /// Refuses a buffer or a stream of another device than the plane's.
    pub(super) fn same_device(plane: &DevicePlane, call: &'static str, what: &str, context: &Arc<CudaContext>) -> Result<()> {
        let own = &plane.gpu().context;
        if Arc::ptr_eq(own, context) || own.cu_ctx() == context.cu_ctx() {
            return Ok(());
        }
        let reason = match (own.ordinal(), context.ordinal()) {
            (own, other) if own == other => {
                format!("{what} belongs to another context of device {own}: use the primary one, as CudaContext::new gives it")
            }
            (own, other) => format!("{what} lives on device {other}, and this communicator on device {own}"),
        };
        Err(Error::argument(call, reason))
    }

    /// Refuses a stream of another device.
    pub(super) fn check_stream(&self, plane: &DevicePlane, call: &'static str) -> Result<()> {
        self.stream.as_ref().map_or(Ok(()), |stream| Self::same_device(plane, call, "the stream", stream.context()))
    }

    /// Everything that is checked before a call is queued.
    pub(super) fn admit(&self, plane: &DevicePlane, call: &DeviceCall<'_>) -> Result<()> {
        let kind = call.job.call.kind;
        self.check_stream(plane, kind.name())?;
        if let Some(source) = call.source {
            Self::same_device(plane, kind.name(), "the source", source.context())?;
        }
        if let Some(destination) = &call.destination {
            Self::same_device(plane, kind.name(), "the destination", destination.context())?;
        }
        let shared = &self.core.shared;
        if let Some(refusal) = shared.health.refusal(|| call.job.call.to_string(), &shared.peers) {
            return Err(refusal);
        }
        Ok(())
    }

    /// What ranks tell each other over the host plane before the calls of a batch are queued: nothing, but where calls are to be compared,
    /// and at the first use of a kernel of the caller's.
    pub(super) fn confer<'a>(&self, plane: &DevicePlane, jobs: impl Iterator<Item = &'a device::Job> + Clone) -> Result<()> {
        self.compare(plane, jobs.clone())?;
        jobs.into_iter().try_for_each(|job| self.prepare_kernel(plane, job))
    }

    /// Loads the kernel that a job needs, where it is the caller's and this is its first use.
    fn prepare_kernel(&self, plane: &DevicePlane, job: &device::Job) -> Result<()> {
        if !plane.is_first_use(job) {
            return Ok(());
        }
        // A rank that cannot load it must not leave the others waiting on their devices.
        let mine = plane.load(job, self.device_stream(plane));
        let mut reason = mine.as_ref().map_or_else(|error| error.to_string().into_bytes(), |()| Vec::new());
        reason.truncate(LONGEST_REASON);
        let reasons = self.all_gather_blobs(&reason).inspect_err(|_| plane.unload(job))?;
        let Some(failed) = reasons.iter().position(|reason| !reason.is_empty()) else { return mine };
        plane.unload(job);
        mine?;
        let reason = format!("{}: {}", self.peers()[failed], String::from_utf8_lossy(&reasons[failed]));
        Err(Error::unsupported(job.call.to_string(), format!("not every rank can do it; {reason}")))
    }

    /// Ends the communicator with an error of a call on devices that other ranks may have queued their part of, and has them told.
    #[cold]
    pub(super) fn end_by_device_call(&self, plane: &DevicePlane, error: &Error) {
        let shared = &self.core.shared;
        plane.comm().fail(error);
        shared.health.keep_cause(error);
        shared.health.end(AbortReason::Failed { rank: self.rank() as u32 });
        shared.announce_end();
        // SAFETY: `caller` is the only caller's side of this hand-off: both were made together and neither can be cloned.
        unsafe { shared.plane.as_caller(&self.core.caller, HostPlane::propagate) };
    }

    /// Queues a checked call on the stream of this handle, and tells those who listen.
    pub(in crate::communicator) fn queue(&self, mut call: DeviceCall<'_>, hold: Hold) -> Result<()> {
        let kind = call.job.call.kind;
        let plane = self.plane(kind.name())?;
        let _alone = plane.enter_call(kind.name())?;
        // Those who listen are told the number, too.
        plane.number([&mut call.job]);
        let Some(watch) = self.core.shared.observers.watch() else { return self.queue_unwatched(call, hold) };
        let moved = Moved { bytes: call.job.source_len.max(call.job.destination_len), algorithm: "nccl" };
        let report = watch.call(&call.job.call, FlightPlane::Device, moved);
        watch.around(report, Track::Device, || self.queue_unwatched(call, hold))
    }

    fn queue_unwatched(&self, call: DeviceCall<'_>, hold: Hold) -> Result<()> {
        let kind = call.job.call.kind;
        let plane = self.plane(kind.name())?;
        let stream = self.device_stream(plane);
        self.admit(plane, &call)?;
        let DeviceCall { mut job, source, destination } = call;
        let mut guards = Guards::new(hold);
        resolve(&mut job, source, destination, stream, &mut guards);
        if overlap(&job) {
            let reason = "source and destination overlap; use the in-place form, or buffers that lie apart";
            return Err(Error::argument(kind.name(), reason));
        }
        guards.check(&plane.gpu().context, stream, kind.name())?;
        // Last of all: who refuses a call by itself has the others wait here, on the host, and not on their devices.
        self.confer(plane, std::iter::once(&job))?;
        let pledge = Pledge::new(plane, false);
        // SAFETY: - the addresses are those of buffers that are borrowed by the call (or owned by a work until it has ended), as
        //   long as their lengths say, on the plane's device (checked in `admit`); they are the same or apart (checked);
        // - their events make later users, and the one who frees them, wait for what is queued here: the guards are dropped
        //   after it (cudarc's protocol; whoever switched that off answers for the order by the `unsafe` he did it with);
        // - all ranks make this call, with these lengths and this type: compared by `confer`, or promised by whoever had it not compared
        //   (`CheckDeviceCalls::unchecked_after`). So what NCCL writes here is as long as the destination, and values of its type, or
        //   bytes that the plan makes truth values of.
        let queued = unsafe { plane.enqueue(&job, stream, self.timeout()) };
        pledge.settle(&queued);
        let flight = &self.core.shared.recorder;
        // A call with wrong arguments was none: the other ranks may not count it either.
        if !matches!(queued, Err(Error::InvalidArgument { .. })) {
            flight.note_device_call(&job.call, plane.comm().last_tracker(), queued.as_ref().err());
        }
        let queued = queued.and(Self::release(guards, plane, stream, kind.name()));
        queued.inspect_err(|error| flight.after_error(error))
    }

    /// Lets go of a call's buffers.
    pub(super) fn release(guards: Guards<'_>, plane: &DevicePlane, stream: &CudaStream, call: &str) -> Result<()> {
        let released = guards.release(&plane.gpu().context, stream);
        released.map_err(|error| device::cuda_error(format!("{call}: ordering its buffers"), error))
    }
}
