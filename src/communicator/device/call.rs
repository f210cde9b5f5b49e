//! A checked call on device buffers, before and after its buffers have addresses.

use cudarc::driver::CudaStream;

use super::guards::Guards;
use crate::buffer::device::{DeviceMemory, DeviceMemoryMut, DeviceRead, DeviceWrite};
use crate::call::{BlockLayout, Call};
use crate::communicator::arguments::Source;
use crate::device;
use crate::error::{Error, Result};
use crate::op;

/// A checked call on device buffers, which it borrows.
pub(in crate::communicator) struct DeviceCall<'a> {
    pub(super) job: device::Job,
    pub(super) source: Option<&'a dyn DeviceRead>,
    pub(super) destination: Option<&'a mut dyn DeviceWrite>,
}

impl<'a> DeviceCall<'a> {
    /// A call without addresses yet: those come with the stream.
    pub(in crate::communicator) fn new<T>(
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
pub(super) fn resolve<'s>(
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
pub(in crate::communicator) fn reduction<T>(reduction: &op::Reduction<T>) -> Result<device::Reduction>
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
pub(super) fn overlap(job: &device::Job) -> bool {
    let end = |start: u64, length: usize| start.saturating_add(length as u64);
    !job.in_place
        && job.source_len != 0
        && job.destination_len != 0
        && job.source < end(job.destination, job.destination_len)
        && job.destination < end(job.source, job.source_len)
}
