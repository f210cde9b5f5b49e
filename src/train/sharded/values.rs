//! This rank's share of a bucket's parameters, on the host or on a device.

use std::ops::Range;

#[cfg(feature = "cuda")]
use crate::buffer::Buffer as _;
use crate::buffer::Memory;
use crate::error::Result;
#[cfg(feature = "cuda")]
use crate::train::device::DeviceFlat;
use crate::train::flat::Place;
#[cfg(feature = "cuda")]
use crate::train::flat::{elsewhere, on_device};
use crate::train::float::Float;

/// The elements of a share.
#[derive(Debug)]
pub(super) enum Values<T: Float> {
    Host(Vec<T>),
    #[cfg(feature = "cuda")]
    Device(DeviceFlat<T>),
}

impl<T: Float> Values<T> {
    /// `len` zeros in a place.
    pub(super) fn in_place(place: &Place, len: usize) -> Result<Self> {
        match place {
            Place::Host => Ok(Self::Host(vec![T::default(); len])),
            #[cfg(feature = "cuda")]
            Place::Device(workplace) => DeviceFlat::new(workplace, len).map(Self::Device),
        }
    }

    /// Refuses what [`put`](Self::put) cannot reach from here.
    pub(super) fn check_put(&self, values: &Memory<'_, T>) -> Result<()> {
        match (self, values) {
            (Self::Host(_), Memory::Host(_)) => Ok(()),
            #[cfg(feature = "cuda")]
            (Self::Device(_), Memory::Device(_)) => Ok(()),
            #[cfg(feature = "cuda")]
            (Self::Host(_), Memory::Device(_)) => Err(elsewhere("in host memory", "on a device")),
            #[cfg(feature = "cuda")]
            (Self::Device(_), Memory::Host(_)) => Err(elsewhere("on a device", "in host memory")),
        }
    }

    /// Copies as many values in, from their `first` on. `range` lies inside, and the values are long enough (checked by the caller).
    pub(super) fn put(&mut self, range: Range<usize>, values: Memory<'_, T>, first: usize) -> Result<()> {
        self.check_put(&values)?;
        match (self, values) {
            (Self::Host(own), Memory::Host(values)) => {
                let len = range.len();
                own[range].copy_from_slice(&values[first..first + len]);
            }
            #[cfg(feature = "cuda")]
            (Self::Device(own), Memory::Device(values)) => own.put(range, values, first, false)?,
            #[cfg(feature = "cuda")]
            // Refused above.
            _ => {}
        }
        Ok(())
    }

    /// All of them, to be read.
    pub(super) fn memory(&self) -> Memory<'_, T> {
        match self {
            Self::Host(own) => Memory::Host(own),
            #[cfg(feature = "cuda")]
            Self::Device(own) => own.slice.memory(),
        }
    }

    /// All of them, where they are in host memory.
    pub(super) fn host_mut(&mut self) -> Result<&mut [T]> {
        match self {
            Self::Host(own) => Ok(own),
            #[cfg(feature = "cuda")]
            Self::Device(_) => Err(on_device()),
        }
    }
}
