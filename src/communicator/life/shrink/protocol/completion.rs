//! The end of a round: its members connect, vote, and publish that they continue.
//!
//! A rank that dies while the members connect can leave some of them connected and others not. So each member that has
//! connected votes, and the leader decides once all have voted. If the leader dies just after that, some members know the
//! decision and others do not. A member that does not know it begins another round, and keeps its connected communicator. If
//! it then finds that another member has continued in this communicator, it does so too.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{GroupSetup, Shrinking, World};
use crate::base::event;
use crate::base::tuning::recovery::{ANSWER, AT_ONCE};
use crate::base::tuning::shrink::{GRACE, LOOKS, SLICE};
use crate::communicator::life::bootstrap::{call_off, is_called_off};
use crate::communicator::life::shrink::status::{Completed, Status};
use crate::communicator::recovery::Probe;
use crate::error::{Error, Result};
use crate::rendezvous::{PrefixStore, Store};

/// The key of the leader's decision that all members continue.
const DECISION: &str = "shrink/decision";

/// The result of a vote.
enum Vote {
    /// All members have connected, so they continue.
    All,
    /// A member has not connected, so no member continues.
    Failed,
    /// The leader does not answer. Other members may know its decision.
    Unknown,
}

impl<W: World> Shrinking<'_, W> {
    /// Makes the communicator of the members. Returns `None` if a member was lost meanwhile, or may have been.
    pub(super) fn connect(&mut self, leader: usize, round: u64, store: &Arc<dyn Store>, members: &[usize]) -> Result<Option<W::Connected>> {
        let store: Arc<dyn Store> = Arc::new(PrefixStore::new(self.round_key(round, "found"), Arc::clone(store)));
        let place = members.iter().position(|rank| *rank == self.me).unwrap_or_default();
        let setup = GroupSetup { members, place, leads: leader == self.me, deadline: &self.deadline };
        let comm = match self.world.connect(Arc::clone(&store), &setup) {
            Ok(comm) => comm,
            Err(error) => {
                call_off(&*store, &error);
                let is_final = matches!(error, Error::Config { .. } | Error::Unsupported { .. } | Error::InvalidArgument { .. });
                // A timeout explains the failure best; any other error only shows how this rank noticed that another
                // one ended.
                return if is_final || error.is_timeout() && self.deadline.has_passed() { Err(error) } else { Ok(None) };
            }
        };
        let (completed, connected) = (Completed { members: members.to_vec(), leader, round }, self.deadline.elapsed());
        match self.vote(&*store, &setup) {
            Vote::All => self.settle(&completed, connected).map(|()| Some(comm)),
            Vote::Failed => Ok(None),
            Vote::Unknown => {
                self.uncertain.push((completed, comm));
                Ok(None)
            }
        }
    }

    /// Finds out whether all members have connected, after this one has.
    fn vote(&self, store: &dyn Store, setup: &GroupSetup<'_>) -> Vote {
        let vote = if setup.leads { self.decide(store, setup) } else { self.await_decision(store, setup.place) };
        vote.unwrap_or_else(|error| {
            event::debug!(rank = self.me, %error, "this rank does not know whether all ranks have connected");
            Vote::Unknown
        })
    }

    /// Waits for the votes of all members, and publishes the decision.
    fn decide(&self, store: &dyn Store, setup: &GroupSetup<'_>) -> Result<Vote> {
        let others = (0..setup.members.len()).filter(|place| *place != setup.place);
        let votes: Vec<String> = others.map(vote_key).collect();
        let votes: Vec<&str> = votes.iter().map(String::as_str).collect();
        // Between two waits, this rank probes all members.
        let slice = SLICE * (1 + setup.members.len() / AT_ONCE) as u32;
        loop {
            match store.wait(&votes, slice) {
                Ok(()) => return store.set(DECISION, b"continue").map(|()| Vote::All),
                Err(error) if !error.is_timeout() => return Err(error),
                Err(_) => {}
            }
            let is_lost = self.world.probe_all(setup.members).contains(&Probe::Gone);
            if is_lost || self.deadline.has_passed() || is_called_off(store)? {
                call_off(store, &self.late());
                return Ok(Vote::Failed);
            }
        }
    }

    /// Votes, and waits for the leader's decision.
    fn await_decision(&self, store: &dyn Store, place: usize) -> Result<Vote> {
        store.set(&vote_key(place), b"connected")?;
        loop {
            match store.get(DECISION, SLICE) {
                Ok(_) => return Ok(Vote::All),
                Err(error) if !error.is_timeout() => return Err(error),
                Err(_) if self.deadline.has_passed() => return Ok(Vote::Unknown),
                // No rank calls off a round that the leader has decided.
                Err(_) if is_called_off(store)? => return Ok(Vote::Failed),
                Err(_) => {}
            }
        }
    }

    /// Returns the error that ends this rank's rounds because another rank continues in this communicator. If this rank has
    /// connected it too, it will continue there.
    pub(super) fn confirm(&self, theirs: &Completed) -> Error {
        self.confirmed.set(self.uncertain.iter().position(|(completed, _)| completed == theirs));
        self.left_behind(&format!("ranks {:?} continued without this rank", theirs.members))
    }

    /// Returns the communicator in which another member has continued, if this rank has connected it too. Otherwise returns
    /// the error that has ended this rank's rounds.
    pub(super) fn follow_confirmed(&mut self, error: Error) -> Result<W::Connected> {
        let Some(index) = self.confirmed.take() else { return Err(error) };
        let (completed, comm) = self.uncertain.swap_remove(index);
        event::debug!(rank = self.me, members = ?completed.members, "another rank has continued in a communicator that this rank has connected");
        self.settle(&completed, Duration::ZERO).map(|()| comm)
    }

    /// Publishes at this rank's recovery listener that it continues, then makes sure that no other group does. This
    /// rank may have been stopped since it last looked at the listeners, and the others may have given it up. Any two
    /// ranks that would continue separately both publish before they look, so one sees the other. This rank has
    /// connected after it had shrunk for the time `connected`.
    fn settle(&self, completed: &Completed, connected: Duration) -> Result<()> {
        let status = Status::Over(completed.clone());
        match self.world.host().and_then(|own| self.say(&*own, &status).map(|()| own)) {
            Ok(own) => {
                // If this rank was held up, even members may have given it up, and continued with others.
                let is_held_up = self.since(connected) >= GRACE;
                self.look_until_on_time(&*own, &status, if is_held_up { &[] } else { &completed.members })
            }
            Err(error) => {
                // This rank has published nothing else to any rank, either.
                event::warn!(%error, "late ranks will not learn from this rank that it has continued");
                Ok(())
            }
        }
    }

    /// Looks whether others have continued, until a look takes no longer than usual. This rank has published `mine` before.
    pub(super) fn look_until_on_time(&self, own: &dyn Store, mine: &Status, mut trusted: &[usize]) -> Result<()> {
        for _ in 0..LOOKS {
            match self.look_for_others(mine, trusted) {
                Ok(held_up) if held_up < ANSWER => break,
                Ok(_) => trusted = &[],
                Err(error) => {
                    let _ = self.say(own, if self.has_grown.get() { &Status::Grown } else { &Status::Refused });
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Visits the recovery listeners of all other ranks that are not trusted. Returns how much longer than usual that took: in
    /// that time, others may not have found this rank.
    fn look_for_others(&self, mine: &Status, trusted: &[usize]) -> Result<Duration> {
        let is_visited = |rank: &usize| *rank != self.me && !trusted.contains(rank) && !self.gone.contains(rank);
        let others: Vec<usize> = (0..self.world.peers().len()).filter(is_visited).collect();
        let mut held_up = Duration::ZERO;
        for some in others.chunks(AT_ONCE) {
            let began = self.deadline.elapsed();
            // This does not notice a rank that sleeps for less time than two visits take.
            let unseen = self.look_at(some, mine)?;
            let unseen = self.look_at(&unseen, mine)?;
            let usual = if unseen.is_empty() { Duration::ZERO } else { 2 * ANSWER };
            held_up += self.since(began).saturating_sub(usual);
        }
        Ok(held_up)
    }

    /// Visits these ranks. Returns those that have published no status. Returns an error if a rank has continued in another
    /// communicator.
    fn look_at(&self, ranks: &[usize], mine: &Status) -> Result<Vec<usize>> {
        let mut unseen: BTreeSet<usize> = ranks.iter().copied().collect();
        let refusal = |rank: usize, theirs: Status, _| {
            unseen.remove(&rank);
            match theirs {
                theirs if theirs == *mine => None,
                Status::Over(theirs) => Some(self.left_behind(&format!("ranks {:?} continued without this rank", theirs.members))),
                Status::Grown => Some(self.grown()),
                _ => None,
            }
        };
        match self.visit(ranks, &self.prefix, refusal) {
            Some(error) => Err(error),
            None => Ok(unseen.into_iter().collect()),
        }
    }
}

/// Returns the key of a member's vote, by its rank in the new communicator.
fn vote_key(place: usize) -> String {
    format!("shrink/vote/{place}")
}
