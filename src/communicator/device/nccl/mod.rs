//! Safe calls of an `NcclCommunicator`. It has no host backend, so the ranks exchange over NCCL the values that they
//! have to agree on.

mod agreement;
mod calls;
mod messages;
mod split;
mod windows;

pub use messages::NcclGroup;
