//! A checked call on device buffers, before and after its buffers have addresses.

use cudarc::driver::CudaStream;

use super::guards::Guards;
use crate::buffer::device::{DeviceRead, DeviceWrite};
use crate::device;
use crate::error::{Error, Result};
use crate::job::Operands;
use crate::op;

/// A checked call on device buffers, which it borrows.
pub(in crate::communicator) struct DeviceCall<'a> {
    /// Its buffers have no addresses yet: those come with the stream.
    pub(in crate::communicator) job: device::Job,
    pub(in crate::communicator) source: Option<&'a dyn DeviceRead>,
    pub(in crate::communicator) destination: Option<&'a mut dyn DeviceWrite>,
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
        job.memory.source = guards.read(source, stream);
    }
    if let Some(destination) = destination {
        job.memory.destination = guards.write(destination, stream);
    }
    if job.in_place {
        job.memory.source = job.memory.destination;
    }
}

/// How a device folds what the caller asked for.
pub(in crate::communicator) fn device_reduction<T>(reduction: &op::Reduction<T>) -> Result<device::Reduction>
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
    let Operands { source, source_len, destination, destination_len } = job.memory;
    let end = |start: u64, length: usize| start.saturating_add(length as u64);
    let is_apart = source >= end(destination, destination_len) || destination >= end(source, source_len);
    !(job.in_place || source_len == 0 || destination_len == 0 || is_apart)
}
