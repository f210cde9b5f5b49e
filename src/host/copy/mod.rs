//! Copies, by what becomes of the destination: read again soon, or left to memory.

#![expect(unsafe_code, reason = "buffers come as pointers: they may lie in memory that ranks share, or be the same")]

mod stream;
#[cfg(test)]
mod tests;

use std::ptr;

use self::stream::{finish, stream};

/// Copies to a destination that is read again soon, or is small.
///
/// # Safety
///
/// `from` is readable and `to` writable for `bytes` bytes for the whole call; nobody writes to the former, and nobody reads the
/// latter, meanwhile: of memory that ranks share that is what steps and cursors see to. They are the same or apart.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        // SAFETY: readable and writable, and unwritten meanwhile, as the caller has promised; not the same, hence apart.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) }
    }
}

/// Copies to a destination that is not read again soon: it is not brought into the cache. Whoever sees a later store of this
/// thread sees all of it.
///
/// # Safety
///
/// As [`copy`].
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        // SAFETY: readable and writable, and unwritten meanwhile, as the caller has promised; not the same, hence apart.
        unsafe { stream(from, to, bytes) }
        finish();
    }
}
