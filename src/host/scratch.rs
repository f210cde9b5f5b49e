//! Memory that belongs to the crate, aligned for every element and reused from call to call.

use crate::base::tuning::engine::KEPT_SCRATCH_BYTES;

/// One cache line; the unit in which scratch memory is allocated.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; Scratch::ALIGNMENT]);

/// A block of initialised memory, aligned to a cache line.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Vec<Line>);

impl Scratch {
    /// Its alignment in bytes.
    pub(crate) const ALIGNMENT: usize = 64;

    /// Makes room for `bytes` bytes, with any content. Returns `false` if there is no memory. Earlier pointers are
    /// invalid afterwards.
    pub(crate) fn reserve(&mut self, bytes: usize) -> bool {
        let lines = bytes.div_ceil(Self::ALIGNMENT);
        if lines <= self.0.len() && self.bytes() <= bytes.max(KEPT_SCRATCH_BYTES) {
            return true;
        }
        self.0 = Vec::new();
        if self.0.try_reserve_exact(lines).is_err() {
            return false;
        }
        self.0.resize(lines, Line([0; Self::ALIGNMENT]));
        true
    }

    /// Frees the memory if it is too much to keep.
    pub(crate) fn trim(&mut self) {
        if self.bytes() > KEPT_SCRATCH_BYTES {
            self.0 = Vec::new();
        }
    }

    /// Returns its start and its length in bytes.
    pub(crate) fn region(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr(), self.bytes())
    }

    /// Returns its start.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    fn bytes(&self) -> usize {
        self.0.len() * Self::ALIGNMENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_made_aligned_and_refused_where_there_is_none() {
        let mut scratch = Scratch::default();
        for bytes in [0, 1, 64, 65, 100_000, 3] {
            assert!(scratch.reserve(bytes));
            assert_eq!(scratch.as_mut_ptr() as usize % 64, 0);
        }
        assert!(!scratch.reserve(usize::MAX / 2));
        assert!(scratch.reserve(10));
    }

    #[test]
    fn memory_that_cannot_be_had_is_no_abort() {
        let mut scratch = Scratch::default();
        assert!(!scratch.reserve(usize::MAX));
        assert!(scratch.reserve(65));
        let (start, bytes) = scratch.region();
        assert_eq!(bytes, 128);
        assert!(start.addr().is_multiple_of(64));
        scratch.trim();
        assert_eq!(scratch.region(), (start, bytes));
    }
}
