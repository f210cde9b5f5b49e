//! How ranks find each other: stores, URLs, launcher variables.

pub(crate) mod error_file;
mod file;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod launcher;
mod limits;
mod memory;
mod prefix;
mod protocol;
mod service;
mod store;
mod table;
mod tcp;
#[cfg(test)]
mod tests;
mod url;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use store::Store;
pub(crate) use store::{Missing, missing};
pub use tcp::{TcpStore, TcpStoreServer};

use launcher::Hosts;
pub(crate) use launcher::Launch;
pub(crate) use tcp::listen;
pub(crate) use url::{Method, Rendezvous};

use crate::authentication::Secret;
use crate::base::deadline::Deadline;
use crate::base::tuning::bootstrap::LAST_QUESTIONS;
use crate::base::tuning::store::TELL_OF_OUTSIDER;
use crate::config::PortRange;
use crate::error::{Error, Result};

/// The store at which the ranks of a job meet, and this process's place among them.
///
/// Fields are dropped in this order: the store before the server, which waits for its clients to leave.
pub(crate) struct JobStore {
    /// The store that all ranks share. Its keys have a prefix, a new one for each attempt of an elastic job.
    pub(crate) store: Arc<dyn Store>,
    /// This process's rank.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) world_size: usize,
    /// The address and prefix of the store, if a launcher's agent serves it. Such a store outlives this communicator.
    pub(crate) agent: Option<String>,
    /// The address of the store, unless it is a file.
    pub(crate) address: Option<StoreAddress>,
    /// The server of the store, if this is rank 0 and rank 0 serves it.
    pub(crate) server: Option<TcpStoreServer>,
    /// The address by which this host reached the store; `None` for a file.
    pub(crate) local_address: Option<IpAddr>,
    /// Set if other hosts may be unable to reach the store.
    pub(crate) confined: Option<Confined>,
}

/// The address of a job's store, for connecting to it again.
#[derive(Clone)]
pub(crate) struct StoreAddress {
    host: String,
    port: u16,
    prefix: String,
    secret: Option<Secret>,
    /// Which process serves it, and for how long.
    served: &'static str,
}

impl StoreAddress {
    /// Opens another connection to the store. `timeout` limits the connection and each request that has no limit of
    /// its own.
    pub(crate) fn open(&self, timeout: Duration) -> Result<Arc<dyn Store>> {
        let store = TcpStore::open_again(&self.host, self.port, timeout, self.secret.as_ref(), self.served)?;
        Ok(Arc::new(PrefixStore::new(&self.prefix, Arc::new(store))))
    }
}

impl fmt::Debug for JobStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world_size, server, local_address, .. } = self;
        write!(f, "JobStore(rank {rank} of {world_size}, server {server:?}, local address {local_address:?})")
    }
}

/// Connects to the store that `rendezvous` names. Tries until `deadline`, which also limits the store's requests.
/// `secret` is what the other end of a connection must know. `environment` reads one variable, and `parent_process` is
/// the id of the process that started this one. Both matter only if a launcher is involved.
pub(crate) fn connect(
    rendezvous: &Rendezvous,
    deadline: &Deadline,
    secret: Option<&Secret>,
    environment: &dyn Fn(&str) -> Option<String>,
    parent_process: u32,
) -> Result<JobStore> {
    match &rendezvous.method {
        Method::Env => connect_to_server(&from_env(rendezvous, environment, parent_process)?, rendezvous.ports, deadline, secret),
        Method::Tcp { host, port } => {
            let (rank, world_size) = numbers(rendezvous, "tcp://")?;
            let agent_store = launcher::serves_store(environment, host, *port);
            let launch = Launch {
                rank,
                world_size,
                local_rank: None,
                local_world_size: None,
                several_hosts: None,
                address: host.clone(),
                port: *port,
                agent_store,
                prefix: launcher::prefix(environment)?,
                launcher: "tcp://",
            };
            connect_to_server(&launch, rendezvous.ports, deadline, secret)
        }
        Method::File { path } => {
            let (rank, world_size) = numbers(rendezvous, "file://")?;
            connect_to_file(path, rank, world_size, deadline.remaining(), &launcher::prefix(environment)?)
        }
    }
}

/// Returns what the launcher specifies. A rank or size in the URL replaces the variable of that name.
fn from_env(rendezvous: &Rendezvous, environment: &dyn Fn(&str) -> Option<String>, parent_process: u32) -> Result<Launch> {
    let given = |name: &str| match name {
        "RANK" => rendezvous.rank,
        "WORLD_SIZE" => rendezvous.world_size,
        _ => None,
    };
    let read = |name: &str| given(name).map(|number| number.to_string()).or_else(|| environment(name));
    let launch = launcher::detect(&read, parent_process)?;
    for (name, given, found) in [("rank", rendezvous.rank, launch.rank), ("world_size", rendezvous.world_size, launch.world_size)] {
        if given.is_some_and(|given| given != found) {
            let reason = format!("{} set it to {found}; set both rank and world_size in the URL, or neither", launch.launcher);
            return Err(Error::config(format!("{name}={} in the URL", given.unwrap_or_default()), reason));
        }
    }
    Ok(launch)
}

/// Returns the rank and size, which this URL must contain.
fn numbers(rendezvous: &Rendezvous, scheme: &str) -> Result<(usize, usize)> {
    let missing = |name: &str| Error::config(format!("{scheme} URL"), format!("{name} is missing; write ?rank=R&world_size=N at its end"));
    let rank = rendezvous.rank.ok_or_else(|| missing("rank"))?;
    let world_size = rendezvous.world_size.ok_or_else(|| missing("world_size"))?;
    Ok((rank, world_size))
}

/// Serves the store if this process has to, and connects to it. If the store's port is not given, it is one of `ports`.
fn connect_to_server(launch: &Launch, ports: Option<PortRange>, deadline: &Deadline, secret: Option<&Secret>) -> Result<JobStore> {
    let Launch { rank, world_size, ref address, mut port, .. } = *launch;
    if rank >= world_size {
        return connect_outside(launch, deadline.remaining(), secret);
    }
    if port == 0 && world_size > 1 {
        let reason = format!("the other {} ranks cannot know the port that would be chosen; set a port", world_size - 1);
        return Err(Error::config(format!("port 0 of {address}"), reason));
    }
    let serves = rank == 0 && !launch.agent_store;
    let server = if serves {
        let addresses = tcp::resolve(address, port, deadline);
        let addresses = addresses.map_err(|error| Error::io(format!("looking up {address}, the address of the store"), error))?;
        Some(TcpStoreServer::open(&addresses, ports, secret)?)
    } else {
        None
    };
    if let Some(server) = &server {
        port = server.local_addr().port();
    }
    let confined = match &server {
        Some(server) => Confined::of(launch, &[server.local_addr()])?,
        None => Confined::of(launch, &tcp::resolve(address, port, deadline).unwrap_or_default())?,
    };
    let store =
        TcpStore::until(address, port, secret, deadline, LAST_QUESTIONS).map_err(|error| Confined::blame(confined.as_ref(), error))?;
    store.join()?;
    let local_address = Some(store.local_address());
    crate::base::event::debug!(
        launcher = launch.launcher,
        rank,
        world_size,
        address,
        port,
        serves = server.is_some(),
        "connected to the store"
    );
    Ok(JobStore {
        store: Arc::new(PrefixStore::new(&launch.prefix, Arc::new(store))),
        rank,
        world_size,
        agent: launch.agent_store.then(|| format!("{address}:{port}/{}", launch.prefix)),
        address: Some(StoreAddress {
            host: address.clone(),
            port,
            prefix: launch.prefix.clone(),
            secret: secret.cloned(),
            served: if launch.agent_store {
                "which the launcher serves"
            } else {
                "which rank 0 of the job serves until it has closed its communicators"
            },
        }),
        server,
        local_address,
        confined,
    })
}

/// Refuses a rank that is outside its world. If the other ranks' store exists, the exchange over it notifies them, so
/// that they do not wait for the missing rank.
fn connect_outside(launch: &Launch, timeout: Duration, secret: Option<&Secret>) -> Result<JobStore> {
    let Launch { rank, world_size, ref address, port, .. } = *launch;
    let reason = format!("its world has {world_size} ranks, 0 to {}, according to {}", world_size.saturating_sub(1), launch.launcher);
    let outside = || Error::config(format!("rank {rank}"), reason.clone());
    let store = TcpStore::open_again(address, port, timeout.min(TELL_OF_OUTSIDER), secret, "the job's store").map_err(|_| outside())?;
    store.join()?;
    let store: Arc<dyn Store> = Arc::new(PrefixStore::new(&launch.prefix, Arc::new(store)));
    let agent = launch.agent_store.then(|| format!("{address}:{port}/{}", launch.prefix));
    Ok(JobStore { store, rank, world_size, agent, address: None, server: None, local_address: None, confined: None })
}

/// The store's address is a loopback address on this host, which no other host can reach. Some systems assign such an
/// address to a host's own name. A launcher's own store may also listen on other addresses.
#[derive(Debug, Clone)]
pub(crate) struct Confined(String);

impl Confined {
    /// Checks whether the job's address, resolved here to `addresses`, is confined to this host. Returns `None` also
    /// if all ranks are known to share this host.
    ///
    /// # Errors
    ///
    /// Fails if several hosts are known to take part and the address is a name. Literal loopback addresses are
    /// allowed, for running several simulated hosts on one.
    fn of(launch: &Launch, addresses: &[SocketAddr]) -> Result<Option<Self>> {
        let Some(first) = addresses.first().filter(|_| addresses.iter().all(|address| address.ip().is_loopback())) else { return Ok(None) };
        if launch.agent_store || launch.hosts() == Hosts::One {
            return Ok(None);
        }
        let (name, here) = (&launch.address, first.ip());
        let reason = format!(
            "on this host ({}) the name resolves to {here}, which no other host can reach; set an address of the host of \
             rank 0 that the others can reach, or correct /etc/hosts",
            rustix::system::uname().nodename().to_string_lossy()
        );
        let named = name.parse::<IpAddr>().is_err() && !name.eq_ignore_ascii_case("localhost");
        if named && launch.hosts() == Hosts::Several {
            let what = if launch.launcher == "tcp://" { format!("the host {name:?} of the URL") } else { format!("MASTER_ADDR={name:?}") };
            return Err(Error::config(what, reason));
        }
        if !named {
            return Ok(Some(Self(format!("{name} is a loopback address, at which ranks on other hosts cannot connect"))));
        }
        crate::base::event::warn!(address = name, "{reason}");
        Ok(Some(Self(format!("{name:?} is the job's address; {reason}"))))
    }

    /// Adds this explanation to the error of a passed deadline.
    pub(crate) fn blame(confined: Option<&Self>, error: Error) -> Error {
        match (confined, error) {
            (Some(Self(words)), Error::Timeout { doing, elapsed, missing, arrived, meanwhile }) => {
                Error::Timeout { doing: format!("{doing} ({words})"), elapsed, missing, arrived, meanwhile }
            }
            (_, error) => error,
        }
    }
}

/// Opens a store in a file.
fn connect_to_file(path: &Path, rank: usize, world_size: usize, timeout: Duration, prefix: &str) -> Result<JobStore> {
    let store = FileStore::open(path, Some(world_size), timeout)?;
    Ok(JobStore {
        store: Arc::new(PrefixStore::new(prefix, Arc::new(store))),
        rank,
        world_size,
        agent: None,
        address: None,
        server: None,
        local_address: None,
        confined: None,
    })
}
