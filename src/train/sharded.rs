//! An optimiser whose state is dealt out over the ranks (ZeRO, stage 1).

use std::any::Any;
use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use super::Options;
use super::averaged::clipping;
use super::bucket::Bucket;
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

/// This rank's shares of a step's averaged gradients; see [`ShardedOptimizer::reduce`].
#[must_use = "the parameters are updated by `update`"]
pub struct Shards<'a, 'comm> {
    optimizer: &'a mut ShardedOptimizer<'comm>,
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
        Ok((&mut master.values, &gradients.host()?[self.range.clone()]))
    }
}

impl<'a, 'comm> Shards<'a, 'comm> {
    /// As [`Averaged::clip_norm`](super::Averaged::clip_norm), of all ranks' shares together. Collective: one all-reduce of one number.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a limit that is not a positive number, and those of collectives.
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
    /// it ends the communicator ([`Communicator::abort`]). So let fail on every rank what can fail, or abort.
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
    flat.host_mut()?[range].copy_from_slice(&master.values);
    let alone = comm.world_size() == 1 || bucket.layout.len == 0;
    master.gathering = if alone { Pending::Ended(flat) } else { Pending::Going(comm.start_all_gather(flat)?) };
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

impl fmt::Debug for ShardedOptimizer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parameters, buckets) = (self.buckets.len(), self.buckets.layouts().len());
        write!(f, "ShardedOptimizer({parameters} parameters in {buckets} buckets on {:?})", self.buckets.comm())
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
