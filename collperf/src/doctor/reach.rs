//! Checks whether ranks of different hosts can connect to each other. A firewall or a wrong host name can prevent it.
//!
//! All findings are exchanged through the store at which the ranks meet, so they arrive even if connections between
//! ranks are blocked.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use collectives::store::Store;
use serde::{Deserialize, Serialize};

use super::finding::{Finding, OfHost};
use super::meeting::Meeting;
use crate::failure::Failure;

/// How long a connection may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// The number of connections that are tried at the same time.
const AT_ONCE: usize = 64;
/// The key that rank 0 sets once it has read everything.
const END: &str = "end";

/// The hosts of a job, each represented by one rank.
pub(super) struct Others<'a> {
    meeting: &'a Meeting,
    /// Accepts connections until this value is dropped.
    _listener: TcpListener,
    places: Vec<Place>,
    /// The ranks that are missing.
    missing: Vec<usize>,
}

/// The place of a rank.
#[derive(Serialize, Deserialize)]
struct Place {
    rank: usize,
    /// Equal on ranks that share a network.
    identity: String,
    host: String,
    address: SocketAddr,
}

impl<'a> Others<'a> {
    /// Publishes this rank's address, and reads those of the others.
    pub(super) fn meet(meeting: &'a Meeting) -> Result<Self, Failure> {
        let address = meeting.address;
        let listener = TcpListener::bind((address, 0)).map_err(|error| Failure::io(format!("listening at {address}"), &error))?;
        let address = listener.local_addr().map_err(|error| Failure::io("reading the address at which this rank listens", &error))?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mine = Place { rank: meeting.rank, identity: identity(), host, address };
        meeting.store.set(&key("place", meeting.rank), &to_text(&mine)?)?;
        let (mut places, mut missing) = (vec![], vec![]);
        let began = Instant::now();
        for rank in 0..meeting.world_size {
            // Ranks that are present get a moment even if another one is missing.
            let left = meeting.timeout.saturating_sub(began.elapsed()).max(Duration::from_millis(10));
            match meeting.store.get(&key("place", rank), left) {
                Ok(text) => places.push(from_text::<Place>(&text)?),
                Err(error) if error.is_timeout() => missing.push(rank),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { meeting, _listener: listener, places, missing })
    }

    /// Returns the first rank of each host.
    fn speakers(&self) -> Vec<&Place> {
        let is_first =
            |place: &&Place| self.places.iter().find(|other| other.identity == place.identity).map(|first| first.rank) == Some(place.rank);
        self.places.iter().filter(is_first).collect()
    }

    /// Whether this rank represents its host.
    pub(super) fn speaks_for_host(&self) -> bool {
        self.speakers().iter().any(|place| place.rank == self.meeting.rank)
    }

    /// Reports which ranks are present, and tries a connection to every other host.
    pub(super) fn probe(&self) -> Vec<Finding> {
        let came = format!("{} of {} joined", self.places.len(), self.meeting.world_size);
        let ranks = match self.missing.as_slice() {
            [] => Finding::good("ranks", came),
            missing => {
                let missing: Vec<String> = missing.iter().take(8).map(|rank| format!("rank {rank}")).collect();
                let found = format!("{came} in {:.0} s; missing: {}", self.meeting.timeout.as_secs_f64(), missing.join(", "));
                Finding::bad("ranks", found, "start all ranks with the same MASTER_ADDR and MASTER_PORT, and open that port")
            }
        };
        vec![ranks, self.hosts()]
    }

    fn hosts(&self) -> Finding {
        let others: Vec<&Place> = self.speakers().into_iter().filter(|place| place.rank != self.meeting.rank).collect();
        if others.is_empty() {
            return Finding::good("other hosts", "none in this job");
        }
        let failed: Vec<String> = others.chunks(AT_ONCE).flat_map(closed).collect();
        let advice = "open all TCP ports above 1024 between the hosts, or select another network with COLLECTIVES_LISTEN_ADDRESS. To find \
                      the rule that blocks a port, look at iptables -L, nft list ruleset, and the security groups";
        match failed.len() {
            0 => Finding::good("other hosts", format!("{0} of {0} can be reached", others.len())),
            count => Finding::bad("other hosts", format!("{count} of {} cannot be reached: {}", others.len(), failed.join("; ")), advice),
        }
    }

    /// Collects every host's findings on rank 0, with the host's name; returns `None` on the other ranks.
    pub(super) fn gather(&self, findings: &[Finding]) -> Result<Option<Vec<OfHost>>, Failure> {
        let Meeting { rank, store, timeout, .. } = self.meeting;
        // The others may still be waiting for connections that get no answer.
        let timeout = *timeout + 4 * PATIENCE;
        store.set(&key("found", *rank), &to_text(&findings)?)?;
        if *rank != 0 {
            // Rank 0 serves the store, and ends it when it has read everything.
            let _ = store.get(END, timeout);
            return Ok(None);
        }
        let mut all = Vec::new();
        for place in self.speakers() {
            let text = store.get(&key("found", place.rank), timeout)?;
            all.push((format!("{} ({}, rank {})", place.host, place.address.ip(), place.rank), from_text(&text)?));
        }
        store.set(END, b"1")?;
        Ok(Some(all))
    }
}

/// Returns the hosts that cannot be reached, and why.
fn closed(some: &[&Place]) -> Vec<String> {
    let attempt = |place: &Place| {
        let error = TcpStream::connect_timeout(&place.address, PATIENCE).err()?;
        Some(format!("rank {} at {}: {error}", place.rank, place.address))
    };
    thread::scope(|scope| {
        let start = |place| thread::Builder::new().spawn_scoped(scope, move || attempt(place)).map_err(|_| place);
        let attempts: Vec<_> = some.iter().copied().map(start).collect();
        // If no thread can be started, the connection is tried here.
        attempts.into_iter().filter_map(|begun| begun.map_or_else(attempt, |thread| thread.join().ok().flatten())).collect()
    })
}

/// Identifies the kernel and its network namespace.
fn identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| std::process::id().to_string());
    let network = std::fs::read_link("/proc/self/ns/net").map(|link| link.display().to_string()).unwrap_or_default();
    format!("{} {network}", boot.trim())
}

fn to_text(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(value).map_err(|error| Failure::internal(format!("encoding a message to the other ranks: {error}")))
}

fn from_text<T: for<'de> Deserialize<'de>>(text: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(text).map_err(|error| Failure::internal(format!("decoding a message from another rank: {error}")))
}

fn key(what: &str, rank: usize) -> String {
    format!("{what}/{rank}")
}
