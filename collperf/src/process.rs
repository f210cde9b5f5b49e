//! The ranks of one process: threads that join one communicator, with those of other processes if there are any.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::thread;

use collectives::store::{MemoryStore, Store};
use collectives::{Builder, Communicator};

use crate::failure::Failure;

/// One of the processes that a launcher has started, as a rank of a communicator of these processes.
pub(crate) struct Process {
    comm: Communicator,
}

impl Process {
    /// Meets the other processes.
    pub(crate) fn join(builder: Builder) -> Result<Self, Failure> {
        let comm = builder.configure(|config| config.keep_store = true).from_env()?;
        Ok(Self { comm })
    }

    /// Returns the communicator of processes.
    pub(crate) fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// Creates `count` ranks of this process in the communicator of all ranks. Every process must use the same count.
    pub(crate) fn ranks(&self, count: usize, builder: impl Fn(usize) -> Builder + Sync) -> Result<Vec<Communicator>, Failure> {
        let address = address(&self.comm)?;
        let first = self.comm.rank() * count;
        let world_size = self.comm.world_size() * count;
        joined(count, |number| {
            let store: Arc<dyn Store> = Arc::new(self.comm.store()?);
            let builder = builder(number).configure(|config| config.listen_address = config.listen_address.or(address));
            builder.with_store(store, first + number, world_size)
        })
    }

    /// Waits for the other processes, because one of them serves the ranks' store. Returns the ranks' `result`.
    pub(crate) fn leave(self, result: Result<u8, Failure>) -> Result<u8, Failure> {
        let code = result?;
        self.comm.close()?;
        Ok(code)
    }
}

/// Returns the address by which ranks on other hosts reach this one; `None` if there are no other hosts.
fn address(comm: &Communicator) -> Result<Option<IpAddr>, Failure> {
    // Hosts may share a name, as containers do; the library knows better which ranks share a host.
    let config = comm.config();
    if comm.local_world_size() == comm.world_size() || config.listen_address.is_some() || config.interfaces.is_some() {
        return Ok(config.listen_address);
    }
    let peers = comm.peers();
    let here = &peers[comm.rank()].host;
    let store = std::env::var("MASTER_ADDR").ok();
    let elsewhere = peers.iter().map(|peer| peer.host.clone()).filter(|host| host != here);
    match store.into_iter().chain(elsewhere).find_map(|host| address_towards(&host)) {
        Some(address) => Ok(Some(address)),
        None => Err(Failure::usage("the address at which other hosts reach this host is not known: set COLLECTIVES_LISTEN_ADDRESS")),
    }
}

/// Returns the address from which this host would send to another; sends nothing.
pub(crate) fn address_towards(host: &str) -> Option<IpAddr> {
    let target = (host.trim_start_matches('[').trim_end_matches(']'), 1).to_socket_addrs().ok()?.next()?;
    let any = if target.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0_u16; 8]) };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(target).ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|address| !address.is_loopback())
}

/// Creates ranks of this process alone, each with its own builder.
pub(crate) fn together(count: usize, builder: impl Fn(usize) -> Builder + Sync) -> Result<Vec<Communicator>, Failure> {
    let store = MemoryStore::new();
    joined(count, |number| builder(number).with_store(Arc::new(store.clone()), number, count))
}

/// Joins each rank on its own thread, and returns them in order.
fn joined(count: usize, join: impl Fn(usize) -> collectives::Result<Communicator> + Sync) -> Result<Vec<Communicator>, Failure> {
    let join = &join;
    thread::scope(|scope| {
        let start = |number: usize| {
            let named = thread::Builder::new().name(format!("rank {number} of this process"));
            named.spawn_scoped(scope, move || join(number)).map_err(|error| Failure::io("starting a thread for a rank", &error))
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        let ended = threads.into_iter().map(|thread| Ok(thread?.join().map_err(|_| Failure::internal("a rank panicked"))??));
        ended.collect::<Vec<Result<Communicator, Failure>>>().into_iter().collect()
    })
}
