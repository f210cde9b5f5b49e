//! The face of the device plane: calls on device buffers are checked, ordered by their buffers' events, and queued.

mod batch;
mod call;
mod compare;
mod counts;
mod guards;
mod handle;
mod headers;
mod liveness;
mod pattern;
mod queue;
mod setup;
mod stream;
mod work;

pub use handle::Device;
pub use setup::{DeviceChoice, device_count};
pub use stream::OnStream;

pub(super) use batch::{Batch, untagged};
pub(super) use call::{DeviceCall, reduction};
pub(super) use guards::Hold;
pub(super) use setup::DeviceRequest;
pub(super) use work::Queued;
