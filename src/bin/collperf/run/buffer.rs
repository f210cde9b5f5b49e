//! Memory that collectives are called on.

use crate::failure::Failure;
use crate::inputs::Sample;
use crate::sizes::human;

/// What buffers are aligned to, in bytes: a page.
const ALIGNMENT: usize = 4096;

/// Elements that begin at a page, or a number of elements after it.
pub(super) struct Buffer<T> {
    storage: Vec<T>,
    start: usize,
    length: usize,
}

impl<T: Sample> Buffer<T> {
    /// `length` zeros, every page of them written to.
    pub(super) fn new(length: usize, unalign: usize) -> Result<Self, Failure> {
        let total = length.saturating_add(ALIGNMENT / size_of::<T>()).saturating_add(unalign);
        let mut storage = Vec::new();
        let refused = |_| Failure::internal(format!("a buffer of {}: not enough memory", human(length.saturating_mul(size_of::<T>()))));
        storage.try_reserve_exact(total).map_err(refused)?;
        storage.resize(total, T::default());
        let to_page = storage.as_ptr().align_offset(ALIGNMENT);
        // The offset is that of a page where one is within reach, which it always is; else alignment is forgone.
        let start = if to_page + unalign + length <= total { to_page + unalign } else { unalign };
        let mut buffer = Self { storage, start, length };
        // Zeros that the system hands out are one page, many times over, until they are written to.
        buffer.elements_mut().fill(T::default());
        Ok(buffer)
    }

    /// All of them.
    pub(super) fn elements(&self) -> &[T] {
        &self.storage[self.start..self.start + self.length]
    }

    /// All of them, to be written.
    pub(super) fn elements_mut(&mut self) -> &mut [T] {
        &mut self.storage[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_where_they_should() {
        for (length, unalign) in [(0, 0), (1, 0), (5000, 3)] {
            let buffer = Buffer::<u16>::new(length, unalign).unwrap();
            assert_eq!(buffer.elements().len(), length);
            assert_eq!(buffer.elements().as_ptr() as usize % ALIGNMENT, 2 * unalign);
        }
    }

    #[test]
    fn what_cannot_be_had_is_an_error() {
        let failure = Buffer::<u64>::new(isize::MAX as usize, 0).err().unwrap();
        assert!(failure.message.contains("not enough memory"), "{}", failure.message);
    }
}
