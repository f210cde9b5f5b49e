//! This rank's shares of what was reduced, and what becomes of them.

use std::any::Any;
use std::fmt;
use std::ops::Range;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaView, CudaViewMut};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use super::values::Values;
use super::{Master, ShardedOptimizer, by_type, master_mut, own_range};
use crate::buffer::BufferMut;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::op::ReduceOp;
use crate::train::averaged::clipping;
use crate::train::bucket::Bucket;
use crate::train::buckets::Buckets;
use crate::train::flat::Flat;
use crate::train::float::Float;
use crate::train::layout::BucketLayout;

/// This rank's shares of a step's averaged gradients; see [`ShardedOptimizer::reduce`].
#[must_use = "the parameters are updated by `update`"]
pub struct Shards<'a, 'comm> {
    pub(super) optimizer: &'a mut ShardedOptimizer<'comm>,
}

/// This rank's share of one bucket, to be updated.
pub struct Shard<'a> {
    /// The bucket's number.
    pub bucket: usize,
    /// Its layout: which parameters lie where in it.
    pub layout: &'a BucketLayout,
    /// Which of the bucket's elements are this rank's. Behind the last gradient they are zeros.
    pub range: Range<usize>,
    /// The `Master` and the `Flat` of its type.
    master: &'a mut dyn Any,
    gradients: &'a dyn Any,
}

impl Shard<'_> {
    /// The parameters, and the averaged gradients for them.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where `T` is not the bucket's type ([`BucketLayout::dtype`]).
    pub fn values<T: Float>(&mut self) -> Result<(&mut [T], &[T])> {
        let reason = || Error::argument("values", format!("bucket {} holds elements of {}", self.bucket, self.layout.dtype));
        let gradients = self.gradients.downcast_ref::<Flat<T>>().ok_or_else(reason)?;
        let master = self.master.downcast_mut::<Master<T>>().ok_or_else(reason)?;
        Ok((master.values.host_mut()?, &gradients.host()?[self.range.clone()]))
    }

    /// The parameters, and the averaged gradients for them, where they are on a device. To be used on the optimiser's stream, or ordered by
    /// events of cudarc's; once `update` returns they are taken back.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where `T` is not the bucket's type, or it is in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_values<T: Float>(&mut self) -> Result<(CudaViewMut<'_, T>, CudaView<'_, T>)> {
        let reason = || Error::argument("device_values", format!("bucket {} holds elements of {}", self.bucket, self.layout.dtype));
        let gradients = self.gradients.downcast_ref::<Flat<T>>().ok_or_else(reason)?;
        let master = self.master.downcast_mut::<Master<T>>().ok_or_else(reason)?;
        let on_host = || Error::argument("device_values", "the parameters are in host memory: use `values`");
        let Values::Device(values) = &mut master.values else { return Err(on_host()) };
        Ok((values.slice.as_view_mut(), gradients.device_view(self.range.clone()).ok_or_else(on_host)?))
    }
}

impl<'a, 'comm> Shards<'a, 'comm> {
    /// As [`Averaged::clip_norm`](crate::train::Averaged::clip_norm), of all ranks' shares together. Collective: one all-reduce of one
    /// number, on the host. On a device it waits for this rank's sum first.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a limit that is not a positive number, and those of collectives and of
    /// [`Averaged::norm`](crate::train::Averaged::norm).
    pub fn clip_norm(&mut self, limit: f64) -> Result<f64> {
        let factor = clipping(limit)?;
        let buckets = &mut self.optimizer.buckets;
        let comm = buckets.comm();
        let mut squares = buckets.sum_of_squares(|layout| own_range(comm, layout))?;
        comm.all_reduce(&mut squares, ReduceOp::Sum)?;
        let norm = squares.sqrt();
        if let Some(factor) = factor(norm) {
            buckets.scale(|layout| own_range(comm, layout), factor)?;
        }
        Ok(norm)
    }

    /// Has `update` change this rank's share of each bucket's parameters, and gathers what the others have. Collective.
    ///
    /// # Errors
    ///
    /// Those of `update`, and of collectives. No step can follow, nor after a panic of `update`: this rank's shares are changed and the
    /// others' are not known. Other ranks are not told of an `update` that fails on one: they wait for its shares until the deadline, unless
    /// it ends the communicator ([`Communicator::abort`](crate::Communicator::abort)). So let fail on every rank what can fail, or abort.
    pub fn update(self, mut update: impl FnMut(&mut Shard<'_>) -> Result<()>) -> Result<Updated<'a, 'comm>> {
        let ShardedOptimizer { buckets, masters, .. } = self.optimizer;
        buckets.go_on(|buckets| {
            for (index, master) in masters.iter_mut().enumerate() {
                let dtype = buckets.layout(index).dtype;
                by_type!(dtype, update_one::<_>(buckets, index, master, &mut update))?;
            }
            for (index, master) in masters.iter_mut().enumerate() {
                let dtype = buckets.layout(index).dtype;
                by_type!(dtype, take_back::<_>(buckets, index, master))?;
            }
            Ok(())
        })?;
        Ok(Updated { buckets })
    }
}

/// Updates this rank's share of a bucket and starts to gather all.
fn update_one<T: Float>(
    buckets: &mut Buckets<'_>,
    index: usize,
    master: &mut Box<dyn Any>,
    update: &mut impl FnMut(&mut Shard<'_>) -> Result<()>,
) -> Result<()> {
    let comm = buckets.comm();
    let bucket: &mut Bucket<T> = buckets.typed_mut(index)?;
    let range = own_range(comm, &bucket.layout);
    let gradients = bucket.flat()?;
    update(&mut Shard { bucket: index, layout: &bucket.layout, range: range.clone(), master: &mut **master, gradients })?;
    let master = master_mut::<T>(master)?;
    let mut flat = bucket.take_flat()?;
    flat.put(range, master.values.memory(), false)?;
    master.gathering = flat.all_gather(comm)?;
    Ok(())
}

/// Waits until a bucket is gathered.
fn take_back<T: Float>(buckets: &mut Buckets<'_>, index: usize, master: &mut Box<dyn Any>) -> Result<()> {
    let flat = master_mut::<T>(master)?.gathering.wait()?;
    buckets.typed_mut(index)?.put_flat(flat);
    Ok(())
}

/// The updated parameters, the same on every rank, until the next step begins.
pub struct Updated<'a, 'comm> {
    buckets: &'a mut Buckets<'comm>,
}

impl Updated<'_, '_> {
    /// A parameter's values.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there is no such parameter, or `T` is not its type.
    pub fn parameter<T: Float>(&self, parameter: usize) -> Result<&[T]> {
        let (flat, range) = self.buckets.slot::<T>("parameter", parameter)?;
        Ok(&flat.host()?[range])
    }

    /// A parameter's values, where they are on a device.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there is no such parameter, `T` is not its type, or it is in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_parameter<T: Float>(&self, parameter: usize) -> Result<CudaView<'_, T>> {
        let (flat, range) = self.buckets.slot::<T>("device_parameter", parameter)?;
        flat.device_view(range).ok_or_else(|| Error::argument("device_parameter", "it is in host memory: use `parameter`"))
    }

    /// Copies a parameter's values to a buffer of its type and length.
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
}

impl fmt::Debug for Shards<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shards({} buckets)", self.optimizer.masters.len())
    }
}

impl fmt::Debug for Shard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shard({:?} of bucket {})", self.range, self.bucket)
    }
}

impl fmt::Debug for Updated<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Updated({} parameters)", self.buckets.len())
    }
}
