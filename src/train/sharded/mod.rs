//! An optimiser whose state is dealt out over the ranks (ZeRO, stage 1).

mod shards;
mod values;

use std::any::Any;
use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use super::Options;
use super::buckets::{Buckets, MakeHook};
use super::flat::{Flat, Place};
use super::float::Float;
use super::hook::{Hook, Progress};
use super::layout::BucketLayout;
use super::outcome::everywhere;
use super::parameter::Parameter;
use super::pending::Pending;
use crate::buffer::{Buffer, BufferMut, Memory};
use crate::communicator::Communicator;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::op::ReduceOp;

use values::Values;

pub use shards::{Shard, Shards, Updated};

/// Averages gradients and lets each rank update its share of the parameters: so each keeps the optimiser's state for that share alone.
///
/// A bucket's gradients are reduced and scattered in the background as it is filled; [`reduce`](Self::reduce) waits for them.
/// [`Shards::update`] then lets the caller's optimiser work on this rank's share of each bucket, and gathers every rank's share, one bucket
/// while the next is updated.
///
/// ```
/// use collectives::Communicator;
/// use collectives::train::{Options, Parameter, ShardedOptimizer};
///
/// let results = Communicator::run_local(2, |comm| {
///     let mut weight = vec![1.0_f32; 5];
///     let mut model = ShardedOptimizer::new(comm, vec![Parameter::new::<f32>("weight", &[5])], Options::default())?;
///     model.broadcast(0, &mut weight, 0)?;
///     let mut momentum: Vec<Vec<f32>> = model.shard_lens().map(|len| vec![0.0; len]).collect();
///     for _step in 0..3 {
///         model.ready(0, &[1.0 + comm.rank() as f32; 5])?;
///         let updated = model.reduce()?.update(|shard| {
///             let momentum = &mut momentum[shard.bucket];
///             let (parameters, gradients) = shard.values::<f32>()?;
///             for ((x, slope), m) in parameters.iter_mut().zip(gradients).zip(momentum) {
///                 *m = 0.9 * *m + slope;
///                 *x -= 0.1 * *m;
///             }
///             Ok(())
///         })?;
///         updated.copy_to(0, &mut weight)?;
///     }
///     Ok(weight)
/// })?;
/// assert_eq!(results[0], results[1]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// With an op's sums in the same order the result has the same bits as an all-reduce and the same optimiser on every rank: always for
/// two ranks, for more under [`Config::reproducible`](crate::Config::reproducible) or in shared memory.
///
/// **Memory**, of each rank of n, for parameters of N bytes: N for the buckets, N/n for this rank's share of the parameters, and the
/// caller's state for that share: 2·N/n for Adam in place of 2·N. Buckets are filled up to a multiple of n elements.
///
/// **Traffic**: as an all-reduce of the gradients. State is saved and loaded by the caller, by share: another world size has other shares.
///
/// On devices too: [`on_device`](Self::on_device).
#[doc(alias = "ZeroRedundancyOptimizer")]
pub struct ShardedOptimizer<'comm> {
    buckets: Buckets<'comm>,
    /// For each bucket, the `Master` of its type.
    masters: Vec<Box<dyn Any>>,
    /// Which parameters' values have come.
    loaded: Vec<bool>,
}

/// This rank's share of a bucket's parameters.
struct Master<T: Float> {
    values: Values<T>,
    /// The bucket, while all shares are gathered.
    gathering: Pending<Flat<T>>,
}

/// Calls a generic function with a bucket's element type, which the plan has made one of the four.
macro_rules! by_type {
    ($dtype:expr, $function:ident::<_>($($argument:expr),* $(,)?)) => {
        match $dtype {
            DType::F64 => $function::<f64>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::Bf16 => $function::<bf16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}
use by_type;

/// A reduce-scatter for every bucket: this rank's share ends where it lies.
struct Scatter(ReduceOp);

struct ReduceScatter<T: Float> {
    op: ReduceOp,
    pending: Pending<Flat<T>>,
}

impl MakeHook for Scatter {
    fn make<T: Float>(&self, _layout: &BucketLayout) -> Box<dyn Hook<T>> {
        Box::new(ReduceScatter { op: self.0, pending: Pending::Idle })
    }
}

impl<T: Float> Hook<T> for ReduceScatter<T> {
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()> {
        self.pending = gradients.reduce_scatter(comm, self.op)?;
        Ok(())
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<T>> {
        self.pending.wait().map(Progress::Done)
    }
}

/// This rank's share of a bucket.
fn own_range(comm: &Communicator, layout: &BucketLayout) -> Range<usize> {
    let len = layout.len / comm.world_size();
    comm.rank() * len..(comm.rank() + 1) * len
}

impl<'comm> ShardedOptimizer<'comm> {
    /// Makes the buckets of a model's parameters, as [`DataParallel::new`](super::DataParallel::new) does. Collective.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn new(comm: &'comm Communicator, parameters: Vec<Parameter>, options: Options) -> Result<Self> {
        Self::in_place(comm, "ShardedOptimizer::new", &Place::Host, parameters, &options)
    }

    /// As [`new`](Self::new), with buckets and shares on the stream's device, as
    /// [`DataParallel::on_device`](super::DataParallel::on_device) has them: parameters and gradients are handed in as device buffers,
    /// [`Shard::device_values`] lends device slices to the optimiser, and [`Updated::device_parameter`] gives one. Neither
    /// [`reduce`](Self::reduce) nor [`Shards::update`] waits for the device. Collective.
    ///
    /// ```no_run
    /// # use collectives::train::{Options, Parameter, ShardedOptimizer};
    /// # use collectives::{Communicator, DeviceChoice};
    /// # fn step(_: &mut cudarc::driver::CudaViewMut<'_, f32>, _: &cudarc::driver::CudaView<'_, f32>) {}
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let comm = Communicator::builder().require_device(DeviceChoice::Local).from_env()?;
    /// let stream = comm.device().expect("it was required").context().new_stream()?;
    /// let parameters = vec![Parameter::new::<f32>("weight", &[1000])];
    /// let mut model = ShardedOptimizer::on_device(&comm, &stream, parameters, Options::default())?;
    /// let (mut weight, gradient) = (stream.alloc_zeros::<f32>(1000)?, stream.alloc_zeros::<f32>(1000)?);
    /// model.broadcast(0, &mut weight, 0)?;
    /// model.ready(0, &gradient)?;
    /// let updated = model.reduce()?.update(|shard| {
    ///     let (mut parameters, gradients) = shard.device_values::<f32>()?;
    ///     step(&mut parameters, &gradients); // a kernel of yours, on `stream`
    ///     Ok(())
    /// })?;
    /// updated.copy_to(0, &mut weight)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`DataParallel::on_device`](super::DataParallel::on_device).
    #[cfg(feature = "cuda")]
    pub fn on_device(
        comm: &'comm Communicator,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
        parameters: Vec<Parameter>,
        options: Options,
    ) -> Result<Self> {
        let place = Place::on_device(stream);
        Self::in_place(comm, "ShardedOptimizer::on_device", &place, parameters, &options)
    }

    fn in_place(
        comm: &'comm Communicator,
        what: &'static str,
        place: &Place,
        parameters: Vec<Parameter>,
        options: &Options,
    ) -> Result<Self> {
        fn master<T: Float>(place: &Place, len: usize) -> Result<Box<dyn Any>> {
            let values = Values::<T>::in_place(place, len)?;
            Ok(Box::new(Master { values, gathering: Pending::Idle }))
        }
        let buckets = Buckets::new(comm, what, parameters, options, (place, comm.world_size()), &Scatter(options.op))?;
        let masters = buckets.layouts().map(|layout| by_type!(layout.dtype, master::<_>(place, own_range(comm, layout).len())));
        let masters = everywhere(comm, what, masters.collect())?;
        let loaded = vec![false; buckets.len()];
        Ok(Self { buckets, masters, loaded })
    }

    /// The buckets, in the order in which they are launched.
    pub fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.buckets.layouts()
    }

    /// How many elements this rank's share of each bucket has: what state is to be kept for.
    pub fn shard_lens(&self) -> impl ExactSizeIterator<Item = usize> {
        self.buckets.layouts().map(|layout| own_range(self.buckets.comm(), layout).len())
    }

    /// Copies the root's values of a parameter to every rank, and this rank's share of them into the optimiser. Every parameter is
    /// broadcast, or [`load`](Self::load)ed, before the first step. Collective.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for another length or type than the parameter's, and those of [`Communicator::broadcast`].
    pub fn broadcast<B>(&mut self, parameter: usize, values: &mut B, root: usize) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        self.check_load("broadcast", parameter, &Buffer::memory(values))?;
        self.buckets.broadcast(parameter, values, root)?;
        self.load(parameter, values)
    }

    /// Takes a parameter's values, which must be the same on every rank, from this one: after a checkpoint was read, say.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for another length or type than the parameter's.
    pub fn load<B>(&mut self, parameter: usize, values: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        let values = values.memory();
        self.check_load("load", parameter, &values)?;
        let (bucket, slot) = self.buckets.place(parameter);
        let layout = &self.buckets.typed::<B::Element>(bucket)?.layout;
        let (own, slot) = (own_range(self.buckets.comm(), layout), layout.slots[slot].range.clone());
        let (start, end) = (own.start.max(slot.start), own.end.min(slot.end));
        if start < end {
            let values_of = &mut master_mut::<B::Element>(&mut self.masters[bucket])?.values;
            values_of.put(start - own.start..end - own.start, values, start - slot.start)?;
        }
        self.loaded[parameter] = true;
        Ok(())
    }

    /// Refuses values of another length, type or place than the parameter's.
    fn check_load<T: Float>(&mut self, call: &'static str, parameter: usize, values: &Memory<'_, T>) -> Result<()> {
        self.buckets.fitting::<T>(call, parameter, values.len())?;
        let (bucket, _) = self.buckets.place(parameter);
        master_mut::<T>(&mut self.masters[bucket])?.values.check_put(values)
    }

    /// As [`DataParallel::accumulate`](super::DataParallel::accumulate).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn accumulate<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("accumulate", parameter, gradient.memory(), false)
    }

    /// As [`DataParallel::ready`](super::DataParallel::ready).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn ready<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("ready", parameter, gradient.memory(), true)
    }

    /// As [`DataParallel::give`](super::DataParallel::give). A gradient is copied where its elements cannot be dealt out evenly.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn give<T: Float>(&mut self, parameter: usize, gradient: impl Into<Flat<T>>) -> Result<()> {
        self.buckets.give("give", parameter, gradient.into())
    }

    /// Launches what was not, and waits until this rank has its share of all averaged gradients. Collective.
    ///
    /// # Errors
    ///
    /// As [`DataParallel::finish`](super::DataParallel::finish); and `InvalidArgument` for a parameter whose values were never given. That is
    /// this rank's alone, before anything is waited for: other ranks wait in their `reduce` until it calls again, once the values were
    /// loaded, or until the deadline.
    pub fn reduce(&mut self) -> Result<Shards<'_, 'comm>> {
        if let Some(index) = self.loaded.iter().position(|loaded| !loaded) {
            let name = self.buckets.parameter(index).map_or_else(String::new, Parameter::to_string);
            return Err(Error::argument("reduce", format!("parameter {index} {name} has no values yet: broadcast or load them first")));
        }
        self.buckets.finish("reduce")?;
        Ok(Shards { optimizer: self })
    }
}

/// The share of a bucket of `T`s.
fn master_mut<T: Float>(master: &mut Box<dyn Any>) -> Result<&mut Master<T>> {
    let other = || Error::argument("train", format!("this bucket does not hold elements of {}", T::ELEMENT_TYPE));
    master.downcast_mut().ok_or_else(other)
}

impl fmt::Debug for ShardedOptimizer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parameters, buckets) = (self.buckets.len(), self.buckets.layouts().len());
        write!(f, "ShardedOptimizer({parameters} parameters in {buckets} buckets on {:?})", self.buckets.comm())
    }
}
