//! Whether ranks of different hosts reach each other: firewalls between them, and names that lead nowhere.
//!
//! All that ranks say here goes through the store at which they meet, so that it arrives whatever is closed between them.

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
/// Connections that are tried at the same time.
const AT_ONCE: usize = 64;
/// Where rank 0 says that it has read everything.
const END: &str = "end";

/// The hosts of a job, each with the rank that speaks for it.
pub(super) struct Others<'a> {
    meeting: &'a Meeting,
    /// Accepts, by being there, until this value is gone.
    _listener: TcpListener,
    places: Vec<Place>,
    /// The ranks that have not come.
    missing: Vec<usize>,
}

/// Where a rank is.
#[derive(Serialize, Deserialize)]
struct Place {
    rank: usize,
    /// Equal on ranks that share a network.
    identity: String,
    host: String,
    address: SocketAddr,
}

impl<'a> Others<'a> {
    /// Says where this rank listens, and hears it of the others.
    pub(super) fn meet(meeting: &'a Meeting) -> Result<Self, Failure> {
        let address = meeting.address;
        let listener = TcpListener::bind((address, 0)).map_err(|error| Failure::io(format!("listening at {address}"), &error))?;
        let address = listener.local_addr().map_err(|error| Failure::io("asking where this rank listens", &error))?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mine = Place { rank: meeting.rank, identity: identity(), host, address };
        meeting.store.set(&key("place", meeting.rank), &to_text(&mine)?)?;
        let (mut places, mut missing) = (vec![], vec![]);
        let began = Instant::now();
        for rank in 0..meeting.world_size {
            // A moment is left for those who are there when somebody else is not.
            let left = meeting.timeout.saturating_sub(began.elapsed()).max(Duration::from_millis(10));
            match meeting.store.get(&key("place", rank), left) {
                Ok(text) => places.push(from_text::<Place>(&text)?),
                Err(error) if error.is_timeout() => missing.push(rank),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { meeting, _listener: listener, places, missing })
    }

    /// The first rank of each host.
    fn speakers(&self) -> Vec<&Place> {
        let is_first =
            |place: &&Place| self.places.iter().find(|other| other.identity == place.identity).map(|first| first.rank) == Some(place.rank);
        self.places.iter().filter(is_first).collect()
    }

    /// Whether this rank is one that speaks for its host.
    pub(super) fn speaks_for_host(&self) -> bool {
        self.speakers().iter().any(|place| place.rank == self.meeting.rank)
    }

    /// Who came, and a connection to every other host.
    pub(super) fn probe(&self) -> Vec<Finding> {
        let came = format!("{} of {} came", self.places.len(), self.meeting.world_size);
        let ranks = match self.missing.as_slice() {
            [] => Finding::good("ranks", came),
            missing => {
                let missing: Vec<String> = missing.iter().take(8).map(|rank| format!("rank {rank}")).collect();
                let found = format!("{came} in {:.0} s; missing: {}", self.meeting.timeout.as_secs_f64(), missing.join(", "));
                Finding::bad("ranks", found, "start all ranks, with one MASTER_ADDR and MASTER_PORT, and open that port")
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
        let advice = "open TCP between the hosts, all ports above 1024 (iptables -L, nft list ruleset, security groups), or name another \
                      network by COLLECTIVES_LISTEN_ADDRESS";
        match failed.len() {
            0 => Finding::good("other hosts", format!("{0} of {0} are reached", others.len())),
            count => Finding::bad("other hosts", format!("{count} of {} are not reached: {}", others.len(), failed.join("; ")), advice),
        }
    }

    /// Brings what every host has found to rank 0, with the host's name; `None` on the other ranks.
    pub(super) fn gather(&self, findings: &[Finding]) -> Result<Option<Vec<OfHost>>, Failure> {
        let Meeting { rank, store, timeout, .. } = self.meeting;
        // Others may still look, and for connections that nobody answers.
        let timeout = *timeout + 4 * PATIENCE;
        store.set(&key("found", *rank), &to_text(&findings)?)?;
        if *rank != 0 {
            // Rank 0 serves the store, and takes it along when it has read everything.
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

/// The hosts to which there is no way, and why.
fn closed(some: &[&Place]) -> Vec<String> {
    let attempt = |place: &Place| {
        let error = TcpStream::connect_timeout(&place.address, PATIENCE).err()?;
        Some(format!("rank {} at {}: {error}", place.rank, place.address))
    };
    thread::scope(|scope| {
        let start = |place| thread::Builder::new().spawn_scoped(scope, move || attempt(place)).map_err(|_| place);
        let attempts: Vec<_> = some.iter().copied().map(start).collect();
        // Without a thread for each they are tried one after another.
        attempts.into_iter().filter_map(|begun| begun.map_or_else(attempt, |thread| thread.join().ok().flatten())).collect()
    })
}

/// Which kernel, and which network of it.
fn identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| std::process::id().to_string());
    let network = std::fs::read_link("/proc/self/ns/net").map(|link| link.display().to_string()).unwrap_or_default();
    format!("{} {network}", boot.trim())
}

fn to_text(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(value).map_err(|error| Failure::internal(format!("writing what others are to read: {error}")))
}

fn from_text<T: for<'de> Deserialize<'de>>(text: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(text).map_err(|error| Failure::internal(format!("reading what another rank says: {error}")))
}

fn key(what: &str, rank: usize) -> String {
    format!("{what}/{rank}")
}
