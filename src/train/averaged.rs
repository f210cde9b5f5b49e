//! What a finished step gives: means, their norm, clipping.

use std::fmt;

use super::buckets::Buckets;
use super::flat::Flat;
use super::float::Float;
use crate::buffer::BufferMut;
use crate::error::{Error, Result};

/// The averaged gradients of a step, the same bits on every rank, until the next step begins; see
/// [`DataParallel::finish`](super::DataParallel::finish).
pub struct Averaged<'a, 'comm> {
    pub(super) buckets: &'a mut Buckets<'comm>,
}

impl Averaged<'_, '_> {
    /// A parameter's gradient.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there is no such parameter, or `T` is not its type.
    pub fn gradient<T: Float>(&self, parameter: usize) -> Result<&[T]> {
        let (flat, range) = self.buckets.slot::<T>("gradient", parameter)?;
        Ok(&flat.host()?[range])
    }

    /// A parameter's gradient, where the buckets are on a device.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there is no such parameter, `T` is not its type, or the buckets are in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_gradient<T: Float>(&self, parameter: usize) -> Result<cudarc::driver::CudaView<'_, T>> {
        let (flat, range) = self.buckets.slot::<T>("device_gradient", parameter)?;
        flat.device_view(range).ok_or_else(|| Error::argument("device_gradient", "the buckets are in host memory: use `gradient`"))
    }

    /// Copies a parameter's gradient to a buffer of its type and length.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for any other.
    pub fn copy_to<B>(&self, parameter: usize, destination: &mut B) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        self.buckets.copy_to("copy_to", parameter, destination)
    }

    /// Moves a parameter's gradient out: the buffer that was [given](super::DataParallel::give) for it, else a copy (or what a hook
    /// gave back in its place). On a device making room for a copy waits for the caller's stream, without a limit.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there is no such parameter, or `T` is not its type; on a device `Cuda`. Once it was taken, this, [`gradient`](Self::gradient) and
    /// [`copy_to`](Self::copy_to) say so, and [`norm`](Self::norm) too, until the next step.
    pub fn take<T: Float>(&mut self, parameter: usize) -> Result<Flat<T>> {
        self.buckets.move_out("take", parameter)
    }

    /// The norm of all gradients together: the root of the sum of all squares, added up in `f64`. Every rank gets the same bits.
    ///
    /// On a device the squares are added up by kernels on the caller's stream, and this waits for that stream; each gradient is read
    /// once. They are added in another order than on the host: of n elements the two norms differ by at most (n + 2)·2⁻⁵³ of the norm.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where a gradient was [taken](Self::take). On a device `Cuda`, and those of the wait: `Timeout` after the
    /// communicator's, `Poisoned`.
    pub fn norm(&self) -> Result<f64> {
        self.buckets.check_all_there("norm")?;
        self.buckets.sum_of_squares(|layout| 0..layout.len).map(f64::sqrt)
    }

    /// Where the [`norm`](Self::norm) is larger than `limit`, multiplies all gradients so that it is `limit`; the norm that was there
    /// before. Where that is no finite number the gradients stay as they are: skip the step. Each product is made in `f64` and rounded
    /// once.
    ///
    /// On a device it waits as [`norm`](Self::norm) does, and queues the products.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a limit that is not a positive number, and those of [`norm`](Self::norm).
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_norm(&mut self, limit: f64) -> Result<f64> {
        let factor = clipping(limit)?;
        let norm = self.norm()?;
        if let Some(factor) = factor(norm) {
            self.buckets.scale(|layout| 0..layout.len, factor)?;
        }
        Ok(norm)
    }
}

/// By what gradients of a norm are multiplied to keep within `limit`; `None` where they stay as they are.
pub(super) fn clipping(limit: f64) -> Result<impl Fn(f64) -> Option<f64>> {
    if !(limit > 0.0 && limit.is_finite()) {
        return Err(Error::argument("clip_norm", format!("a limit of {limit}; it must be a positive number")));
    }
    Ok(move |norm: f64| (norm.is_finite() && norm > limit).then_some(limit / norm))
}

impl fmt::Debug for Averaged<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Averaged({} gradients)", self.buckets.len())
    }
}
