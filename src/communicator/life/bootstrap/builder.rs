//! Joining a job: through the environment, a URL or a store, or as threads of this process.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::Duration;
#[cfg(feature = "cuda")]
use std::time::Instant;

use super::store::{await_ranks, call_off};
use super::{Origin, Start, connect_over_store};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::bootstrap::{ARRIVAL, LATE_LINGER};
use crate::communicator::Communicator;
#[cfg(feature = "cuda")]
use crate::communicator::device::{DeviceChoice, DeviceRequest};
use crate::communicator::handle::kept_store::{KeptStore, Reach};
use crate::communicator::recovery::PeerWatch;
use crate::communicator::recovery::RecoveryListener;
use crate::config::{Config, environment};
use crate::error::{Error, Peer, Result};
use crate::host::net::interfaces::listen_address;
#[cfg(feature = "cuda")]
use crate::observe::LIFE;
use crate::rendezvous::{self, JobStore, MemoryStore, PrefixStore, Rendezvous, Store};

/// Makes communicators with settings of your choice. Each setting, except the request for a device, is a field of
/// [`Config`]. [`Communicator::builder`] returns a builder.
///
/// ```
/// # use collectives::{Communicator, Transport};
/// let builder = Communicator::builder().configure(|config| config.transport = Transport::Tcp);
/// let hosts = builder.run_local(2, |comm| Ok(comm.local_world_size()))?;
/// assert_eq!(hosts, [2, 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct Builder {
    pub(in crate::communicator::life) config: Config,
    #[cfg(feature = "cuda")]
    pub(in crate::communicator::life) device: Option<DeviceRequest>,
}

impl Communicator {
    /// Returns a builder with default settings.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use std::time::Duration;
    /// let builder = Communicator::builder().configure(|config| config.timeout = Duration::from_secs(60));
    /// let timeouts = builder.run_local(2, |comm| Ok(comm.timeout()))?;
    /// assert_eq!(timeouts, [Duration::from_secs(60); 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Joins the job that a launcher's environment variables describe. The launcher can be torchrun, collrun, Slurm,
    /// Open MPI, a launcher with PMI, or a Kubernetes indexed job. Waits until every rank has joined.
    ///
    /// ```no_run
    /// # use collectives::Communicator;
    /// # fn main() -> collectives::Result<()> {
    /// let comm = Communicator::from_env()?;
    /// println!("rank {} of {}", comm.rank(), comm.world_size());
    /// comm.close()
    /// # }
    /// ```
    ///
    /// If `COLLECTIVES_JOIN` is set, for example to `10.0.0.1:40123`, this process joins the running job at this
    /// address instead, like [`join`](Self::join). If `COLLECTIVES_JOIN_FILE` is set, this process writes its
    /// [`join_address`](Self::join_address) to this file, from which a launcher can pass it to processes that join later.
    ///
    /// # Errors
    ///
    /// - `Config` if environment variables are missing or malformed.
    /// - `Conflict` if ranks contradict each other.
    /// - `Timeout`, which names the ranks that have not joined.
    #[doc(alias = "init_process_group")]
    pub fn from_env() -> Result<Self> {
        Self::builder().from_env()
    }

    /// Joins the job at a URL, which has one of these forms: `env://`, `tcp://host:port?rank=R&world_size=N` or
    /// `file:///path?rank=R&world_size=N`.
    ///
    /// ```no_run
    /// # use collectives::Communicator;
    /// # fn main() -> collectives::Result<()> {
    /// let comm = Communicator::from_url("tcp://10.0.0.1:29500?rank=1&world_size=4&timeout=60")?;
    /// # comm.close()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::from_env`].
    pub fn from_url(url: &str) -> Result<Self> {
        Self::builder().from_url(url)
    }

    /// Makes a communicator of `world_size` ranks for the threads of this process. Returns one handle for each rank.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// let sums: Vec<i32> = std::thread::scope(|scope| {
    ///     let ranks = Communicator::local(3)?.into_iter().map(|comm| {
    ///         scope.spawn(move || {
    ///             let mut x = [comm.rank() as i32 + 1];
    ///             comm.all_reduce(&mut x, ReduceOp::Sum).map(|()| x[0])
    ///         })
    ///     });
    ///     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<collectives::Result<_>>()
    /// })?;
    /// assert_eq!(sums, [6, 6, 6]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` for a world size of 0.
    /// - `Config` for a world size above 1,048,576, or if environment variables are malformed.
    /// - Errors of the operating system.
    #[doc(alias = "ncclCommInitAll")]
    pub fn local(world_size: usize) -> Result<Vec<Self>> {
        Self::builder().local(world_size)
    }

    /// Runs `program` on `world_size` threads. Each thread is a rank of one new communicator. Returns the results of
    /// the threads, in rank order.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// let ranks = Communicator::run_local(3, |comm| Ok((comm.rank(), comm.world_size())))?;
    /// assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The error of the lowest rank that failed for a reason other than a lost peer. If there is no such rank, the
    /// error of the lowest rank that failed. A rank that panics is reported as lost.
    pub fn run_local<R: Send>(world_size: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Result<Vec<R>> {
        Self::builder().run_local(world_size, program)
    }
}

impl Builder {
    /// Replaces all settings. To change only some settings, use [`configure`](Self::configure).
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Changes some settings: `change` gets the builder's current settings, which are at first the defaults.
    ///
    /// ```
    /// # use collectives::{Communicator, Transport};
    /// # use std::time::Duration;
    /// let builder = Communicator::builder().configure(|config| {
    ///     config.transport = Transport::Tcp;
    ///     config.timeout = Duration::from_secs(30);
    /// });
    /// let timeouts = builder.run_local(2, |comm| Ok(comm.config().timeout))?;
    /// assert_eq!(timeouts, [Duration::from_secs(30); 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    pub fn configure(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Gives the communicator a device backend if there is a GPU for every rank. Otherwise the communicator has no
    /// device backend, and [`Communicator::why_no_device`] returns the reason. All ranks must make the same request:
    /// all call `device`, all call [`require_device`](Self::require_device), or none calls either.
    #[cfg(feature = "cuda")]
    pub fn device(mut self, choice: DeviceChoice) -> Self {
        self.device = Some(DeviceRequest { choice, required: false });
        self
    }

    /// Requires a device backend. `choice` selects the GPU, as for [`device`](Self::device). If no device backend can
    /// be made, no communicator is made either: every rank gets `NoDevice`, with the reason.
    #[cfg(feature = "cuda")]
    pub fn require_device(mut self, choice: DeviceChoice) -> Self {
        self.device = Some(DeviceRequest { choice, required: true });
        self
    }

    /// Joins a job with these settings, like [`Communicator::from_url`].
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::from_url`].
    pub fn from_url(mut self, url: &str) -> Result<Communicator> {
        let mut rendezvous: Rendezvous = url.parse()?;
        self.config = self.config.with_environment()?;
        rendezvous.ports = self.config.port_range;
        let timeout = rendezvous.timeout.unwrap_or(self.config.timeout);
        self.config.timeout = timeout;
        let deadline = Deadline::after(timeout);
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
        let job = rendezvous::connect(&rendezvous, &deadline, self.config.secret.as_ref(), &environment, parent)?;
        let JobStore { store, rank, world_size, agent, address, server, local_address, confined } = job;
        let reach = address.map_or_else(|| Reach::Shared(Arc::clone(&store)), Reach::Address);
        let store = agent.map_or(Arc::clone(&store), |agent| Arc::new(PrefixStore::new(rendezvous_prefix(agent, rank), store)));
        let keeps = self.config.keep_store;
        let watch = server.as_ref().map(|server| {
            let lack = server.lack();
            Box::new(move || lack.get().map(|lack| format!("rank 0, which serves the job's store, cannot accept the other ranks: {lack}")))
                as PeerWatch
        });
        let comm = self.connect(store, rank, world_size, local_address, watch, &deadline);
        let comm = comm.map_err(|error| rendezvous::Confined::blame(confined.as_ref(), error));
        match &comm {
            Ok(comm) if keeps => comm.keep_store(Some(Arc::new(KeptStore::new(reach, server)))),
            // The other ranks are equally late.
            Err(error) if error.is_timeout() => drop(server.map(|server| server.end_within(LATE_LINGER))),
            // Lingers until the last rank has read what it needs from the store.
            _ => drop(server),
        }
        comm
    }

    /// Joins a job over a store that all ranks share. A store can serve only one communicator. For each further
    /// communicator, wrap the store in a [`PrefixStore`] with a new prefix.
    ///
    /// If the ranks are on several hosts, set [`Config::listen_address`] to an address at which peers reach this rank.
    /// Without this setting, the rank listens on the loopback interface, because a store does not provide such an
    /// address.
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::from_env`].
    pub fn with_store(mut self, store: Arc<dyn Store>, rank: usize, world_size: usize) -> Result<Communicator> {
        self.config = self.config.with_environment()?;
        let deadline = Deadline::after(self.config.timeout);
        let kept = self.config.keep_store.then(|| Arc::new(KeptStore::new(Reach::Shared(Arc::clone(&store)), None)));
        self.connect(store, rank, world_size, None, None, &deadline).inspect(|comm| comm.keep_store(kept))
    }

    /// Connects this rank with the others that meet at a store, then connects their devices. This rank reaches the
    /// store from the address `from`.
    fn connect(
        self,
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        from: Option<IpAddr>,
        watch: Option<PeerWatch>,
        deadline: &Deadline,
    ) -> Result<Communicator> {
        let listener = listen_address(&self.config, from).and_then(|at| Ok((at, RecoveryListener::new(at, self.config.port_range)?)));
        // The others would wait for this rank.
        let gives_up = |error: &Error| call_off(&*store, &Error::Conflict { reason: format!("rank {rank} cannot continue: {error}") });
        let (listen, listener) = listener.inspect_err(|error| {
            gives_up(error);
            // Only a rank that serves the store watches for a lack of resources there.
            if watch.is_some() {
                await_ranks(&*store, world_size.saturating_sub(1), &Deadline::after(ARRIVAL.min(deadline.remaining())));
            }
        })?;
        let start = Start { rank, world_size, config: self.config, listen, origin: Origin::Job(listener) };
        let comm = connect_over_store(Arc::clone(&store), start, watch, deadline).inspect_err(|error| {
            // Errors that the others receive or detect themselves need no notification.
            if matches!(error, Error::Io { .. }) {
                gives_up(error);
            }
        })?;
        #[cfg(feature = "cuda")]
        if let Some(request) = self.device {
            connect_device(&comm, &request)?;
        }
        Ok(comm)
    }

    /// Makes communicators with these settings, like [`Communicator::local`].
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::local`].
    pub fn local(self, world_size: usize) -> Result<Vec<Communicator>> {
        if world_size == 0 {
            return Err(Error::argument("local", "a communicator must have at least one rank"));
        }
        let store = MemoryStore::new();
        let join = |rank: usize| self.clone().with_store(Arc::new(store.clone()), rank, world_size);
        let call_off = |error: &Error| call_off(&store, error);
        on_threads("local", (0..world_size).collect(), join, call_off).into_iter().collect()
    }

    /// Runs a program with these settings, like [`Communicator::run_local`].
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::run_local`].
    pub fn run_local<R: Send>(self, world_size: usize, program: impl Fn(&Communicator) -> Result<R> + Sync) -> Result<Vec<R>> {
        let comms = self.local(world_size)?;
        // If a rank gets no thread, its communicator is dropped, so its peers lose the rank.
        let results = on_threads("run_local", comms, |comm| program(&comm), |_| {});
        // A rank's own error explains more than the reports of peers that lost this rank.
        let own = |(rank, result): (usize, &Result<R>)| match result {
            Ok(_) => false,
            Err(Error::PeerLost { peer, .. }) => peer.rank == rank,
            Err(error) => !error.is_peer_lost(),
        };
        match results.iter().enumerate().position(own) {
            Some(rank) => results.into_iter().nth(rank).into_iter().collect(),
            None => results.into_iter().collect(),
        }
    }
}

/// Makes the device backend that was requested.
#[cfg(feature = "cuda")]
fn connect_device(comm: &Communicator, request: &DeviceRequest) -> Result<()> {
    // All ranks have joined. The time for NCCL starts now, so late ranks do not shorten it.
    let began = Instant::now();
    comm.connect_device(request, &Deadline::after(comm.timeout()))?;
    if comm.device().is_some() {
        let took_ms = began.elapsed().as_millis() as u64;
        event::info!(target: LIFE, communicator = "world", rank = comm.rank(), took_ms, "the device backend is ready");
    }
    Ok(())
}

/// How often this process has joined at an agent's store, by the store and the rank.
static RENDEZVOUS_COUNTS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());

/// Returns the key prefix of one rendezvous at an agent's store. The store outlives the communicator, so the process's
/// next communicator needs its own keys. Every rank counts in the same way.
fn rendezvous_prefix(agent: String, rank: usize) -> String {
    let mut counts = event::lock(&RENDEZVOUS_COUNTS);
    let number = counts.entry((agent, rank)).or_default();
    *number += 1;
    number.to_string()
}

/// Runs `program` on a thread for each rank, and returns the results in rank order. If the system refuses a thread,
/// `without_thread` gets the error, which is also the result of that rank.
fn on_threads<T: Send, R: Send>(
    doing: &str,
    ranks: Vec<T>,
    program: impl Fn(T) -> Result<R> + Sync,
    without_thread: impl Fn(&Error),
) -> Vec<Result<R>> {
    let program = &program;
    std::thread::scope(|scope| {
        let start = |(rank, given): (usize, T)| {
            let thread = std::thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, move || program(given));
            thread.map_err(|error| Error::io(format!("{doing}: starting a thread for rank {rank}"), error)).inspect_err(&without_thread)
        };
        let threads: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
        let join = |(rank, thread): (usize, Result<ScopedJoinHandle<'_, Result<R>>>)| {
            thread.and_then(|thread| thread.join().unwrap_or_else(|_| Err(panicked(doing, rank))))
        };
        threads.into_iter().enumerate().map(join).collect()
    })
}

/// Returns the error for a panic on a rank's thread.
fn panicked(doing: &str, rank: usize) -> Error {
    let reason = "its thread panicked; the message is on standard error".to_owned();
    Error::PeerLost { doing: doing.to_owned(), peer: Peer::unknown(rank), elapsed: Duration::ZERO, reason }
}
