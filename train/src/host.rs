//! Gradients in host memory: the flat buffer of a bucket, conversions, and sums of squares.

use std::ops::{Deref, DerefMut};

use super::parameter::Float;
use crate::tuning::CONVERTED_AT_ONCE;
use collectives::Result;
use collectives::{Communicator, SharedBuffer};

/// The number of partial sums of squares, so that the processor can add them in parallel.
const LANES: usize = 8;

/// Elements in host memory.
#[derive(Debug)]
pub(super) enum HostFlat<T: Float> {
    /// Memory that the ranks of a host share.
    Shared(SharedBuffer<T>),
    /// A vector that the caller gave.
    Given(Vec<T>),
}

impl<T: Float> HostFlat<T> {
    /// Returns the bytes of memory it holds.
    pub(super) fn bytes(&self) -> usize {
        let elements = match self {
            Self::Shared(buffer) => buffer.len(),
            Self::Given(vector) => vector.capacity(),
        };
        elements * size_of::<T>()
    }

    /// Returns the given vector; for shared memory, a copy.
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

/// Converts elements: each is converted to `f32`, multiplied by the weight, rounded to `f32` and then to `T`.
pub(super) fn convert<F: Float, T: Float>(from: &[F], into: &mut [T], weight: f64) {
    let mut block = [0.0_f32; CONVERTED_AT_ONCE];
    for (from, into) in from.chunks(CONVERTED_AT_ONCE).zip(into.chunks_mut(CONVERTED_AT_ONCE)) {
        let block = &mut block[..from.len()];
        F::widen(from, block);
        if weight != 1.0 {
            block.iter_mut().for_each(|x| *x = (f64::from(*x) * weight) as f32);
        }
        T::narrow(block, into);
    }
}

/// A running sum of squares. The order of summation depends only on the elements' positions.
#[derive(Debug, Default)]
pub(super) struct Squares {
    host: f64,
    /// The sum for elements on a device, if there are any.
    #[cfg(feature = "cuda")]
    pub(super) device: Option<super::device::DeviceSquares>,
}

impl Squares {
    /// Adds elements' squares.
    pub(super) fn add<T: Float>(&mut self, elements: &[T]) {
        let mut sums = [0.0_f64; LANES];
        for chunk in elements.chunks(LANES) {
            chunk.iter().zip(&mut sums).for_each(|(x, sum)| *sum += x.to_f64() * x.to_f64());
        }
        self.host += sums.iter().sum::<f64>();
    }

    /// Returns the sum. Waits for the device, at most for the communicator's timeout.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the host has it"))]
    pub(super) fn total(&self, comm: &Communicator) -> Result<f64> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return device.total(comm).map(|total| total + self.host);
        }
        Ok(self.host)
    }
}
