//! The steps of a call: entering it, publishing, waiting for the others, and what becomes of the group when that fails.

#![expect(unsafe_code, reason = "reads fingerprints that flags have ordered")]

use super::group::Group;
use super::state::{CallContext, Fingerprint, GroupState, PollResult};
use crate::call::{Call, Kind};
use crate::host::abort_reason::{AbortReason, Interrupted};

impl Group {
    /// Begins a call. Gives its fingerprint, which travels with every step of it.
    #[inline]
    pub(super) fn enter(&mut self, context: &CallContext<'_>) -> Result<Fingerprint, Interrupted> {
        if self.state != GroupState::Ready {
            self.resume(context)?;
        }
        Ok(context.call.fingerprint())
    }

    /// Finishes what an earlier barrier left, or says why the group has ended.
    #[cold]
    pub(super) fn resume(&mut self, context: &CallContext<'_>) -> Result<(), Interrupted> {
        match self.state {
            GroupState::Ready => Ok(()),
            GroupState::Ended(abort_reason) => Err(abort_reason.into()),
            GroupState::Unfinished(fingerprint) => {
                self.arrive(self.step, fingerprint, context)?;
                self.state = GroupState::Ready;
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
    pub(super) fn arrive(&mut self, step: u64, fingerprint: Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        if !self.arrives_soon(step, &fingerprint, context) {
            context.recorder.begin(context.call);
            self.wait(step, &fingerprint, context).map_err(|stop| self.fail(stop, fingerprint, context))?;
        }
        // Whoever arrives last sees the step complete at once and finds here who sleeps: nobody else need look.
        if self.region.control().has_sleepers() {
            self.region.wake();
        }
        Ok(())
    }

    /// Publishes and arrives.
    #[inline]
    pub(super) fn meet(&mut self, step: u64, fingerprint: Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        self.publish(step, fingerprint);
        self.arrive(step, fingerprint, context)
    }

    /// Publishes and arrives, and does this rank's own part in between: where `is_agreed`, meanwhile; in the first step of a call
    /// not before all are known to make it, since nothing may be written to a destination before.
    #[inline]
    pub(super) fn meet_meanwhile(
        &mut self,
        step: u64,
        fingerprint: Fingerprint,
        context: &CallContext<'_>,
        is_agreed: bool,
        part: impl Fn(usize),
    ) -> Result<(), Interrupted> {
        self.publish(step, fingerprint);
        if is_agreed {
            part(self.me);
        }
        self.arrive(step, fingerprint, context)?;
        if !is_agreed {
            part(self.me);
        }
        Ok(())
    }

    /// Spins for a while; says whether the step is complete. A rank that differs is left to the slow wait to report. The call goes on
    /// record while another's flag is on its way: this rank's own is out, so that holds nobody up.
    #[inline]
    fn arrives_soon(&self, step: u64, fingerprint: &Fingerprint, context: &CallContext<'_>) -> bool {
        // One of those missing must be waiting for a processor, perhaps this one.
        if self.running < self.ranks && self.missing(step).count() >= self.running {
            return false;
        }
        let mut spins = self.spins;
        for rank in (0..self.ranks).filter(|rank| *rank != self.me) {
            if !self.has_reached(rank, step) {
                context.recorder.begin(context.call);
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
    pub(super) fn look(&self, step: u64, fingerprint: &Fingerprint) -> PollResult {
        let mut poll_result = PollResult::Complete;
        for rank in (0..self.ranks).filter(|rank| *rank != self.me) {
            if !self.has_reached(rank, step) {
                poll_result = PollResult::Behind;
            } else if self.differs(rank, step, fingerprint) {
                return PollResult::Differs(rank);
            }
        }
        poll_result
    }

    /// Whether a rank that was seen to reach `step` published another call there.
    #[inline]
    fn differs(&self, rank: usize, step: u64, fingerprint: &Fingerprint) -> bool {
        // SAFETY: both callers have seen the flag at `step`, the last one that this rank has published.
        let theirs = unsafe { self.read_fingerprint(rank, step) };
        theirs.iter().zip(fingerprint).fold(0, |difference, (a, b)| difference | (a ^ b)) != 0
    }

    /// The abort reason of two different calls at `step`.
    #[cold]
    pub(super) fn mismatch(&self, rank: usize, step: u64, fingerprint: &Fingerprint) -> AbortReason {
        // SAFETY: `look` has seen that rank's flag at `step`, the last one that this rank has published.
        let theirs = unsafe { self.read_fingerprint(rank, step) };
        match (Call::from_fingerprint(*fingerprint), Call::from_fingerprint(theirs)) {
            (Some(mine), Some(theirs)) => {
                AbortReason::Mismatch { first: (self.globals[self.me], mine), second: (self.globals[rank], theirs) }
            }
            // Not a call at all: that rank's memory is broken.
            _ => AbortReason::Failed { rank: self.globals[rank] },
        }
    }

    /// Ends the group and tells the others, except where a barrier's deadline passed: that can be tried again.
    #[cold]
    pub(super) fn fail(&mut self, stop: Interrupted, fingerprint: Fingerprint, context: &CallContext<'_>) -> Interrupted {
        let is_barrier = context.call.kind == Kind::Barrier && context.call.fingerprint() == fingerprint;
        if is_barrier && matches!(stop.abort_reason, AbortReason::TimedOut { .. }) && !stop.missing.is_empty() {
            self.state = GroupState::Unfinished(fingerprint);
        } else {
            self.region.propagate(&stop.abort_reason);
            self.state = GroupState::Ended(stop.abort_reason);
        }
        stop
    }
}
