//! Deadlines of calls that were made, and the ranks that they wait for in vain. Nothing here calls the driver or NCCL, or waits for a lock that
//! is held while somebody else does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::ncclResult_t;

use super::state::{Inner, Notice};
use crate::base::tuning::device::STUCK;
use crate::error::Error;

/// Something that is waited for.
#[derive(Debug, Clone)]
struct Wait {
    /// What, where it is not the last call.
    doing: Option<String>,
    since: Instant,
    limit: Duration,
    /// When it was known last that it had not come to its end.
    known: Instant,
}

impl Wait {
    /// Whether it has taken too long. What was seen last before its deadline may have ended since: whoever looks gets some time for another look
    /// before he is taken to be stuck.
    fn is_overdue(&self, now: Instant) -> bool {
        self.known - self.since > self.limit || now - self.since > self.limit.saturating_add(STUCK)
    }
}

impl Inner {
    /// Ends the communicator where something has not come to its end in time, or waits for a rank that is gone.
    pub(in crate::device) fn keep_time(self: &Arc<Self>, now: Instant) {
        // A launch first: it says best which call it is, also where others have been queued behind it.
        let waits = [self.launched(now), self.unfinished(now), self.inside_nccl(now)];
        if let Some(error) = waits.into_iter().flatten().find_map(|wait| self.trouble_of(&wait, now))
            && !self.is_ended()
        {
            self.fail(error, Duration::ZERO);
        }
    }

    /// The wait for the oldest calls that the device had not done at the last look, or else for those that were never looked at.
    fn unfinished(&self, now: Instant) -> Option<Wait> {
        let unfinished = self.watched.unfinished();
        let behind = self.trackers().iter().find_map(|tracker| tracker.unmarked_behind()).filter(|_| unfinished.is_none());
        let unmarked = self.watched.unmarked_since(behind, now);
        let known =
            unfinished.map(|found| Wait { doing: None, since: found.since, limit: found.limit, known: found.looked.max(found.since) });
        known.or_else(|| unmarked.map(|since| Wait { doing: None, since, limit: self.limit(), known: since }))
    }

    /// The wait for a thread that has been inside NCCL for a while.
    fn inside_nccl(&self, now: Instant) -> Option<Wait> {
        self.watched.inside_since(self.last_entry(), now).map(|since| Wait { doing: None, since, limit: self.entry_limit(), known: now })
    }

    /// The wait for a call in a graph that was launched.
    fn launched(&self, now: Instant) -> Option<Wait> {
        let launched = self.graphs.launched(now)?;
        let doing = format!("a launch of a captured graph, in {}", self.call_of(launched.label));
        Some(Wait { doing: Some(doing), since: launched.since, limit: launched.limit, known: now })
    }

    /// Why a wait will not end, where that is known.
    fn trouble_of(&self, wait: &Wait, now: Instant) -> Option<Error> {
        let doing = || wait.doing.clone().unwrap_or_else(|| self.last_call());
        let waited = now - wait.since;
        if self.watched.is_stalled(wait.since, wait.limit, waited) {
            let (seconds, limit) = (waited.as_secs_f64(), wait.limit.as_secs_f64());
            let stalled = format!(
                "the device has not done what was queued {seconds:.1} s ago, up to this call at most; giving up after {limit:.1} s"
            );
            let (rank, call) = (self.rank, doing());
            let line = self.watched.is_long(waited).then(|| format!("rank {rank}: {call}: {stalled}"));
            crate::base::event::tell_aloud(line, move || crate::base::event::warn!(rank, call, "{stalled}"));
        }
        let overdue = wait.is_overdue(now).then(|| self.timeout(self.with_silence(doing(), wait, now), waited));
        overdue.or_else(|| self.trouble(&doing, waited))
    }

    /// Adds for how long the driver has not said anything, where it is held up.
    fn with_silence(&self, doing: String, wait: &Wait, now: Instant) -> String {
        let silence = now - wait.known;
        if silence < STUCK {
            return doing;
        }
        format!("{doing}, and the driver has not answered for {:.1} s (another thread's call holds it up)", silence.as_secs_f64())
    }

    /// After how long a call that the device has not done is warned of; zero for never.
    pub(in crate::device) fn warn_after(&self, after: Duration) {
        self.watched.warn_after(Some(after).filter(|after| !after.is_zero()));
    }

    /// The error of a deadline that has passed, which names who is known not to run.
    pub(super) fn timeout(&self, doing: String, elapsed: Duration) -> Error {
        let missing = self.liveness_probe.as_ref().map_or_else(Vec::new, |liveness_probe| liveness_probe.standing_still());
        let error = Error::Timeout { doing, elapsed, missing, arrived: Vec::new(), meanwhile: Vec::new() };
        match self.flight() {
            Some(flight) => flight.with_meanwhile(error),
            None => error,
        }
    }

    /// The error of what has been waiting for so long, where a rank has said that it gives up, or the liveness probe knows one that is gone.
    pub(super) fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        if let Some(Notice::Ended(error)) = self.end_notice.as_ref().and_then(|end_notice| end_notice.read(doing, waited)) {
            return Some(error);
        }
        self.liveness_probe.as_ref()?.trouble(doing, waited)
    }

    /// An error of NCCL's about some other rank names that, where it is known which.
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
