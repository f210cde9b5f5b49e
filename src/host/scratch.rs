//! Memory of the crate's own, aligned for every element, reused from call to call.

/// One cache line; the unit in which scratch memory is had.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; Line::BYTES]);

impl Line {
    const BYTES: usize = 64;
}

/// What is kept from one call to the next.
const KEPT_BYTES: usize = 64 << 20;

/// A block of memory, initialised, aligned to a cache line.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Vec<Line>);

impl Scratch {
    /// Makes room for `bytes`, with any content. `false` where there is no memory. Pointers taken before are void.
    pub(crate) fn reserve(&mut self, bytes: usize) -> bool {
        let lines = bytes.div_ceil(Line::BYTES);
        if lines <= self.0.len() && self.0.len() * Line::BYTES <= bytes.max(KEPT_BYTES) {
            return true;
        }
        self.0 = Vec::new();
        if self.0.try_reserve_exact(lines).is_err() {
            return false;
        }
        self.0.resize(lines, Line([0; Line::BYTES]));
        true
    }

    /// Where it begins.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
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
}
