//! The store of a job, as its launchers see it.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use collectives::Secret;
use collectives::store::{TcpStore, TcpStoreServer};

/// Where the ranks of a job meet: the address that every rank is told, and the server while it runs here, as in torchrun's agent.
pub struct Store {
    /// As in `MASTER_ADDR`.
    pub address: String,
    /// As in `MASTER_PORT`.
    pub port: u16,
    /// A secret that ranks have to be told, because their environment does not say it.
    pub secret: Option<Secret>,
    /// Kept so that it serves until the last rank has ended.
    _server: Option<TcpStoreServer>,
}

impl Store {
    /// Serves a job of this host alone, on the loopback address and a free port.
    ///
    /// # Errors
    ///
    /// As [`Store::serve`].
    pub fn local(secret: Option<&Secret>) -> collectives::Result<Self> {
        Self::serve(&IpAddr::V4(Ipv4Addr::LOCALHOST).to_string(), 0, secret)
    }

    /// Serves a job of several hosts on the address that they were all given; port 0 is one that is free.
    ///
    /// # Errors
    ///
    /// Where the address is not this host's, or its port is taken.
    pub fn serve(address: &str, port: u16, secret: Option<&Secret>) -> collectives::Result<Self> {
        let server = match secret {
            Some(secret) => TcpStoreServer::bind_with_secret((address, port), secret)?,
            None => TcpStoreServer::bind((address, port))?,
        };
        Ok(Self { address: address.to_owned(), port: server.local_addr().port(), secret: None, _server: Some(server) })
    }

    /// The store that another host serves.
    pub fn elsewhere(address: &str, port: u16) -> Self {
        Self { address: address.to_owned(), port, secret: None, _server: None }
    }
}

/// A job's store, as a host finds it that was not told its number.
pub enum Found {
    /// This host came first, and serves it.
    Served(Store),
    /// Another host serves it.
    Elsewhere(Arc<TcpStore>),
}
