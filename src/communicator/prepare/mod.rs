//! Turns a call's arguments into a job: checks each argument once, and makes the job for the backend of the buffers.

mod arguments;
#[cfg(feature = "cuda")]
pub(in crate::communicator) mod device_call;
pub(in crate::communicator) mod prepared;
