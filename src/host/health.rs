//! Whether a communicator is still whole, shared by everyone who waits on its behalf.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::notice::Notice;

/// Set once, when a communicator ends: by an error found here, by a peer's notice, or by `abort` from any thread.
///
/// Shared (`Arc`) between the calling thread, the progress thread and abort handles.
#[derive(Debug, Default)]
pub(crate) struct Health {
    ended: AtomicBool,
    notice: OnceLock<Notice>,
}

impl Health {
    /// Ends the communicator; the first notice wins.
    pub(crate) fn end(&self, notice: Notice) {
        let _ = self.notice.set(notice);
        self.ended.store(true, Ordering::Release);
    }

    /// Why it ended; `None` while it is whole. One relaxed load while whole.
    pub(crate) fn notice(&self) -> Option<&Notice> {
        if !self.ended.load(Ordering::Acquire) {
            return None;
        }
        self.notice.get()
    }
}
