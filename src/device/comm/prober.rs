//! Queries the driver for the progress of the streams of earlier calls. The driver may delay the caller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::DriverError;

use super::lock::{BackOff, lock_within};
use super::state::{Inner, NO_TRACKER};
use super::stream_tracker::Outstanding;
use super::watched::Unfinished;
use crate::base::deadline::Deadline;
use crate::base::tuning::device::{GONE_WAIT, REGISTRATION_DROP_WAIT, STUCK};
use crate::device::driver;
use crate::device::nccl::{Raw, Refusal};

/// The progress of a communicator's streams at a query.
enum Progress {
    Known(Option<Unfinished>),
    /// During the whole wait, another thread was querying the streams.
    Busy,
}

impl Inner {
    /// Queries NCCL and the driver, marks new work and publishes the progress of earlier work. An error of NCCL or the
    /// driver ends the communicator.
    pub(in crate::device) fn probe(self: &Arc<Self>, now: Instant) {
        self.look();
        if let Err(error) = self.look_at_streams(now, STUCK)
            && !self.is_ended()
        {
            self.fail(driver::cuda_error(self.last_call(), error), Duration::ZERO);
        }
    }

    /// Queries the progress of the streams, once no other thread is doing so.
    fn look_at_streams(&self, now: Instant, patience: Duration) -> std::result::Result<Progress, DriverError> {
        let Some(_looking) = lock_within(&self.watched.looking, patience) else { return Ok(Progress::Busy) };
        let oldest = self.oldest(now)?;
        Ok(Progress::Known(self.watched.publish(oldest, now)))
    }

    /// Returns the oldest calls that the device has not completed.
    fn oldest(&self, now: Instant) -> std::result::Result<Option<Outstanding>, DriverError> {
        // Before any query: a call that is on record now was given to its tracker before.
        let noted = self.flight().map_or(0, |flight| flight.device_calls_noted());
        let has_done = |tracker: u8, calls: u64| self.flight().into_iter().for_each(|flight| flight.device_has_done(tracker, calls));
        let trackers = {
            let trackers = self.trackers();
            if trackers.iter().all(|tracker| tracker.is_idle() && Arc::strong_count(tracker) > 1) {
                trackers.iter().filter(|tracker| tracker.is_followed()).for_each(|tracker| has_done(tracker.number, noted));
                // These calls put nothing on a stream, or became part of a graph.
                has_done(NO_TRACKER, noted);
                return Ok(None);
            }
            // The driver is queried without the lock, because calls take it.
            trackers.clone()
        };
        driver::bind(&self.context)?;
        let mut oldest: Option<Outstanding> = None;
        for tracker in &trackers {
            if tracker.has_new_calls() && !tracker.is_full() {
                tracker.mark(&self.context, now, noted, || self.term())?;
            }
            let (waiting, done) = tracker.progress()?;
            // A call may be marked, and done, before it is on record.
            let done = if tracker.is_idle() { Some(noted) } else { done };
            if let Some(calls) = done.filter(|_| tracker.is_followed()) {
                has_done(tracker.number, calls);
            }
            oldest = oldest.into_iter().chain(waiting).min_by_key(|(term, since)| (term.number, *since));
        }
        drop(trackers);
        self.forget_unused();
        Ok(oldest)
    }

    /// Forgets streams that are no longer in use, so that they are not kept alive.
    fn forget_unused(&self) {
        let mut unused = Vec::new();
        self.trackers().retain(|tracker| {
            let guards = Arc::strong_count(tracker) > 1 || !tracker.is_idle();
            if !guards {
                unused.push(Arc::clone(tracker));
            }
            guards
        });
        // Without the lock: the stream may end with it.
        drop(unused);
    }

    /// Makes a call by which NCCL forgets a resource, once the device has completed all recorded calls, and waits for
    /// the end of the call. If the device does not come to rest, the communicator is ended. Returns whether NCCL has
    /// forgotten the resource: by this call, or because the communicator is gone.
    pub(in crate::device) fn manage_at_rest(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> bool {
        let deadline = Deadline::after(self.limit().min(REGISTRATION_DROP_WAIT));
        let gate = lock_within(&self.gate, deadline.remaining()).filter(|_| !self.is_ended());
        let outcome = gate.map(|_gate| match self.quiesce(&deadline) {
            Ok(true) => self.inside(doing, deadline.remaining(), work),
            Ok(false) => Err(self.expire(doing, deadline.elapsed())),
            Err(error) => Err(self.end(driver::cuda_error(doing(), error), doing)),
        });
        if let Some(Err(error)) = &outcome {
            crate::base::event::warn!(%error, "a call that returns a resource to NCCL failed");
        }
        matches!(outcome, Some(Ok(()))) || self.is_gone_within(&Deadline::after(GONE_WAIT))
    }

    /// Whether NCCL no longer knows memory that was passed to it in a failed call: either it refused the memory and the
    /// communicator lives on, or the communicator has ended and is gone.
    pub(in crate::device) fn has_let_go(&self) -> bool {
        !self.is_ended() || self.is_gone_within(&Deadline::after(GONE_WAIT))
    }

    /// Waits until NCCL has given everything back, if the communicator has ended.
    fn is_gone_within(&self, deadline: &Deadline) -> bool {
        let mut back_off = BackOff::default();
        while self.is_ended() && !self.is_gone() && !deadline.has_passed() {
            back_off.rest();
        }
        self.is_gone()
    }

    /// Waits until the device has completed all recorded calls.
    pub(super) fn quiesce(&self, deadline: &Deadline) -> std::result::Result<bool, DriverError> {
        let mut back_off = BackOff::default();
        loop {
            if self.is_ended() {
                return Ok(true);
            }
            let progress = self.look_at_streams(Instant::now(), deadline.remaining())?;
            if matches!(progress, Progress::Known(None)) && self.trackers().iter().all(|tracker| tracker.unmarked_behind().is_none()) {
                return Ok(true);
            }
            if deadline.has_passed() {
                return Ok(false);
            }
            back_off.rest();
        }
    }
}
