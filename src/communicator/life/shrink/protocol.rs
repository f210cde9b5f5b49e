//! The protocol of a shrink. It determines which rank leads, which ranks join, when a round is closed, and which ranks
//! may continue.

mod completion;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::status::{Completed, Status, list, parse, status_key};
use crate::base::deadline::Deadline;
use crate::base::tuning::recovery::{ANSWER, AT_ONCE, PROBE};
use crate::base::tuning::shrink::{GRACE, LONG, LONGEST_PAUSE, LOOK_FURTHER, PAUSE, SLICE};
use crate::communicator::recovery::Probe;
use crate::error::{Error, Peer, Result};
use crate::rendezvous::Store;

/// The rank that leads.
enum Leader {
    Me,
    Other(usize, Arc<dyn Store>),
}

/// The value that a rank has published at its recovery listener, and the store behind the listener.
pub(in crate::communicator::life) type Visited = (Vec<u8>, Arc<dyn Store>);

/// The environment of a shrink. All ranks are numbers in the old communicator.
pub(in crate::communicator::life) trait World {
    /// The result for the members: a communicator.
    type Connected;

    /// Returns the ranks.
    fn peers(&self) -> &[Peer];

    /// Finds out whether the processes of these ranks live. The ranks that do not answer hold up no other.
    fn probe_all(&self, ranks: &[usize]) -> Vec<Probe>;

    /// Reads a key in the stores behind these ranks' recovery listeners. Returns `None` for a rank if its listener is closed
    /// or cannot be reached, or if its store does not have the key. The ranks that do not answer hold up no other.
    fn visit_all(&self, ranks: &[usize], key: &str) -> Vec<Option<Visited>>;

    /// Opens this rank's own recovery listener, and returns the store behind it.
    fn host(&self) -> Result<Arc<dyn Store>>;

    /// Waits for this time.
    fn pause(&self, limit: Duration);

    /// Connects this rank with the other members. The members exchange data under keys of this store that no other rank
    /// uses.
    fn connect(&self, store: Arc<dyn Store>, setup: &GroupSetup<'_>) -> Result<Self::Connected>;
}

/// A rank's part in making the new communicator.
pub(in crate::communicator::life) struct GroupSetup<'a> {
    /// The members, in order.
    pub(in crate::communicator::life) members: &'a [usize],
    /// This rank's number among them.
    pub(in crate::communicator::life) place: usize,
    /// Whether this rank watches for deaths meanwhile.
    pub(in crate::communicator::life) leads: bool,
    pub(in crate::communicator::life) deadline: &'a Deadline,
}

/// The ranks that were given up before a shrink begins.
#[derive(Debug, Default)]
pub(in crate::communicator::life) struct Given {
    /// Ranks that another rank has given up waiting for: the wait for them is short.
    pub(in crate::communicator::life) doubts: BTreeSet<usize>,
    /// Ranks that have closed the communicator: there is no wait for them.
    pub(in crate::communicator::life) left: BTreeSet<usize>,
    /// Set if the communicator has grown, and its ranks have not met yet.
    pub(in crate::communicator::life) unmet: Option<Unmet>,
}

/// The ranks that have admitted the others of a communicator that has grown. Some of them may have decided otherwise, so
/// only the larger part of them may continue.
#[derive(Debug)]
pub(in crate::communicator::life) struct Unmet {
    /// Their number. They have the same ranks as in their old communicator.
    pub(in crate::communicator::life) members: usize,
    /// The prefix of the keys of a shrink of that communicator. Newcomers do not know it.
    pub(in crate::communicator::life) old_prefix: Option<String>,
}

/// The result of a shrink.
#[derive(Debug)]
pub(in crate::communicator::life) enum Shrunk<C> {
    /// The remaining ranks continue in this communicator.
    Into(C),
    /// Other ranks continue in the communicator that an admission made. The error is `LeftBehind`.
    Grown(Error),
}

/// One rank's part of a shrink.
pub(in crate::communicator::life) struct Shrinking<'a, W: World> {
    world: &'a W,
    me: usize,
    /// The prefix of all keys.
    prefix: String,
    deadline: Deadline,
    given: Given,
    /// Ranks whose process is gone.
    gone: BTreeSet<usize>,
    /// Ranks that did not answer the last probe.
    silent: BTreeSet<usize>,
    /// Whether a rank continues in the communicator that an admission made.
    has_grown: Cell<bool>,
    /// The communicators that this rank has connected without knowing whether all members have.
    uncertain: Vec<(Completed, W::Connected)>,
    /// The index of one of these in which another member has continued.
    confirmed: Cell<Option<usize>>,
}

impl<'a, W: World> Shrinking<'a, W> {
    pub(in crate::communicator::life) fn new(world: &'a W, me: usize, prefix: String, limit: Duration, given: Given) -> Self {
        Self {
            world,
            me,
            prefix,
            deadline: Deadline::after(limit),
            given,
            gone: BTreeSet::new(),
            silent: BTreeSet::new(),
            has_grown: Cell::new(false),
            uncertain: Vec::new(),
            confirmed: Cell::new(None),
        }
    }

    /// Runs rounds until this rank is a member of a new communicator, or cannot become one.
    pub(in crate::communicator::life) fn run(mut self) -> Result<Shrunk<W::Connected>> {
        match self.run_rounds().or_else(|error| self.follow_confirmed(error)) {
            Ok(comm) => Ok(Shrunk::Into(comm)),
            Err(error) if self.has_grown.get() => Ok(Shrunk::Grown(error)),
            Err(error) => Err(error),
        }
    }

    /// Publishes that this rank continues in the communicator that an admission made.
    pub(in crate::communicator::life) fn publish_grown(&self) -> Result<()> {
        self.world.host().and_then(|own| self.say(&*own, &Status::Grown))
    }

    /// Makes sure that the other ranks did not continue without this one before it published that.
    pub(in crate::communicator::life) fn look_after_grown(&self) -> Result<()> {
        self.look_until_on_time(&*self.world.host()?, &Status::Grown, &[])
    }

    fn run_rounds(&mut self) -> Result<W::Connected> {
        // Without this look, a rank that has continued could join a round of another rank.
        if let Ok(own) = self.world.host() {
            self.refuse_to_repeat(&*own)?;
        }
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

    /// Whether this rank has waited long enough for other ranks: for half of its timeout.
    fn is_impatient(&self) -> bool {
        self.deadline.elapsed() >= self.deadline.remaining()
    }

    /// Whether only as much time is left as the connection of a new communicator may need.
    fn is_late(&self) -> bool {
        self.deadline.remaining() < self.deadline.limit() / 4
    }

    /// Returns the time that has passed since `moment`. `moment` is a time since the beginning of the shrink.
    fn since(&self, moment: Duration) -> Duration {
        self.deadline.elapsed().saturating_sub(moment)
    }

    fn left_behind(&self, why: &str) -> Error {
        Error::LeftBehind { doing: "shrink".to_owned(), rank: self.me, reason: why.to_owned() }
    }

    fn grown(&self) -> Error {
        self.has_grown.set(true);
        self.left_behind("other ranks continued in the communicator that an admission made")
    }

    fn late(&self) -> Error {
        let doing = "shrink: agreeing on the surviving ranks".to_owned();
        let (missing, arrived) = self.world.peers().iter().cloned().partition(|peer: &Peer| self.gone.contains(&peer.rank));
        Error::Timeout { doing, elapsed: self.deadline.elapsed(), missing, arrived, meanwhile: Vec::new() }
    }

    /// Visits ranks, up to [`AT_ONCE`] at the same time, and reads what they publish about a shrink whose keys have this
    /// prefix. Returns the first result of `accept`, in the order of the ranks.
    fn visit<T>(&self, ranks: &[usize], prefix: &str, mut accept: impl FnMut(usize, Status, Arc<dyn Store>) -> Option<T>) -> Option<T> {
        let key = status_key(prefix);
        ranks.chunks(AT_ONCE).find_map(|some| {
            let visited = some.iter().zip(self.world.visit_all(some, &key));
            let mut published = visited.filter_map(|(rank, visited)| {
                let (text, store) = visited?;
                Some((*rank, Status::parse(&text)?, store))
            });
            published.find_map(|(rank, status, store)| accept(rank, status, store))
        })
    }

    /// Returns the first of these ranks that leads this shrink or has led it, and its store.
    fn leading(&self, ranks: &[usize]) -> Option<(usize, Arc<dyn Store>)> {
        self.visit(ranks, &self.prefix, |rank, status, store| (!matches!(status, Status::SteppedBack)).then_some((rank, store)))
    }

    /// Reads the status that a rank has published about this shrink.
    fn read_status(&self, store: &dyn Store) -> Result<Option<Status>> {
        Ok(read(store, &status_key(&self.prefix))?.and_then(|text| Status::parse(&text)))
    }

    /// Whether all of `ranks` are numbers of ranks in the old communicator.
    fn are_ranks(&self, ranks: &[usize]) -> bool {
        ranks.iter().all(|rank| *rank < self.world.peers().len())
    }

    /// Publishes this rank's progress at its own recovery listener.
    fn say(&self, store: &dyn Store, status: &Status) -> Result<()> {
        store.set(&status_key(&self.prefix), status.to_string().as_bytes())
    }

    /// Returns those of these ranks whose process is not known to be gone.
    fn not_gone(&mut self, ranks: impl Iterator<Item = usize>) -> Vec<usize> {
        let asked: Vec<usize> = ranks.filter(|rank| !self.gone.contains(rank)).collect();
        for (rank, probe) in asked.iter().zip(self.world.probe_all(&asked)) {
            match probe {
                Probe::Gone => drop(self.gone.insert(*rank)),
                Probe::Alive => drop(self.silent.remove(rank)),
                Probe::NoAnswer => drop(self.silent.insert(*rank)),
            }
        }
        asked.into_iter().filter(|rank| !self.gone.contains(rank)).collect()
    }

    /// Returns the lowest rank that leads. Returns this rank if no lower rank leads and this rank need not wait for a
    /// lower rank. Returns `None` once the deadline has passed.
    ///
    /// A visit to a rank that lives but serves no store takes a while. The lowest rank should lead, so this rank
    /// usually visits only the lowest rank.
    fn find_leader(&mut self) -> Option<Leader> {
        let (began, mut pause, mut given_up) = (self.deadline.elapsed(), PAUSE, None::<Duration>);
        let limit = self.deadline.limit();
        loop {
            let lower = self.not_gone(0..self.me);
            let awaited: Vec<usize> =
                lower.iter().copied().filter(|rank| !self.given.doubts.contains(rank) && !self.given.left.contains(rank)).collect();
            let looks_at_all = awaited.is_empty() || self.since(began) >= LOOK_FURTHER;
            let looked_at = if looks_at_all { &lower[..] } else { &awaited[..1] };
            if let Some((rank, store)) = self.leading(looked_at) {
                return Some(Leader::Other(rank, store));
            }
            if awaited.is_empty() {
                return Some(Leader::Me);
            }
            if self.deadline.has_passed() {
                return None;
            }
            if self.is_impatient() {
                // A rank that does not answer cannot lead this one.
                let silent: Vec<usize> = awaited.iter().copied().filter(|rank| self.silent.contains(rank)).collect();
                if !silent.is_empty() {
                    self.given.doubts.extend(silent);
                    continue;
                }
                // One rank after another: the next rank may have given up the same one, and be about to lead.
                if given_up.is_none_or(|since| self.since(since) >= LONG.min(limit / 8)) {
                    self.given.doubts.insert(awaited[0]);
                    (given_up, pause) = (Some(self.deadline.elapsed()), PAUSE);
                    continue;
                }
            }
            self.world.pause(pause.min(self.deadline.remaining()));
            pause = (pause * 2).min(LONGEST_PAUSE).min(limit / 32);
        }
    }

    /// Joins the rounds of `leader`. Returns `None` if `leader` is gone or no longer leads.
    fn follow(&mut self, leader: usize, store: &Arc<dyn Store>) -> Result<Option<W::Connected>> {
        let (mut joined, mut failed) = (0, 0);
        while !self.deadline.has_passed() {
            let Ok(Some(status)) = self.read_status(&**store) else { return Ok(None) };
            match status {
                Status::SteppedBack => return Ok(None),
                Status::Open(round) if round > joined => {
                    // After a comma, because no value in a store may be empty (`bootstrap/store.rs`).
                    let doubts = format!(",{}", list(self.given.doubts.iter()));
                    if store.set(&self.join_key(round, self.me), doubts.as_bytes()).is_err() {
                        return Ok(None);
                    }
                    joined = round;
                }
                Status::Members(round, members) if round > failed && members.contains(&self.me) && self.are_ranks(&members) => {
                    if let Some(comm) = self.connect(leader, round, store, &members)? {
                        return Ok(Some(comm));
                    }
                    failed = round;
                }
                // A rank that is not a member may join another round if this one fails.
                Status::Open(_) | Status::Claim(_) | Status::Members(..) => {}
                Status::Over(theirs) => return Err(self.confirm(&theirs)),
                Status::Grown => return Err(self.grown()),
                Status::Refused => return Err(self.left_behind(&format!("rank {leader} found that other ranks may have continued"))),
            }
            self.world.pause(PAUSE);
        }
        let peers = self.world.peers();
        let doing = format!("shrink: waiting for {}, which leads the shrink", peers[leader]);
        Err(Error::Timeout {
            doing,
            elapsed: self.deadline.elapsed(),
            missing: vec![peers[leader].clone()],
            arrived: vec![],
            meanwhile: vec![],
        })
    }

    /// Returns an error if this rank has continued, by what it has published at its own recovery listener.
    fn refuse_to_repeat(&self, own: &dyn Store) -> Result<()> {
        match self.read_status(own)? {
            Some(Status::Over(mine)) => {
                Err(self.left_behind(&format!("this rank has already continued as one of ranks {:?}", mine.members)))
            }
            Some(Status::Grown) => Err(self.left_behind("this rank has already continued in the communicator that an admission made")),
            _ => Ok(()),
        }
    }

    /// Leads a round. Returns `None` if the round failed.
    fn lead(&mut self) -> Result<Option<W::Connected>> {
        let store = self.world.host()?;
        self.refuse_to_repeat(&*store)?;
        let round = store.add(&self.key("rounds"), 1)?.unsigned_abs();
        self.say(&*store, &Status::Open(round))?;
        let outcome = self.gather(round, &*store).and_then(|members| match members {
            Some(members) => {
                self.say(&*store, &Status::Members(round, members.clone()))?;
                self.connect(self.me, round, &store, &members)
            }
            None => Ok(None),
        });
        match outcome {
            Ok(Some(comm)) => Ok(Some(comm)),
            // Even if a member was lost, this rank may lead again in a moment, or follow another.
            Ok(None) => self.say(&*store, &Status::SteppedBack).map(|()| None),
            Err(error) => {
                // The ranks that wait here must not wait without need.
                let status = match error {
                    _ if self.has_grown.get() => Status::Grown,
                    // This rank is about to publish more.
                    _ if self.confirmed.get().is_some() => return Err(error),
                    Error::LeftBehind { .. } => Status::Refused,
                    _ => Status::SteppedBack,
                };
                let _ = self.say(&*store, &status);
                Err(error)
            }
        }
    }

    /// Waits for every rank that should join a round. Returns `None` if a lower rank leads.
    fn gather(&mut self, round: u64, store: &dyn Store) -> Result<Option<Vec<usize>>> {
        let began = self.deadline.elapsed();
        let mut joined = BTreeSet::from([self.me]);
        let mut elsewhere = began;
        loop {
            self.admit(round, store, &mut joined)?;
            let absent = (0..self.world.peers().len()).filter(|rank| !joined.contains(rank) && !self.given.left.contains(rank));
            let present = self.not_gone(absent.collect::<Vec<_>>().into_iter());
            let lower: Vec<usize> = present.iter().copied().filter(|rank| *rank < self.me).collect();
            if self.leading(&lower).is_some() {
                return Ok(None);
            }
            if present.is_empty() || self.has_waited_enough(began, &present, &joined) {
                self.say(store, &Status::Claim(round))?;
                // If this has taken long, ranks that had joined may have continued with others.
                let all: Vec<usize> = (0..self.world.peers().len()).filter(|rank| *rank != self.me && !self.gone.contains(rank)).collect();
                self.refuse_to_split(if self.since(began) >= LONG { &all } else { &present })?;
                self.refuse_to_be_few(&present, &joined)?;
                self.refuse_without_members(&present, &joined)?;
                self.admit(round, store, &mut joined)?;
                return Ok(Some(joined.into_iter().collect()));
            }
            if self.since(elsewhere) >= GRACE {
                self.refuse_to_split(&present)?;
                elsewhere = self.deadline.elapsed();
            }
            // Only a pause: joins are read above.
            let keys: Vec<String> = present.iter().map(|rank| self.join_key(round, *rank)).collect();
            let _ = store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), SLICE);
        }
    }

    /// Whether a leader need not wait any longer for ranks that have not joined.
    fn has_waited_enough(&self, began: Duration, present: &[usize], joined: &BTreeSet<usize>) -> bool {
        let silent: Vec<usize> = present.iter().copied().filter(|rank| self.silent.contains(rank)).collect();
        // Before they join, others look for leaders among the same silent ranks.
        let looks = silent.len().div_ceil(AT_ONCE) as u32;
        let grace = GRACE + (2 * (PROBE + ANSWER) * looks).min(self.deadline.limit() / 8);
        let has_waited = self.since(began) >= grace;
        // Without those that only hints call late, the ranks here may be too few to continue.
        let needs_more = silent.len() < present.len() && are_few(&silent, joined) && !self.is_late();
        has_waited && !needs_more && (self.is_impatient() || present.iter().all(|rank| self.given.doubts.contains(rank)))
    }

    /// Accepts the ranks that have joined since.
    fn admit(&mut self, round: u64, store: &dyn Store, joined: &mut BTreeSet<usize>) -> Result<()> {
        for rank in 0..self.world.peers().len() {
            let key = self.join_key(round, rank);
            if !joined.contains(&rank) && store.check(&[&key])? {
                joined.insert(rank);
                let doubts = store.get(&key, SLICE)?;
                self.given.doubts.extend(std::str::from_utf8(&doubts).ok().and_then(parse).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Returns an error if one of these ranks continues with others, or if a rank lower than this one is about to. If
    /// two ranks are about to continue, both have published that before they look.
    fn refuse_to_split(&self, ranks: &[usize]) -> Result<()> {
        let refusal = |rank: usize, status, _| match status {
            Status::Grown => Some(self.grown()),
            Status::Over(theirs) => Some(self.confirm(&theirs)),
            Status::Claim(_) if rank > self.me => None,
            Status::Claim(_) | Status::Members(..) => {
                Some(self.left_behind(&format!("rank {rank} continues with other ranks, which did not wait for this rank")))
            }
            _ => None,
        };
        self.visit(ranks, &self.prefix, refusal).map_or(Ok(()), Err)
    }

    /// Returns an error if the ranks that admitted the others may have continued without these ranks.
    fn refuse_without_members(&self, present: &[usize], joined: &BTreeSet<usize>) -> Result<()> {
        let Some(Unmet { members, old_prefix }) = &self.given.unmet else { return Ok(()) };
        let members = *members;
        // The network may have been restored after a member has looked for this rank without success.
        let present_members: Vec<usize> = present.iter().copied().filter(|rank| *rank < members).collect();
        let has_continued = |rank, status, _| matches!(status, Status::Over(_)).then_some(rank);
        if let Some(rank) = old_prefix.as_ref().and_then(|prefix| self.visit(&present_members, prefix, has_continued)) {
            return Err(self.left_behind(&format!("rank {rank} has continued without the newcomers")));
        }
        let here: BTreeSet<usize> = joined.range(..members).copied().collect();
        let silent: Vec<usize> = present_members.into_iter().filter(|rank| self.silent.contains(rank)).collect();
        let another = (0..members).find(|rank| !here.contains(rank) && !self.gone.contains(rank));
        match another {
            Some(member) if here.is_empty() || are_few(&silent, &here) => {
                Err(self.left_behind(&format!("rank {member} may have continued without ranks {joined:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns an error if unreachable ranks may continue by themselves, and the ranks here are not the larger part.
    fn refuse_to_be_few(&self, present: &[usize], joined: &BTreeSet<usize>) -> Result<()> {
        let probes = self.world.probe_all(present);
        let silent: Vec<usize> = present.iter().zip(probes).filter(|(_, probe)| *probe == Probe::NoAnswer).map(|(rank, _)| *rank).collect();
        if !are_few(&silent, joined) {
            return Ok(());
        }
        let reason =
            format!("ranks {joined:?} cannot reach ranks {silent:?}, which may have continued; ranks {joined:?} are too few to continue");
        Err(self.left_behind(&reason))
    }
}

/// Reads the value of a key; `None` if it has none.
pub(super) fn read(store: &dyn Store, key: &str) -> Result<Option<Vec<u8>>> {
    if store.check(&[key])? { store.get(key, SLICE).map(Some) } else { Ok(None) }
}

/// Whether these ranks must not continue, since ranks that do not answer may continue without them. Of two equal parts, the
/// part with the lowest rank continues.
fn are_few(silent: &[usize], joined: &BTreeSet<usize>) -> bool {
    let all = joined.len() + silent.len();
    let has_lowest = silent.iter().all(|rank| joined.first().is_some_and(|first| first < rank));
    !(silent.is_empty() || 2 * joined.len() > all || 2 * joined.len() == all && has_lowest)
}
