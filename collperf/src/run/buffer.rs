//! Memory on which collectives are called.

use collectives::{Communicator, SharedBuffer};

use crate::failure::Failure;
use crate::inputs::Sample;
use crate::sizes::human;

/// The alignment of buffers in bytes: a page.
const ALIGNMENT: usize = 4096;

/// Elements that begin at a page, or a given number of elements after it.
pub(super) struct Buffer<T> {
    storage: Storage<T>,
    start: usize,
    length: usize,
}

/// The memory of the elements.
enum Storage<T> {
    /// A vector.
    Ordinary(Vec<T>),
    /// Memory from the library.
    Allocated(SharedBuffer<T>),
}

impl<T: Sample> Buffer<T> {
    /// Returns `length` zeros in a vector, and writes to each of its pages.
    pub(super) fn new(length: usize, unalign: usize) -> Result<Self, Failure> {
        let total = length.saturating_add(ALIGNMENT / size_of::<T>()).saturating_add(unalign);
        let mut storage = Vec::new();
        let refused = |_| Failure::internal(format!("a buffer of {}: not enough memory", human(length.saturating_mul(size_of::<T>()))));
        storage.try_reserve_exact(total).map_err(refused)?;
        storage.resize(total, T::default());
        let to_page = storage.as_ptr().align_offset(ALIGNMENT);
        // A page boundary is always within reach; if not, alignment is omitted.
        let start = if to_page + unalign + length <= total { to_page + unalign } else { unalign };
        let mut buffer = Self { storage: Storage::Ordinary(storage), start, length };
        // Zeros from the system share one physical page until they are written to.
        buffer.elements_mut().fill(T::default());
        Ok(buffer)
    }

    /// Returns `length` zeros in memory from the library. Every rank must ask for the same length.
    pub(super) fn allocated(comm: &Communicator, length: usize, unalign: usize) -> Result<Self, Failure> {
        let storage = comm.alloc(length.saturating_add(unalign))?;
        Ok(Self { storage: Storage::Allocated(storage), start: unalign, length })
    }

    /// Returns all elements.
    pub(super) fn elements(&self) -> &[T] {
        let storage = match &self.storage {
            Storage::Ordinary(storage) => &storage[..],
            Storage::Allocated(storage) => storage,
        };
        &storage[self.start..self.start + self.length]
    }

    /// Returns all elements, to be written.
    pub(super) fn elements_mut(&mut self) -> &mut [T] {
        let storage = match &mut self.storage {
            Storage::Ordinary(storage) => &mut storage[..],
            Storage::Allocated(storage) => storage,
        };
        &mut storage[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_where_they_should() {
        let comm = Communicator::local(1).unwrap().remove(0);
        for (length, unalign) in [(0, 0), (1, 0), (5000, 3)] {
            for buffer in [Buffer::<u16>::new(length, unalign).unwrap(), Buffer::allocated(&comm, length, unalign).unwrap()] {
                assert_eq!(buffer.elements().len(), length);
                assert!(length == 0 || buffer.elements().as_ptr() as usize % ALIGNMENT == 2 * unalign);
            }
        }
    }

    #[test]
    fn what_cannot_be_had_is_an_error() {
        let failure = Buffer::<u64>::new(isize::MAX as usize, 0).err().unwrap();
        assert!(failure.message.contains("not enough memory"), "{}", failure.message);
    }
}
