//! Copies past the cache, for destinations that are larger than it: the lines are written without being read first.

#![expect(unsafe_code, reason = "wide stores that no safe function offers")]

use std::ptr;

/// Copies as `ptr::copy_nonoverlapping`; where the processor can, past the cache. Visible to other threads by the next release store.
///
/// # Safety
///
/// As `ptr::copy_nonoverlapping` of bytes.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there; the rest is passed on.
        return unsafe { x86::copy(from, to, bytes) };
    }
    // SAFETY: passed on.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_mm_sfence, _mm512_loadu_si512, _mm512_stream_si512};
    use std::ptr;

    /// The width of a store.
    const LINE: usize = 64;

    /// # Safety
    ///
    /// As `ptr::copy_nonoverlapping` of bytes, on a processor with AVX-512.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        let head = to.align_offset(LINE).min(bytes);
        let lines = (bytes - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail are within both ranges and cover them; the lines of the destination are aligned.
        unsafe {
            ptr::copy_nonoverlapping(from, to, head);
            let (source, target) = (from.add(head), to.add(head));
            for line in 0..lines {
                _mm512_stream_si512(target.add(line * LINE).cast(), _mm512_loadu_si512(source.add(line * LINE).cast()));
            }
            ptr::copy_nonoverlapping(from.add(tail), to.add(tail), bytes - tail);
        }
        _mm_sfence();
    }
}
