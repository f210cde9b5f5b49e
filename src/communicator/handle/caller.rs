//! Finds out whether two threads make collectives on one communicator at the same time. If they do, the order of their
//! calls is a matter of chance, and may differ on other ranks.
//!
//! Ranks cannot find this out by comparing calls, because the calls of two threads may be equal. The calling thread
//! alone does not show a mistake either: a thread pool can make calls in a common order, each call on a different
//! thread. But the program has determined no order for two blocking calls that run at the same time. So it is enough to
//! detect such pairs.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::base::sync::thread_key;

/// The thread that is in a blocking collective: its key, or 0 for none.
#[derive(Debug, Default)]
pub(super) struct Caller(AtomicUsize);

/// A collective of this thread. The drop ends it.
pub(in crate::communicator) struct InCollective<'a>(&'a AtomicUsize);

impl Drop for InCollective<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Another thread is in a collective.
pub(super) struct Crossed;

impl Caller {
    /// Records that this thread is in a collective. Returns `None` for an inner collective, which belongs to the outer
    /// one.
    pub(super) fn enter(&self) -> Result<Option<InCollective<'_>>, Crossed> {
        let me = thread_key();
        match self.0.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(Some(InCollective(&self.0))),
            Err(other) if other == me => Ok(None),
            Err(_) => Err(Crossed),
        }
    }
}
