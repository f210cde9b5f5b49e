//! Reuses a limited number of buffers of whole units.

use crate::any_flat::{AnyFlat, zeros};
use crate::flat::Place;
use collectives::DType;
use collectives::Result;

/// Free buffers, and the number in use. A buffer only fits a unit of its own type and length, so units of the same type
/// and length share buffers.
pub(super) struct Pool {
    place: Place,
    /// The limit on the number of buffers, including those in use. While more are in use, no free buffer is kept.
    most: usize,
    out: usize,
    /// The free buffers, in the order in which they were put back.
    free: Vec<Box<dyn AnyFlat>>,
}

impl Pool {
    pub(super) fn new(place: &Place, most: usize) -> Self {
        Self { place: place.clone(), most, out: 0, free: Vec::new() }
    }

    /// Takes a buffer of this type and length, with arbitrary contents.
    pub(super) fn take(&mut self, dtype: DType, len: usize) -> Result<Box<dyn AnyFlat>> {
        let fitting = self.free.iter().rposition(|free| free.dtype() == dtype && free.len() == len);
        let buffer = match fitting {
            Some(index) => self.free.remove(index),
            None => {
                self.shrink_to(self.most.saturating_sub(1));
                zeros(&self.place, dtype, len)?
            }
        };
        self.out += 1;
        Ok(buffer)
    }

    /// Puts a buffer back.
    pub(super) fn put(&mut self, buffer: Box<dyn AnyFlat>) {
        self.out = self.out.saturating_sub(1);
        self.free.push(buffer);
        self.shrink_to(self.most);
    }

    /// Frees the oldest buffers until there are no more than `most`, including those in use.
    fn shrink_to(&mut self, most: usize) {
        let surplus = (self.out + self.free.len()).saturating_sub(most).min(self.free.len());
        self.free.drain(..surplus);
    }

    /// Returns the bytes of free buffers.
    pub(super) fn free_bytes(&self) -> usize {
        self.free.iter().map(|free| free.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_buffers_are_kept_than_asked_for() {
        let mut pool = Pool::new(&Place::Host, 2);
        let out: Vec<_> = (0..3).map(|_| pool.take(DType::F32, 10).unwrap()).collect();
        out.into_iter().for_each(|buffer| pool.put(buffer));
        assert_eq!(pool.free_bytes(), 80);
        let other = pool.take(DType::F32, 5).unwrap();
        assert_eq!((pool.free_bytes(), other.bytes()), (40, 20), "an old one made room");
        let same = pool.take(DType::F32, 10).unwrap();
        assert_eq!((pool.free_bytes(), same.bytes()), (0, 40));
        [other, same].into_iter().for_each(|buffer| pool.put(buffer));
        assert_eq!(pool.take(DType::F16, 10).unwrap().bytes() + pool.free_bytes(), 20 + 40);
    }

    #[test]
    fn more_elements_than_memory_are_an_error() {
        assert!(Pool::new(&Place::Host, 1).take(DType::F64, usize::MAX / 16).is_err());
    }
}
