//! The life of a communicator: how it starts, what is made from it, how it is shrunk after a failure, and how it ends.

pub(in crate::communicator) mod bootstrap;
pub(in crate::communicator) mod close;
mod shrink;
mod split;
mod store;
