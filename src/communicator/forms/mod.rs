//! The forms of a call: blocking, in the background, in a group, on many buffers, and on serialised values.

mod barrier;
mod collectives;
pub(in crate::communicator) mod group;
mod list;
mod many;
mod messages;
#[cfg(feature = "serde")]
pub(in crate::communicator) mod object;
#[cfg(feature = "serde")]
mod object_messages;
pub(in crate::communicator) mod shared_buffer;
mod started;
mod variable;
