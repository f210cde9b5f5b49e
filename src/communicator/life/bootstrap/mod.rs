//! Start-up: how the ranks of a new communicator find each other, what they tell each other, and how they are connected.
//!
//! Two steps, the same for a job that begins, a split, a shrink and a device backend. Ranks *exchange* small blobs (`Exchange`): over the
//! store at which a job meets (`store.rs`), or over the communicator that a new one is made of (`parent.rs`). Then they *connect*: of what
//! all have told, each makes its backends. `builder.rs` finds the job and its store.
//!
//! # A job
//!
//! Each rank claims its number at the store, and says how large it believes the world to be. Contradictions are written under one key that
//! everyone looks at while waiting, so all hear of them. Facts then travel in four exchanges. Rank 0 collects everyone's blob and publishes
//! them as one value, so the number of store messages grows as n. After a last barrier nobody needs the store, and rank 0 stops serving it,
//! unless it is kept for the program (`kept_store.rs`).
//!
//! # Who is let in
//!
//! Where the job has a secret, a connection begins with a proof by both ends (`authentication/`): `Initiator` and `Responder` take and give bytes and
//! know no sockets. Three listeners drive one for each connection, beside those that are proven: the store's server, the listener of a rank,
//! and the one of shared memory. A silent connection costs a descriptor for a bounded time and holds up nobody: at most 512, 256 and 64 are
//! there at a time. Once that many are, those that were silent for longer than 100 to 200 ms make room. Between ranks the hello is part of
//! what is proven. Facts carry an HMAC too: it finds a rank with another secret at a store that proves nothing, and names it on every rank.
//! Without a secret not one byte more is sent, but for shared memory: its key is a random number then, which the exchange carries.
//!
//! # What is lacking
//!
//! A listener that has no descriptor for who comes rests, since a flood of unproven connections may be the cause. Where none is there, and the lack
//! lasts, it is a limit of the process's own (`Admission::starved`), and whoever waits is told: a client by a last word for which a
//! descriptor is kept, rank 0 by its store's server, a rank by its own listener. Where the system refuses to share memory, the ranks of that host, all of them,
//! go over TCP (`host/shm/group.rs`).

mod builder;
mod parent;
mod store;

use std::net::IpAddr;
use std::sync::Arc;

pub use builder::Builder;
pub(in crate::communicator) use parent::ParentExchange;
pub(in crate::communicator) use store::{StoreExchange, call_off};

use crate::base::deadline::Deadline;
use crate::communicator::Communicator;
use crate::communicator::handle::state::Shared;
use crate::communicator::recovery::{PeerWatch, RecoveryGroup, RecoveryListener};
use crate::config::{Config, nvtx_injection};
use crate::error::Result;
use crate::flight::{self, About};
use crate::host::backend::{BackendSetup, HostBackend};
use crate::host::exchange::Exchange;
use crate::observe::{LIFE, Observers, TraceLog, Watch};
use crate::rendezvous::Store;

/// What a new communicator comes of.
pub(in crate::communicator) enum Origin {
    /// A job that begins, in which this rank can be found here.
    Job(RecoveryListener),
    /// An older communicator: where its ranks find each other, their numbers in the job, the new one's name, and the log of traces.
    Communicator { recovery: RecoveryGroup, world_ranks: Arc<[usize]>, name: String, trace: Option<Arc<TraceLog>> },
}

/// A rank that starts, and what it knows before it has heard of the others.
pub(in crate::communicator) struct Start {
    pub(in crate::communicator) rank: usize,
    pub(in crate::communicator) world_size: usize,
    pub(in crate::communicator) config: Config,
    /// Where to listen for other ranks.
    pub(in crate::communicator) listen: IpAddr,
    pub(in crate::communicator) origin: Origin,
}

/// Connects the ranks that meet at a store. When it returns they need the store no more. `watch` looks for ranks that are gone meanwhile.
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
    // Nobody needs the store any more once everyone is here: rank 0 may stop serving it.
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

/// Connects the ranks of an exchange, and makes this one's communicator. The others may still be on their way.
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
    let listener = Watch::new(&name, (rank, world_size), config.observer.clone(), trace.as_ref(), nvtx_injection().as_deref());
    backend.set_observers(Observers::new(listener));
    let recorder = backend.recorder();
    let about =
        About { id: About::id_of(backend.id()), name, rank, peers: backend.peers(), wiring: backend.wiring(), timeout: config.timeout };
    if recorder.introduce(about) {
        flight::enlist(&recorder);
    }
    Ok(Communicator::new(Shared::new(backend, connector, config, listen, recovery, world_ranks, trace)))
}

/// Begins a trace where one was asked for.
fn new_trace(backend: &HostBackend, config: &Config) -> Option<Arc<TraceLog>> {
    if !config.trace && config.trace_dir.is_none() {
        return None;
    }
    let (ranks, me) = ((backend.rank(), backend.peers().len()), backend.peers()[backend.rank()].clone());
    Some(Arc::new(TraceLog::new(About::id_of(backend.id()), ranks, me, config.trace_dir.clone())))
}
