//! From the arguments of a call to what runs: each argument is checked once, and a job is made for the backend that has the buffers.

mod arguments;
#[cfg(feature = "cuda")]
pub(in crate::communicator) mod device_call;
pub(in crate::communicator) mod prepared;
