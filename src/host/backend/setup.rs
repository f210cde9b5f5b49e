//! The start of a host backend. Ranks exchange facts about themselves, share memory if they share a host, and open
//! their first links.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Once};

use super::HostBackend;
use super::links::{BackendLink, BackendLinks, MessageConnector};
use super::plans::{Chooser, Plans};
use super::topology::Topology;
use crate::authentication::{self, Secret};
use crate::base::deadline::Deadline;
use crate::base::event;
#[cfg(feature = "cuda")]
use crate::config::nccl::CheckDeviceCalls;
use crate::config::{Config, Transport};
use crate::error::{Error, Peer, Result};
use crate::flight::{Flight, Orders};
use crate::host::abort_reason::Interrupted;
use crate::host::engine::Engine;
use crate::host::exchange::Exchange;
use crate::host::health::Health;
use crate::host::net::Terms;
use crate::host::net::identity::{FOUND_IDENTITY, host_identity, host_name, loopback_interface, process_numbers, process_token};
use crate::host::net::mesh::Mesh;
use crate::host::net::own_address::seen_from;
use crate::host::processors::{self, Processors};
use crate::host::scratch::Scratch;
use crate::host::shm::{Channel, Sharing};
use crate::observe::Observers;

/// What a rank knows before any exchange.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackendSetup<'a> {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) config: &'a Config,
    /// The address on which to listen for ranks of other hosts.
    pub(crate) listen: IpAddr,
    /// The address at which this rank is reachable if the communicator fails.
    pub(crate) recovery_listener: Option<SocketAddr>,
}

impl BackendSetup<'_> {
    /// Returns this rank's facts.
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
                None => host_identity().map_err(|error| Error::io("determining the identity of this host", error))?,
            },
            host: host_name(),
            recovery_listener: self.recovery_listener.map(|address| address.to_string()).unwrap_or_default(),
            process: process_token().map_err(|error| Error::io("drawing the process's random number", error))?,
            numbers: process_numbers(),
            loopback: loopback_interface(),
            processors: Processors::here().to_text(),
        })
    }

    /// Returns every rank's facts, once they are found to be consistent.
    fn exchange_facts(&self, exchange: &mut dyn Exchange, deadline: &Deadline) -> Result<Vec<HostFacts>> {
        let blobs = exchange.all_gather(&self.facts()?.to_bytes(), deadline)?;
        let facts: Vec<HostFacts> =
            blobs.iter().enumerate().map(|(rank, blob)| HostFacts::from_bytes(rank, blob)).collect::<Result<_>>()?;
        HostFacts::compare(&facts)?;
        HostFacts::check_tags(&facts, self.config.secret.as_ref())?;
        Ok(facts)
    }
}

impl HostBackend {
    /// Number of exchanges that [`HostBackend::connect`] takes part in, whatever the topology.
    pub(crate) const EXCHANGES: usize = 4;

    /// Describes the parts of a rank's settings that all ranks must share, and the version of the data that they exchange.
    pub(crate) fn shared_settings(config: &Config) -> String {
        format!("protocol version {VERSION}, {}", HostFacts::settings_of(config))
    }

    /// Connects this rank with the others of the exchange. Returns its backend, and the connector for its messages.
    /// Every rank calls it.
    pub(crate) fn connect(exchange: &mut dyn Exchange, setup: &BackendSetup<'_>, deadline: &Deadline) -> Result<(Self, MessageConnector)> {
        let BackendSetup { rank, world_size, config, listen, recovery_listener: _ } = *setup;
        let secret = config.secret.as_ref();
        let facts = setup.exchange_facts(exchange, deadline)?;
        let identities: Vec<String> = facts.iter().map(|facts| facts.identity.clone()).collect();
        let topology = Topology::new(&identities, rank, config.transport);
        let local = place_on_host(&identities, rank);
        let is_crowded = is_crowded(&facts, rank);
        if config.transport == Transport::Shm && !topology.is_one_host() && world_size > 1 {
            let hosts = topology.host_count();
            let reason = format!("the ranks are on {hosts} hosts; use the auto or the tcp transport");
            return Err(Error::Unsupported { what: "the shm transport".to_owned(), reason });
        }
        let peers: Arc<[Peer]> =
            facts.iter().enumerate().map(|(rank, facts)| Peer { rank, host: facts.host.clone(), pid: facts.pid }).collect();
        let health = Arc::new(Health::of(rank));
        let required = config.transport == Transport::Shm && topology.local_ranks().len() > 1;
        let sharing = Sharing::connect(exchange, topology.local_ranks(), (rank, world_size), secret, required, deadline)?;
        let Sharing { mut group, refusals } = sharing;
        if let Some(group) = &mut group {
            group.set_waiting(config.waiting);
        }
        let unshared = in_words(refusals.first(), &peers, config);
        let topology = match &unshared {
            Some(_) => {
                let ours = refusals.iter().find(|(rank, _)| topology.local_ranks().contains(rank));
                report(in_words(ours, &peers, config), &topology);
                Topology::new(&apart(&identities, &refusals), rank, config.transport)
            }
            None => topology,
        };
        let terms = Terms {
            secret: config.secret.clone(),
            silence_timeout: config.silence_timeout,
            connections: config.connections.clamp(1, Config::MAX_CONNECTIONS) as u8,
            ports: config.port_range,
        };
        let needs_listener = !topology.is_one_host() && world_size > 1;
        let mut mesh = Mesh::exchange(exchange, rank, world_size, needs_listener, listen, facts[0].nonce, 0, &terms, deadline)?;
        check_reach(&facts, &peers, |rank| mesh.address(rank))?;
        mesh.set_neighbours(facts.iter().map(|theirs| theirs.runs_near(&facts[rank])).collect());
        let mesh = Arc::new(mesh);
        let chooser = Chooser::new(config, local.1 == world_size);
        let mut rings = Vec::new();
        if let Some(group) = group.as_mut() {
            for (local, rank) in topology.local_ranks().iter().enumerate() {
                rings.extend(group.link(local, Channel::PointToPoint).map(|link| (*rank, BackendLink::ring(link))));
            }
        }
        let mut links = BackendLinks::new(Arc::clone(&mesh), group.as_mut(), &topology, world_size, Arc::clone(&health));
        if topology.local() == 0 && topology.host_count() > 1 {
            let opened = links.connect_partners(&topology.share_owners(0), deadline);
            let failed = |stop: Interrupted| {
                mesh.lack().cloned().unwrap_or_else(|| stop.to_error("opening links between hosts", deadline, rank, &peers))
            };
            opened.map_err(failed)?;
        }
        let connector = MessageConnector { rings, mesh, health: Arc::clone(&health), rank: rank as u32, waiting: config.waiting };
        let backend = Self {
            rank,
            engine: Engine::new(rank, world_size, is_crowded).waiting(config.waiting),
            plans: Plans::default(),
            links,
            peers,
            health,
            recorder: Arc::new(Flight::new(orders(config))),
            observers: Observers::default(),
            local,
            is_crowded,
            topology,
            group,
            unshared,
            chooser,
            sequence: 0,
            unfinished_barrier: None,
            scratch: Scratch::default(),
            joined: Scratch::default(),
            id: facts[0].nonce,
            recovery_listeners: facts.iter().map(|facts| Some(seen_from(listen, facts.recovery_listener.parse().ok()?))).collect(),
            #[cfg(feature = "cuda")]
            same_process: facts.iter().map(|theirs| theirs.process == facts[rank].process).collect(),
            #[cfg(feature = "cuda")]
            same_numbers: facts.iter().map(|theirs| !theirs.numbers.is_empty() && theirs.numbers == facts[rank].numbers).collect(),
            has_left: false,
        };
        Ok((backend, connector))
    }
}

/// Returns the settings of the flight recorder. The number of calls that it keeps is limited, because they occupy
/// memory.
fn orders(config: &Config) -> Orders {
    let calls = config.flight_recorder_calls.min(Config::MAX_FLIGHT_RECORDER_CALLS);
    Orders { calls, stall_warning: config.stall_warning, folder: config.flight_recorder_dir.clone(), answers: config.status_socket }
}

/// Refuses a rank that listens on its loopback interface if another rank has a different loopback interface: that other
/// rank could never connect to it.
fn check_reach(facts: &[HostFacts], peers: &[Peer], address_of: impl Fn(usize) -> Option<SocketAddr>) -> Result<()> {
    for (rank, own) in facts.iter().enumerate() {
        let Some(address) = address_of(rank).filter(|address| address.ip().is_loopback() && !own.loopback.is_empty()) else { continue };
        let is_elsewhere = |other: &HostFacts| !other.loopback.is_empty() && other.loopback != own.loopback;
        if let Some(other) = facts.iter().position(is_elsewhere) {
            let reason = format!(
                "{} cannot reach this address from its own host; set COLLECTIVES_LISTEN_ADDRESS (or Config::listen_address) to an address \
                 that the other hosts can reach, or use a store address on the network instead of loopback",
                peers[other]
            );
            return Err(Error::config(format!("the listen address {} of {}", address.ip(), peers[rank]), reason));
        }
    }
    Ok(())
}

/// Describes which rank cannot share memory, and why; `None` if there is no refusal.
fn in_words(refusal: Option<&(usize, String)>, peers: &[Peer], config: &Config) -> Option<String> {
    let (rank, reason) = refusal?;
    let remedy = if config.host_identity.is_some() {
        "; check COLLECTIVES_HOST_IDENTITY (or Config::host_identity), which decides which ranks share a host"
    } else {
        ""
    };
    Some(format!("{} cannot share memory: {reason}{remedy}", peers[*rank]))
}

/// Warns once per process, on the first rank of a host whose ranks do without shared memory.
fn report(why: Option<String>, topology: &Topology) {
    static REPORTED: Once = Once::new();
    let Some(why) = why.filter(|_| topology.local() == 0) else { return };
    REPORTED.call_once(|| {
        let line = format!("the ranks of this host reach each other over TCP, without shared memory: {why}");
        event::tell_aloud(Some(line.clone()), move || event::warn!("{line}"));
    });
}

/// Returns the identities, in which each rank of a host counts as a host of its own if any rank of that host cannot
/// share memory.
fn apart(identities: &[String], refusals: &[(usize, String)]) -> Vec<String> {
    let is_without = |identity: &String| refusals.iter().any(|(rank, _)| identities.get(*rank) == Some(identity));
    let name = |(rank, identity): (usize, &String)| if is_without(identity) { format!("{identity} rank={rank}") } else { identity.clone() };
    identities.iter().enumerate().map(name).collect()
}

/// Returns a rank's index among the ranks of its host, and the number of these ranks, whatever links they use.
fn place_on_host(identities: &[String], rank: usize) -> (usize, usize) {
    let before = |end: usize| identities[..end].iter().filter(|identity| **identity == identities[rank]).count();
    (before(rank), before(identities.len()))
}

/// Whether the ranks of a rank's host outnumber the processors that they share.
fn is_crowded(facts: &[HostFacts], rank: usize) -> bool {
    let ranks: Vec<&HostFacts> = facts.iter().filter(|facts_of| facts_of.identity == facts[rank].identity).collect();
    let known: Vec<Processors> = ranks.iter().filter_map(|facts| Processors::from_text(&facts.processors)).collect();
    processors::between(&known) < ranks.len()
}

/// The version of the facts and of everything that follows them.
const VERSION: u32 = 4;

/// One rank's facts.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostFacts {
    /// A random number; rank 0's becomes the communicator's.
    nonce: [u8; 16],
    /// A tag that shows that the rank knows the job's secret, if there is one. The tag only detects mistakes.
    /// Protection comes from the connections: they refuse ranks that cannot prove that they know the secret.
    tag: Option<[u8; 32]>,
    pid: u32,
    /// The settings that all ranks must share, as text.
    settings: String,
    /// The identity by which ranks of one host recognise each other.
    identity: String,
    host: String,
    /// The address at which the rank is reachable if the communicator fails; empty if there is none.
    recovery_listener: String,
    /// A token for the process that the rank is a thread of. Any two processes have different tokens.
    process: String,
    /// The numbering of processes that `pid` belongs to; empty if unknown.
    numbers: String,
    /// Its loopback interface: the boot id of its kernel, a colon, and its network namespace. Empty if unknown.
    loopback: String,
    /// The processors that it may use ([`Processors::to_text`]).
    processors: String,
}

impl HostFacts {
    /// Returns the settings that decide what is sent, as text that can be compared and read.
    fn settings_of(config: &Config) -> String {
        let algorithms = if config.algorithms.is_empty() { "auto".to_owned() } else { config.algorithms.to_string() };
        let mut settings = format!("transport {}, reproducible {}, algorithm {algorithms}", config.transport, config.reproducible);
        if config.connections > 1 {
            settings.push_str(&format!(", {} connections (COLLECTIVES_CONNECTIONS or Config::connections)", config.connections));
        }
        if config.encrypt {
            settings.push_str(", encrypted (COLLECTIVES_ENCRYPT or Config::encrypt)");
        }
        // Ranks without a device backend do not mention it, so the default must not be mentioned either.
        #[cfg(feature = "cuda")]
        if config.check_device_calls != CheckDeviceCalls::default() {
            return format!("{settings}, device calls compared {}", config.check_device_calls);
        }
        settings
    }

    /// Whether two ranks run on one host, possibly in different containers. If a program has given them different
    /// identities, they do not.
    fn runs_near(&self, other: &Self) -> bool {
        let boot_id = |facts: &Self| facts.loopback.split_once(':').map(|(boot_id, _)| boot_id.to_owned());
        let are_found = [self, other].iter().all(|facts| facts.identity.starts_with(FOUND_IDENTITY));
        self.identity == other.identity || are_found && boot_id(self).is_some() && boot_id(self) == boot_id(other)
    }

    /// Encodes version, nonce, process number, then the eight texts, each after its length, and the tag.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.nonce);
        bytes.extend(self.pid.to_le_bytes());
        let places = [&self.process, &self.numbers, &self.loopback, &self.processors];
        for text in [&self.settings, &self.identity, &self.host, &self.recovery_listener].into_iter().chain(places) {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes.extend(self.tag.iter().flatten());
        bytes
    }

    /// Decodes [`HostFacts::to_bytes`].
    fn from_bytes(rank: usize, bytes: &[u8]) -> Result<Self> {
        let malformed = |reason: String| Error::Protocol { with: Peer::unknown(rank).to_string(), reason };
        let short = || malformed(format!("its start-up data is truncated to {} B", bytes.len()));
        let (version, rest) = bytes.split_first_chunk::<4>().ok_or_else(short)?;
        if u32::from_le_bytes(*version) != VERSION {
            let theirs = u32::from_le_bytes(*version);
            return Err(malformed(format!(
                "it uses protocol version {theirs}, and this rank uses version {VERSION}; build all ranks from one release"
            )));
        }
        let (nonce, rest) = rest.split_first_chunk::<16>().ok_or_else(short)?;
        let (pid, mut rest) = rest.split_first_chunk::<4>().ok_or_else(short)?;
        let mut text = || {
            let (length, tail) = rest.split_first_chunk::<4>()?;
            let (text, tail) = tail.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            rest = tail;
            Some(String::from_utf8_lossy(text).into_owned())
        };
        let mut next = || text().ok_or_else(short);
        let (settings, identity, host, recovery_listener) = (next()?, next()?, next()?, next()?);
        let (process, numbers, loopback, processors) = (next()?, next()?, next()?, next()?);
        let tag = match rest {
            [] => None,
            rest => {
                let reason = || format!("its start-up data is followed by {} unexpected bytes", rest.len());
                Some(<[u8; 32]>::try_from(rest).map_err(|_| malformed(reason()))?)
            }
        };
        let pid = u32::from_le_bytes(*pid);
        Ok(Self { nonce: *nonce, tag, pid, settings, identity, host, recovery_listener, process, numbers, loopback, processors })
    }

    /// Returns the tag of a rank.
    fn vouch(secret: &Secret, rank: usize, nonce: &[u8; 16]) -> [u8; 32] {
        authentication::vouch(secret, &Self::vouched(rank, nonce))
    }

    fn vouched(rank: usize, nonce: &[u8; 16]) -> Vec<u8> {
        [b"facts".as_slice(), &(rank as u64).to_le_bytes(), nonce].concat()
    }

    /// Refuses ranks with a different secret, ranks without one, and ranks that have one if this rank has none.
    fn check_tags(all: &[HostFacts], secret: Option<&Secret>) -> Result<()> {
        for (rank, facts) in all.iter().enumerate() {
            let lacks = match (secret, &facts.tag) {
                (None, None) => continue,
                (Some(secret), Some(tag)) if authentication::is_vouched(secret, &Self::vouched(rank, &facts.nonce), tag) => continue,
                (Some(_), Some(_)) => {
                    "it has a different secret than this rank; set COLLECTIVES_SECRET (or Config::secret) to one value on all ranks"
                }
                (Some(_), None) => {
                    "it has no secret, and this rank has one; set COLLECTIVES_SECRET (or Config::secret) for all ranks or none"
                }
                (None, Some(_)) => {
                    "it has a secret, and this rank has none; set COLLECTIVES_SECRET (or Config::secret) for all ranks or none"
                }
            };
            let with = Peer { rank, host: facts.host.clone(), pid: facts.pid }.to_string();
            return Err(Error::Unauthorized { with, reason: lacks.to_owned() });
        }
        Ok(())
    }

    /// Refuses settings that differ between ranks.
    fn compare(all: &[HostFacts]) -> Result<()> {
        let differs = all.iter().position(|facts| facts.settings != all[0].settings);
        match differs {
            None => Ok(()),
            Some(other) => {
                let reason = format!("rank 0 has {}; and rank {other} has {}", all[0].settings, all[other].settings);
                Err(Error::Conflict { reason })
            }
        }
    }
}

/// Invariants for any facts that a rank sends.
#[cfg(feature = "__internals")]
pub(crate) mod fuzz {
    use super::HostFacts;

    /// Decodes any bytes as a rank's facts. The result is an error that names the rank, or facts that are the same
    /// after they are encoded and decoded again.
    pub fn facts(data: &[u8]) {
        match HostFacts::from_bytes(3, data) {
            Ok(facts) => {
                let again = HostFacts::from_bytes(3, &facts.to_bytes()).expect("encoded again");
                assert_eq!(again, facts);
                assert!((0..data.len().min(48)).all(|short| HostFacts::from_bytes(3, &data[..short]).is_err()), "in part");
            }
            Err(error) => assert!(error.to_string().contains("rank 3"), "{error}"),
        }
    }

    /// Returns a seed input.
    pub(in crate::host) fn seed() -> Vec<u8> {
        HostFacts {
            nonce: [7; 16],
            tag: None,
            pid: 12,
            settings: "transport auto".into(),
            identity: String::new(),
            host: "h\u{f6}st".into(),
            recovery_listener: String::new(),
            process: "7".into(),
            numbers: String::new(),
            loopback: String::new(),
            processors: "2 3".into(),
        }
        .to_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> HostFacts {
        HostFacts {
            nonce: [7; 16],
            tag: None,
            pid: 12,
            settings: "s".into(),
            identity: String::new(),
            host: "höst".into(),
            recovery_listener: "[::1]:9".into(),
            process: "7".into(),
            numbers: "4:5".into(),
            loopback: "6".into(),
            processors: "2 3".into(),
        }
    }

    #[test]
    fn facts_survive_the_exchange() {
        assert_eq!(HostFacts::from_bytes(0, &example().to_bytes()).unwrap(), example());
    }

    #[test]
    fn facts_cut_short_or_of_another_version_are_refused() {
        let bytes = example().to_bytes();
        for length in (0..bytes.len()).chain([bytes.len() + 1, bytes.len() + 31, bytes.len() + 33]) {
            let bytes: Vec<u8> = bytes.iter().copied().chain([0; 33]).take(length).collect();
            assert!(HostFacts::from_bytes(3, &bytes).unwrap_err().to_string().contains("rank 3"));
        }
        let other = [&99_u32.to_le_bytes()[..], &bytes[4..]].concat();
        assert!(HostFacts::from_bytes(3, &other).unwrap_err().to_string().contains("version 99"));
    }

    #[test]
    fn whoever_has_another_secret_or_none_is_named() {
        let [ours, theirs] = [1, 2].map(|seed| Secret::new(vec![seed; 20]).unwrap());
        let with = |secret: Option<&Secret>, rank| {
            let tag = secret.map(|secret| HostFacts::vouch(secret, rank, &[7; 16]));
            HostFacts::from_bytes(rank, &HostFacts { tag, ..example() }.to_bytes()).unwrap()
        };
        let all = [with(Some(&ours), 0), with(Some(&ours), 1)];
        HostFacts::check_tags(&all, Some(&ours)).unwrap();
        HostFacts::check_tags(&[with(None, 0), with(None, 1)], None).unwrap();
        let error = |all: &[HostFacts], secret| HostFacts::check_tags(all, secret).unwrap_err();
        for (all, words) in [
            ([all[0].clone(), with(Some(&theirs), 1)], "a different secret"),
            ([all[0].clone(), with(Some(&ours), 0)], "a different secret"),
            ([all[0].clone(), with(None, 1)], "it has no secret"),
        ] {
            let error = error(&all, Some(&ours));
            assert!(error.is_unauthorized() && error.to_string().contains("rank 1 (host höst"), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(error(&all, None).to_string().contains("this rank has none"));
        assert!(error(&all, Some(&theirs)).to_string().contains("rank 0"));
    }

    #[test]
    fn a_loopback_address_is_refused_where_a_rank_has_another_loopback_interface() {
        let [here, there] = ["a", "b"].map(|loopback| HostFacts { loopback: loopback.into(), ..example() });
        let unknown = HostFacts { loopback: String::new(), ..example() };
        let peers: Vec<Peer> = (0..3).map(Peer::unknown).collect();
        let check = |facts: &[&HostFacts], addresses: [Option<&str>; 3]| {
            let facts: Vec<HostFacts> = facts.iter().copied().cloned().collect();
            check_reach(&facts, &peers, |rank| Some(format!("{}:7", addresses[rank]?).parse().unwrap()))
        };
        let local = Some("127.0.1.1");
        check(&[&here, &here, &here], [local; 3]).unwrap();
        check(&[&here, &here, &unknown], [local; 3]).unwrap();
        check(&[&here, &here, &there], [Some("10.0.0.1"); 3]).unwrap();
        check(&[&here, &here, &there], [None; 3]).unwrap();
        let error = check(&[&here, &here, &there], [Some("10.0.0.1"), local, Some("10.0.0.2")]).unwrap_err().to_string();
        assert!(error.contains("127.0.1.1 of rank 1: rank 2 cannot reach this") && error.contains("COLLECTIVES_LISTEN_ADDRESS"), "{error}");
    }

    #[test]
    fn ranks_of_one_host_are_recognised_in_other_containers_unless_they_have_names_of_their_own() {
        let facts = |identity: &str, loopback: &str| HostFacts { identity: identity.into(), loopback: loopback.into(), ..example() };
        let near = |one: [&str; 2], other: [&str; 2]| facts(one[0], one[1]).runs_near(&facts(other[0], other[1]));
        assert!(near(["boot=1 net=4", "1:40"], ["boot=1 net=5", "1:41"]));
        assert!(!near(["boot=1 net=4", "1:40"], ["boot=2 net=4", "2:40"]));
        assert!(!near(["boot=1 net=4", ""], ["boot=1 net=5", ""]));
        assert!(!near(["first", "1:40"], ["second", "1:40"]) && near(["first", "1:40"], ["first", "2:40"]));
    }

    #[test]
    fn ranks_are_crowded_where_those_of_their_host_have_fewer_processors() {
        let facts = |identity: &str, processors: &str| HostFacts { identity: identity.into(), processors: processors.into(), ..example() };
        let each_its_own = [facts("a", "1 1"), facts("b", "1 1"), facts("a", "1 2"), facts("b", "1 1")];
        assert_eq!([0, 1, 2, 3].map(|rank| is_crowded(&each_its_own, rank)), [false, true, false, true]);
        assert!(!is_crowded(&[facts("a", "what?"), facts("a", "2 3")], 0));
    }

    #[test]
    fn whose_host_cannot_share_memory_is_apart_and_others_are_not() {
        let names = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let apart = apart(&names("a b a b"), &[(2, "no memory".to_owned())]);
        let topology = Topology::new(&apart, 0, Transport::Auto);
        assert_eq!((topology.host_count(), topology.local_ranks()), (3, &[0][..]));
        assert_eq!(Topology::new(&apart, 3, Transport::Auto).local_ranks(), [1, 3]);
    }

    #[test]
    fn different_settings_are_named() {
        let other = HostFacts { settings: "t".into(), ..example() };
        let error = HostFacts::compare(&[example(), example(), other]).unwrap_err().to_string();
        assert!(error.contains("rank 0 has s; and rank 2 has t"), "{error}");
    }
}
