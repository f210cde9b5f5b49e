//! The steps of a call: entering it, publishing, waiting for the others, and what happens to the group if that fails.
//!
//! A rank publishes a fingerprint, and a payload in the smallest area that holds it. A mailbox's first line is `flag:
//! u64, fingerprint: 4 × u64, payload: 24 bytes`, so that a tiny call costs its readers one line. A larger payload of
//! up to [`LINES_BYTES`](super::layout::LINES_BYTES) lies in the lines after that, which the processor prefetches.
//! Anything larger goes through a slot.
//!
//! # Waiting
//!
//! With a core for every rank, a waiter spins first, because waking a thread on another core costs a hundred times as
//! much as reading a flag. With fewer cores, it yields its core at once if the ranks it waits for need it: if more
//! ranks are missing than the other cores can run at once. If all of them may be running, it spins for a moment, so
//! that each core goes through its ranks about once per step. Then the policy of all waits applies
//! (`host/waiting.rs`): it yields, then sleeps.
//!
//! A sleeper announces itself, looks once more, and sleeps for a bounded time. The last rank to publish wakes it. To
//! find every sleeper, a publisher needs a fence between the store of its flag and its check for sleepers, and a fence
//! would slow down every call. So there is a fence only while a rank of the group has slept lately. Each publisher sees
//! this in a word that is rarely written (`Control::has_light_sleepers`). A publisher that has not seen the change of
//! the word yet may miss the sleeper that changed it, so that sleeper's first sleep is as short as a nap.

#![expect(unsafe_code, reason = "reads and writes the mapped mailboxes, which flags have ordered")]

use super::chunking::{Area, Chunking};
use super::control::Control;
use super::flags::parity;
use super::group::{CallContext, Fingerprint, Group, GroupState};
use crate::base::tuning::shm::LIVENESS_INTERVAL;
use crate::call::{Call, Collective};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::waiting::{Interval, Pause, Sleep};

/// The offset of the fingerprint in a mailbox: after the flag.
const FINGERPRINT_AT: usize = 8;

/// The result of a look at all ranks.
#[derive(Debug, PartialEq, Eq)]
enum PollResult {
    /// All ranks have published the step, and all of them made the same call.
    Complete,
    /// Some ranks have not published the step.
    Behind,
    /// The rank with this number published a different call.
    Differs(usize),
}

/// What a rank publishes in a step.
impl Group {
    /// Returns where the payload of `rank` for `step` lies.
    #[inline]
    pub(super) fn area(&self, rank: usize, step: u64, area: Area) -> *mut u8 {
        let layout = self.region.layout();
        match area {
            Area::Slot => self.region.at(layout.slot_ring(rank) + self.slot_ring.start(step)),
            _ => self.region.at(layout.mailbox(rank, parity(step)) + area.offset()),
        }
    }

    /// Returns where the fingerprint of `rank` for `step` lies.
    #[inline]
    fn fingerprint_of(&self, rank: usize, step: u64) -> *mut Fingerprint {
        self.region.at(self.region.layout().mailbox(rank, parity(step)) + FINGERPRINT_AT).cast()
    }

    /// Publishes this rank's area for `step`: the payload has been written.
    #[inline]
    pub(super) fn publish(&mut self, step: u64, fingerprint: Fingerprint) {
        // SAFETY: inside this rank's own mailbox, aligned to 8. The others have read what they need of it: each has
        // published the step before this one, after it had read the step before that, which the mailbox served last
        // (see `flags`).
        unsafe { self.fingerprint_of(self.me, step).write(fingerprint) };
        self.region.flag(self.me, parity(step)).publish(step);
        if self.region.control().has_light_sleepers() {
            self.wake_after(step);
        }
    }

    /// Wakes the sleepers, if this rank's publish of `step` was the last one.
    #[cold]
    fn wake_after(&mut self, step: u64) {
        Control::fence();
        // The last rank to come to the fence sees all flags here, and every sleeper that has missed one of these flags.
        if self.region.control().has_sleepers() && self.missing(step).next().is_none() {
            self.region.wake();
        }
        self.region.fade();
    }

    /// Whether `rank` has published `step`.
    #[inline]
    pub(super) fn has_reached(&self, rank: usize, step: u64) -> bool {
        self.region.flag(rank, parity(step)).has_reached(step)
    }

    /// Returns what `rank` published with `step`.
    ///
    /// # Safety
    ///
    /// `rank` has been seen to reach `step`, and this rank has not published the next one.
    #[inline]
    pub(super) unsafe fn read_fingerprint(&self, rank: usize, step: u64) -> Fingerprint {
        // SAFETY: inside the mailbox, aligned to 8; any bytes are valid numbers. Its owner wrote it before the flag
        // that the caller has seen. It does not write it again before this rank has published the next step, which it
        // has not (as the caller promised).
        unsafe { self.fingerprint_of(rank, step).read() }
    }
}

/// The steps of a call.
impl Group {
    /// Begins a call. Returns its fingerprint, which travels with every step of it.
    #[inline]
    pub(super) fn enter(&mut self, context: &CallContext<'_>) -> Result<Fingerprint, Interrupted> {
        if self.state != GroupState::Ready {
            self.resume(context)?;
        }
        Ok(context.call.fingerprint())
    }

    /// Finishes what an earlier barrier left, or returns why the group has ended.
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

    /// Returns the number of the next step, whose areas of this rank may be written now.
    #[inline]
    pub(super) fn next_step(&mut self) -> u64 {
        self.step += 1;
        self.step
    }

    /// Returns the number of the next step, and reserves a place for the step's payload if it goes through a slot.
    #[inline]
    pub(super) fn next_step_of(&mut self, chunking: &Chunking) -> u64 {
        let step = self.next_step();
        if chunking.area == Area::Slot {
            self.slot_ring.advance(step, chunking.step_bytes());
        }
        step
    }

    /// Waits until every rank has published `step` with the same fingerprint. From then until this rank publishes again, all
    /// areas of the step may be read.
    #[inline]
    pub(super) fn arrive(&mut self, step: u64, fingerprint: Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        if !self.arrives_soon(step, &fingerprint, context) {
            context.recorder.begin(context.call);
            self.wait(step, &fingerprint, context).map_err(|stop| self.fail(stop, fingerprint, context))?;
        }
        Ok(())
    }

    /// Publishes `step` and waits for all ranks to do so.
    #[inline]
    pub(super) fn meet(&mut self, step: u64, fingerprint: Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        self.publish(step, fingerprint);
        self.arrive(step, fingerprint, context)
    }

    /// Publishes and arrives. Runs this rank's own part in between if `is_agreed`. If not, as in the first step of a
    /// call, runs that part afterwards, since nothing may be written to a destination before all ranks are known to
    /// make the call.
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

    /// Spins for a while. Returns whether the step is complete. If a rank's call differs, the slow wait reports it. The
    /// call is recorded while another rank's flag is on its way: this rank has published its own, so recording delays
    /// no rank.
    #[inline]
    fn arrives_soon(&mut self, step: u64, fingerprint: &Fingerprint, context: &CallContext<'_>) -> bool {
        // At least one of the missing ranks must be waiting for a processor, perhaps for this one.
        if self.running < self.ranks && self.missing(step).count() >= self.running {
            return false;
        }
        let most = self.patience.looks(self.first_looks);
        let mut looks = most;
        for rank in (0..self.ranks).filter(|rank| *rank != self.me) {
            if !self.has_reached(rank, step) {
                context.recorder.begin(context.call);
                while !self.has_reached(rank, step) {
                    if looks == 0 {
                        return false;
                    }
                    looks -= 1;
                    std::hint::spin_loop();
                }
            }
            if self.differs(rank, step, fingerprint) {
                return false;
            }
        }
        if looks < most {
            self.patience.was_brief();
        }
        true
    }

    /// Looks at every rank once.
    fn look(&self, step: u64, fingerprint: &Fingerprint) -> PollResult {
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

    /// Returns the abort reason of two different calls at `step`.
    #[cold]
    fn mismatch(&self, rank: usize, step: u64, fingerprint: &Fingerprint) -> AbortReason {
        // SAFETY: `look` has seen that rank's flag at `step`, the last one that this rank has published.
        let theirs = unsafe { self.read_fingerprint(rank, step) };
        match (Call::from_fingerprint(*fingerprint), Call::from_fingerprint(theirs)) {
            (Some(mine), Some(theirs)) => {
                AbortReason::Mismatch { first: (self.globals[self.me], mine), second: (self.globals[rank], theirs) }
            }
            // Not a call at all: that rank's memory is corrupt.
            _ => AbortReason::Failed { rank: self.globals[rank] },
        }
    }

    /// Ends the group and notifies the others, except if a barrier's deadline passed: such a barrier can be retried.
    #[cold]
    pub(super) fn fail(&mut self, stop: Interrupted, fingerprint: Fingerprint, context: &CallContext<'_>) -> Interrupted {
        let is_barrier = context.call.kind == Collective::Barrier && context.call.fingerprint() == fingerprint;
        if is_barrier && matches!(stop.abort_reason, AbortReason::TimedOut { .. }) && !stop.missing.is_empty() {
            self.state = GroupState::Unfinished(fingerprint);
        } else {
            self.region.propagate(&stop.abort_reason);
            self.state = GroupState::Ended(stop.abort_reason);
        }
        stop
    }
}

/// Waiting for ranks that have not arrived after the first looks.
impl Group {
    /// Waits for all ranks to publish `step`, however long that takes. Stops for a difference, a deadline, or an end of
    /// the communicator or of a rank.
    #[cold]
    fn wait(&mut self, step: u64, fingerprint: &Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        let result = self.wait_patiently(step, fingerprint, context);
        self.patience.reset();
        result
    }

    fn wait_patiently(&mut self, step: u64, fingerprint: &Fingerprint, context: &CallContext<'_>) -> Result<(), Interrupted> {
        let mut liveness = Interval::default();
        loop {
            if let Some(result) = self.arrived(step, fingerprint) {
                return result;
            }
            let pause = self.patience.next();
            let asks_kernel = liveness.is_due(self.patience.now(), LIVENESS_INTERVAL);
            if let Some(stop) = self.reason_to_stop(step, asks_kernel, context) {
                // What was published before the reason appeared still counts.
                return self.arrived(step, fingerprint).unwrap_or(Err(stop));
            }
            match pause {
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => self.patience.yield_now(),
                Pause::Sleep(sleep) => self.sleep(sleep, step, fingerprint, context),
            }
        }
    }

    /// Sleeps until the last rank publishes `step`, or for a while.
    fn sleep(&mut self, sleep: Sleep, step: u64, fingerprint: &Fingerprint, context: &CallContext<'_>) {
        // Others may publish once more before they see that they must check for sleepers.
        let most = if self.region.sleeps_lightly() { sleep.nap } else { sleep.limit };
        let stopped = || self.region.abort_reason().is_some() || context.health.abort_reason().is_some();
        let missing = self.missing(step).map(|rank| self.globals[rank]);
        context.recorder.waits(context.call, context.deadline, missing);
        let limit = most.min(context.deadline.remaining());
        self.region.sleep(limit, || stopped() || self.look(step, fingerprint) != PollResult::Behind);
    }

    /// Returns how the wait for `step` ends, given what the ranks have published; `None` while some are missing.
    fn arrived(&self, step: u64, fingerprint: &Fingerprint) -> Option<Result<(), Interrupted>> {
        match self.look(step, fingerprint) {
            PollResult::Complete => Some(Ok(())),
            PollResult::Differs(rank) => Some(Err(self.mismatch(rank, step, fingerprint).into())),
            PollResult::Behind => None,
        }
    }

    /// Returns why to stop waiting. `asks_kernel`: also checks whether the missing ranks live.
    fn reason_to_stop(&self, step: u64, asks_kernel: bool, context: &CallContext<'_>) -> Option<Interrupted> {
        if let Some(abort_reason) = context.health.abort_reason().copied().or_else(|| self.region.abort_reason()) {
            let global = |rank: usize| self.globals[rank];
            return Some(Interrupted::from(abort_reason).seen_by(global(self.me), self.missing(step).map(global)));
        }
        for rank in self.missing(step) {
            if self.region.member(rank).has_departed() {
                // It may have recorded why before it left.
                return Some(self.region.abort_reason().unwrap_or(AbortReason::Left { rank: self.globals[rank] }).into());
            }
            if asks_kernel && !self.region.lives(rank) {
                let departed = self.region.member(rank).has_departed();
                let rank = self.globals[rank];
                let abort_reason =
                    if departed { AbortReason::Left { rank } } else { AbortReason::Lost { rank, by: self.globals[self.me] } };
                return Some(self.region.abort_reason().unwrap_or(abort_reason).into());
            }
        }
        if context.deadline.has_passed() { self.timed_out(step) } else { None }
    }

    /// Returns the ranks that have not published `step`.
    pub(super) fn missing(&self, step: u64) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |rank| *rank != self.me && !self.has_reached(*rank, step))
    }

    /// Returns the interruption by a deadline that passed; `None` if all ranks have arrived after all.
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

#[cfg(feature = "__internals")]
impl Group {
    /// Runs one step between two ranks that publish it one after the other, `first` or second, for a benchmark. Returns
    /// what the other rank published, or `None` if that did not come within `looks` looks.
    pub(crate) fn volley(&mut self, is_first: bool, fingerprint: [u64; 4], looks: u64) -> Option<[u64; 4]> {
        assert_eq!(self.ranks, 2, "a volley is between two");
        let (step, peer) = (self.next_step(), 1 - self.me);
        if is_first {
            self.publish(step, fingerprint);
        }
        let mut left = looks;
        while !self.has_reached(peer, step) {
            left = left.checked_sub(1)?;
            if left.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // SAFETY: the peer has been seen to reach the step, and this rank publishes the next one only after this.
        let theirs = unsafe { self.read_fingerprint(peer, step) };
        if !is_first {
            self.publish(step, fingerprint);
        }
        Some(theirs)
    }
}
