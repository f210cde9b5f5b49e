//! Links between ranks of different hosts, over TCP.
//!
//! Every rank that peers may have to reach listens on one port ([`listener`]). A [`mesh::Mesh`] has the address of
//! every rank and opens a link when it is first needed ([`connector`]). A link begins with a handshake ([`hello`]), in
//! which both ends check that they belong to the same job and are the right ranks. After that the stream belongs to its
//! user.

mod connector;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod hello;
pub(crate) mod identity;
pub(crate) mod interfaces;
mod link;
mod listener;
pub(crate) mod mesh;
mod opening;
pub(crate) mod own_address;
mod striped;
mod tcp;
mod tcp_info;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests;

pub(crate) use hello::Channel;
pub(crate) use link::{Link, Terms};
pub(crate) use opening::Opening;
