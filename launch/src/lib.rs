//! Starts the ranks of one job on this host, watches them, and leaves none behind.
//!
//! Shared by `collrun`, which starts any program, and `collperf`, which starts itself.

mod child;
mod output;
mod supervisor;

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use collectives::{Secret, store::TcpStoreServer};
pub use output::Output;

/// What to start, how often, and where in the job this host stands.
#[derive(Debug, Clone)]
pub struct Job {
    /// The program, looked up in PATH.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Ranks on this host.
    pub local_world_size: usize,
    /// Hosts in the job, each with as many ranks.
    pub nodes: usize,
    /// This host's number among them.
    pub node: usize,
    /// Where the ranks' output goes.
    pub output: Output,
    /// How long ranks that were asked to stop may take before they are killed.
    pub grace: Duration,
    /// An exit code by which a rank tells what it found; it becomes ours, and the other ranks go on.
    pub verdict: Option<u8>,
    /// Whether the others go on when a rank fails, and one that succeeds is enough.
    pub keep_going: bool,
}

/// Why a job could not be started, and the exit code that says so.
#[derive(Debug)]
pub struct Refused {
    /// What went wrong, in words.
    pub message: String,
    /// As shells have it: 127 for a program that is not there, 126 for one that cannot be run, else 1.
    pub code: u8,
}

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

/// Starts the job's ranks and waits for all of them. Returns the exit code: that of the rank that failed first, else 0; 0 also
/// where ranks are to go on without those that fail and one has succeeded. `name`, the program's, stands before what is said of them on
/// standard error.
///
/// Must be called on a thread that lives as long as the process: the ranks die with it. From here on SIGINT, SIGTERM and SIGHUP are passed on
/// to the ranks, unless they were ignored. Costs a process and up to three threads for each rank.
///
/// # Errors
///
/// When a rank or the means to watch it cannot be started; those already started are killed first.
pub fn run(name: &str, job: &Job, store: &Store) -> Result<u8, Refused> {
    // Signals first: from here on none of them can end this process before its ranks have heard of it.
    let (sender, events) = std::sync::mpsc::channel();
    supervisor::listen(&sender).map_err(|error| Refused { message: format!("waiting for signals: {error}"), code: 1 })?;
    let mut supervisor = supervisor::Supervisor::new(name, job, sender, events);
    let mut forwarders = output::Forwarders::default();
    for local_rank in 0..job.local_world_size {
        let rank = job.node * job.local_world_size + local_rank;
        let mut child = child::spawn(job, store, local_rank).map_err(|error| child::refused(&job.program, rank, &error))?;
        forwarders.attach(rank, &mut child);
        supervisor.watch(rank, child).map_err(|error| Refused { message: format!("watching rank {rank}: {error}"), code: 1 })?;
    }
    let code = supervisor.wait();
    drop(supervisor);
    forwarders.finish();
    Ok(code)
}
