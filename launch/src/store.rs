//! The store of a job, as its launchers use it.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use collectives::Secret;
use collectives::store::{TcpStore, TcpStoreServer};

/// The store at which a job's ranks meet: the address that every rank gets, and the server if this process runs the
/// server. As with torchrun, a launcher, not a rank, runs the server.
pub struct Store {
    /// The host, as in `MASTER_ADDR`.
    pub address: String,
    /// The port, as in `MASTER_PORT`.
    pub port: u16,
    /// A secret that is passed to the ranks because their environment does not have it.
    pub secret: Option<Secret>,
    /// Kept so that it serves until the last rank has ended.
    _server: Option<TcpStoreServer>,
}

impl Store {
    /// Serves the store of a job on this host alone, at the loopback address and a free port.
    ///
    /// # Errors
    ///
    /// The errors of [`Store::serve`].
    pub fn local(secret: Option<&Secret>) -> collectives::Result<Self> {
        Self::serve(&IpAddr::V4(Ipv4Addr::LOCALHOST).to_string(), 0, secret)
    }

    /// Serves the store of a job on several hosts, at the address that all hosts were given. If `port` is 0, the system
    /// chooses a free port.
    ///
    /// # Errors
    ///
    /// If the address is not this host's, or its port is taken.
    pub fn serve(address: &str, port: u16, secret: Option<&Secret>) -> collectives::Result<Self> {
        let server = match secret {
            Some(secret) => TcpStoreServer::bind_with_secret((address, port), secret)?,
            None => TcpStoreServer::bind((address, port))?,
        };
        Ok(Self { address: address.to_owned(), port: server.local_addr().port(), secret: None, _server: Some(server) })
    }

    /// Returns the store that another host serves.
    pub fn elsewhere(address: &str, port: u16) -> Self {
        Self { address: address.to_owned(), port, secret: None, _server: None }
    }
}

/// The store of a job, as found by a launcher that was not given its host's number.
pub enum Found {
    /// This host was first, and serves the store.
    Served(Store),
    /// Another host serves the store.
    Elsewhere(Arc<TcpStore>),
}
