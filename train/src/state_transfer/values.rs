//! The memory of the parts that a rank offers or wants.

use crate::bytes::{bytes_of, copy_from_bytes};
use collectives::Element;

/// The elements of a wanted part, regardless of their type.
pub(super) trait Destination: Send {
    /// Returns the elements' bytes, as in memory.
    fn bytes(&self) -> &[u8];

    /// Overwrites the elements from number `first` on. Returns `false`, and writes nothing, if the bytes are not
    /// elements, or if they do not fit.
    fn put(&mut self, first: usize, bytes: &[u8]) -> bool;
}

impl<T: Element> Destination for &mut [T] {
    fn bytes(&self) -> &[u8] {
        bytes_of(self)
    }

    fn put(&mut self, first: usize, bytes: &[u8]) -> bool {
        let elements = self.get_mut(first..first.saturating_add(bytes.len() / size_of::<T>()));
        elements.is_some_and(|elements| copy_from_bytes(elements, bytes))
    }
}

/// The parts of one rank, in the order of its declaration.
#[derive(Default)]
pub(super) struct Parts<'a> {
    pub(super) offered: Vec<&'a [u8]>,
    pub(super) wanted: Vec<Box<dyn Destination + 'a>>,
}
