//! Safe calls of an `NcclCommunicator`, which has no host backend: what ranks have to agree on they tell each other over NCCL.

mod agreement;
mod calls;
mod messages;
mod split;
mod windows;

pub use messages::NcclGroup;
