//! A new communicator of those who are left.
//!
//! The survivors meet behind the door of the lowest of them (see `meeting`). It leads: it opens a round, waits until everyone has
//! come whom it has no reason to take for gone, says who the members are, and they join at its store as ranks join at the start of a
//! job. Whoever dies meanwhile, the leader among them, fails the round for all, and there is another. Who lives is found out by
//! knocking. Who is stopped, or cut off, is guessed at by what the failed communicator knew: a rank that others gave up waiting for gets
//! a short while. That may have been another one's fault, and ranks may know different things, so whoever comes in time is taken, and a
//! leader steps back where it finds a lower rank leading after all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Communicator;
use super::bootstrap;
use super::builder::{Origin, join};
#[cfg(feature = "cuda")]
use super::device::{DeviceChoice, Request};
use super::meeting::{Knock, Lineage};
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::fork;
use crate::host::notice::Notice;
use crate::rendezvous::{PrefixStore, Store};

/// How long one wait at the leader's store lasts before other doors are looked at.
const SLICE: Duration = Duration::from_millis(50);
/// The pause between two rounds of knocking while nobody leads.
const PAUSE: Duration = Duration::from_millis(10);
/// After how long without a leader all lower ranks are looked at, not the lowest alone.
const LOOK_FURTHER: Duration = Duration::from_millis(250);
/// How long a leader waits for ranks that were given up once.
const GRACE: Duration = Duration::from_secs(1);

impl Communicator {
    /// A new communicator of the ranks that are left, in their old order and numbered from 0 without gaps; also of one that has been
    /// ended by a lost peer, a deadline or an abort. Every rank that is left calls it; so a whole communicator is ended by it, and
    /// peers that are inside a call get `Aborted` and should call it too.
    ///
    /// Ranks whose process is gone are left out at once, as are those that had closed this communicator. Those whose lateness had ended
    /// it are waited for during a second, any other rank during half the [`timeout`](Self::timeout). A rank that dies meanwhile is left
    /// out too. Where ranks cannot be reached at all, as when a network is cut, only the larger part goes on, or of two halves that with
    /// the lowest rank. It needs neither the store of the start nor rank 0.
    ///
    /// The new communicator has this one's settings and, where this one had it, a device plane on the same GPU. Buffers from
    /// [`alloc`](Self::alloc) stay with this one. Cost: some ten store requests for each rank, and what a start costs.
    ///
    /// ```
    /// # use collectives::{Communicator, ReduceOp};
    /// # let counts = Communicator::run_local(2, |comm| {
    /// let comm = comm.shrink()?; // after an error, in practice
    /// let mut x = [1_u32];
    /// comm.all_reduce(&mut x, ReduceOp::Sum)?;
    /// # Ok(x[0])
    /// # })?;
    /// # assert_eq!(counts, [2, 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `LeftBehind` where the others went on without this rank, `Timeout` where they did not come to an agreement, `Unsupported`
    /// where this rank could not listen when the job began, and those of a start.
    #[doc(alias("ncclCommShrink", "MPIX_Comm_shrink", "shrink_group"))]
    pub fn shrink(&self) -> Result<Self> {
        if fork::is_child() {
            let reason = "this process was forked from the one that made the communicator".to_owned();
            return Err(Error::Unsupported { what: "shrink".to_owned(), reason });
        }
        self.abort();
        let health = &self.core.shared.health;
        let mut doubts: BTreeSet<usize> = health.late_ranks().into_iter().collect();
        let mut left = BTreeSet::new();
        match health.notice() {
            Some(Notice::TimedOut { missing, .. }) => drop(doubts.insert(*missing as usize)),
            Some(Notice::Lost { rank }) => drop(doubts.insert(*rank as usize)),
            Some(Notice::Left { rank }) => drop(left.insert(*rank as usize)),
            _ => {}
        }
        // Who is named itself is here all the same.
        doubts.remove(&self.rank());
        left.remove(&self.rank());
        let shrinking = Shrinking {
            comm: self,
            me: self.rank(),
            lineage: self.core.shared.lineage.clone(),
            prefix: self.core.shared.id.iter().fold("shrink/".to_owned(), |text, byte| format!("{text}{byte:02x}")),
            deadline: Deadline::after(self.timeout()),
            doubts,
            left,
            gone: BTreeSet::new(),
            rounds: BTreeMap::new(),
        };
        let comm = shrinking.run()?;
        #[cfg(feature = "cuda")]
        if let Some(device) = self.device() {
            let request = Request { choice: DeviceChoice::Context(Arc::clone(device.context())), required: false };
            comm.attach_device(&request, &Deadline::after(comm.timeout()))?;
        }
        Ok(comm)
    }

    fn left_behind(&self, why: &str) -> Error {
        Error::LeftBehind { doing: "shrink".to_owned(), rank: self.rank(), reason: why.to_owned() }
    }
}

/// Who leads.
enum Leader {
    Me,
    Other(usize, Arc<dyn Store>),
}

/// One rank's way to the new communicator. Ranks are those of the old one.
struct Shrinking<'a> {
    comm: &'a Communicator,
    me: usize,
    lineage: Lineage,
    /// Of all keys.
    prefix: String,
    deadline: Deadline,
    /// Whom others, or this rank, have given up waiting for: not waited for long.
    doubts: BTreeSet<usize>,
    /// Who has closed the communicator, and is not waited for.
    left: BTreeSet<usize>,
    /// Whose process is gone.
    gone: BTreeSet<usize>,
    /// By leader, the last round that failed.
    rounds: BTreeMap<usize, u64>,
}

impl Shrinking<'_> {
    fn run(mut self) -> Result<Communicator> {
        loop {
            let attempt = match self.find_leader() {
                Leader::Me => self.lead()?,
                Leader::Other(leader, store) => self.follow(leader, &store)?,
            };
            if let Some(comm) = attempt {
                return Ok(comm);
            }
            if self.deadline.has_passed() {
                return Err(self.late());
            }
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    fn round_key(&self, round: u64, name: &str) -> String {
        format!("{}/{round}/{name}", self.prefix)
    }

    fn join_key(&self, round: u64, rank: usize) -> String {
        self.round_key(round, &format!("join/{rank}"))
    }

    /// Whether others have been waited for long enough.
    fn is_impatient(&self) -> bool {
        self.deadline.elapsed() >= self.deadline.remaining()
    }

    fn late(&self) -> Error {
        let doing = "shrink: agreeing on who is left".to_owned();
        let (missing, arrived) = self.comm.peers().iter().cloned().partition(|peer: &Peer| self.gone.contains(&peer.rank));
        Error::Timeout { doing, elapsed: self.deadline.elapsed(), missing, arrived }
    }

    /// The store of a rank that leads this shrink.
    fn leading(&self, rank: usize) -> Option<Arc<dyn Store>> {
        let store = self.lineage.meeting.visit(self.lineage.places[rank])?;
        store.check(&[&self.key("led")]).ok()?.then(|| Arc::new(store) as Arc<dyn Store>)
    }

    /// Finds out whether a rank's process is gone.
    fn is_gone(&mut self, rank: usize) -> bool {
        if !self.gone.contains(&rank) && self.lineage.meeting.knock(self.lineage.places[rank]) == Knock::Gone {
            self.gone.insert(rank);
        }
        self.gone.contains(&rank)
    }

    /// The lowest rank that leads, or this one where every lower one is gone or not to be waited for.
    ///
    /// A rank that is there and does not serve takes a while to look at, so usually only the lowest is, which should lead.
    fn find_leader(&mut self) -> Leader {
        let began = Instant::now();
        loop {
            let lower: Vec<usize> = (0..self.me).filter(|rank| !self.is_gone(*rank)).collect();
            let awaited: Vec<usize> =
                lower.iter().copied().filter(|rank| !self.doubts.contains(rank) && !self.left.contains(rank)).collect();
            let looks_at_all = awaited.is_empty() || began.elapsed() >= LOOK_FURTHER;
            let looked_at = if looks_at_all { &lower[..] } else { &awaited[..1] };
            for rank in looked_at {
                if let Some(store) = self.leading(*rank) {
                    return Leader::Other(*rank, store);
                }
            }
            if awaited.is_empty() {
                return Leader::Me;
            }
            if self.is_impatient() {
                self.doubts.extend(awaited);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Joins the next round of `leader`; `None` where nothing came of it.
    fn follow(&mut self, leader: usize, store: &Arc<dyn Store>) -> Result<Option<Communicator>> {
        let round = self.rounds.get(&leader).copied().unwrap_or_default() + 1;
        let Some(()) = self.await_leader(leader, store, &self.round_key(round, "open"))? else { return Ok(None) };
        let doubts: Vec<String> = self.doubts.iter().map(usize::to_string).collect();
        if store.set(&self.join_key(round, self.me), doubts.join(",").as_bytes()).is_err() {
            return Ok(None);
        }
        let members_key = self.round_key(round, "members");
        let Some(()) = self.await_leader(leader, store, &members_key)? else { return Ok(None) };
        let Ok(members) = store.get(&members_key, SLICE) else { return Ok(None) };
        let members = parse(&members).filter(|members| members.iter().all(|rank| *rank < self.comm.world_size()));
        let Some(members) = members else {
            self.rounds.insert(leader, round);
            return Ok(None);
        };
        if !members.contains(&self.me) {
            return Err(self.comm.left_behind(&format!("ranks {members:?} are complete without it")));
        }
        self.found(leader, round, store, &members)
    }

    /// Waits for a key of the leader's; `None` where the leader is gone or has stepped back.
    fn await_leader(&self, leader: usize, store: &Arc<dyn Store>, key: &str) -> Result<Option<()>> {
        loop {
            match store.wait(&[key], SLICE) {
                Ok(()) => return Ok(Some(())),
                Err(error) if !error.is_timeout() => return Ok(None),
                Err(_) => {}
            }
            match store.check(&[&self.key("left")]) {
                Ok(false) => {}
                Ok(true) | Err(_) => return Ok(None),
            }
            if self.deadline.has_passed() {
                let peers = self.comm.peers();
                let doing = format!("shrink: waiting for {}, which leads it", peers[leader]);
                return Err(Error::Timeout {
                    doing,
                    elapsed: self.deadline.elapsed(),
                    missing: vec![peers[leader].clone()],
                    arrived: vec![],
                });
            }
        }
    }

    /// Leads one round; `None` where nothing came of it.
    fn lead(&mut self) -> Result<Option<Communicator>> {
        let store = self.lineage.meeting.host()?;
        let round = self.rounds.get(&self.me).copied().unwrap_or_default() + 1;
        store.delete_key(&self.key("left"))?;
        store.set(&self.round_key(round, "open"), b"1")?;
        store.set(&self.key("led"), b"1")?;
        let Some(members) = self.gather(round, &*store)? else {
            store.set(&self.key("left"), b"1")?;
            store.delete_key(&self.key("led"))?;
            self.rounds.insert(self.me, round);
            return Ok(None);
        };
        let text: Vec<String> = members.iter().map(usize::to_string).collect();
        store.set(&self.key("done"), b"1")?;
        store.set(&self.round_key(round, "members"), text.join(",").as_bytes())?;
        self.found(self.me, round, &store, &members)
    }

    /// Waits for everyone who should come to a round; `None` where a lower rank leads.
    fn gather(&mut self, round: u64, store: &dyn Store) -> Result<Option<Vec<usize>>> {
        let began = Instant::now();
        let mut joined = BTreeSet::from([self.me]);
        let mut elsewhere = began;
        loop {
            self.admit(round, store, &mut joined)?;
            let present: Vec<usize> = (0..self.comm.world_size())
                .filter(|rank| !joined.contains(rank) && !self.left.contains(rank) && !self.is_gone(*rank))
                .collect();
            let is_over = self.is_impatient() || began.elapsed() >= GRACE && present.iter().all(|rank| self.doubts.contains(rank));
            if present.is_empty() || is_over {
                self.refuse_to_split(&present)?;
                self.refuse_to_be_few(&present, &joined)?;
                return Ok(Some(joined.into_iter().collect()));
            }
            if elsewhere.elapsed() >= GRACE {
                self.refuse_to_split(&present)?;
                elsewhere = Instant::now();
            }
            if present.iter().any(|rank| *rank < self.me && self.leading(*rank).is_some()) {
                return Ok(None);
            }
            // Only a pause: who came is looked at above.
            let keys: Vec<String> = present.iter().map(|rank| self.join_key(round, *rank)).collect();
            let _ = store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), SLICE);
        }
    }

    /// Takes in those who have come since.
    fn admit(&mut self, round: u64, store: &dyn Store, joined: &mut BTreeSet<usize>) -> Result<()> {
        for rank in 0..self.comm.world_size() {
            let key = self.join_key(round, rank);
            if !joined.contains(&rank) && store.check(&[&key])? {
                joined.insert(rank);
                self.doubts.extend(parse(&store.get(&key, SLICE)?).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// An error where one of those that are there and do not come has made a communicator of others already.
    fn refuse_to_split(&self, present: &[usize]) -> Result<()> {
        let has_led = |rank: usize| self.leading(rank).is_some_and(|store| store.check(&[&self.key("done")]).unwrap_or(false));
        match present.iter().copied().find(|rank| has_led(*rank)) {
            Some(leader) => Err(self.comm.left_behind(&format!("rank {leader} leads others that had given it up"))),
            None => Ok(()),
        }
    }

    /// An error where some cannot be reached, so that they may be going on by themselves, and these here are not the most of all.
    fn refuse_to_be_few(&self, present: &[usize], joined: &BTreeSet<usize>) -> Result<()> {
        let knock = |rank: &usize| self.lineage.meeting.knock(self.lineage.places[*rank]);
        let silent: Vec<usize> = present.iter().copied().filter(|rank| knock(rank) == Knock::Silence).collect();
        let all = joined.len() + silent.len();
        let has_lowest = silent.iter().all(|rank| joined.first().is_some_and(|first| first < rank));
        if silent.is_empty() || 2 * joined.len() > all || 2 * joined.len() == all && has_lowest {
            return Ok(());
        }
        let reason =
            format!("ranks {silent:?} cannot be reached from ranks {joined:?}, which are too few to go on: the others may have done so");
        Err(self.comm.left_behind(&reason))
    }

    /// Founds the communicator of the members; `None` where a member was lost meanwhile.
    fn found(&mut self, leader: usize, round: u64, store: &Arc<dyn Store>, members: &[usize]) -> Result<Option<Communicator>> {
        let lineage = self.lineage.of(members);
        let shared = &self.comm.core.shared;
        let mut config = shared.config.clone();
        config.timeout = self.comm.timeout();
        let place = members.iter().position(|rank| *rank == self.me).unwrap_or_default();
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(self.round_key(round, "found"), Arc::clone(store)));
        let name = format!("{}, shrunk", shared.health.flight().name());
        let origin = Origin::Shrunk { lineage, name, watches: leader == self.me };
        let joined = join(Arc::clone(&store), (place, members.len()), Some(shared.listen), config, &self.deadline, origin);
        self.rounds.insert(leader, round);
        match joined {
            Ok(comm) => Ok(Some(comm)),
            Err(error) => {
                bootstrap::call_off(&*store, &error);
                let is_final = matches!(error, Error::Config { .. } | Error::Unsupported { .. } | Error::InvalidArgument { .. });
                if is_final || self.deadline.has_passed() { Err(error) } else { Ok(None) }
            }
        }
    }
}

/// Ranks as they are written in a store: in decimal, between commas.
fn parse(text: &[u8]) -> Option<Vec<usize>> {
    let text = std::str::from_utf8(text).ok()?;
    text.split(',').filter(|rank| !rank.is_empty()).map(|rank| rank.parse().ok()).collect()
}
