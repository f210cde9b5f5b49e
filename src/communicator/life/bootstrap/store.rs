//! Exchanges over a store, for ranks that are not connected yet.
//!
//! No value is ever empty: PyTorch's server without libuv sends an empty value in a way that makes the kernel delay
//! it, by 200 ms each.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::deadline::Deadline;
use crate::base::tuning::bootstrap::{ARRIVAL_PAUSE, FINDING_OUT, INTRODUCED, SLICE, SLICE_PER_RANK};
use crate::communicator::recovery::PeerWatch;
use crate::error::{Error, Peer, Result};
use crate::host::exchange::Exchange;
use crate::host::net::identity::host_name;
use crate::rendezvous::{self, Missing, Store};

/// The sender of blobs that were read from the store, in errors.
const OF_STORE: &str = "the store of this job";

/// The key under which contradictions are written.
const CONFLICT: &str = "collectives/conflict";

/// The key under which the first rank writes the world size, and its own number.
const WORLD: &str = "collectives/world";

/// The key that counts ranks as they join.
const COME: &str = "collectives/come";

/// The most ranks of a world; a larger number is a mistake in a variable.
const MAX_WORLD: usize = 1 << 20;

/// Notifies all ranks that meet at this store that the start has failed.
pub(in crate::communicator) fn call_off(store: &dyn Store, error: &Error) {
    // If the store cannot be reached either, the ranks end at their deadline.
    let reason = if let Error::Conflict { reason } = error { reason.clone() } else { error.to_string() };
    let _ = store.compare_set(CONFLICT, b"", reason.as_bytes());
}

/// Waits until `ranks` ranks have come to a store that this process serves, or until the deadline passes. A rank that
/// came later would not find the store, and would look for it until its own deadline.
pub(in crate::communicator) fn await_ranks(store: &dyn Store, ranks: usize, deadline: &Deadline) {
    while store.add(COME, 0).is_ok_and(|come| usize::try_from(come).is_ok_and(|come| come < ranks)) && !deadline.has_passed() {
        std::thread::sleep(ARRIVAL_PAUSE.min(deadline.remaining()));
    }
}

/// Whether a rank has called off the start of the ranks that meet at this store.
pub(in crate::communicator) fn is_called_off(store: &dyn Store) -> Result<bool> {
    store.check(&[CONFLICT])
}

/// One rank's part of an exchange over a store.
pub(in crate::communicator) struct StoreExchange {
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    round: usize,
    watch: Option<PeerWatch>,
}

impl StoreExchange {
    /// Claims this rank's number and compares the world size with the others'. As soon as `watch` finds a rank gone,
    /// the start is called off for all ranks.
    pub(in crate::communicator) fn new(
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        watch: Option<PeerWatch>,
        deadline: &Deadline,
    ) -> Result<Self> {
        let exchange = Self { store, rank, world_size, round: 0, watch };
        let me = format!("host {}, pid {}", host_name(), std::process::id());
        if world_size == 0 || world_size > MAX_WORLD {
            return Err(Error::config(format!("world size {world_size}"), format!("a job has 1 to {MAX_WORLD} ranks")));
        }
        if rank >= world_size {
            return Err(
                exchange.contradict(&format!("{me} claims rank {rank}, but its world has {world_size} ranks, 0 to {}", world_size - 1))
            );
        }
        if exchange.store.add(&format!("collectives/claim/{rank}"), 1)? > 1 {
            let other = exchange.introduction(rank, deadline.remaining().min(Duration::from_secs(1)));
            let other = other.unwrap_or_else(|| "a process that gave no host and pid".to_owned());
            return Err(exchange.contradict(&format!("rank {rank} is claimed by two processes: {other}; and {me}")));
        }
        exchange.store.set(&who_key(rank), me.as_bytes())?;
        exchange.store.add(COME, 1)?;
        let mine = format!("{world_size} ranks according to rank {rank} ({me})");
        let first = exchange.store.compare_set(WORLD, b"", mine.as_bytes())?;
        let first = String::from_utf8_lossy(&first).into_owned();
        if first.split(' ').next() != Some(world_size.to_string().as_str()) {
            return Err(exchange.contradict(&format!("the world has {first}; and {mine}")));
        }
        Ok(exchange)
    }

    /// Notifies all ranks of a contradiction; the first one counts.
    fn contradict(&self, reason: &str) -> Error {
        let told = self.store.compare_set(CONFLICT, b"", reason.as_bytes());
        let reason =
            told.ok().filter(|told| !told.is_empty()).map_or(reason.to_owned(), |told| String::from_utf8_lossy(&told).into_owned());
        Error::Conflict { reason }
    }

    /// Waits for keys, and checks for contradictions meanwhile. Returns `Ok(false)` if the deadline passes first.
    fn wait(&self, keys: &[&str], deadline: &Deadline) -> Result<bool> {
        let slice = SLICE.max(SLICE_PER_RANK * self.world_size as u32);
        loop {
            match self.store.wait(keys, slice.min(deadline.remaining())) {
                Ok(()) => return Ok(true),
                Err(error) if !error.is_timeout() => return Err(error),
                Err(_) => {}
            }
            if let Some(reason) = self.watch.as_ref().and_then(|watch| watch()) {
                return Err(self.contradict(&reason));
            }
            if is_called_off(&*self.store)? {
                let reason = self.store.get(CONFLICT, SLICE)?;
                return Err(Error::Conflict { reason: String::from_utf8_lossy(&reason).into_owned() });
            }
            if deadline.has_passed() {
                return Ok(false);
            }
        }
    }

    /// Returns the error for a deadline that has passed, with the ranks that joined and those that did not.
    fn late(&self, deadline: &Deadline) -> Error {
        let mut doing = format!("rank {} waiting for the {} ranks of the job to join", self.rank, self.world_size);
        let attendance = self.attendance().unwrap_or_else(|error| {
            doing += &format!(" (this rank could not find out which ranks have not joined: {error})");
            Attendance::default()
        });
        let Attendance { mut missing, mut arrived } = attendance;
        if missing.is_empty() && !arrived.is_empty() {
            doing = format!("rank {} waiting for the ranks of the job to connect, after all {} have joined", self.rank, self.world_size);
            (missing, arrived) = self.divided(arrived);
        }
        Error::Timeout { doing, elapsed: deadline.elapsed(), missing, arrived, meanwhile: Vec::new() }
    }

    /// Divides ranks that joined into those that have stopped since, and the others.
    fn divided(&self, came: Vec<Peer>) -> (Vec<Peer>, Vec<Peer>) {
        let keys: Vec<String> = came.iter().map(|peer| self.blob_key(peer.rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let limit = Deadline::after(FINDING_OUT);
        let found = rendezvous::missing(&keys, &mut || !limit.has_passed(), &mut |keys| self.store.check(keys));
        let absent: BTreeSet<&str> = found.map(|found| found.absent.into_iter().collect()).unwrap_or_default();
        // If no blob is missing, only rank 0's collection of the blobs can be: so rank 0 has stopped.
        let (none, is_rank_0) = (absent.is_empty(), |peer: &Peer| peer.rank == 0);
        came.into_iter().partition(|peer| if none { is_rank_0(peer) } else { absent.contains(&*self.blob_key(peer.rank)) })
    }

    /// Returns which ranks joined and which did not. Deadlines pass on all ranks at once, so one rank determines this
    /// for all, and writes it to the store. The result is valid until another rank joins.
    fn attendance(&self) -> Result<Attendance> {
        let come = self.store.add(COME, 0)?;
        let (key, me) = (format!("collectives/late/{come}"), self.rank.to_string());
        let finds_out = self.store.compare_set(&format!("{key}/by"), b"", me.as_bytes())?;
        if finds_out != me.as_bytes()
            && let Ok(text) = self.store.get(&key, FINDING_OUT)
            && let Some(attendance) = Attendance::parse(&String::from_utf8_lossy(&text), self.world_size)
        {
            return Ok(attendance);
        }
        let attendance = self.find_out()?;
        // If that fails, the others determine it themselves.
        let _ = self.store.set(&key, attendance.to_string().as_bytes());
        Ok(attendance)
    }

    /// Reads from the store which ranks joined, and the host and process of some of them.
    fn find_out(&self) -> Result<Attendance> {
        let keys: Vec<String> = (0..self.world_size).map(who_key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let limit = Deadline::after(FINDING_OUT);
        let Missing { absent, unknown } = rendezvous::missing(&keys, &mut || !limit.has_passed(), &mut |keys| self.store.check(keys))?;
        let [absent, unknown] = [absent, unknown].map(BTreeSet::from_iter);
        let came: Vec<usize> =
            (0..self.world_size).filter(|rank| !absent.contains(keys[*rank]) && !unknown.contains(keys[*rank])).collect();
        let introduced: Vec<&str> = came.iter().take(INTRODUCED).map(|rank| keys[*rank]).collect();
        let said = self.store.multi_get(&introduced, SLICE).unwrap_or_default();
        let mut said = said.iter().map(|said| String::from_utf8_lossy(said));
        let arrived = came.into_iter().map(|rank| said.next().map_or_else(|| Peer::unknown(rank), |said| peer(rank, &said)));
        let missing = (0..self.world_size).filter(|rank| absent.contains(keys[*rank])).map(Peer::unknown);
        Ok(Attendance { missing: missing.collect(), arrived: arrived.collect() })
    }

    /// Returns the host and process that a rank has written.
    fn introduction(&self, rank: usize, limit: Duration) -> Option<String> {
        let said = self.store.get(&who_key(rank), limit).ok()?;
        Some(String::from_utf8_lossy(&said).into_owned())
    }

    /// Collects all blobs of this round on rank 0, and publishes them together.
    fn collect(&self, deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = (0..self.world_size).map(|rank| self.blob_key(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        if !self.wait(&keys, deadline)? {
            return Err(self.late(deadline));
        }
        let all = self.store.multi_get(&keys, deadline.remaining())?.concat();
        self.store.set(&self.all_key(), &all)?;
        split_blobs(&all, self.world_size, OF_STORE)
    }

    fn blob_key(&self, rank: usize) -> String {
        format!("collectives/{}/{rank}", self.round)
    }

    fn all_key(&self) -> String {
        format!("collectives/{}/all", self.round)
    }
}

/// The ranks that have joined, and those that have not. A rank whose state could not be determined is in neither list.
#[derive(Debug, Default, PartialEq, Eq)]
struct Attendance {
    missing: Vec<Peer>,
    arrived: Vec<Peer>,
}

impl Attendance {
    /// Parses the written form; `None` for anything else.
    fn parse(text: &str, world_size: usize) -> Option<Self> {
        let mut attendance = Self::default();
        for line in text.lines() {
            let (kind, rest) = line.split_at_checked(1)?;
            let (rank, said) = rest.split_once(' ').unwrap_or((rest, ""));
            let rank = rank.parse().ok().filter(|rank| *rank < world_size)?;
            match kind {
                "-" => attendance.missing.push(Peer::unknown(rank)),
                "+" => attendance.arrived.push(peer(rank, said)),
                _ => return None,
            }
        }
        Some(attendance)
    }
}

/// One line for each rank: a sign, its number, and its host and process if known.
impl fmt::Display for Attendance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.missing.iter().try_for_each(|peer| writeln!(f, "-{}", peer.rank))?;
        self.arrived.iter().try_for_each(|peer| match peer {
            Peer { rank, host, .. } if host.is_empty() => writeln!(f, "+{rank}"),
            Peer { rank, host, pid } => writeln!(f, "+{rank} host {host}, pid {pid}"),
        })
    }
}

impl Exchange for StoreExchange {
    fn all_gather(&mut self, mine: &[u8], deadline: &Deadline) -> Result<Vec<Vec<u8>>> {
        self.store.set(&self.blob_key(self.rank), &measured(mine))?;
        let blobs = if self.rank == 0 {
            self.collect(deadline)?
        } else {
            let key = self.all_key();
            if !self.wait(&[&key], deadline)? {
                return Err(self.late(deadline));
            }
            split_blobs(&self.store.get(&key, deadline.remaining())?, self.world_size, OF_STORE)?
        };
        self.round += 1;
        Ok(blobs)
    }
}

/// Returns the key under which a rank writes its host and process.
fn who_key(rank: usize) -> String {
    format!("collectives/who/{rank}")
}

/// Returns the rank that wrote `said`.
fn peer(rank: usize, said: &str) -> Peer {
    match said.strip_prefix("host ").and_then(|said| said.rsplit_once(", pid ")) {
        Some((host, pid)) => Peer { rank, host: host.to_owned(), pid: pid.parse().unwrap_or(0) },
        None => Peer::unknown(rank),
    }
}

/// Returns a blob with its length in front. The result is never empty, and a reader finds the next blob.
pub(in crate::communicator) fn measured(blob: &[u8]) -> Vec<u8> {
    [&(blob.len() as u32).to_le_bytes(), blob].concat()
}

/// Splits a sequence of blobs, each preceded by its length, that came from `with`.
pub(in crate::communicator) fn split_blobs(mut bytes: &[u8], expected: usize, with: &str) -> Result<Vec<Vec<u8>>> {
    let malformed = |reason: &str| Error::Protocol { with: with.to_owned(), reason: reason.to_owned() };
    let mut blobs = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let (blob, rest) =
            rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(|| malformed("a list of blobs that is cut short"))?;
        blobs.push(blob.to_vec());
        bytes = rest;
    }
    if blobs.len() == expected && bytes.is_empty() {
        return Ok(blobs);
    }
    Err(malformed(&format!("a list of {} blobs instead of {expected} blobs", blobs.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::MemoryStore;

    #[test]
    fn ranks_do_not_wait_for_a_start_that_was_called_off() {
        let store = MemoryStore::new();
        call_off(&store, &Error::argument("local", "no more threads"));
        let deadline = Deadline::after(Duration::from_secs(60));
        let mut exchange = StoreExchange::new(Arc::new(store), 1, 3, None, &deadline).unwrap();
        let error = exchange.all_gather(b"facts", &deadline).unwrap_err();
        assert!(matches!(error, Error::Conflict { .. }) && error.to_string().contains("no more threads"), "{error}");
    }

    #[test]
    fn who_came_is_found_out_once_for_all_who_ask_and_anew_when_another_comes() {
        let store = MemoryStore::new();
        let now = Deadline::after(Duration::ZERO);
        let join = |rank| StoreExchange::new(Arc::new(store.clone()), rank, 5, None, &now).unwrap();
        let numbers = |peers: &[Peer]| peers.iter().map(|peer| peer.rank).collect::<Vec<_>>();
        let seen = |exchange: &StoreExchange| {
            let Attendance { missing, arrived } = exchange.attendance().unwrap();
            assert!(arrived.iter().all(|peer| peer.pid == std::process::id()), "{arrived:?}");
            (numbers(&missing), numbers(&arrived))
        };
        let [first, second] = [3, 1].map(join);
        assert_eq!(seen(&first), (vec![0, 2, 4], vec![1, 3]));
        assert_eq!(seen(&second), seen(&first));
        assert!(store.check(&["collectives/late/2"]).unwrap());
        let third = join(0);
        assert_eq!([&first, &second, &third].map(seen), std::array::from_fn(|_| (vec![2, 4], vec![0, 1, 3])));
        assert!(first.late(&now).to_string().contains("still missing: rank 2, rank 4; arrived: rank 0 (host "));
    }

    #[test]
    fn nonsense_in_place_of_who_came_is_not_believed() {
        for nonsense in ["x", "-", "-5", "+a host h, pid 1", "\u{fc}1", "+1\n?2"] {
            assert_eq!(Attendance::parse(nonsense, 5), None, "{nonsense:?}");
        }
        let attendance = Attendance { missing: vec![Peer::unknown(4)], arrived: vec![Peer::unknown(0), peer(2, "host a b, pid 7")] };
        assert_eq!(Attendance::parse(&attendance.to_string(), 5), Some(attendance));
    }

    #[test]
    fn blobs_survive_the_store_and_nonsense_does_not() {
        let blobs = vec![vec![1, 2], vec![], vec![3]];
        let bytes = blobs.iter().map(|blob| measured(blob)).collect::<Vec<_>>().concat();
        assert_eq!(split_blobs(&bytes, 3, OF_STORE).unwrap(), blobs);
        assert!(split_blobs(&bytes, 2, OF_STORE).is_err() && split_blobs(&bytes, 4, OF_STORE).is_err());
        for length in 0..bytes.len() {
            assert!(split_blobs(&bytes[..length], 3, OF_STORE).is_err());
        }
        assert!(split_blobs(&[0xff; 12], 3, OF_STORE).is_err());
    }
}
