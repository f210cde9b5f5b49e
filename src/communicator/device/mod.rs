//! The face of the device plane: calls on device buffers are checked, ordered by their buffers' events, and queued.

mod attach;
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
mod stream;
mod work;

pub use attach::{DeviceChoice, device_count};
pub use handle::Device;
pub use stream::OnStream;

pub(super) use attach::DeviceRequest;
pub(super) use batch::{Batch, untagged};
pub(super) use call::{DeviceCall, device_reduction};
pub(super) use guards::Hold;
pub(super) use work::Queued;
