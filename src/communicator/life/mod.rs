//! The life of a communicator: its start, the communicators that are made from it, its shrinking after a failure, and
//! its end.

pub(in crate::communicator) mod bootstrap;
pub(in crate::communicator) mod close;
mod lane;
pub(in crate::communicator) mod membership;
mod shrink;
mod split;
mod store;
