//! Watches for calls that miss their deadlines, and for lost ranks that calls wait for. Nothing here calls the driver
//! or NCCL, or waits for a lock that is held during such a call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::ncclResult_t;

use super::state::{Inner, Notice};
use crate::base::tuning::device::STUCK;
use crate::error::Error;

/// A wait in progress.
#[derive(Debug, Clone)]
struct Wait {
    /// The object of the wait, if it is not the last call.
    doing: Option<String>,
    since: Instant,
    limit: Duration,
    /// The time at which the wait was last known to be unfinished.
    known: Instant,
}

impl Wait {
    /// Whether the wait has taken too long. Work that was unfinished when last queried may have ended since. So the
    /// prober gets some time for another query before the work is considered stuck.
    fn is_overdue(&self, now: Instant) -> bool {
        self.known - self.since > self.limit || now - self.since > self.limit.saturating_add(STUCK)
    }
}

impl Inner {
    /// Ends the communicator if something has not ended in time, or waits for a rank that is gone.
    pub(in crate::device) fn keep_time(self: &Arc<Self>, now: Instant) {
        // A launch comes first: it identifies its call best, even if others have been queued behind it.
        let waits = [self.launched(now), self.unfinished(now), self.inside_nccl(now)];
        if let Some(error) = waits.into_iter().flatten().find_map(|wait| self.trouble_of(&wait, now))
            && !self.is_ended()
        {
            self.fail(error, Duration::ZERO);
        }
    }

    /// Returns the wait for the oldest calls that the device had not completed when last queried, or else for those
    /// that were never queried.
    fn unfinished(&self, now: Instant) -> Option<Wait> {
        let unfinished = self.watched.unfinished();
        let behind = self.trackers().iter().find_map(|tracker| tracker.unmarked_behind()).filter(|_| unfinished.is_none());
        let unmarked = self.watched.unmarked_since(behind, now);
        let known =
            unfinished.map(|found| Wait { doing: None, since: found.since, limit: found.limit, known: found.looked.max(found.since) });
        known.or_else(|| unmarked.map(|since| Wait { doing: None, since, limit: self.limit(), known: since }))
    }

    /// Returns the wait for a thread that has been inside NCCL for a while.
    fn inside_nccl(&self, now: Instant) -> Option<Wait> {
        self.watched.inside_since(self.last_entry(), now).map(|since| Wait { doing: None, since, limit: self.entry_limit(), known: now })
    }

    /// Returns the wait for a call in a launched graph.
    fn launched(&self, now: Instant) -> Option<Wait> {
        let launched = self.graphs.launched(now)?;
        let doing = format!("a launch of a captured graph, in {}", self.call_of(launched.label));
        Some(Wait { doing: Some(doing), since: launched.since, limit: launched.limit, known: now })
    }

    /// Returns the reason why a wait will not end, if it is known.
    fn trouble_of(&self, wait: &Wait, now: Instant) -> Option<Error> {
        let doing = || wait.doing.clone().unwrap_or_else(|| self.last_call());
        let waited = now - wait.since;
        if self.watched.is_stalled(wait.since, wait.limit, waited) {
            let (seconds, limit) = (waited.as_secs_f64(), wait.limit.as_secs_f64());
            let stalled = format!(
                "the device has not completed the work that was queued {seconds:.1} s ago (this call or earlier calls); giving up after \
                 {limit:.1} s"
            );
            let (rank, call) = (self.rank, doing());
            let line = self.watched.is_long(waited).then(|| format!("rank {rank}: {call}: {stalled}"));
            crate::base::event::tell_aloud(line, move || crate::base::event::warn!(rank, call, "{stalled}"));
        }
        let overdue = wait.is_overdue(now).then(|| self.timeout(self.with_silence(doing(), wait, now), waited));
        overdue.or_else(|| self.trouble(&doing, waited))
    }

    /// Adds the time for which the driver has not answered, if it is held up.
    fn with_silence(&self, doing: String, wait: &Wait, now: Instant) -> String {
        let silence = now - wait.known;
        if silence < STUCK {
            return doing;
        }
        format!("{doing}, and the driver has not answered for {:.1} s (another thread's call blocks it)", silence.as_secs_f64())
    }

    /// Sets the time after which there is a warning about a call that the device has not completed; zero means never.
    pub(in crate::device) fn warn_after(&self, after: Duration) {
        self.watched.warn_after(Some(after).filter(|after| !after.is_zero()));
    }

    /// Returns the error of a passed deadline, which names the ranks that are known not to run.
    pub(super) fn timeout(&self, doing: String, elapsed: Duration) -> Error {
        let missing = self.liveness_probe.as_ref().map_or_else(Vec::new, |liveness_probe| liveness_probe.standing_still());
        let error = Error::Timeout { doing, elapsed, missing, arrived: Vec::new(), meanwhile: Vec::new() };
        match self.flight() {
            Some(flight) => flight.with_meanwhile(error),
            None => error,
        }
    }

    /// Returns the error of a wait of this length, if a rank has reported that it gives up, or if the liveness probe
    /// knows a rank that is gone.
    pub(super) fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        if let Some(Notice::Ended(error)) = self.end_notice.as_ref().and_then(|end_notice| end_notice.read(doing, waited)) {
            return Some(error);
        }
        self.liveness_probe.as_ref()?.trouble(doing, waited)
    }

    /// If NCCL's error is about some other rank and the lost rank is known, names it in the error.
    pub(super) fn explained(&self, error: Error) -> Error {
        match &error {
            Error::Nccl { code, doing, .. } if *code == ncclResult_t::ncclRemoteError.0 => {
                let liveness_probe = self.liveness_probe.as_ref();
                liveness_probe.and_then(|liveness_probe| liveness_probe.culprit(&|| doing.clone())).unwrap_or(error)
            }
            _ => error,
        }
    }
}
