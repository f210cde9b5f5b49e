//! The device plane: collectives on GPU memory, over NCCL.

mod buffers;
mod comm;
mod driver;
mod fold;
mod job;
mod kernels;
mod lookout;
mod memory;
mod native;
mod nccl;
mod plane;
mod pool;
mod standalone;
mod user;
mod watchdog;

pub(crate) use comm::{NcclComm, Setup, unique_id};
pub(crate) use driver::{Gpu, check as check_driver, count, cuda_error, is_capturing, is_complete, of, open};
pub(crate) use job::{Job, Message, Reduction};
pub(crate) use kernels::{Kernels, MOST_PARTIALS};
pub(crate) use lookout::Lookout;
pub use memory::{NcclBuffer, Registrable, Registration, Window};
pub(crate) use nccl::library;
pub(crate) use plane::DevicePlane;
pub(crate) use pool::share as share_pool;
pub use standalone::{NcclAbortHandle, NcclCommunicator, RawBuffer, RawCall, Shrink, UniqueId};
