//! What is lent to an optimiser: one rank's share of parameters, and of the gradients for them.

use std::any::Any;
use std::fmt;
use std::ops::Range;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaView, CudaViewMut};

use super::flat::Flat;
use super::layout::BucketLayout;
use super::parameter::Float;
use collectives::{Error, Result};

/// This rank's share of one bucket, to be updated.
pub struct Shard<'a> {
    /// The bucket's number; of [`FullySharded`](super::FullySharded), the unit's.
    pub bucket: usize,
    /// Its layout: which parameters lie where in it.
    pub layout: &'a BucketLayout,
    /// Which of the bucket's elements are this rank's. Behind the last gradient they are zeros.
    pub range: Range<usize>,
    /// A `Flat` of the bucket's type.
    pub(super) parameters: &'a mut dyn Any,
    /// Another one; this rank's are in `own_gradients`.
    pub(super) gradients: &'a dyn Any,
    pub(super) own_gradients: Range<usize>,
}

impl Shard<'_> {
    /// The parameters, and the averaged gradients for them.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where `T` is not the bucket's type ([`BucketLayout::dtype`]).
    pub fn values<T: Float>(&mut self) -> Result<(&mut [T], &[T])> {
        let own = self.own_gradients.clone();
        let (parameters, gradients) = self.typed::<T>("values")?;
        Ok((parameters.host_mut()?, &gradients.host()?[own]))
    }

    /// The parameters, and the averaged gradients for them, where they are on a device. To be used on the optimiser's stream, or ordered by
    /// events of cudarc's; once `update` returns they are taken back.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where `T` is not the bucket's type, or it is in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_values<T: Float>(&mut self) -> Result<(CudaViewMut<'_, T>, CudaView<'_, T>)> {
        let own = self.own_gradients.clone();
        let (parameters, gradients) = self.typed::<T>("device_values")?;
        let on_host = || Error::argument("device_values", "the parameters are in host memory: use `values`");
        let parameters = parameters.device_mut().ok_or_else(on_host)?;
        Ok((parameters.as_view_mut(), gradients.device_view(own).ok_or_else(on_host)?))
    }

    /// This rank's share of the parameters, and the gradients among which its share is.
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
