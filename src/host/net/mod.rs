//! Links between ranks of different hosts, over TCP.
//!
//! Every rank that peers may have to reach listens on one port ([`listener`]). A [`mesh::Mesh`] knows every rank's address and opens a link
//! when it is first wanted ([`connector`]). A link begins with a greeting ([`hello`]), by which both ends find out whether they belong to
//! the same job and are the right ranks. After it the stream belongs to whoever asked for it.

mod connector;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod hello;
pub(crate) mod identity;
mod link;
mod listener;
pub(crate) mod mesh;
pub(crate) mod own_address;
mod tcp;
mod tcp_info;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests;

pub(crate) use connector::Connector;
pub(crate) use hello::Channel;
pub(crate) use link::{Link, Terms};
