//! Where the ranks of a job meet: served by the launcher, as torchrun's agent does.

use std::net::{IpAddr, Ipv4Addr};

use collectives::{Result, TcpStoreServer};

/// The job's store: the address that every rank is told, and the server while it runs here.
pub(crate) struct Store {
    /// As in `MASTER_ADDR`.
    pub(crate) address: String,
    /// As in `MASTER_PORT`.
    pub(crate) port: u16,
    /// Kept so that it serves until the last rank has ended.
    _server: Option<TcpStoreServer>,
}

impl Store {
    /// Serves a job of this host alone, on the loopback address and a free port.
    pub(crate) fn local() -> Result<Self> {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let server = TcpStoreServer::bind((loopback, 0))?;
        Ok(Self { address: loopback.to_string(), port: server.local_addr().port(), _server: Some(server) })
    }

    /// Serves a job of several hosts on the address that they were all given.
    pub(crate) fn serve(address: &str, port: u16) -> Result<Self> {
        let server = TcpStoreServer::bind((address, port))?;
        Ok(Self { address: address.to_owned(), port: server.local_addr().port(), _server: Some(server) })
    }

    /// The store that another host serves.
    pub(crate) fn elsewhere(address: &str, port: u16) -> Self {
        Self { address: address.to_owned(), port, _server: None }
    }
}
