//! The face of the device plane: calls on device buffers are checked, ordered by their buffers' events, and queued.

#![expect(unsafe_code, reason = "addresses of buffers that are borrowed, or owned by a work, are handed to the device plane")]

mod attach;
mod batch;
mod compare;
mod guards;
mod handle;
mod headers;
mod liveness;
mod pattern;
mod stream;
mod work;

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use guards::Guards;

use super::Communicator;
use super::prepare::Source;
use crate::buffer::device::{DeviceMemory, DeviceMemoryMut, DeviceRead, DeviceWrite};
use crate::call::{BlockLayout, Call};
use crate::device::{self, DevicePlane};
use crate::error::{Error, Result};
use crate::flight::FlightPlane;
use crate::host::abort_reason::AbortReason;
use crate::host::health::forked;
use crate::host::plane::HostPlane;
use crate::observe::{Moved, Track};
use crate::op;

pub use attach::{DeviceChoice, device_count};
pub use handle::Device;
pub use stream::OnStream;

pub(super) use attach::DeviceRequest;
pub(super) use batch::{Batch, untagged};
pub(super) use guards::Hold;
pub(super) use work::Queued;

/// How much of an error a rank tells the others, in bytes: a compiler's can be long.
const LONGEST_REASON: usize = 4096;

/// A checked call on device buffers, which it borrows.
pub(super) struct DeviceCall<'a> {
    job: device::Job,
    source: Option<&'a dyn DeviceRead>,
    destination: Option<&'a mut dyn DeviceWrite>,
}

impl<'a> DeviceCall<'a> {
    /// A call without addresses yet: those come with the stream.
    pub(super) fn new<T>(
        call: Call,
        source: Source<DeviceMemory<'a, T>>,
        destination: Option<DeviceMemoryMut<'a, T>>,
        layout: BlockLayout,
        reduction: Option<device::Reduction>,
    ) -> Self {
        let bytes = |elements: usize| elements * size_of::<T>();
        let destination_len = destination.as_ref().map_or(0, |memory| bytes(memory.len()));
        let (in_place, source_len, source) = match source {
            Source::Nothing => (false, 0, None),
            Source::InPlace => (true, destination_len, None),
            Source::Separate(memory) => (false, bytes(memory.len()), Some(memory.inner)),
        };
        let destination = destination.map(|memory| memory.inner);
        let element_bytes = size_of::<T>();
        let job = device::Job { call, source: 0, source_len, destination: 0, destination_len, layout, element_bytes, reduction, in_place };
        Self { job, source, destination }
    }
}

/// Makes `stream` wait for what else uses a call's buffers, and fills in their addresses.
fn resolve<'s>(
    job: &mut device::Job,
    source: Option<&'s dyn DeviceRead>,
    destination: Option<&'s mut (dyn DeviceWrite + '_)>,
    stream: &'s CudaStream,
    guards: &mut Guards<'s>,
) {
    if let Some(source) = source {
        job.source = guards.read(source, stream);
    }
    if let Some(destination) = destination {
        job.destination = guards.write(destination, stream);
    }
    if job.in_place {
        job.source = job.destination;
    }
}

/// How a device folds what the caller asked for.
pub(super) fn reduction<T>(reduction: &op::Reduction<T>) -> Result<device::Reduction>
where
    T: crate::element::Data,
{
    match &reduction.0 {
        op::ReductionKind::Builtin(op, dtype) => op.check(*dtype).map(|()| device::Reduction::Builtin(*op)),
        op::ReductionKind::Custom(op) => op.device_code().cloned().map(device::Reduction::User).ok_or_else(|| {
            let reason = "it has a function for host memory only; give it an expression with CustomOp::with_expression";
            Error::unsupported(format!("{:?} on device memory", op.name()), reason)
        }),
    }
}

/// Two ranges of device memory that are not the same and share bytes.
fn overlap(job: &device::Job) -> bool {
    let end = |start: u64, length: usize| start.saturating_add(length as u64);
    !job.in_place
        && job.source_len != 0
        && job.destination_len != 0
        && job.source < end(job.destination, job.destination_len)
        && job.destination < end(job.source, job.source_len)
}

/// What this rank owes from the moment when others may count on its calls: that they are queued. Where they are not, by whichever way that
/// comes about, the device plane ends: NCCL would match the others' calls with later ones of this rank, of other lengths perhaps.
struct Pledge<'a> {
    plane: &'a DevicePlane,
    /// Whether other ranks were told of these calls by headers; else all have compared them.
    has_told: bool,
    is_kept: bool,
}

impl<'a> Pledge<'a> {
    fn new(plane: &'a DevicePlane, has_told: bool) -> Self {
        Self { plane, has_told, is_kept: false }
    }

    /// How queueing went. Compared calls that are refused before anything is queued are refused on all ranks, which made the same.
    fn settle(mut self, queued: &Result<()>) {
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
    pub(super) fn plane(&self, call: &str) -> Result<&DevicePlane> {
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
    fn device_stream<'a>(&'a self, plane: &'a DevicePlane) -> &'a Arc<CudaStream> {
        self.stream.as_ref().unwrap_or_else(|| plane.stream())
    }

    /// Refuses a buffer or a stream of another device than the plane's.
    fn same_device(plane: &DevicePlane, call: &'static str, what: &str, context: &Arc<CudaContext>) -> Result<()> {
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
    fn check_stream(&self, plane: &DevicePlane, call: &'static str) -> Result<()> {
        self.stream.as_ref().map_or(Ok(()), |stream| Self::same_device(plane, call, "the stream", stream.context()))
    }

    /// Everything that is checked before a call is queued.
    fn admit(&self, plane: &DevicePlane, call: &DeviceCall<'_>) -> Result<()> {
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
    fn confer<'a>(&self, plane: &DevicePlane, jobs: impl Iterator<Item = &'a device::Job> + Clone) -> Result<()> {
        self.compare(plane, jobs.clone().map(|job| &job.call))?;
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
    fn end_by_device_call(&self, plane: &DevicePlane, error: &Error) {
        let shared = &self.core.shared;
        plane.comm().fail(error);
        shared.health.keep_cause(error);
        shared.health.end(AbortReason::Failed { rank: self.rank() as u32 });
        shared.announce_end();
        // SAFETY: `caller` is the only caller's side of this hand-off: both were made together and neither can be cloned.
        unsafe { shared.plane.as_caller(&self.core.caller, HostPlane::propagate) };
    }

    /// Queues a checked call on the stream of this handle, and tells those who listen.
    pub(super) fn queue(&self, mut call: DeviceCall<'_>, hold: Hold) -> Result<()> {
        // Those who listen are told the number, too.
        self.plane(call.job.call.kind.name())?.number([&mut call.job]);
        let Some(watch) = self.core.shared.health.watch() else { return self.queue_unwatched(call, hold) };
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
        let flight = self.core.shared.health.flight();
        // A call with wrong arguments was none: the other ranks may not count it either.
        if !matches!(queued, Err(Error::InvalidArgument { .. })) {
            flight.note_device_call(&job.call, plane.comm().last_tracker(), queued.as_ref().err());
        }
        let queued = queued.and(Self::release(guards, plane, stream, kind.name()));
        queued.inspect_err(|error| flight.after_error(error))
    }

    /// Lets go of a call's buffers.
    fn release(guards: Guards<'_>, plane: &DevicePlane, stream: &CudaStream, call: &str) -> Result<()> {
        let released = guards.release(&plane.gpu().context, stream);
        released.map_err(|error| device::cuda_error(format!("{call}: ordering its buffers"), error))
    }
}
