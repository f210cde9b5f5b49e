//! Stores that pass the cache.

use std::ptr;
use std::sync::OnceLock;

/// A way to store past the cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    copy: unsafe fn(*const u8, *mut u8, usize),
    finish: fn(),
}

impl Stream {
    /// Copies; other processors may see it only after [`Stream::finish`].
    ///
    /// # Safety
    ///
    /// As [`super::copy`], and the two are apart.
    pub(crate) unsafe fn copy(&self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the contract is the same, and the function was chosen by what the processor has.
        unsafe { (self.copy)(from, to, bytes) }
    }

    /// Orders what was copied before every later store.
    pub(crate) fn finish(&self) {
        (self.finish)();
    }
}

/// The best way that this processor has.
pub(crate) fn best() -> Stream {
    static BEST: OnceLock<Stream> = OnceLock::new();
    *BEST.get_or_init(|| Stream { copy: through_the_cache, finish: || () })
}

/// What every processor can do.
///
/// # Safety
///
/// As [`Stream::copy`].
unsafe fn through_the_cache(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's word.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) }
}
