//! Links between ranks of different hosts, over TCP.
//!
//! Every rank that peers may have to reach listens on one port; a [`mesh::Mesh`] knows everyone's address and opens a link when
//! it is first wanted. A link begins with a greeting ([`hello`]) that proves both ends to belong to the same job and to be the
//! ranks they are taken for; after it the stream belongs to whoever asked for it.

mod address;
pub(crate) mod collective;
mod connector;
#[cfg(feature = "internals")]
pub(crate) mod fuzz;
mod hello;
pub(crate) mod identity;
mod listener;
pub(crate) mod mesh;
mod pending_connection;
pub(crate) mod tcp;
mod tcp_info;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests;

pub(crate) use connector::Connector;
pub(crate) use hello::Channel;
