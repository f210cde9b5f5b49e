//! The face of the device plane: calls on device buffers are checked, ordered by their buffers' events, and queued.

mod attach;
mod batch;
mod call;
mod compare;
mod handle;
mod headers;
mod liveness;
mod queue;

pub use attach::{DeviceChoice, device_count};
pub use handle::{Device, OnStream};

pub(super) use attach::DeviceRequest;
pub(super) use batch::{Batch, untagged};
pub(super) use call::{DeviceCall, Hold, device_reduction};
pub(super) use queue::Queued;
