//! Where the ranks of a job meet: served by the launcher, as torchrun's agent does.

use std::net::{IpAddr, Ipv4Addr};

use collectives::{Result, Secret, TcpStoreServer};

/// The job's store: the address that every rank is told, and the server while it runs here.
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
    pub fn local(secret: Option<&Secret>) -> Result<Self> {
        Self::serve(&IpAddr::V4(Ipv4Addr::LOCALHOST).to_string(), 0, secret)
    }

    /// Serves a job of several hosts on the address that they were all given.
    pub fn serve(address: &str, port: u16, secret: Option<&Secret>) -> Result<Self> {
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
