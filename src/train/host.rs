//! The flat buffer of a bucket in host memory: what the communicator handed out, or a vector of the caller's.

use std::ops::{Deref, DerefMut};

use super::float::Float;
use crate::communicator::SharedBuffer;

/// Elements in host memory.
#[derive(Debug)]
pub(super) enum HostFlat<T: Float> {
    /// Memory that the ranks of a host have in common.
    Shared(SharedBuffer<T>),
    /// A vector that was given.
    Given(Vec<T>),
}

impl<T: Float> HostFlat<T> {
    /// The vector that was given; of other memory, a copy.
    pub(super) fn into_vec(self) -> Vec<T> {
        match self {
            Self::Shared(buffer) => buffer.to_vec(),
            Self::Given(vector) => vector,
        }
    }
}

impl<T: Float> Deref for HostFlat<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Shared(buffer) => buffer,
            Self::Given(vector) => vector,
        }
    }
}

impl<T: Float> DerefMut for HostFlat<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Shared(buffer) => buffer,
            Self::Given(vector) => vector,
        }
    }
}
