//! Copies bytes, with instructions that depend on whether the destination is read again soon.
//!
//! On x86, the non-temporal stores used here are the 16-byte stores that every such processor has: four of them fill a
//! line, and wider stores are not faster. (The processor's own `rep movsb` is faster for one core, up to the size of
//! its caches. It is not faster if two cores copy at once, and it is slower if source and destination are aligned
//! differently in their lines.) Longer copies with ordinary stores use a loop of 32-byte vectors. The C library would
//! use `rep movsb` for such copies, with which a broadcast of 16 KiB takes 1.4 times as long (Zen 3). Miri lacks
//! non-temporal stores; under Miri, copies are made as on other processors.

#![expect(unsafe_code, reason = "buffers come as pointers: they may lie in memory that ranks share, or be the same")]

use std::ptr;

use crate::base::tuning::copy::VECTORS_FROM_BYTES;

/// A way to copy, called like [`copy`].
pub(crate) type Copy = unsafe fn(*const u8, *mut u8, usize);

/// Copies to a destination that is small or is read again soon.
///
/// # Safety
///
/// - `from` is readable and `to` writable for `bytes` bytes for the whole call.
/// - Meanwhile, nothing writes to `from` and nothing else reads `to`. For memory that ranks share, steps and cursors
///   ensure that.
/// - `from` and `to` are the same address, or the two ranges do not overlap.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        // SAFETY: the caller promised that both are valid for the access, and that `from` is not written meanwhile.
        // They are not the same, so they do not overlap.
        unsafe {
            if bytes < VECTORS_FROM_BYTES || !copy_by_vectors(from, to, bytes) {
                ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
    }
}

/// Copies to a destination that is not read again soon, without bringing it into the cache. A thread that sees a later
/// store of this thread sees the whole copy.
///
/// # Safety
///
/// As [`copy`].
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        // SAFETY: the caller promised that both are valid for the access, and that `from` is not written meanwhile.
        // They are not the same, so they do not overlap.
        unsafe { stream(from, to, bytes) }
        finish();
    }
}

/// Prefetches the cache line of an address for a store. Does nothing on processors without such an instruction.
#[inline]
pub(crate) fn prefetch_for_writing(place: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch changes nothing that a program can observe, whatever the address. Processors without it
    // execute it as a no-op.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = place;
}

/// The unit of non-temporal stores, in bytes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LINE_BYTES: usize = 64;

/// Copies, and uses stores that bypass the cache for whole lines of the destination. Other processors are sure to see
/// these lines only after [`finish`].
///
/// # Safety
///
/// As [`copy`], and the two do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;

    let head = to.align_offset(LINE_BYTES).min(bytes);
    let lines = (bytes - head) / LINE_BYTES;
    let tail = head + lines * LINE_BYTES;
    // Blocks of a longer copy have neither head nor tail, so not even a call is spent on them. SAFETY: head, lines and
    // tail lie one after the other in `bytes` bytes, which the caller promised to be readable and writable. A line
    // begins at a multiple of its size, so its quarters are aligned for their stores; the loads need no alignment. Both
    // are SSE2 instructions, which every processor of this architecture has.
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

/// Copies a block of at least `VECTORS_FROM_BYTES` with 32-byte vectors if the processor has them. Returns whether it
/// did.
///
/// # Safety
///
/// As [`copy`], and the two do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn copy_by_vectors(from: *const u8, to: *mut u8, bytes: usize) -> bool {
    let can = std::arch::is_x86_feature_detected!("avx");
    if can {
        // SAFETY: the processor has the instructions, and this function's caller promised what the callee requires.
        unsafe { copy_vectors(from, to, bytes) }
    }
    can
}

/// Implements [`copy_by_vectors`].
///
/// # Safety
///
/// As for [`copy_by_vectors`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn copy_vectors(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_storeu_si256};

    const GROUP: usize = 4 * 32;
    let whole = bytes / GROUP * GROUP;
    // SAFETY: whole groups, then the rest, of `bytes` bytes that the caller promised to be readable and writable.
    // Neither loads nor stores need an alignment.
    unsafe {
        for at in (0..whole).step_by(GROUP) {
            let load = |index: usize| _mm256_loadu_si256(from.add(at + 32 * index).cast());
            let (a, b, c, d) = (load(0), load(1), load(2), load(3));
            _mm256_storeu_si256(to.add(at).cast(), a);
            _mm256_storeu_si256(to.add(at + 32).cast(), b);
            _mm256_storeu_si256(to.add(at + 64).cast(), c);
            _mm256_storeu_si256(to.add(at + 96).cast(), d);
        }
        ptr::copy_nonoverlapping(from.add(whole), to.add(whole), bytes - whole);
    }
}

/// Orders the streamed stores before every later store.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn finish() {
    // SAFETY: an SSE fence, which every processor of this architecture has; it touches no memory.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// Copies with ordinary stores: on this processor, no non-temporal stores are known to be faster.
///
/// # Safety
///
/// As [`copy`], and the two do not overlap.
#[cfg(any(not(target_arch = "x86_64"), miri))]
unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: this function's caller promised what the callee requires.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Returns `false`: on this processor, copies are those of the C library.
///
/// # Safety
///
/// None: it does nothing.
#[cfg(any(not(target_arch = "x86_64"), miri))]
unsafe fn copy_by_vectors(_from: *const u8, _to: *mut u8, _bytes: usize) -> bool {
    false
}

/// Does nothing: ordinary stores need no further ordering.
#[cfg(any(not(target_arch = "x86_64"), miri))]
fn finish() {}

#[cfg(test)]
mod tests {
    //! Tests every length around a line and a block, at every alignment that matters, with margins that must not
    //! change.

    use super::{copy, copy_streaming};

    const MARGIN: usize = 128;
    const LENGTHS: &[usize] =
        if cfg!(miri) { &[1, 191] } else { &[0, 1, 3, 15, 16, 31, 32, 63, 64, 65, 127, 129, 191, 256, 1000, 4095, 4097, 8192 + 5, 70_000] };
    const STARTS: [usize; 7] = [0, 1, 8, 31, 32, 63, 64];

    /// Returns bytes in which a shift by any small distance is visible.
    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|index| (index % 251) as u8 ^ (index / 251) as u8).collect()
    }

    /// Calls `write` with a destination of `length` bytes that begins `start` bytes past a line, and checks the result.
    fn check(length: usize, start: usize, expected: &[u8], what: &str, write: impl FnOnce(*mut u8)) {
        let mut room = vec![0xa5_u8; length + start + 3 * MARGIN];
        let begin = room.as_ptr().align_offset(64) + MARGIN / 2 + start;
        write(room[begin..].as_mut_ptr());
        let (before, rest) = room.split_at(begin);
        let (got, after) = rest.split_at(length);
        assert!(got == expected, "{what}: {length} bytes at {start} differ");
        assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "{what}: {length} bytes at {start}: written outside");
    }

    #[test]
    fn every_copy_writes_its_bytes_and_no_others() {
        let source = pattern(LENGTHS[LENGTHS.len() - 1] + 64);
        for &length in LENGTHS {
            for from in STARTS {
                let expected = &source[from..from + length];
                let from = expected.as_ptr();
                for start in STARTS {
                    // SAFETY: the source covers `length` bytes, and so does the destination, which is another vector.
                    check(length, start, expected, "copy", |to| unsafe { copy(from, to, length) });
                    // SAFETY: the same source, and a vector of this case.
                    check(length, start, expected, "copy_streaming", |to| unsafe { copy_streaming(from, to, length) });
                }
            }
        }
    }

    #[test]
    fn a_destination_may_be_the_source() {
        let mut bytes = pattern(10_000);
        let here = bytes.as_mut_ptr();
        // SAFETY: the same 10,000 bytes twice.
        unsafe {
            copy(here, here, 10_000);
            copy_streaming(here, here, 10_000);
        }
        assert!(bytes == pattern(10_000));
    }
}
