//! Sums of squares.

use super::float::Float;
use crate::communicator::Communicator;
use crate::error::Result;

/// How many sums the host keeps, so that the processor can add them side by side.
const LANES: usize = 8;

/// A sum of squares that is being added up, in an order that depends on the elements' numbers alone.
#[derive(Debug, Default)]
pub(super) struct Squares {
    host: f64,
    /// That of the elements on a device, once there are some.
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

    /// The sum; waits for the device, for at most the communicator's timeout.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the host has it"))]
    pub(super) fn total(&self, comm: &Communicator) -> Result<f64> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            return device.total(comm).map(|total| total + self.host);
        }
        Ok(self.host)
    }
}
