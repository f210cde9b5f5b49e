//! How far a transfer has come.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far a [`StateTransfer`](super::StateTransfer) has come on this rank. Any thread can read the figures while the
/// transfer runs. A clone shows the same transfer.
#[derive(Debug, Clone, Default)]
pub struct TransferProgress(Arc<Figures>);

#[derive(Debug, Default)]
struct Figures {
    moved: AtomicU64,
    total: AtomicU64,
}

impl TransferProgress {
    /// Returns the number of bytes that this rank has sent, received or copied.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.0.moved.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes that this rank sends, receives or copies in total. Returns `None` until the ranks
    /// have agreed on the transfer.
    #[must_use]
    pub fn total_bytes(&self) -> Option<u64> {
        // One more than the number, so that 0 means that the number is unknown.
        self.0.total.load(Ordering::Relaxed).checked_sub(1)
    }

    pub(super) fn begin(&self, total: u64) {
        self.0.total.store(total.saturating_add(1), Ordering::Relaxed);
    }

    pub(super) fn add(&self, bytes: u64) {
        self.0.moved.fetch_add(bytes, Ordering::Relaxed);
    }
}
