//! Waiting for ranks that are not there yet: yield, then sleep, and look for reasons to stop.
//!
//! With a core for every rank a waiter spins first (see `steps`), because a wake across cores costs a hundred times what a flag
//! costs. With fewer cores it gives up its core at once where the ranks it waits for need it: more are missing than other cores could be
//! running. Where they may all be running it spins for a moment, so that a step takes each core about one turn of its ranks.
//!
//! A sleeper announces itself, looks once more, and sleeps for a bounded time. The announcement and the flag of a rank that
//! arrives at the same moment can miss each other, since no fence orders that rank's flag store before its look at the
//! sleepers. The waiter then sleeps to the end of this nap: a millisecond at first, and never longer than about what it had waited
//! before, nor than [`LONGEST_NAP`], 50 ms. So a wait gets at most twice as long, once in a great while, where a fence would cost
//! every call.

use std::time::{Duration, Instant};

use super::group::Group;
use super::presence::PULSE;
use super::state::{CallContext, Fingerprint, PollResult};
use crate::host::abort_reason::{AbortReason, Interrupted};

/// For how long it yields before it sleeps.
const YIELD_FOR: Duration = Duration::from_micros(200);
/// The first sleep; each one is twice as long as the one before.
const FIRST_NAP: Duration = Duration::from_millis(1);
/// The longest sleep: how late a waiter may notice what nobody wakes it for.
const LONGEST_NAP: Duration = Duration::from_millis(50);

impl Group {
    /// Waits for all ranks to publish `step`, however long that takes, and stops for a difference, a deadline, an end of the
    /// communicator or of a rank.
    #[cold]
    pub(super) fn wait(&self, step: u64, fingerprint: &Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        let began = Instant::now();
        let mut pulse = began;
        let mut nap = FIRST_NAP;
        loop {
            match self.look(step, fingerprint) {
                PollResult::Complete => return Ok(()),
                PollResult::Differs(rank) => return Err(self.mismatch(rank, step, fingerprint).into()),
                PollResult::Behind => {}
            }
            let now = Instant::now();
            let feel = now.duration_since(pulse) >= PULSE;
            if feel {
                pulse = now;
            }
            if let Some(stop) = self.reason_to_stop(step, feel, context) {
                // What was published before the reason came still counts.
                return match self.look(step, fingerprint) {
                    PollResult::Complete => Ok(()),
                    PollResult::Differs(rank) => Err(self.mismatch(rank, step, fingerprint).into()),
                    PollResult::Behind => Err(stop),
                };
            }
            if now.duration_since(began) < YIELD_FOR {
                std::thread::yield_now();
            } else {
                let stopped = || self.region.abort_reason().is_some() || context.health.abort_reason().is_some();
                let missing = self.missing(step).map(|rank| self.globals[rank]);
                context.recorder.waits(context.call, context.deadline, missing);
                let limit = nap.min(context.deadline.remaining());
                self.region.sleep(limit, || stopped() || self.look(step, fingerprint) != PollResult::Behind);
                nap = (nap * 2).min(LONGEST_NAP);
            }
        }
    }

    /// Why not to wait any longer. `feel`: also ask the kernel whether the missing ranks live.
    fn reason_to_stop(&self, step: u64, feel: bool, context: &CallContext<'_>) -> Option<Interrupted> {
        if let Some(abort_reason) = context.health.abort_reason().copied().or_else(|| self.region.abort_reason()) {
            let global = |rank: usize| self.globals[rank];
            return Some(Interrupted::from(abort_reason).seen_by(global(self.me), self.missing(step).map(global)));
        }
        for rank in self.missing(step) {
            if self.region.member(rank).has_departed() {
                // It may have told why before it left.
                return Some(self.region.abort_reason().unwrap_or(AbortReason::Left { rank: self.globals[rank] }).into());
            }
            if feel && !self.region.lives(rank) {
                let departed = self.region.member(rank).has_departed();
                let rank = self.globals[rank];
                let abort_reason = if departed { AbortReason::Left { rank } } else { AbortReason::Lost { rank } };
                return Some(self.region.abort_reason().unwrap_or(abort_reason).into());
            }
        }
        if context.deadline.has_passed() { self.timed_out(step) } else { None }
    }

    /// The ranks that have not published `step`.
    pub(super) fn missing(&self, step: u64) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |rank| *rank != self.me && !self.has_reached(*rank, step))
    }

    /// The stop of a deadline that passed; `None` where everyone has arrived after all.
    fn timed_out(&self, step: u64) -> Option<Interrupted> {
        let behind: Vec<_> = self.missing(step).collect();
        let global = |rank: usize| self.globals[rank];
        let first = *behind.first()?;
        Some(Interrupted {
            abort_reason: AbortReason::TimedOut { waiting: global(self.me), missing: global(first) },
            missing: behind.iter().copied().map(global).collect(),
            arrived: (0..self.ranks).filter(|rank| !behind.contains(rank)).map(global).collect(),
        })
    }
}
