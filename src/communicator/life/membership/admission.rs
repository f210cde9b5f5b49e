//! One call of `admit`: attempts to let newcomers in, and shrinks in between.

use super::attempt::{Attempt, Vote};
use super::protocol::{Members, connection_time};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::communicator::life::shrink::protocol::{Shrunk, Unmet};
use crate::error::{Error, Result};
use crate::observe::LIFE;

/// The result of an admission.
#[derive(Debug)]
pub(super) struct Admitted<C> {
    pub(super) comm: C,
    /// The number of ranks that were there before. They have the first ranks.
    pub(super) members: usize,
}

/// One call of `admit`.
pub(super) struct Admission<C> {
    comm: C,
    /// The ranks with lower job ranks are members, the others newcomers.
    first_newcomer: usize,
    /// The ranks of the communicator that has grown to `comm`, until the ranks of `comm` have met.
    unmet: Option<Unmet>,
    deadline: Deadline,
}

impl<C: Members> Admission<C> {
    /// Prepares an admission over `comm`, of which all ranks are members.
    pub(super) fn new(comm: C) -> Self {
        let deadline = Deadline::after(comm.timeout());
        Self { comm, first_newcomer: usize::MAX, unmet: None, deadline }
    }

    /// Lets the newcomers in that wait. Leaves out the ranks that are lost, before or meanwhile.
    pub(super) fn run(mut self) -> Result<Admitted<C>> {
        loop {
            let outcome = if self.comm.has_ended() { self.shrink() } else { self.attempt() };
            match outcome {
                Ok(true) => return Ok(Admitted { members: self.members(), comm: self.comm }),
                Ok(false) => {}
                Err(error) if self.may_continue(&error) => {
                    event::info!(target: LIFE, rank = self.comm.rank(), %error, "a rank was lost during an admission");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Completes an admission for a newcomer: waits for the other ranks of `comm`. Its first `admitting` ranks have let this
    /// one in, and of these the first `members` are members. If a rank is lost, continues as a member does.
    pub(super) fn complete(comm: C, members: usize, admitting: usize) -> Result<Admitted<C>> {
        let mut admission = Self { first_newcomer: members, ..Self::new(comm) };
        match admission.meet() {
            Ok(()) => Ok(Admitted { members, comm: admission.comm }),
            Err(error) if admission.may_continue(&error) => {
                admission.unmet = Some(Unmet { members: admitting, old_prefix: None });
                admission.run()
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the number of ranks that were there before.
    fn members(&self) -> usize {
        self.comm.job_ranks().iter().filter(|rank| **rank < self.first_newcomer).count()
    }

    /// Whether a shrink can help after this error.
    fn is_loss(&self, error: &Error) -> bool {
        let is_loss = error.is_peer_lost() || error.is_timeout() || matches!(error.root(), Error::Aborted { .. });
        is_loss && self.comm.has_ended()
    }

    /// Whether this call continues after this error.
    fn may_continue(&self, error: &Error) -> bool {
        self.is_loss(error) && !self.deadline.has_passed()
    }

    /// Leaves out the ranks that are lost.
    fn shrink(&mut self) -> Result<bool> {
        match self.comm.shrink(self.unmet.take())? {
            Shrunk::Into(comm) => self.comm = comm,
            Shrunk::Grown(error) => return Err(error),
        }
        Ok(false)
    }

    /// Waits for the first time for all ranks of a communicator that has grown. A newcomer that is stopped cannot be
    /// distinguished from a slow one.
    fn meet(&self) -> Result<()> {
        self.comm.meet(connection_time(self.comm.world_size()).min(self.comm.timeout()))
    }

    /// Lets the newcomers in that wait. Returns whether this rank has the communicator in which all ranks continue.
    fn attempt(&mut self) -> Result<bool> {
        let mut attempt = Attempt::new(self.comm.timeout(), self.comm.next_prefix());
        let vote = self.comm.in_one_turn(|| attempt.run(&self.comm, self.members()));
        if let Some(rank) = attempt.members.and_then(|members| self.comm.job_ranks().get(members)) {
            self.first_newcomer = *rank;
        }
        let vote = match vote {
            Ok(Vote::Unknown(grown, error)) if self.is_loss(&error) => self.find_out(grown),
            vote => vote,
        };
        attempt.decide(matches!(vote, Ok(Vote::Grown(_))));
        match vote? {
            Vote::Stay => Ok(true),
            Vote::Again => Ok(false),
            Vote::Grown(grown) => self.continue_in(grown).map(|()| true),
            Vote::Unknown(_, error) => Err(error),
        }
    }

    /// Continues in a communicator that has grown. If its ranks do not meet, makes sure that no member continues without
    /// this rank.
    fn continue_in(&mut self, grown: C) -> Result<()> {
        self.first_newcomer = self.members();
        let old = std::mem::replace(&mut self.comm, grown);
        self.meet().or_else(|error| {
            self.unmet = Some(Unmet { members: old.world_size(), old_prefix: Some(old.shrink_prefix()) });
            // Members that still wait for votes find out that the new communicator counts.
            old.abort();
            old.look_for_others()?;
            Err(error)
        })
    }

    /// Finds out whether the communicator of members and newcomers counts, after a rank was lost during the vote. It
    /// counts if another member has seen all votes. A shrink finds that out.
    fn find_out(&mut self, grown: C) -> Result<Vote<C>> {
        match self.comm.shrink(None)? {
            Shrunk::Into(comm) => {
                self.comm = comm;
                Ok(Vote::Again)
            }
            Shrunk::Grown(_) => {
                self.comm.publish_commit()?;
                self.comm.look_for_others()?;
                Ok(Vote::Grown(grown))
            }
        }
    }
}
