//! An optimiser whose state is dealt out over the ranks (ZeRO, stage 1).

mod shards;

use std::any::Any;
use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use super::Options;
use super::buckets::{Buckets, MakeHook};
use super::flat::{Flat, Place};
use super::float::Float;
use super::hook::{Hook, Pending, Progress};
use super::layout::BucketLayout;
use super::parameter::Parameter;
use crate::buffer::{Buffer, BufferMut, Memory};
use crate::communicator::Communicator;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::op::ReduceOp;

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
/// On the host only.
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
    values: Vec<T>,
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
        let alone = comm.world_size() == 1 && !matches!(self.op, ReduceOp::PreMulSum(_));
        self.pending = if alone { Pending::Ended(gradients) } else { Pending::Going(comm.start_reduce_scatter(gradients, self.op)?) };
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
        fn master<T: Float>(len: usize) -> Box<dyn Any> {
            Box::new(Master { values: vec![T::default(); len], gathering: Pending::Idle })
        }
        let hooks = Scatter(options.op);
        let buckets = Buckets::new(comm, "ShardedOptimizer::new", parameters, &options, (&Place::Host, comm.world_size()), &hooks)?;
        let masters = buckets.layouts().map(|layout| by_type!(layout.dtype, master::<_>(own_range(comm, layout).len()))).collect();
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
        let values = host(values.memory())?;
        self.buckets.fitting::<B::Element>("load", parameter, values.len())?;
        let (bucket, slot) = self.buckets.place(parameter);
        let layout = &self.buckets.typed::<B::Element>(bucket)?.layout;
        let (own, slot) = (own_range(self.buckets.comm(), layout), layout.slots[slot].range.clone());
        let (start, end) = (own.start.max(slot.start), own.end.min(slot.end));
        if start < end {
            let master = master_mut::<B::Element>(&mut self.masters[bucket])?;
            master.values[start - own.start..end - own.start].copy_from_slice(&values[start - slot.start..end - slot.start]);
        }
        self.loaded[parameter] = true;
        Ok(())
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

/// Values in host memory.
fn host<T>(memory: Memory<'_, T>) -> Result<&[T]> {
    match memory {
        Memory::Host(values) => Ok(values),
        #[cfg(feature = "cuda")]
        Memory::Device(_) => Err(Error::unsupported("a ShardedOptimizer of parameters on a device", "copy them to the host")),
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
