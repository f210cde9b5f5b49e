//! Finds out whether two threads make collectives on one communicator at the same time. Then the order of their calls
//! is a matter of chance, and may differ on other ranks.
//!
//! Ranks cannot find this out by comparing calls. The calls of two threads may be equal, and which thread of a rank
//! makes a call says nothing: pools of threads make calls in a common order on other threads each time. But two
//! blocking calls at the same time have no order that the program has determined, so it is enough to detect these.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::base::sync::thread_key;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::host::abort_reason::AbortReason;

/// The thread that is in a blocking collective: its key, or 0 for none.
#[derive(Debug, Default)]
pub(in crate::communicator) struct Caller(AtomicUsize);

/// A collective of this thread. The drop ends it.
pub(in crate::communicator) struct InCollective<'a>(&'a AtomicUsize);

impl Drop for InCollective<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl Communicator {
    /// Records that this thread is in a collective, if that is checked. An inner collective belongs to the outer one.
    /// If another thread is in one, ends the communicator: this call cannot be left out, because other ranks may
    /// already wait for it.
    #[inline]
    pub(in crate::communicator) fn in_collective(&self, call: impl FnOnce() -> &'static str) -> Result<Option<InCollective<'_>>> {
        let shared = &self.core.shared;
        if !shared.config.check_threads || shared.peers.len() == 1 {
            return Ok(None);
        }
        let (thread, me) = (&self.core.caller.0, thread_key());
        match thread.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(Some(InCollective(thread))),
            Err(other) if other == me => Ok(None),
            Err(_) => Err(self.end_unordered(call())),
        }
    }

    #[cold]
    fn end_unordered(&self, call: &'static str) -> Error {
        let shared = &self.core.shared;
        if let Some(refusal) = shared.health.refusal(|| call.to_owned(), &shared.peers) {
            return refusal;
        }
        let error = Error::Unordered { call };
        shared.health.keep_cause(&error);
        shared.health.end(AbortReason::Failed { rank: shared.rank as u32 });
        shared.after_failure(&error);
        error
    }
}
