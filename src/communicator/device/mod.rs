//! The device backend as the communicator uses it: calls on device buffers are checked, ordered by their buffers'
//! events, and queued.

mod batch;
mod compare;
mod end_notice;
mod handle;
mod headers;
mod liveness;
mod nccl;
mod newcomer;
mod queue;
mod setup;
mod started;

pub use handle::Device;
pub use nccl::NcclGroup;
pub use setup::{DeviceChoice, device_count};

pub(super) use batch::{Batch, untagged};
pub(super) use setup::DeviceRequest;
pub(super) use started::Queued;
