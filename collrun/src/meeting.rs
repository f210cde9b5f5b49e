//! Lets the hosts of a job meet, and numbers them.

use std::net::ToSocketAddrs as _;
use std::time::Duration;

use collectives::store::Store as _;
use collectives::{Error, Result, Secret};
use collectives_launch::{Found, Store};

use crate::place::Place;

/// The hosts of a job.
pub(crate) struct Hosts<'a> {
    pub(crate) count: usize,
    /// The job's name. Jobs at the same address count their hosts separately.
    pub(crate) job: &'a str,
    /// How long the others may take to start.
    pub(crate) patience: Duration,
}

/// Returns this host's number, and the job's store, which host 0 serves. In an elastic job, the number says only whether
/// this host serves the store.
pub(crate) fn meet(place: &Place, secret: Option<&Secret>, hosts: &Hosts<'_>) -> Result<(usize, Store)> {
    if let Place::Among { address, port, .. } | Place::Unnumbered { address, port } | Place::Elastic { address, port } = place {
        check_reach(address, *port)?;
    }
    match place {
        Place::Alone { address: None, port: None } => Ok((0, Store::local(secret)?)),
        Place::Alone { address, port } => Ok((0, Store::serve(address.as_deref().unwrap_or("127.0.0.1"), port.unwrap_or(0), secret)?)),
        Place::Among { node: 0, address, port } => Ok((0, Store::serve(address, *port, secret)?)),
        Place::Among { node, address, port } => Ok((usize::from(*node), Store::elsewhere(address, *port))),
        Place::Unnumbered { address, port } => numbered(address, *port, secret, hosts),
        Place::Elastic { address, port } => match Store::serve_or_reach("collrun", address, *port, secret, hosts.patience)? {
            Found::Served(store) => Ok((0, store)),
            Found::Elsewhere(_) => Ok((1, Store::elsewhere(address, *port))),
        },
    }
}

/// Refuses a name that resolves only to the loopback interface on this host, as a host's own name often does. Other
/// hosts cannot connect there. The loopback interface itself is allowed, for trying several hosts on one.
fn check_reach(address: &str, port: u16) -> Result<()> {
    if address.eq_ignore_ascii_case("localhost") || address.parse::<std::net::IpAddr>().is_ok() {
        return Ok(());
    }
    // A name that is not known yet may be known later.
    let found: Vec<_> = (address, port).to_socket_addrs().into_iter().flatten().map(|found| found.ip()).collect();
    match found.first().filter(|_| found.iter().all(std::net::IpAddr::is_loopback)) {
        None => Ok(()),
        Some(here) => {
            let what = format!("--master-addr (or --rdzv-endpoint) {address}");
            let reason = format!(
                "on this host the name resolves to {here}, which no other host can reach. Give the address at which the other hosts reach \
                 the host that serves the store, or correct /etc/hosts"
            );
            Err(Error::Config { what, reason })
        }
    }
}

/// Returns this host's number and the store. The host that can serve at the address is host 0; it numbers the others.
fn numbered(address: &str, port: u16, secret: Option<&Secret>, hosts: &Hosts<'_>) -> Result<(usize, Store)> {
    let store = match Store::serve_or_reach("collrun", address, port, secret, hosts.patience)? {
        Found::Served(store) => return Ok((0, store)),
        Found::Elsewhere(store) => store,
    };
    let number = usize::try_from(store.add(&format!("collrun/hosts/{}", hosts.job), 1)?).unwrap_or(usize::MAX);
    if number >= hosts.count {
        let what = format!("--rdzv-endpoint {address}:{port}");
        let reason = format!(
            "all {} hosts of --nnodes have joined already, so this host is one too many; was collrun started twice on a host?",
            hosts.count
        );
        return Err(Error::Config { what, reason });
    }
    Ok((number, Store::elsewhere(address, port)))
}
