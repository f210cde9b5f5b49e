//! Safe calls of an `NcclCommunicator`. An `NcclCommunicator` has no host backend. So its ranks use NCCL to exchange
//! the values on which they have to agree.

mod agreement;
mod calls;
mod messages;
mod split;
mod windows;

pub use messages::NcclGroup;
