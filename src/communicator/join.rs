//! How a rank joins the job that was found.

use std::net::IpAddr;
use std::sync::Arc;

use super::Communicator;
use super::bootstrap::StoreExchange;
use super::progress::ProgressEngine;
use super::recovery::{RecoveryGroup, RecoveryListener};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::host::plane::{HostPlane, PlaneSetup};
use crate::observe::{LIFE, TraceLog};
use crate::rendezvous::Store;

/// What a communicator comes of.
pub(super) enum Origin {
    /// A job that begins.
    Job,
    /// One that has failed: the recovery listeners of its members, its name, its trace, and whether this rank looks out for deaths meanwhile.
    Shrunk { recovery: RecoveryGroup, name: String, trace: Option<Arc<TraceLog>>, watches: bool },
}

/// Joins the job that was found: tells who this rank is, learns who the others are, opens the links.
pub(super) fn join(
    store: Arc<dyn Store>,
    (rank, world_size): (usize, usize),
    local_address: Option<IpAddr>,
    config: Config,
    deadline: &Deadline,
    origin: Origin,
) -> Result<Communicator> {
    let listen = config.listen_address.or(local_address).unwrap_or(IpAddr::from([127, 0, 0, 1]));
    let (recovery_listener, watch) = match &origin {
        Origin::Job => (RecoveryListener::new(listen), None),
        Origin::Shrunk { recovery, watches, .. } => (RecoveryListener::none(), watches.then(|| recovery.watch())),
    };
    let mut exchange = StoreExchange::join(store, rank, world_size, deadline)?.watched(watch);
    let met = deadline.elapsed();
    let setup = PlaneSetup { rank, world_size, config: &config, listen, recovery_listener: recovery_listener.address() };
    let (plane, connector) = HostPlane::establish(&mut exchange, &setup, deadline)?;
    let (linked, wiring) = (deadline.elapsed(), plane.wiring());
    let (recovery, name, trace) = match origin {
        Origin::Job => (RecoveryGroup::new(recovery_listener, plane.recovery_listeners(), config.secret.clone()), "world".to_owned(), None),
        Origin::Shrunk { recovery, name, trace, .. } => (recovery, name, trace),
    };
    let progress = ProgressEngine::new(&plane, connector);
    let comm = Communicator::new(plane, progress, config, listen, recovery, name, trace);
    // Nobody needs the store any more once everyone is here: rank 0 may stop serving it.
    let timeout = comm.timeout();
    comm.set_timeout(deadline.remaining());
    comm.barrier()?;
    comm.set_timeout(timeout);
    let [met_ms, linked_ms, ready_ms] = [met, linked, deadline.elapsed()].map(|time| time.as_secs_f64() * 1e3);
    let communicator = comm.core.shared.health.flight().name();
    crate::event::info!(target: LIFE, communicator, rank, world_size, wiring, met_ms, linked_ms, ready_ms, "ready");
    Ok(comm)
}
