//! The steps of a call: entering it, publishing, waiting for the others, and what becomes of the group when that fails.

#![expect(unsafe_code, reason = "reads fingerprints that flags have ordered")]

use super::group::Group;
use super::lane::Fingerprint;
use crate::call::{Call, Kind};
use crate::deadline::Deadline;
use crate::host::health::Health;
use crate::host::notice::{Notice, Stop};

/// What a call of this host is made under: what it is, how long it may take, and what else may end it.
#[derive(Clone, Copy)]
pub(crate) struct Terms<'a> {
    pub(crate) call: &'a Call,
    pub(crate) deadline: &'a Deadline,
    pub(crate) health: &'a Health,
}

/// Whether a group's next call may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// All steps are done.
    Ready,
    /// The deadline of a barrier passed while others were missing. They will still come to this step, so it is waited for again:
    /// by the same barrier tried once more, or before the next call.
    Unfinished(Fingerprint),
    /// The steps of the ranks have come apart; every call ends at once.
    Ended(Notice),
}

/// What a look at all ranks shows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// All have published the step, and agree.
    Complete,
    /// Some have not.
    Behind,
    /// This rank published another call.
    Differs(usize),
}

impl Group {
    /// Begins a call. Gives its fingerprint, which travels with every step of it.
    #[inline]
    pub(super) fn enter(&mut self, terms: &Terms<'_>) -> Result<Fingerprint, Stop> {
        if self.standing != Standing::Ready {
            self.resume(terms)?;
        }
        Ok(terms.call.fingerprint())
    }

    /// Finishes what an earlier barrier left, or says why the group has ended.
    #[cold]
    pub(super) fn resume(&mut self, terms: &Terms<'_>) -> Result<(), Stop> {
        match self.standing {
            Standing::Ready => Ok(()),
            Standing::Ended(notice) => Err(notice.into()),
            Standing::Unfinished(fingerprint) => {
                self.arrive(self.step, fingerprint, terms)?;
                self.standing = Standing::Ready;
                Ok(())
            }
        }
    }

    /// The number of the next step, whose areas of this rank may be written now.
    #[inline]
    pub(super) fn next_step(&mut self) -> u64 {
        self.step += 1;
        self.step
    }

    /// Waits until every rank has published `step` with the same fingerprint. From then until this rank publishes again, all
    /// areas of the step may be read.
    #[inline]
    pub(super) fn arrive(&mut self, step: u64, fingerprint: Fingerprint, terms: &Terms<'_>) -> Result<(), Stop> {
        if !self.arrives_soon(step, &fingerprint, terms) {
            terms.health.flight().begin(terms.call);
            self.wait(step, &fingerprint, terms).map_err(|stop| self.fail(stop, fingerprint, terms))?;
        }
        // Whoever arrives last sees the step complete at once and finds here who sleeps: nobody else need look.
        if self.region.control().has_sleepers() {
            self.region.wake();
        }
        Ok(())
    }

    /// Publishes and arrives.
    #[inline]
    pub(super) fn meet(&mut self, step: u64, fingerprint: Fingerprint, terms: &Terms<'_>) -> Result<(), Stop> {
        self.publish(step, fingerprint);
        self.arrive(step, fingerprint, terms)
    }

    /// Publishes and arrives, and does this rank's own part in between: where `is_agreed`, meanwhile; in the first step of a call
    /// not before all are known to make it, since nothing may be written to a destination before.
    #[inline]
    pub(super) fn meet_meanwhile(
        &mut self,
        step: u64,
        fingerprint: Fingerprint,
        terms: &Terms<'_>,
        is_agreed: bool,
        part: impl Fn(usize),
    ) -> Result<(), Stop> {
        self.publish(step, fingerprint);
        if is_agreed {
            part(self.me);
        }
        self.arrive(step, fingerprint, terms)?;
        if !is_agreed {
            part(self.me);
        }
        Ok(())
    }

    /// Spins for a while; says whether the step is complete. A rank that differs is left to the slow wait to report. The call goes on
    /// record while another's flag is on its way: this rank's own is out, so that holds nobody up.
    #[inline]
    fn arrives_soon(&self, step: u64, fingerprint: &Fingerprint, terms: &Terms<'_>) -> bool {
        // One of those missing must be waiting for a processor, perhaps this one.
        if self.running < self.ranks && self.missing(step).count() >= self.running {
            return false;
        }
        let mut spins = self.spins;
        for rank in (0..self.ranks).filter(|rank| *rank != self.me) {
            if !self.has_reached(rank, step) {
                terms.health.flight().begin(terms.call);
                while !self.has_reached(rank, step) {
                    if spins == 0 {
                        return false;
                    }
                    spins -= 1;
                    std::hint::spin_loop();
                }
            }
            if self.differs(rank, step, fingerprint) {
                return false;
            }
        }
        true
    }

    /// Looks at every rank once.
    pub(super) fn look(&self, step: u64, fingerprint: &Fingerprint) -> Sight {
        let mut sight = Sight::Complete;
        for rank in (0..self.ranks).filter(|rank| *rank != self.me) {
            if !self.has_reached(rank, step) {
                sight = Sight::Behind;
            } else if self.differs(rank, step, fingerprint) {
                return Sight::Differs(rank);
            }
        }
        sight
    }

    /// Whether a rank that was seen to reach `step` published another call there.
    #[inline]
    fn differs(&self, rank: usize, step: u64, fingerprint: &Fingerprint) -> bool {
        // SAFETY: both callers have seen the flag at `step`, the last one that this rank has published.
        let theirs = unsafe { self.read_fingerprint(rank, step) };
        theirs.iter().zip(fingerprint).fold(0, |difference, (a, b)| difference | (a ^ b)) != 0
    }

    /// The notice of two different calls at `step`.
    #[cold]
    pub(super) fn mismatch(&self, rank: usize, step: u64, fingerprint: &Fingerprint) -> Notice {
        // SAFETY: `look` has seen that rank's flag at `step`, the last one that this rank has published.
        let theirs = unsafe { self.read_fingerprint(rank, step) };
        match (Call::from_fingerprint(*fingerprint), Call::from_fingerprint(theirs)) {
            (Some(mine), Some(theirs)) => Notice::Mismatch { first: (self.globals[self.me], mine), second: (self.globals[rank], theirs) },
            // Not a call at all: that rank's memory is broken.
            _ => Notice::Failed { rank: self.globals[rank] },
        }
    }

    /// Ends the group and tells the others, except where a barrier's deadline passed: that can be tried again.
    #[cold]
    pub(super) fn fail(&mut self, stop: Stop, fingerprint: Fingerprint, terms: &Terms<'_>) -> Stop {
        let is_barrier = terms.call.kind == Kind::Barrier && terms.call.fingerprint() == fingerprint;
        if is_barrier && matches!(stop.notice, Notice::TimedOut { .. }) && !stop.missing.is_empty() {
            self.standing = Standing::Unfinished(fingerprint);
        } else {
            self.region.tell(&stop.notice);
            self.standing = Standing::Ended(stop.notice);
        }
        stop
    }
}
