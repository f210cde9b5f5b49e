//! Records whether and why a communicator has ended. Shared by everything that waits on its behalf.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::abort_reason::AbortReason;
use crate::base::deadline::Deadline;
use crate::base::fork::Process;
use crate::error::{Error, Peer};

/// The state of a communicator. It ends once: by an error found here, by a peer's abort reason, or by `abort` from any
/// thread. Shared between the calling thread, the threads of messages and abort handles.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// This rank.
    rank: usize,
    ended: AtomicBool,
    /// Whether it ended because it was closed here.
    is_closed: AtomicBool,
    abort_reason: OnceLock<AbortReason>,
    /// The first error that a call on it returned.
    cause: OnceLock<Arc<Error>>,
    /// The process that created it. In a forked child, the communicator counts as ended.
    process: Process,
}

impl Health {
    pub(crate) fn of(rank: usize) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Ends the communicator; the first abort reason wins.
    pub(crate) fn end(&self, abort_reason: AbortReason) {
        let _ = self.abort_reason.set(abort_reason);
        self.ended.store(true, Ordering::Release);
    }

    /// Whether it has ended, or was closed here.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Ends the communicator because it was closed here.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.ended.store(true, Ordering::Release);
    }

    /// Whether it was closed here.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Returns why it ended; `None` if it has not ended, or was only closed. Checking costs one load.
    #[inline]
    pub(crate) fn abort_reason(&self) -> Option<&AbortReason> {
        if !self.ended.load(Ordering::Acquire) {
            return None;
        }
        self.abort_reason.get()
    }

    /// Keeps the first error of a call that was in progress at the end, for later calls to quote.
    pub(crate) fn keep_cause(&self, error: &Error) {
        self.cause.get_or_init(|| Arc::new(error.clone()));
    }

    /// Returns this rank's own error if a wait has ended because of this rank's failure.
    pub(crate) fn own_failure(&self, abort_reason: &AbortReason, rank: usize) -> Option<Error> {
        let is_own = matches!(abort_reason, AbortReason::Failed { rank: failed } if *failed as usize == rank);
        self.cause.get().filter(|_| is_own).map(|cause| Error::clone(cause))
    }

    /// Returns the ranks that the first failed call was still waiting for, if its error was a timeout.
    pub(crate) fn late_ranks(&self) -> Vec<usize> {
        match self.cause.get().map(Arc::as_ref) {
            Some(Error::Timeout { missing, .. }) => missing.iter().map(|peer| peer.rank).collect(),
            _ => Vec::new(),
        }
    }

    /// Whether the communicator was created in a process that this one was forked from.
    #[inline]
    pub(crate) fn is_foreign(&self) -> bool {
        self.process.is_foreign()
    }

    /// Returns the error of a call that comes after the end; `None` while the communicator has not ended.
    pub(crate) fn refusal(&self, call: impl FnOnce() -> String, peers: &[Peer]) -> Option<Error> {
        if self.is_foreign() {
            return Some(forked(call()));
        }
        if !self.ended.load(Ordering::Acquire) {
            return None;
        }
        let Some(abort_reason) = self.abort_reason() else { return Some(Error::Closed { call: call() }) };
        let doing = match abort_reason {
            AbortReason::TimedOut { waiting, .. } => format!("between this rank's calls, during a call of rank {waiting}"),
            _ => "between calls".to_owned(),
        };
        let between_calls = || Arc::new(abort_reason.to_error(&doing, &Deadline::after(Duration::ZERO), self.rank, peers));
        Some(Error::Poisoned { call: call(), cause: Arc::clone(self.cause.get_or_init(between_calls)) })
    }
}

/// Returns the error of a call in a process that was forked from the communicator's.
pub(crate) fn forked(what: String) -> Error {
    let reason =
        "this process was forked from the one that made the communicator; make a new communicator here, or start a new program (exec)";
    Error::Unsupported { what, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_and_the_first_error_are_quoted() {
        let health = Health::default();
        assert!(health.abort_reason().is_none() && health.refusal(String::new, &[]).is_none());
        health.end(AbortReason::Aborted { by: 3 });
        health.end(AbortReason::Lost { rank: 4, by: 0 });
        assert_eq!(health.abort_reason(), Some(&AbortReason::Aborted { by: 3 }));
        health.keep_cause(&Error::argument("reduce", "first"));
        health.keep_cause(&Error::argument("reduce", "second"));
        let text = health.refusal(|| "barrier".to_owned(), &[]).unwrap().to_string();
        assert_eq!(text, "barrier: this communicator was ended by an earlier error: reduce: first");
    }

    #[test]
    fn an_end_between_calls_is_said_to_be_one() {
        let health = Health::default();
        health.end(AbortReason::Aborted { by: 3 });
        let error = health.refusal(|| "barrier".to_owned(), &[]).unwrap();
        assert_eq!(error.to_string(), "barrier: this communicator was ended by an earlier error: between calls: aborted by rank 3");
    }
}
