//! The flat buffer of a bucket, on the host or on a device.

use std::ops::Range;

use super::float::Float;
use super::hook::Pending;
use crate::buffer::{Buffer, BufferMut, Memory, MemoryMut, sealed::Sealed};
use crate::communicator::{Communicator, SharedBuffer};
#[cfg(feature = "cuda")]
use crate::error::Error;
use crate::error::Result;
use crate::op::ReduceOp;

/// The gradients of one bucket, one behind the other; a buffer that every collective takes.
#[derive(Debug)]
pub struct Flat<T: Float>(SharedBuffer<T>);

impl<T: Float> Flat<T> {
    /// `len` zeros. Collective.
    pub(super) fn new(comm: &Communicator, len: usize) -> Result<Self> {
        comm.alloc(len).map(Self)
    }

    /// Its elements.
    #[must_use]
    pub fn host(&self) -> &[T] {
        &self.0
    }

    /// Its elements, to be written.
    #[must_use]
    pub fn host_mut(&mut self) -> &mut [T] {
        &mut self.0
    }

    /// Copies a gradient in, or adds it to what is there. `range` lies inside, and the gradient is as long (checked by the caller).
    pub(super) fn put(&mut self, range: Range<usize>, gradient: Memory<'_, T>, add: bool) -> Result<()> {
        let own = &mut self.0[range];
        match gradient {
            Memory::Host(gradient) if add => own.iter_mut().zip(gradient).for_each(|(sum, new)| *sum = sum.plus(*new)),
            Memory::Host(gradient) => own.copy_from_slice(gradient),
            #[cfg(feature = "cuda")]
            Memory::Device(_) => return Err(elsewhere("a gradient on a device", "the buckets are in host memory")),
        }
        Ok(())
    }

    /// Copies a gradient out.
    pub(super) fn copy_to(&self, range: Range<usize>, destination: MemoryMut<'_, T>) -> Result<()> {
        match destination {
            MemoryMut::Host(destination) => destination.copy_from_slice(&self.0[range]),
            #[cfg(feature = "cuda")]
            MemoryMut::Device(_) => return Err(elsewhere("a destination on a device", "the buckets are in host memory")),
        }
        Ok(())
    }

    /// Zeros in place of a gradient.
    pub(super) fn clear(&mut self, range: Range<usize>) -> Result<()> {
        self.0[range].fill(T::default());
        Ok(())
    }
}

impl<T: Float> Flat<T> {
    /// Starts an all-reduce of it.
    pub(super) fn all_reduce(self, comm: &Communicator, op: ReduceOp) -> Result<Pending<Self>> {
        comm.start_all_reduce(self, op).map(Pending::Going)
    }

    /// The sum of the squares of the elements in `range`, the same on every rank that holds the same elements.
    pub(super) fn sum_of_squares(&self, range: Range<usize>) -> Result<f64> {
        const LANES: usize = 8;
        let mut sums = [0.0_f64; LANES];
        for chunk in self.0[range].chunks(LANES) {
            chunk.iter().zip(&mut sums).for_each(|(x, sum)| *sum += x.to_f64() * x.to_f64());
        }
        Ok(sums.iter().sum())
    }

    /// Multiplies the elements in `range`.
    pub(super) fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()> {
        self.0[range].iter_mut().for_each(|x| *x = T::from_f64(x.to_f64() * factor));
        Ok(())
    }
}

#[cfg(feature = "cuda")]
fn elsewhere(what: &str, reason: &str) -> Error {
    Error::argument("train", format!("{what}, where {reason}"))
}

impl<T: Float> Sealed for Flat<T> {}

impl<T: Float> Buffer for Flat<T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        self.0.memory()
    }
}

impl<T: Float> BufferMut for Flat<T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        self.0.memory_mut()
    }
}
