//! One thread per process that notices calls that do not end, and aborts their communicators.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use cudarc::driver::DriverError;
use nccl_sys::ncclResult_t;

use super::lock::{BackOff, lock_within, try_lock};
use super::state::{Inner, LivenessProbe, NO_TRACKER};
use super::stream_tracker::Outstanding;
use crate::deadline::Deadline;
use crate::device::driver;
use crate::device::nccl::{Raw, Refusal};
use crate::error::Error;
use crate::tuning::device::{GONE_WAIT, REGISTRATION_DROP_WAIT, ROUNDS};

/// What the watchdog waits for.
#[derive(Debug, Clone, Copy)]
struct Wait {
    since: Instant,
    limit: Duration,
}

#[derive(Debug)]
struct Watch {
    communicators: Vec<Weak<Inner>>,
    running: bool,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { communicators: Vec::new(), running: false });
/// A communicator came: the next round may be due earlier.
static CAME: Condvar = Condvar::new();

/// Has a communicator watched until it ends. The thread is there while any communicator is.
pub(super) fn watch(communicator: &Arc<Inner>) -> io::Result<()> {
    let mut watch = lock();
    if !watch.running {
        thread::Builder::new().name("collectives-watchdog".to_owned()).spawn(run)?;
        watch.running = true;
    }
    watch.communicators.push(Arc::downgrade(communicator));
    drop(watch);
    CAME.notify_one();
    Ok(())
}

fn run() {
    driver::ignore_captures();
    let mut watch = lock();
    while let Some(communicators) = living(&mut watch) {
        drop(watch);
        let mut rest = ROUNDS.1;
        for communicator in communicators {
            communicator.watchdog_check(Instant::now());
            rest = rest.min(communicator.limit() / 10);
        }
        watch = lock();
        let waited = CAME.wait_timeout(watch, rest.max(ROUNDS.0));
        watch = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    watch.running = false;
}

/// The communicators that have not ended; nothing where there is none.
fn living(watch: &mut Watch) -> Option<Vec<Arc<Inner>>> {
    let alive = |communicator: &Weak<Inner>| communicator.upgrade().filter(|communicator| !communicator.is_ended());
    let mut living = Vec::with_capacity(watch.communicators.len());
    watch.communicators.retain(|communicator| alive(communicator).map(|communicator| living.push(communicator)).is_some());
    (!living.is_empty()).then_some(living)
}

fn lock() -> MutexGuard<'static, Watch> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// One round of the watchdog: marks new work, and ends the communicator where old work has not come to its end in time.
    pub(in crate::device) fn watchdog_check(self: &Arc<Self>, now: Instant) {
        self.look();
        let stuck = self.stuck_since(now).map(|since| Wait { since, limit: self.entry_limit() });
        let trouble = match self.oldest(now) {
            Err(error) => Some(driver::cuda_error(self.last_call(), error)),
            Ok(oldest) => [oldest, stuck].into_iter().flatten().find_map(|wait| self.trouble_of(wait, now)),
        };
        if let Some(error) = trouble.filter(|_| !self.is_ended()) {
            self.fail(error, Duration::ZERO);
        }
    }

    /// Why a wait will not end, where that is known.
    fn trouble_of(&self, wait: Wait, now: Instant) -> Option<Error> {
        self.warn_of_stall(wait, now);
        let waited = now - wait.since;
        let overdue = (waited > wait.limit).then(|| self.timeout(self.last_call(), waited));
        overdue.or_else(|| self.trouble(&|| self.last_call(), waited))
    }

    /// Warns, once, of what has been waiting on the device since then.
    fn warn_of_stall(&self, wait: Wait, now: Instant) {
        let mut stall = crate::event::lock(&self.stall);
        let (after, elapsed) = (stall.0.min(wait.limit / 2), now - wait.since);
        if stall.0 == Duration::MAX || elapsed < after || stall.1 == Some(wait.since) {
            return;
        }
        stall.1 = Some(wait.since);
        let (waited, limit) = (elapsed.as_secs_f64(), wait.limit.as_secs_f64());
        crate::event::warn!(
            rank = self.rank,
            call = self.last_call(),
            "the device has not done what was queued {waited:.1} s ago, up to this call at most; giving up after {limit:.1} s"
        );
    }

    /// After how long a call that the device has not done is warned of; zero for never.
    pub(in crate::device) fn warn_after(&self, after: Duration) {
        let after = if after.is_zero() { Duration::MAX } else { after };
        crate::event::lock(&self.stall).0 = after;
    }

    /// The error of a deadline that has passed, which names who is known not to run.
    pub(super) fn timeout(&self, doing: String, elapsed: Duration) -> Error {
        let missing = self.liveness_probe().map_or_else(Vec::new, |liveness_probe| liveness_probe.standing_still());
        let error = Error::Timeout { doing, elapsed, missing, arrived: Vec::new(), meanwhile: Vec::new() };
        match self.flight() {
            Some(flight) => flight.with_meanwhile(error),
            None => error,
        }
    }

    /// The error of what has been waiting for so long, where the liveness probe knows a rank that is gone.
    pub(super) fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        self.liveness_probe()?.trouble(doing, waited)
    }

    /// An error of NCCL's about some other rank names that, where it is known which.
    pub(super) fn explained(&self, error: Error) -> Error {
        match &error {
            Error::Nccl { code, doing, .. } if *code == ncclResult_t::ncclRemoteError.0 => {
                let liveness_probe = self.liveness_probe();
                liveness_probe.and_then(|liveness_probe| liveness_probe.culprit(&|| doing.clone())).unwrap_or(error)
            }
            _ => error,
        }
    }

    pub(super) fn liveness_probe(&self) -> Option<Arc<dyn LivenessProbe>> {
        self.liveness_probe.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The wait for the oldest call that the device has not done.
    fn oldest(&self, now: Instant) -> std::result::Result<Option<Wait>, DriverError> {
        // Before anything is looked at: what is on record now was given to its tracker before.
        let noted = self.flight().map_or(0, |flight| flight.device_calls_noted());
        let has_done = |tracker: u8, calls: u64| self.flight().into_iter().for_each(|flight| flight.device_has_done(tracker, calls));
        let mut trackers = self.trackers();
        if trackers.iter().all(|tracker| tracker.is_idle()) && trackers.iter().all(|tracker| Arc::strong_count(tracker) > 1) {
            trackers.iter().filter(|tracker| tracker.is_followed()).for_each(|tracker| has_done(tracker.number, noted));
            // Calls that had nothing to put on a stream.
            has_done(NO_TRACKER, noted);
            return Ok(self.head(None, now));
        }
        driver::bind(&self.context)?;
        let mut oldest: Option<Outstanding> = None;
        for tracker in trackers.iter() {
            if tracker.has_new_calls()
                && !tracker.is_full()
                && let Some(_lock) = try_lock(&self.device.lock)
            {
                tracker.mark(&self.context, now, noted, self.term())?;
            }
            let (waiting, done) = tracker.progress()?;
            if let Some(calls) = done.filter(|_| tracker.is_followed()) {
                has_done(tracker.number, calls);
            }
            oldest = oldest.into_iter().chain(waiting).min_by_key(|(term, since)| (term.number, *since));
        }
        // A stream that is not in use any more need not be kept alive.
        trackers.retain(|tracker| Arc::strong_count(tracker) > 1 || !tracker.is_idle());
        Ok(self.head(oldest, now))
    }

    /// The wait for the oldest calls, whose time counts from when nothing with another time was outstanding before them: a short one that can
    /// only follow a long one does not end that.
    fn head(&self, oldest: Option<Outstanding>, now: Instant) -> Option<Wait> {
        let mut head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((term, since)) = oldest else {
            *head = None;
            return None;
        };
        let begun = match *head {
            Some((number, begun)) if number == term.number => begun,
            // Nothing was outstanding before.
            None => since,
            Some(_) => now,
        };
        *head = Some((term.number, begun));
        Some(Wait { since: since.max(begun), limit: term.limit })
    }

    /// Since when one thread has been inside NCCL, at least.
    fn stuck_since(&self, now: Instant) -> Option<Instant> {
        let entry = self.entries.load(Ordering::Relaxed);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match *seen {
            _ if entry.is_multiple_of(2) => *seen = None,
            Some((known, _)) if known == entry => {}
            _ => *seen = Some((entry, now)),
        }
        seen.map(|(_, since)| since)
    }

    /// Makes a call that has NCCL forget something, once the device has done all that is on record, and waits for its end. A communicator
    /// that the device does not come to rest for is ended. Whether NCCL has forgotten it: by this, or because the communicator is gone.
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
            crate::event::warn!(%error, "a call that gives something back to NCCL failed");
        }
        matches!(outcome, Some(Ok(()))) || self.is_gone_within(&Deadline::after(GONE_WAIT))
    }

    /// Waits until NCCL has given everything back, where the communicator has ended.
    fn is_gone_within(&self, deadline: &Deadline) -> bool {
        let mut back_off = BackOff::default();
        while self.is_ended() && !self.gone.load(Ordering::Acquire) && !deadline.has_passed() {
            back_off.rest();
        }
        self.gone.load(Ordering::Acquire)
    }

    /// Waits until the device has done all that is on record.
    pub(super) fn quiesce(&self, deadline: &Deadline) -> std::result::Result<bool, DriverError> {
        driver::bind(&self.context)?;
        let mut back_off = BackOff::default();
        loop {
            let now = Instant::now();
            if self.is_ended() || (self.oldest(now)?.is_none() && !self.trackers().iter().any(|tracker| tracker.has_waitable_news())) {
                return Ok(true);
            }
            if deadline.has_passed() {
                return Ok(false);
            }
            back_off.rest();
        }
    }
}
