//! Stores that pass the cache.
//!
//! On x86 these are the 16-byte ones that every such processor has: four of them fill a line, and wider ones are no faster. (The
//! processor's own `rep movsb` is faster for one core up to the size of its caches, but not where two cores copy at once, and slower
//! where source and destination lie differently in their lines.) Miri, which has no such stores, copies as on any other processor.

/// The unit in which stores pass the cache.
pub(super) const LINE_BYTES: usize = 64;

/// Copies past the cache whatever whole lines the destination has. Other processors may see it only after [`finish`].
///
/// # Safety
///
/// As [`super::copy`], and the two are apart.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;

    let head = to.align_offset(LINE_BYTES).min(bytes);
    let lines = (bytes - head) / LINE_BYTES;
    let tail = head + lines * LINE_BYTES;
    // Blocks of a longer copy have neither head nor tail: not even a call is spent on them.
    // SAFETY: head, lines and tail lie one after the other in `bytes` bytes, readable and writable as the caller has promised. A line
    // begins at a multiple of its size, so its quarters are aligned for their stores; the loads need no alignment. Both are of SSE2,
    // which every processor of this architecture has.
    unsafe {
        if head > 0 {
            copy_nonoverlapping(from, to, head);
        }
        for line in 0..lines {
            let (from, to) = (from.add(head + line * LINE_BYTES), to.add(head + line * LINE_BYTES));
            let quarter = |index: usize| _mm_loadu_si128(from.add(16 * index).cast());
            let (a, b, c, d) = (quarter(0), quarter(1), quarter(2), quarter(3));
            _mm_stream_si128(to.cast(), a);
            _mm_stream_si128(to.add(16).cast(), b);
            _mm_stream_si128(to.add(32).cast(), c);
            _mm_stream_si128(to.add(48).cast(), d);
        }
        if tail < bytes {
            copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail);
        }
    }
}

/// Orders what was streamed before every later store.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn finish() {
    // SAFETY: a fence of SSE, which every processor of this architecture has; it touches no memory.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// Copies; this processor has no stores past the cache that are known to be faster.
///
/// # Safety
///
/// As [`super::copy`], and the two are apart.
#[cfg(any(not(target_arch = "x86_64"), miri))]
pub(super) unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: it asks for what this function's caller has promised.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Ordinary stores need no more order than they have.
#[cfg(any(not(target_arch = "x86_64"), miri))]
pub(super) fn finish() {}
