//! How a host plane comes to be: the ranks exchange facts, share memory, and open links.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::HostPlane;
use super::facts::HostFacts;
use super::links::{MessageConnector, PlaneLink, PlaneLinks};
use super::plans::{Chooser, Plans};
use super::topology::Topology;
use crate::config::{Config, Transport};
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::flight::{Flight, Orders};
use crate::host::bootstrap::Exchange;
use crate::host::engine::Engine;
use crate::host::health::Health;
use crate::host::net::identity::{host_identity, host_name};
use crate::host::net::mesh::Mesh;
use crate::host::scratch::Scratch;
use crate::host::shm::{Channel, Group};

/// What is known before anyone has said anything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaneSetup<'a> {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) config: &'a Config,
    /// Where to listen, should ranks of other hosts turn up.
    pub(crate) listen: IpAddr,
    /// Where this rank can be found should the communicator fail.
    pub(crate) recovery_listener: Option<SocketAddr>,
}

impl PlaneSetup<'_> {
    /// This rank's facts.
    fn facts(&self) -> Result<HostFacts> {
        let mut nonce = [0; 16];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| Error::io("drawing the communicator's random number", error))?;
        Ok(HostFacts {
            nonce,
            tag: self.config.secret.as_ref().map(|secret| HostFacts::vouch(secret, self.rank, &nonce)),
            pid: std::process::id(),
            settings: HostFacts::settings_of(self.config),
            identity: match &self.config.host_identity {
                Some(identity) => identity.clone(),
                None => host_identity().map_err(|error| Error::io("finding out which host this is", error))?,
            },
            host: host_name(),
            recovery_listener: self.recovery_listener.map(|recovery_listener| recovery_listener.to_string()).unwrap_or_default(),
        })
    }
}

impl HostPlane {
    /// How many exchanges [`HostPlane::establish`] takes part in, whatever the topology.
    pub(crate) const EXCHANGES: usize = 4;

    /// Establishes the plane of one rank, and what its messages will travel on. Every rank calls it.
    pub(crate) fn establish(exchange: &mut dyn Exchange, setup: &PlaneSetup<'_>, deadline: &Deadline) -> Result<(Self, MessageConnector)> {
        let PlaneSetup { rank, world_size, config, listen, recovery_listener: _ } = *setup;
        let secret = config.secret.as_ref();
        let blobs = exchange.all_gather(&setup.facts()?.to_bytes(), deadline)?;
        let facts: Vec<HostFacts> =
            blobs.iter().enumerate().map(|(rank, blob)| HostFacts::from_bytes(rank, blob)).collect::<Result<_>>()?;
        HostFacts::compare(&facts)?;
        HostFacts::check_tags(&facts, secret)?;
        let identities: Vec<String> = facts.iter().map(|facts| facts.identity.clone()).collect();
        let topology = Topology::new(&identities, rank, config.transport);
        let local = place_on_host(&identities, rank);
        if config.transport == Transport::Shm && !topology.is_one_host() && world_size > 1 {
            let hosts = topology.host_count();
            let reason = format!("the ranks are on {hosts} hosts; use the auto or the tcp transport");
            return Err(Error::Unsupported { what: "the shm transport".to_owned(), reason });
        }
        let peers: Arc<[Peer]> =
            facts.iter().enumerate().map(|(rank, facts)| Peer { rank, host: facts.host.clone(), pid: facts.pid }).collect();
        let health = Arc::new(Health::recording(Flight::new(orders(config))));
        let mut group = if topology.local_ranks().len() > 1 {
            Some(Group::establish(exchange, topology.local_ranks(), rank, world_size, secret, deadline)?)
        } else {
            exchange.all_gather(&[], deadline)?;
            exchange.all_gather(&[], deadline)?;
            None
        };
        let needs_listener = !topology.is_one_host() && world_size > 1;
        let mesh = Mesh::establish(exchange, rank, world_size, needs_listener, listen, facts[0].nonce, 0, secret, deadline)?;
        let mesh = Arc::new(mesh);
        let chooser = Chooser::new(config, local.1 == world_size)?;
        let mut rings = Vec::new();
        if let Some(group) = group.as_mut() {
            for (local, rank) in topology.local_ranks().iter().enumerate() {
                rings.extend(group.link(local, Channel::PointToPoint).map(|link| (*rank, PlaneLink::ring(link))));
            }
        }
        let mut links = PlaneLinks::new(Arc::clone(&mesh), group.as_mut(), &topology, world_size, Arc::clone(&health));
        if topology.local() == 0 && topology.host_count() > 1 {
            let opened = links.connect_partners(&topology.share_owners(0), deadline);
            opened.map_err(|stop| stop.to_error("opening links between hosts", deadline, &peers))?;
        }
        let plane = Self {
            rank,
            engine: Engine::new(rank, world_size, local.1),
            plans: Plans::default(),
            links,
            peers,
            health,
            local,
            topology,
            group,
            chooser,
            sequence: 0,
            unfinished_barrier: None,
            scratch: Scratch::default(),
            id: facts[0].nonce,
            recovery_listeners: facts.iter().map(|facts| facts.recovery_listener.parse().ok()).collect(),
        };
        Ok((plane, MessageConnector { rings, mesh }))
    }
}

/// What the flight recorder is to do. An absurd number of calls given by the program is cut to what memory may hold.
fn orders(config: &Config) -> Orders {
    let calls = config.flight_recorder_calls.min(Config::MAX_FLIGHT_RECORDER_CALLS);
    Orders { calls, stall_warning: config.stall_warning, folder: config.flight_recorder_dir.clone() }
}

/// A rank's place among the ranks of its host, and how many these are, whatever links they use.
fn place_on_host(identities: &[String], rank: usize) -> (usize, usize) {
    let before = |end: usize| identities[..end].iter().filter(|identity| **identity == identities[rank]).count();
    (before(rank), before(identities.len()))
}
