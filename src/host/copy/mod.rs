//! Copies, by what becomes of the destination: read again soon, or left to memory; one destination, or two.

#![expect(unsafe_code, reason = "buffers come as pointers: they may lie in a mapping that other processes write to")]
#![allow(dead_code, reason = "the collectives over shared memory take these up one after the other")]

mod stream;
#[cfg(test)]
mod tests;

use std::ptr;

/// What is copied at a time where memory is read twice: small enough to be in the first-level cache the second time.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// The unit in which stores pass the cache.
pub(crate) const LINE_BYTES: usize = 64;

/// Copies to a destination that is read again soon, or is small.
///
/// # Safety
///
/// `from` is readable and `to` writable for `bytes` bytes for the whole call; nobody writes to the former, and nobody reads the
/// latter, meanwhile. They are the same or apart.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        // SAFETY: the caller's word; they are not the same, hence apart.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) }
    }
}

/// Copies to a destination that is not read again soon: it need not be brought into the cache first. All of it is written, for
/// every processor that then sees a later store of this one, when the call returns.
///
/// # Safety
///
/// As [`copy`].
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        let stream = stream::best();
        // SAFETY: the caller's word; they are not the same, hence apart.
        unsafe { stream.copy(from, to, bytes) }
        stream.finish();
    }
}

/// Copies to two destinations, reading the source from memory once. The first one may be left out of the cache, as by
/// [`copy_streaming`].
///
/// # Safety
///
/// As [`copy`], for each destination; the destinations are apart.
pub(crate) unsafe fn copy_to_two(from: *const u8, first: *mut u8, second: *mut u8, bytes: usize, streaming_first: bool) {
    let mut start = 0;
    while start < bytes {
        // SAFETY: `start` is below `bytes`, which the first destination covers.
        let length = block(unsafe { first.add(start) }, bytes - start);
        // SAFETY: `start + length` is at most `bytes`, which all three cover; the rest is the caller's word.
        unsafe {
            copy(from.add(start), second.add(start), length);
            if streaming_first && !ptr::eq(from, first) {
                stream::best().copy(from.add(start), first.add(start), length);
            } else {
                copy(from.add(start), first.add(start), length);
            }
        }
        start += length;
    }
    if streaming_first {
        stream::best().finish();
    }
}

/// The length of the next block of a destination that is streamed to: one that ends at the end of a line, as far as bytes are left.
pub(crate) fn block(to: *const u8, left: usize) -> usize {
    (BLOCK_BYTES - to.addr() % LINE_BYTES).min(left)
}
