//! A new communicator of those who are left.
//!
//! The survivors meet behind the door of the lowest of them (see `meeting`). It leads: it opens a round, waits until everyone has
//! come whom it has no reason to take for gone, says who the members are, and they join at its store as ranks join at the start of a
//! job. Whoever dies meanwhile, the leader among them, fails the round for all, and there is another. Who lives is found out by
//! knocking. Who is stopped, or cut off, is guessed at by what the failed communicator knew: a rank that others gave up waiting for gets
//! a short while. That may have been another one's fault, and ranks may know different things, so whoever comes in time is taken, and a
//! leader steps back where it finds a lower rank leading after all.

use std::collections::BTreeSet;
use std::fmt;
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
use crate::host::notice::Notice;
use crate::observe::LIFE;
use crate::rendezvous::{PrefixStore, Store};

/// How long one wait at the leader's store lasts before other doors are looked at.
const SLICE: Duration = Duration::from_millis(50);
/// The pause between two rounds of knocking while nobody leads.
const PAUSE: Duration = Duration::from_millis(10);
/// After how long without a leader all lower ranks are looked at, not the lowest alone.
const LOOK_FURTHER: Duration = Duration::from_millis(250);
/// How long a leader waits for ranks that were given up once.
const GRACE: Duration = Duration::from_secs(1);
/// After how long a leader that was held up may have been given up itself.
const LONG: Duration = Duration::from_secs(3);
/// The longest pause between two looks for a leader: each costs it a place among those who wait at its closed door.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

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
        if self.core.shared.health.is_foreign() {
            let reason = "this process was forked from the one that made the communicator".to_owned();
            return Err(Error::Unsupported { what: "shrink".to_owned(), reason });
        }
        let comm = self.shrink_host()?;
        #[cfg(feature = "cuda")]
        let comm = self.with_device_of_this(comm)?;
        Ok(comm)
    }

    /// The same, without devices.
    fn shrink_host(&self) -> Result<Self> {
        self.abort();
        let health = &self.core.shared.health;
        let mut doubts: BTreeSet<usize> = health.late_ranks().into_iter().collect();
        let mut left = BTreeSet::new();
        tracing::info!(target: LIFE, communicator = health.flight().name(), rank = self.rank(), "shrinking");
        match health.notice() {
            Some(Notice::TimedOut { missing, .. }) => drop(doubts.insert(*missing as usize)),
            Some(Notice::Lost { rank }) => drop(doubts.insert(*rank as usize)),
            Some(Notice::Left { rank }) => drop(left.insert(*rank as usize)),
            _ => {}
        }
        #[cfg(feature = "cuda")]
        doubts.extend(self.late_on_device());
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
        };
        shrinking.run()
    }

    /// Whom a deadline of the device plane was waiting for.
    #[cfg(feature = "cuda")]
    fn late_on_device(&self) -> Vec<usize> {
        match self.device().and_then(|device| device.failure()) {
            Some(Error::Timeout { missing, .. }) => missing.iter().map(|peer| peer.rank).collect(),
            _ => Vec::new(),
        }
    }

    /// Gives a shrunk communicator the GPU of this one. Where a rank is lost meanwhile, the others have gone on without this one already,
    /// so the new communicator is what is shrunk once more.
    #[cfg(feature = "cuda")]
    fn with_device_of_this(&self, mut comm: Self) -> Result<Self> {
        let Some(device) = self.device() else { return Ok(comm) };
        loop {
            let request = Request { choice: DeviceChoice::Context(Arc::clone(device.context())), required: false };
            match comm.attach_device(&request, &Deadline::after(comm.timeout())) {
                Ok(()) => return Ok(comm),
                Err(error) if error.is_peer_lost() || matches!(error.root(), Error::Aborted { .. }) => comm = comm.shrink_host()?,
                Err(error) => return Err(error),
            }
        }
    }

    fn left_behind(&self, why: &str) -> Error {
        Error::LeftBehind { doing: "shrink".to_owned(), rank: self.rank(), reason: why.to_owned() }
    }
}

/// How far a rank is, as it says at its door.
#[derive(Debug, PartialEq, Eq)]
enum Status {
    /// It leads this round and takes in whoever comes.
    Open(u64),
    /// It is about to close the round.
    Claim(u64),
    /// The round is complete, with these ranks, and they are founding a communicator.
    Members(u64, Vec<usize>),
    /// It leads no round at the moment: a lower rank does, or its last one failed.
    SteppedBack,
    /// It has found that others may have gone on.
    Refused,
    /// It is a rank of the new communicator of these.
    Over(Vec<usize>),
}

impl Status {
    fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let mut words = text.split(' ');
        let (kind, mut number) = (words.next()?, || words.next());
        Some(match kind {
            "open" => Self::Open(number()?.parse().ok()?),
            "claim" => Self::Claim(number()?.parse().ok()?),
            "members" => Self::Members(number()?.parse().ok()?, parse(number()?)?),
            "stepped-back" => Self::SteppedBack,
            "refused" => Self::Refused,
            "over" => Self::Over(parse(number()?)?),
            _ => return None,
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(round) => write!(f, "open {round}"),
            Self::Claim(round) => write!(f, "claim {round}"),
            Self::Members(round, members) => write!(f, "members {round} {}", list(members.iter())),
            Self::SteppedBack => f.write_str("stepped-back"),
            Self::Refused => f.write_str("refused"),
            Self::Over(members) => write!(f, "over {}", list(members.iter())),
        }
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
}

impl Shrinking<'_> {
    fn run(mut self) -> Result<Communicator> {
        loop {
            let attempt = match self.find_leader() {
                Some(Leader::Me) => self.lead()?,
                Some(Leader::Other(leader, store)) => self.follow(leader, &store)?,
                None => None,
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

    /// What a rank says at its door of this shrink, and the store behind the door; `None` where it is closed, or says nothing.
    fn visit(&self, rank: usize) -> Option<(Status, Arc<dyn Store>)> {
        let store: Arc<dyn Store> = Arc::new(self.lineage.meeting.visit(self.lineage.places[rank])?);
        Some((self.read_status(&*store).ok()??, store))
    }

    /// The store of a rank that leads this shrink, or has led it.
    fn leading(&self, rank: usize) -> Option<Arc<dyn Store>> {
        self.visit(rank).filter(|(status, _)| !matches!(status, Status::SteppedBack)).map(|(_, store)| store)
    }

    fn read_status(&self, store: &dyn Store) -> Result<Option<Status>> {
        let key = self.key("status");
        if !store.check(&[&key])? {
            return Ok(None);
        }
        Ok(Status::parse(&store.get(&key, SLICE)?))
    }

    /// Whether these are ranks of the old communicator.
    fn are_ranks(&self, ranks: &[usize]) -> bool {
        ranks.iter().all(|rank| *rank < self.comm.world_size())
    }

    /// Says at this rank's own door how far it is.
    fn say(&self, store: &dyn Store, status: &Status) -> Result<()> {
        store.set(&self.key("status"), status.to_string().as_bytes())
    }

    /// Finds out whether a rank's process is gone.
    fn is_gone(&mut self, rank: usize) -> bool {
        if !self.gone.contains(&rank) && self.lineage.meeting.knock(self.lineage.places[rank]) == Knock::Gone {
            self.gone.insert(rank);
        }
        self.gone.contains(&rank)
    }

    /// The lowest rank that leads, or this one where every lower one is gone or not to be waited for; `None` once the deadline has passed.
    ///
    /// A rank that is there and does not serve takes a while to look at, so usually only the lowest is, which should lead.
    fn find_leader(&mut self) -> Option<Leader> {
        let (began, mut pause, mut given_up) = (Instant::now(), PAUSE, None::<Instant>);
        let limit = self.deadline.limit();
        loop {
            let lower: Vec<usize> = (0..self.me).filter(|rank| !self.is_gone(*rank)).collect();
            let awaited: Vec<usize> =
                lower.iter().copied().filter(|rank| !self.doubts.contains(rank) && !self.left.contains(rank)).collect();
            let looks_at_all = awaited.is_empty() || began.elapsed() >= LOOK_FURTHER;
            let looked_at = if looks_at_all { &lower[..] } else { &awaited[..1] };
            for rank in looked_at {
                if let Some(store) = self.leading(*rank) {
                    return Some(Leader::Other(*rank, store));
                }
            }
            if awaited.is_empty() {
                return Some(Leader::Me);
            }
            if self.deadline.has_passed() {
                return None;
            }
            // One after another: the next one may be about to lead, having given up the same one.
            if self.is_impatient() && given_up.is_none_or(|since| since.elapsed() >= LONG.min(limit / 8)) {
                self.doubts.insert(awaited[0]);
                (given_up, pause) = (Some(Instant::now()), PAUSE);
                continue;
            }
            std::thread::sleep(pause.min(self.deadline.remaining()));
            pause = (pause * 2).min(LONGEST_PAUSE).min(limit / 32);
        }
    }

    /// Joins the rounds of `leader`; `None` where it is gone, or leads no more.
    fn follow(&mut self, leader: usize, store: &Arc<dyn Store>) -> Result<Option<Communicator>> {
        let (mut joined, mut failed) = (0, 0);
        while !self.deadline.has_passed() {
            let Ok(Some(status)) = self.read_status(&**store) else { return Ok(None) };
            match status {
                Status::SteppedBack => return Ok(None),
                Status::Open(round) if round > joined => {
                    let doubts = list(self.doubts.iter());
                    if store.set(&self.join_key(round, self.me), doubts.as_bytes()).is_err() {
                        return Ok(None);
                    }
                    joined = round;
                }
                Status::Members(round, members) if round > failed && members.contains(&self.me) && self.are_ranks(&members) => {
                    if let Some(comm) = self.found(leader, round, store, &members)? {
                        return Ok(Some(comm));
                    }
                    failed = round;
                }
                // Whoever is not among the members may come to another round, should this one fail.
                Status::Open(_) | Status::Claim(_) | Status::Members(..) => {}
                Status::Over(members) => {
                    return Err(self.comm.left_behind(&format!("ranks {members:?} went on without it")));
                }
                Status::Refused => return Err(self.comm.left_behind(&format!("rank {leader} found that others may have gone on"))),
            }
            std::thread::sleep(PAUSE);
        }
        let peers = self.comm.peers();
        let doing = format!("shrink: waiting for {}, which leads it", peers[leader]);
        Err(Error::Timeout { doing, elapsed: self.deadline.elapsed(), missing: vec![peers[leader].clone()], arrived: vec![] })
    }

    /// Leads a round; `None` where nothing came of it.
    fn lead(&mut self) -> Result<Option<Communicator>> {
        let store = self.lineage.meeting.host()?;
        let round = match self.read_status(&*store)? {
            Some(Status::Over(members)) => return Err(self.comm.left_behind(&format!("it has become one of {members:?} already"))),
            _ => store.add(&self.key("rounds"), 1)?.unsigned_abs(),
        };
        self.say(&*store, &Status::Open(round))?;
        let outcome = self.gather(round, &*store).and_then(|members| match members {
            Some(members) => {
                self.say(&*store, &Status::Members(round, members.clone()))?;
                self.found(self.me, round, &store, &members)
            }
            None => Ok(None),
        });
        match outcome {
            Ok(Some(comm)) => Ok(Some(comm)),
            // Also where a member was lost: this rank may be leading again in a moment, or following another.
            Ok(None) => self.say(&*store, &Status::SteppedBack).map(|()| None),
            Err(error) => {
                // Those who wait here must not wait for nothing.
                let status = if matches!(error, Error::LeftBehind { .. }) { Status::Refused } else { Status::SteppedBack };
                let _ = self.say(&*store, &status);
                Err(error)
            }
        }
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
            if present.iter().any(|rank| *rank < self.me && self.leading(*rank).is_some()) {
                return Ok(None);
            }
            let has_waited = began.elapsed() >= GRACE;
            if present.is_empty() || has_waited && (self.is_impatient() || present.iter().all(|rank| self.doubts.contains(rank))) {
                self.say(store, &Status::Claim(round))?;
                // Where it has taken long, those who had come may have gone on with others.
                let all: Vec<usize> = (0..self.comm.world_size()).filter(|rank| *rank != self.me && !self.gone.contains(rank)).collect();
                self.refuse_to_split(if began.elapsed() >= LONG { &all } else { &present })?;
                self.refuse_to_be_few(&present, &joined)?;
                self.admit(round, store, &mut joined)?;
                return Ok(Some(joined.into_iter().collect()));
            }
            if elsewhere.elapsed() >= GRACE {
                self.refuse_to_split(&present)?;
                elsewhere = Instant::now();
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
                let doubts = store.get(&key, SLICE)?;
                self.doubts.extend(std::str::from_utf8(&doubts).ok().and_then(parse).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// An error where one of these ranks makes a communicator of others, or has become one of another. Of two that are about to, the lower
    /// one goes on: both have said so before they look.
    fn refuse_to_split(&self, ranks: &[usize]) -> Result<()> {
        let goes_on = |rank: &usize| match self.visit(*rank) {
            Some((Status::Members(..) | Status::Over(_), _)) => true,
            Some((Status::Claim(_), _)) => *rank < self.me,
            _ => false,
        };
        match ranks.iter().copied().find(goes_on) {
            Some(other) => Err(self.comm.left_behind(&format!("rank {other} goes on with others that had given it up"))),
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
        match joined {
            Ok(comm) => {
                // Whoever comes later hears it from any of the members. One that cannot say so has told nobody anything else either.
                let told = self.lineage.meeting.host().and_then(|own| self.say(&*own, &Status::Over(members.to_vec())));
                told.unwrap_or_else(|error| tracing::warn!(%error, "late ranks will not hear from this one that it went on"));
                Ok(Some(comm))
            }
            Err(error) => {
                bootstrap::call_off(&*store, &error);
                let is_final = matches!(error, Error::Config { .. } | Error::Unsupported { .. } | Error::InvalidArgument { .. });
                if is_final || self.deadline.has_passed() { Err(error) } else { Ok(None) }
            }
        }
    }
}

/// Ranks as they are written in a store: in decimal, between commas.
fn list<'a>(ranks: impl Iterator<Item = &'a usize>) -> String {
    ranks.map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The reverse of [`list`].
fn parse(text: &str) -> Option<Vec<usize>> {
    text.split(',').filter(|rank| !rank.is_empty()).map(|rank| rank.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_at_a_door_is_understood() {
        let said = [
            Status::Open(3),
            Status::Claim(4),
            Status::Members(1, vec![0, 2, 11]),
            Status::SteppedBack,
            Status::Refused,
            Status::Over(vec![7]),
        ];
        for status in said {
            assert_eq!(Status::parse(status.to_string().as_bytes()), Some(status));
        }
        for nonsense in ["", "open", "open x", "members 1", "members 1 2,x", "over -1", "\u{fffd}"] {
            assert_eq!(Status::parse(nonsense.as_bytes()), None, "{nonsense}");
        }
    }
}
