//! Start-up: the ranks of a new communicator find each other, exchange facts, and connect.
//!
//! There are two steps. They are the same for a new job, a split, a shrink and a device backend:
//! - Ranks *exchange* small blobs (`Exchange`): over the store at which a job meets (`store.rs`), or over the
//!   communicator that a new one is made from (`parent.rs`).
//! - Then they *connect*: each rank makes its backends from the blobs that all ranks have sent.
//!
//! `builder.rs` finds the job and its store.
//!
//! # A job
//!
//! Each rank claims its number at the store, and writes its world size. Contradictions are written under one key that
//! every rank reads while it waits, so every rank learns of them. Facts then travel in four exchanges. Rank 0 collects
//! all blobs and publishes them as one value, so the number of store messages grows in proportion to the number of
//! ranks. After a last barrier no rank needs the store, and rank 0 stops serving it, unless the store is kept for the
//! program (`kept_store.rs`).
//!
//! # Authentication
//!
//! If the job has a secret, a connection begins with a proof by both ends (`authentication/`): `Initiator` and
//! `Responder` consume and produce bytes, and use no sockets. Three listeners run a `Responder` for each connection,
//! and keep unproven connections separate from proven ones: the store's server, a rank's listener, and the listener for
//! shared memory. A silent connection occupies a descriptor for a bounded time and delays no other connection. At these
//! three listeners, at most 512, 256 and 64 unproven connections exist at a time. At the limit, connections that were
//! silent for longer than 100 to 200 ms are closed. Between ranks, the proof also covers the hello, the message that
//! opens a link. Facts carry an HMAC too. It detects a rank with a different secret even at a store that demands no
//! proof, and every rank's error names that rank. Without a secret, no additional bytes are sent. Shared memory is the
//! exception: its key is then a random number, which the exchange carries.
//!
//! # Missing resources
//!
//! If a listener has no descriptor for a new connection, it pauses, because a flood of unproven connections may be the
//! cause. If there are no unproven connections and the shortage lasts, the cause is a limit of the process itself
//! (`Admission::starved`). The listener then notifies the parties that wait. A client gets a last message, for which a
//! descriptor is reserved. Rank 0 is notified by its store's server, and a rank by its own listener. If the system
//! refuses to share memory, all ranks of that host use TCP (`host/shm/group.rs`).

mod builder;
mod parent;
mod store;

use std::net::IpAddr;
use std::sync::Arc;

pub use builder::Builder;
pub(in crate::communicator) use parent::ParentExchange;
pub(in crate::communicator) use store::{StoreExchange, call_off, is_called_off, measured, split_blobs};

use crate::base::deadline::Deadline;
use crate::communicator::Communicator;
use crate::communicator::handle::state::Shared;
use crate::communicator::recovery::{PeerWatch, RecoveryGroup, RecoveryListener};
use crate::config::{Config, nvtx_injection};
use crate::error::{Peer, Result};
use crate::flight::{self, About};
use crate::host::backend::{BackendSetup, HostBackend};
use crate::host::exchange::Exchange;
use crate::metrics::{Group, Metered, Place, Sink};
use crate::observe::{LIFE, Observer, Observers, TraceLog, Watch};
use crate::rendezvous::Store;
use crate::status;

/// The origin of a new communicator.
pub(in crate::communicator) enum Origin {
    /// A new job. Other ranks find this rank at this recovery listener.
    Job(RecoveryListener),
    /// An older communicator. These values are for the new communicator:
    /// - `recovery`: the recovery listeners of its ranks,
    /// - `world_ranks`: the numbers of its ranks in the job,
    /// - `name`: its name,
    /// - `trace`: the log of the trace, which the new communicator shares with the older communicator.
    Communicator { recovery: RecoveryGroup, world_ranks: Arc<[usize]>, name: String, trace: Option<Arc<TraceLog>> },
}

/// A rank that starts, and what it knows before it has received anything from the others.
pub(in crate::communicator) struct Start {
    pub(in crate::communicator) rank: usize,
    pub(in crate::communicator) world_size: usize,
    pub(in crate::communicator) config: Config,
    /// The address on which to listen for other ranks.
    pub(in crate::communicator) listen: IpAddr,
    pub(in crate::communicator) origin: Origin,
}

/// Connects the ranks that meet at a store. Once it returns, they no longer need the store. Meanwhile, `watch` detects
/// ranks that are gone.
pub(in crate::communicator) fn connect_over_store(
    store: Arc<dyn Store>,
    start: Start,
    watch: Option<PeerWatch>,
    deadline: &Deadline,
) -> Result<Communicator> {
    let (rank, world_size) = (start.rank, start.world_size);
    let mut exchange = StoreExchange::new(store, rank, world_size, watch, deadline)?;
    let met = deadline.elapsed();
    let comm = connect(&mut exchange, start, deadline)?;
    let linked = deadline.elapsed();
    // No rank needs the store once all are here: rank 0 may stop serving it.
    let timeout = comm.timeout();
    comm.set_timeout(deadline.remaining());
    comm.barrier()?;
    comm.set_timeout(timeout);
    let [met_ms, linked_ms, ready_ms] = [met, linked, deadline.elapsed()].map(|time| time.as_secs_f64() * 1e3);
    let wiring = comm.with_backend(|backend| backend.wiring()).unwrap_or_default();
    let communicator = comm.core.shared.recorder.name();
    crate::base::event::info!(target: LIFE, communicator, rank, world_size, wiring, met_ms, linked_ms, ready_ms, "ready");
    Ok(comm)
}

/// Connects the ranks of an exchange, and makes this rank's communicator. The others may not have finished yet.
pub(in crate::communicator) fn connect(exchange: &mut dyn Exchange, start: Start, deadline: &Deadline) -> Result<Communicator> {
    let Start { rank, world_size, config, listen, origin } = start;
    let recovery_listener = match &origin {
        Origin::Job(listener) => listener.address(),
        Origin::Communicator { .. } => None,
    };
    let setup = BackendSetup { rank, world_size, config: &config, listen, recovery_listener };
    let (mut backend, connector) = HostBackend::connect(exchange, &setup, deadline)?;
    let (recovery, world_ranks, name, trace) = match origin {
        Origin::Job(listener) => {
            let recovery = RecoveryGroup::new(listener, backend.recovery_listeners(), config.secret.clone());
            (recovery, (0..world_size).collect(), "world".to_owned(), None)
        }
        Origin::Communicator { recovery, world_ranks, name, trace } => (recovery, world_ranks, name, trace),
    };
    let trace = trace.or_else(|| new_trace(&backend, &config));
    let recorder = backend.recorder();
    let observer = observer(&backend, &name, &config);
    let log = trace.as_ref().map(|log| (log, log.admit(&name, Arc::clone(&world_ranks))));
    let listener = Watch::new(&name, (rank, world_size), observer, log, nvtx_injection().as_deref());
    backend.set_observers(Observers::new(listener));
    let about = About {
        id: About::id_of(backend.id()),
        name,
        rank,
        peers: backend.peers(),
        world_ranks: Arc::clone(&world_ranks),
        wiring: backend.wiring(),
        timeout: config.timeout,
    };
    if recorder.introduce(about) {
        flight::enlist(&recorder);
        if config.status_socket {
            status::serve();
        }
    }
    Ok(Communicator::new(Shared::new(backend, connector, config, listen, recovery, world_ranks, trace)))
}

/// Returns the program's observer, or one that also keeps metrics.
fn observer(backend: &HostBackend, name: &str, config: &Config) -> Option<Arc<dyn Observer>> {
    let sinks = [config.metrics_dir.clone().map(Sink::Folder), config.metrics_address.map(Sink::Port)];
    let with_metrics = |next, sink| -> Option<Arc<dyn Observer>> {
        let (rank, world_size) = (backend.rank(), backend.peers().len());
        let group = Group { communicator: name.to_owned(), rank, world_size, wiring: backend.wiring() };
        Some(Arc::new(Metered::new((sink, place(backend)), group, &backend.recorder(), next)))
    };
    sinks.into_iter().flatten().fold(config.observer.clone(), with_metrics)
}

/// Returns the position of this process among the processes of its host.
fn place(backend: &HostBackend) -> Place {
    let (rank, peers) = (backend.rank(), backend.peers());
    let is_own = |peer: &&Peer| (peer.pid, &peer.host) == (peers[rank].pid, &peers[rank].host);
    let (index, count) = backend.local();
    // Earlier ranks may be threads of this process.
    Place { index: index.saturating_sub(peers[..rank].iter().filter(is_own).count()), count }
}

/// Begins a trace if one is enabled.
fn new_trace(backend: &HostBackend, config: &Config) -> Option<Arc<TraceLog>> {
    if !config.trace && config.trace_dir.is_none() {
        return None;
    }
    let (ranks, me) = ((backend.rank(), backend.peers().len()), backend.peers()[backend.rank()].clone());
    Some(Arc::new(TraceLog::new(About::id_of(backend.id()), ranks, me, config.trace_dir.clone())))
}
