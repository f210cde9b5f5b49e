//! The store over TCP: a server of one thread, and clients.

mod attempts;
mod backoff;
mod client;
mod connection;
mod daemon;
mod server;
#[cfg(test)]
mod tests;

use attempts::Attempts;
pub use client::TcpStore;
pub use server::TcpStoreServer;
pub(crate) use server::listen;

pub(super) use backoff::Backoff;
pub(super) use connection::resolve;
