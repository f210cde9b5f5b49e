//! The device plane: collectives on GPU memory, over NCCL.

mod buffers;
mod comm;
mod custom_kernels;
mod driver;
mod kernels;
mod liveness;
mod memory;
mod nccl;
mod plan;
mod plane;
mod pool;
mod standalone;
mod watchdog;

pub(crate) use comm::{NcclComm, Setup, unique_id};
pub(crate) use driver::{Gpu, check as check_driver, count, cuda_error, is_capturing, is_complete, of, open};
pub(crate) use kernels::{Kernels, MOST_PARTIALS};
pub(crate) use liveness::LivenessProbe;
pub use memory::{NcclBuffer, Registrable, Registration, Window};
pub(crate) use nccl::library;
pub(crate) use plan::{Job, Message, Reduction};
pub(crate) use plane::DevicePlane;
pub(crate) use pool::share as share_pool;
pub use standalone::{NcclAbortHandle, NcclCommunicator, RawBuffer, RawCall, Shrink, UniqueId};
