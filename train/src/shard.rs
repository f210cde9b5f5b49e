//! The data lent to an optimiser: one rank's share of parameters and of their gradients.

use std::any::Any;
use std::fmt;
use std::ops::Range;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaView, CudaViewMut};

use super::flat::Flat;
use super::layout::BucketLayout;
use super::parameter::Float;
use collectives::{Error, Result};

/// This rank's share of one bucket, which the optimiser updates.
pub struct Shard<'a> {
    /// The number of the bucket, or of the unit in a [`FullySharded`](super::FullySharded).
    pub bucket: usize,
    /// The bucket's layout: the places of the parameters in the bucket.
    pub layout: &'a BucketLayout,
    /// The range of the bucket's elements that belongs to this rank. Elements after the last gradient are zeros.
    pub range: Range<usize>,
    /// A `Flat` of the bucket's type.
    pub(super) parameters: &'a mut dyn Any,
    /// Another `Flat`; this rank's elements are at `own_gradients`.
    pub(super) gradients: &'a dyn Any,
    pub(super) own_gradients: Range<usize>,
}

impl Shard<'_> {
    /// Returns this rank's share of the parameters and of their averaged gradients.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if `T` is not the bucket's type ([`BucketLayout::dtype`]).
    pub fn values<T: Float>(&mut self) -> Result<(&mut [T], &[T])> {
        let own = self.own_gradients.clone();
        let (parameters, gradients) = self.typed::<T>("values")?;
        Ok((parameters.host_mut()?, &gradients.host()?[own]))
    }

    /// Returns this rank's share of the parameters and of their averaged gradients, if the share is on a device. Use
    /// the slices on the optimiser's stream, or order their use by cudarc's events. You can use the slices until
    /// `update` returns.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if `T` is not the bucket's type, or the bucket is in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_values<T: Float>(&mut self) -> Result<(CudaViewMut<'_, T>, CudaView<'_, T>)> {
        let own = self.own_gradients.clone();
        let (parameters, gradients) = self.typed::<T>("device_values")?;
        let on_host = || Error::argument("device_values", "the parameters are in host memory: use `values`");
        let parameters = parameters.device_mut().ok_or_else(on_host)?;
        Ok((parameters.as_view_mut(), gradients.device_view(own).ok_or_else(on_host)?))
    }

    /// Returns this rank's share of the parameters, and the gradients that include its share.
    fn typed<T: Float>(&mut self, call: &'static str) -> Result<(&mut Flat<T>, &Flat<T>)> {
        let both = self.parameters.downcast_mut().zip(self.gradients.downcast_ref());
        both.ok_or_else(|| Error::argument(call, format!("bucket {} holds elements of {}", self.bucket, self.layout.dtype)))
    }
}

impl fmt::Debug for Shard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shard({:?} of bucket {})", self.range, self.bucket)
    }
}
