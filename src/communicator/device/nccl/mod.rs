//! Safe calls of an `NcclCommunicator`, which has no host backend: the ranks exchange over NCCL what they have to
//! agree on.

mod agreement;
mod calls;
mod messages;
mod split;
mod windows;

pub use messages::NcclGroup;
