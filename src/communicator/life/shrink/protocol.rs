//! The protocol of a shrink. It determines which rank leads, which ranks join, when a round is closed, and which ranks
//! may continue.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::status::{Status, list, parse, status_key};
use crate::base::deadline::Deadline;
use crate::base::tuning::recovery::{ANSWER, PROBE};
use crate::base::tuning::shrink::{GRACE, LONG, LONGEST_PAUSE, LOOK_FURTHER, LOOKS, PAUSE, SLICE};
use crate::communicator::life::bootstrap::call_off;
use crate::communicator::recovery::Probe;
use crate::error::{Error, Peer, Result};
use crate::rendezvous::{PrefixStore, Store};

/// The rank that leads.
enum Leader {
    Me,
    Other(usize, Arc<dyn Store>),
}

/// The environment of a shrink. All ranks are numbers in the old communicator.
pub(in crate::communicator::life) trait World {
    /// The result for the members: a communicator.
    type Connected;

    /// Returns the ranks.
    fn peers(&self) -> &[Peer];

    /// Finds out whether a rank's process lives.
    fn probe(&self, rank: usize) -> Probe;

    /// Finds out whether the processes of these ranks live. Ranks that do not answer need not hold up others.
    fn probe_all(&self, ranks: &[usize]) -> Vec<Probe> {
        ranks.iter().map(|rank| self.probe(*rank)).collect()
    }

    /// Returns the store behind a rank's recovery listener; `None` if the listener is closed or cannot be reached.
    fn visit(&self, rank: usize) -> Option<Arc<dyn Store>>;

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
pub(in crate::communicator::life) struct Shrinking<'a, W> {
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
        }
    }

    /// Runs rounds until this rank is a member of a new communicator, or cannot become one.
    pub(in crate::communicator::life) fn run(mut self) -> Result<Shrunk<W::Connected>> {
        match self.run_rounds() {
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
        self.look_until_on_time(&*self.world.host()?, &Status::Grown, &[self.me])
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

    /// Returns the status that a rank publishes about this shrink at its recovery listener, and the store behind the
    /// listener. Returns `None` if the listener is closed, or if the store contains no such status.
    fn visit(&self, rank: usize) -> Option<(Status, Arc<dyn Store>)> {
        let store = self.world.visit(rank)?;
        Some((self.read_status(&*store).ok()??, store))
    }

    /// Returns the store of `rank` if that rank leads this shrink or has led it.
    fn leading(&self, rank: usize) -> Option<Arc<dyn Store>> {
        self.visit(rank).filter(|(status, _)| !matches!(status, Status::SteppedBack)).map(|(_, store)| store)
    }

    fn read_status(&self, store: &dyn Store) -> Result<Option<Status>> {
        self.read_status_of(store, &self.prefix)
    }

    /// Reads the status that a rank has published about a shrink whose keys have this prefix.
    fn read_status_of(&self, store: &dyn Store, prefix: &str) -> Result<Option<Status>> {
        let key = status_key(prefix);
        if !store.check(&[&key])? {
            return Ok(None);
        }
        Ok(Status::parse(&store.get(&key, SLICE)?))
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
                Status::Over(members) => {
                    return Err(self.left_behind(&format!("ranks {members:?} continued without this rank")));
                }
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
            Some(Status::Over(members)) => Err(self.left_behind(&format!("this rank has already continued as one of ranks {members:?}"))),
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
            if present.iter().any(|rank| *rank < self.me && self.leading(*rank).is_some()) {
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
        let grace = GRACE + (2 * (PROBE + ANSWER) * silent.len() as u32).min(self.deadline.limit() / 8);
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
        for rank in ranks {
            let goes_on = match self.visit(*rank) {
                Some((Status::Grown, _)) => return Err(self.grown()),
                Some((Status::Members(..) | Status::Over(_), _)) => true,
                Some((Status::Claim(_), _)) => *rank < self.me,
                _ => false,
            };
            if goes_on {
                return Err(self.left_behind(&format!("rank {rank} continues with other ranks, which did not wait for this rank")));
            }
        }
        Ok(())
    }

    /// Returns an error if the ranks that admitted the others may have continued without these ranks.
    fn refuse_without_members(&self, present: &[usize], joined: &BTreeSet<usize>) -> Result<()> {
        let Some(Unmet { members, old_prefix }) = &self.given.unmet else { return Ok(()) };
        let members = *members;
        // The network may have been restored after a member has looked for this rank without success.
        let has_continued = |rank: &usize| {
            let prefix = old_prefix.as_ref()?;
            let status = self.read_status_of(&*self.world.visit(*rank)?, prefix).ok()?;
            matches!(status, Some(Status::Over(_))).then_some(*rank)
        };
        if let Some(rank) = present.iter().filter(|rank| **rank < members).find_map(has_continued) {
            return Err(self.left_behind(&format!("rank {rank} has continued without the newcomers")));
        }
        let here: BTreeSet<usize> = joined.range(..members).copied().collect();
        let silent: Vec<usize> = present.iter().copied().filter(|rank| *rank < members && self.silent.contains(rank)).collect();
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

    /// Makes the communicator of the members. Returns `None` if a member was lost meanwhile.
    fn connect(&mut self, leader: usize, round: u64, store: &Arc<dyn Store>, members: &[usize]) -> Result<Option<W::Connected>> {
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(self.round_key(round, "found"), Arc::clone(store)));
        let place = members.iter().position(|rank| *rank == self.me).unwrap_or_default();
        let setup = GroupSetup { members, place, leads: leader == self.me, deadline: &self.deadline };
        match self.world.connect(Arc::clone(&store), &setup) {
            Ok(comm) => self.settle(members).map(|()| Some(comm)),
            Err(error) => {
                call_off(&*store, &error);
                let is_final = matches!(error, Error::Config { .. } | Error::Unsupported { .. } | Error::InvalidArgument { .. });
                // A timeout explains the failure best; any other error only shows how this rank noticed that another
                // one ended.
                if is_final || error.is_timeout() && self.deadline.has_passed() { Err(error) } else { Ok(None) }
            }
        }
    }

    /// Publishes at this rank's recovery listener that it continues, then makes sure that no other group does. This
    /// rank may have been stopped since it last looked at the listeners, and the others may have given it up. Any two
    /// ranks that would continue separately both publish before they look, so one sees the other.
    fn settle(&self, members: &[usize]) -> Result<()> {
        let status = Status::Over(members.to_vec());
        match self.world.host().and_then(|own| self.say(&*own, &status).map(|()| own)) {
            Ok(own) => self.look_until_on_time(&*own, &status, members),
            Err(error) => {
                // This rank has published nothing else to any rank, either.
                crate::base::event::warn!(%error, "late ranks will not learn from this rank that it has continued");
                Ok(())
            }
        }
    }

    /// Looks whether others have continued, until a look takes no longer than usual. This rank has published `status` before.
    fn look_until_on_time(&self, own: &dyn Store, status: &Status, members: &[usize]) -> Result<()> {
        for _ in 0..LOOKS {
            match self.look_for_others(status, members) {
                Ok(held_up) if held_up < ANSWER => break,
                Ok(_) => {}
                Err(error) => {
                    let _ = self.say(own, if self.has_grown.get() { &Status::Grown } else { &Status::Refused });
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Visits every recovery listener except the members'. Returns how much longer than usual that took: in that time,
    /// others may not have found this rank.
    fn look_for_others(&self, status: &Status, members: &[usize]) -> Result<Duration> {
        let mut held_up = Duration::ZERO;
        let others = (0..self.world.peers().len()).filter(|rank| !members.contains(rank) && !self.gone.contains(rank));
        for rank in others {
            let began = self.deadline.elapsed();
            // This does not notice a rank that sleeps for less time than two visits take.
            let seen = self.visit(rank).or_else(|| self.visit(rank));
            match &seen {
                Some((Status::Over(theirs), _)) => {
                    return Err(self.left_behind(&format!("ranks {theirs:?} continued without ranks {members:?}")));
                }
                Some((Status::Grown, _)) if *status != Status::Grown => return Err(self.grown()),
                _ => {}
            }
            let usual = if seen.is_some() { Duration::ZERO } else { 2 * ANSWER };
            held_up += self.since(began).saturating_sub(usual);
        }
        Ok(held_up)
    }
}

/// Whether these ranks must not continue, since ranks that do not answer may continue without them. Of two equal parts, the
/// part with the lowest rank continues.
fn are_few(silent: &[usize], joined: &BTreeSet<usize>) -> bool {
    let all = joined.len() + silent.len();
    let has_lowest = silent.iter().all(|rank| joined.first().is_some_and(|first| first < rank));
    !(silent.is_empty() || 2 * joined.len() > all || 2 * joined.len() == all && has_lowest)
}
