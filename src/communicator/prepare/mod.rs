//! From a call's arguments to what runs: checks each argument once, and makes a job for the backend that holds the
//! buffers.

mod arguments;
#[cfg(feature = "cuda")]
pub(in crate::communicator) mod device_call;
pub(in crate::communicator) mod prepared;
