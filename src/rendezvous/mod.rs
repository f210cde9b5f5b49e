//! How ranks find each other: stores, URLs, launcher variables.

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
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use store::Store;
pub(crate) use store::{Missing, missing};
pub use tcp::{TcpStore, TcpStoreServer};

pub(crate) use launcher::Launch;
pub(crate) use tcp::listen;
pub(crate) use url::{Method, Rendezvous};

use crate::deadline::Deadline;
use crate::proof::Secret;
use crate::tuning::bootstrap::LAST_QUESTIONS;
use crate::{Error, Result};

/// The store at which the ranks of a job meet, and who this process is among them.
///
/// Fields are dropped in this order: the store before the server, which waits for its clients to leave.
pub(crate) struct JobStore {
    /// The store, which all ranks share. Its keys have a prefix of their own, for each attempt of an elastic job.
    pub(crate) store: Arc<dyn Store>,
    /// This process's rank.
    pub(crate) rank: usize,
    /// How many ranks there are.
    pub(crate) world_size: usize,
    /// Where the store is one that a launcher's agent serves, and which outlives this meeting: its address and prefix.
    pub(crate) agent: Option<String>,
    /// Where the store is, unless it is in a file.
    pub(crate) address: Option<StoreAddress>,
    /// The server of the store, on rank 0 where it serves it.
    pub(crate) server: Option<TcpStoreServer>,
    /// The address by which this host reached the store; `None` for a file.
    pub(crate) local_address: Option<IpAddr>,
}

/// Where the store of a job is, for those who connect to it once more.
#[derive(Clone)]
pub(crate) struct StoreAddress {
    host: String,
    port: u16,
    prefix: String,
    secret: Option<Secret>,
    /// Who serves it, and for how long.
    served: &'static str,
}

impl StoreAddress {
    /// One more connection to the store, which is bounded by `timeout`, as are requests that have no limit of their own.
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

/// Connects to the store that `rendezvous` names, until `deadline`, as long as which its requests may take. `secret` is what the other end of a connection must know. `environment`
/// reads one variable, and `parent_process` is the id of the process that started this one: both matter only where launchers do.
pub(crate) fn connect(
    rendezvous: &Rendezvous,
    deadline: &Deadline,
    secret: Option<&Secret>,
    environment: &dyn Fn(&str) -> Option<String>,
    parent_process: u32,
) -> Result<JobStore> {
    match &rendezvous.method {
        Method::Env => connect_to_server(&from_env(rendezvous, environment, parent_process)?, deadline, secret),
        Method::Tcp { host, port } => {
            let (rank, world_size) = numbers(rendezvous, "tcp://")?;
            let agent_store = launcher::serves_store(environment, host, *port);
            let launch = Launch {
                rank,
                world_size,
                local_rank: None,
                local_world_size: None,
                address: host.clone(),
                port: *port,
                agent_store,
                prefix: launcher::prefix(environment)?,
                launcher: "tcp://",
            };
            connect_to_server(&launch, deadline, secret)
        }
        Method::File { path } => {
            let (rank, world_size) = numbers(rendezvous, "file://")?;
            connect_to_file(path, rank, world_size, deadline.remaining(), &launcher::prefix(environment)?)
        }
    }
}

/// What the launcher says. A rank or size in the URL stands for the variable of that name.
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
            let reason = format!("{} says {found}; give both rank and world_size, or neither", launch.launcher);
            return Err(Error::config(format!("{name}={} in the URL", given.unwrap_or_default()), reason));
        }
    }
    Ok(launch)
}

/// The rank and size that a URL must say.
fn numbers(rendezvous: &Rendezvous, scheme: &str) -> Result<(usize, usize)> {
    let missing = |name: &str| Error::config(format!("{scheme} URL"), format!("{name} is missing; write ?rank=R&world_size=N at its end"));
    let rank = rendezvous.rank.ok_or_else(|| missing("rank"))?;
    let world_size = rendezvous.world_size.ok_or_else(|| missing("world_size"))?;
    Ok((rank, world_size))
}

/// Serves the store where that is this process's part, and connects to it.
fn connect_to_server(launch: &Launch, deadline: &Deadline, secret: Option<&Secret>) -> Result<JobStore> {
    let Launch { rank, world_size, ref address, mut port, .. } = *launch;
    if port == 0 && world_size > 1 {
        let reason = format!("the other {} ranks cannot know the port that would be chosen; name one", world_size - 1);
        return Err(Error::config(format!("port 0 of {address}"), reason));
    }
    let serves = rank == 0 && !launch.agent_store;
    let server = if serves {
        let addresses = tcp::resolve(address, port, deadline);
        let addresses = addresses.map_err(|error| Error::io(format!("looking up {address}, the address of the store"), error))?;
        Some(TcpStoreServer::open(addresses.as_slice(), secret)?)
    } else {
        None
    };
    if let Some(server) = &server {
        port = server.local_addr().port();
        check_reachable(launch, server.local_addr().ip())?;
    }
    let store = TcpStore::until(address, port, secret, deadline, LAST_QUESTIONS)?;
    store.join()?;
    let local_address = Some(store.local_address());
    crate::event::debug!(launcher = launch.launcher, rank, world_size, address, port, serves = server.is_some(), "connected to the store");
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
    })
}

/// Warns, or refuses, where the address of rank 0 is one that only its own host can reach: some systems give a host's own name
/// an address of the loopback interface.
fn check_reachable(launch: &Launch, bound: IpAddr) -> Result<()> {
    let named = launch.address.parse::<IpAddr>().is_err() && launch.address != "localhost";
    if !bound.is_loopback() || !named || launch.world_size == 1 || launch.local_world_size == Some(launch.world_size) {
        return Ok(());
    }
    let reason =
        format!("on this host that name is {bound}, which no other host can reach; name the host by an address, or mend /etc/hosts");
    if launch.local_world_size.is_some() {
        return Err(Error::config(format!("MASTER_ADDR={:?}", launch.address), reason));
    }
    crate::event::warn!(address = &launch.address, "{reason}");
    Ok(())
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
    })
}
