//! An optimiser whose state is sharded over the ranks (ZeRO, stage 1).

use std::fmt;
use std::ops::Range;

#[cfg(feature = "cuda")]
use cudarc::driver::CudaView;

use super::bucket::{Ending, Lent, own_range};
use super::buckets::Buckets;
use super::data_parallel::{check_norm, clipping};
use super::flat::{Flat, Place};
use super::layout::{BucketLayout, Options};
use super::loss_scaler::LossScaler;
use super::parameter::{Float, Parameter};
use super::shard::Shard;
use super::step_order::Done;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::interop::Memory;
use collectives::{Buffer, BufferMut};
use collectives::{Error, Result};

/// Averages gradients and lets each rank update its share of the parameters. So each rank keeps the optimiser's state
/// only for its share.
///
/// When a bucket is full, its gradients are reduced and scattered in the background. [`reduce`](Self::reduce) waits for
/// all buckets. Then [`Shards::update`] calls the caller's optimiser for this rank's share of each bucket. While the
/// shares of one bucket are gathered, `update` already updates the next bucket.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::{Options, Parameter, ShardedOptimizer};
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
/// With [`DataParallel`](super::DataParallel), every rank updates all parameters. A `ShardedOptimizer` computes the
/// same bits if a reduce-scatter sums in the same order as an all-reduce. With two ranks, the order is always the same.
/// With more ranks, the order is the same if [`Config::reproducible`](collectives::Config::reproducible) is set, or if
/// the ranks communicate through shared memory.
///
/// **Memory.** For parameters of N bytes, each of n ranks needs the sum of these numbers of bytes:
///
/// - N for the buckets, which are padded to a multiple of n elements,
/// - N/n for this rank's share of the parameters,
/// - the optimiser's state for this share, which the caller keeps: for Adam, 2·N/n instead of 2·N.
///
/// **Traffic.** In each step, a rank sends as much as in an all-reduce of the gradients.
///
/// The caller saves and loads the optimiser's state. With another world size, the shares are different. With the
/// feature `checkpoint`, the module `checkpoint` can save with one world size and load with another, and
/// `StateTransfer` moves shares in a job whose ranks come and go ([`resized`](Self::resized)).
///
/// For devices, see [`on_device`](Self::on_device).
#[doc(alias = "ZeroRedundancyOptimizer")]
pub struct ShardedOptimizer {
    buckets: Buckets,
    /// Whether each parameter has values.
    loaded: Vec<bool>,
}

/// Checks that a trainer can move it into a thread.
const _: () = {
    const fn sendable<T: Send + 'static>() {}
    sendable::<ShardedOptimizer>();
};

impl ShardedOptimizer {
    /// Makes the buckets of a model's parameters, like [`DataParallel::new`](super::DataParallel::new). Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::new`](super::DataParallel::new).
    pub fn new(comm: &Communicator, parameters: Vec<Parameter>, options: Options) -> Result<Self> {
        Self::in_place(comm, "ShardedOptimizer::new", &Place::Host, parameters, &options)
    }

    /// Makes the buckets and shares like [`new`](Self::new), but on the device of `stream`, as
    /// [`DataParallel::on_device`](super::DataParallel::on_device) does. Parameters and gradients are passed as device
    /// buffers. [`Shard::device_values`] lends device slices to the optimiser, and [`Updated::device_parameter`]
    /// returns a device slice. Neither [`reduce`](Self::reduce) nor [`Shards::update`] waits for the device.
    /// Collective.
    ///
    /// ```no_run
    /// # use collectives_train::{Options, Parameter, ShardedOptimizer};
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
    /// The errors of [`DataParallel::on_device`](super::DataParallel::on_device).
    #[cfg(feature = "cuda")]
    pub fn on_device(
        comm: &Communicator,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
        parameters: Vec<Parameter>,
        options: Options,
    ) -> Result<Self> {
        let place = Place::on_device(stream);
        Self::in_place(comm, "ShardedOptimizer::on_device", &place, parameters, &options)
    }

    fn in_place(comm: &Communicator, what: &'static str, place: &Place, parameters: Vec<Parameter>, options: &Options) -> Result<Self> {
        let buckets = Buckets::new(comm, what, parameters, options, place, Ending::Shares)?;
        let loaded = vec![false; buckets.len()];
        Ok(Self { buckets, loaded })
    }

    /// Makes an optimiser with the same parameters and options for the ranks of another communicator, for example after
    /// [`Communicator::admit`]. Newcomers call [`new`](Self::new) or [`on_device`](Self::on_device) instead, with the
    /// same arguments as the members. This call does not change this optimiser, and also works after a step that
    /// failed. Collective over `comm`.
    ///
    /// In the new optimiser, ranks have other shares, and no parameter has values yet. Pass all parameters to
    /// [`load`](Self::load): each member still has their values, because only the optimiser's state is sharded. With
    /// the feature `checkpoint`, `StateTransfer::offer_shares` and `want_shares` move the optimiser's state from the
    /// old shares to the new shares.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new) or [`on_device`](Self::on_device).
    pub fn resized(&self, comm: &Communicator) -> Result<Self> {
        let what = self.buckets.place_of_memory().either("ShardedOptimizer::new", "ShardedOptimizer::on_device");
        let buckets = self.buckets.resized(comm, what)?;
        let loaded = vec![false; buckets.len()];
        Ok(Self { buckets, loaded })
    }

    /// Returns the buckets' layouts, in the order in which the buckets are launched.
    pub fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.buckets.layouts()
    }

    /// Returns the communicator of the ranks over which the optimiser's state is sharded.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        self.buckets.comm()
    }

    /// Returns the parameter with this number.
    #[must_use]
    pub fn parameter(&self, parameter: usize) -> Option<&Parameter> {
        self.buckets.parameter(parameter)
    }

    /// Returns the range of each bucket's elements that belongs to this rank. [`Slot::overlap`](super::Slot::overlap)
    /// converts the range of a share to elements of a parameter. With the feature `checkpoint`,
    /// `checkpoint::Writer::shares` saves the shares, and a job of any world size can load them.
    pub fn shares(&self) -> impl ExactSizeIterator<Item = Range<usize>> {
        self.buckets.layouts().map(|layout| own_range(self.buckets.comm(), layout))
    }

    /// Returns one number for each bucket: the number of elements of this rank's share. The caller keeps an optimiser's
    /// state for these elements.
    pub fn shard_lens(&self) -> impl ExactSizeIterator<Item = usize> {
        self.shares().map(|range| range.len())
    }

    /// Copies the root's values of a parameter to every rank, and copies this rank's share of the values into the
    /// optimiser. Call `broadcast` or [`load`](Self::load) for every parameter before the first step. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`load`](Self::load) and of [`Communicator::broadcast`].
    pub fn broadcast<B>(&mut self, parameter: usize, values: &mut B, root: usize) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        self.check_load("broadcast", parameter, &Buffer::memory(values))?;
        self.buckets.broadcast(parameter, values, root)?;
        self.load(parameter, values)
    }

    /// Loads a parameter's values on this rank, for example values from a checkpoint. The values must be the same on
    /// every rank.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no such parameter, or if `values` does not have the parameter's length and type.
    /// - `InvalidArgument` unless `values` and the buckets are both in host memory, or both in memory of the same
    ///   `CudaContext`.
    /// - On a device, also `Cuda` if the driver fails.
    pub fn load<B>(&mut self, parameter: usize, values: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        let values = values.memory();
        self.check_load("load", parameter, &values)?;
        let (bucket, slot) = self.buckets.place(parameter);
        let comm = &self.buckets.comm().clone();
        let bucket = self.buckets.typed_mut::<B::Element>(bucket)?;
        let (elements, within) = bucket.layout.slots[slot].overlap(&own_range(comm, &bucket.layout));
        if !elements.is_empty() {
            bucket.share_mut()?.put(within, values, elements.start, false)?;
        }
        self.loaded[parameter] = true;
        Ok(())
    }

    /// Refuses values whose length, type or place is not the parameter's.
    fn check_load<T: Float>(&mut self, call: &'static str, parameter: usize, values: &Memory<'_, T>) -> Result<()> {
        self.buckets.fitting::<T>(call, parameter, values.len())?;
        let (bucket, _) = self.buckets.place(parameter);
        self.buckets.typed_mut::<T>(bucket)?.share_mut()?.check_put(values)
    }

    /// Adds a part of a parameter's gradient, like [`DataParallel::accumulate`](super::DataParallel::accumulate).
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::accumulate`](super::DataParallel::accumulate).
    pub fn accumulate<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("accumulate", parameter, gradient.memory(), false)
    }

    /// Passes a parameter's gradient, like [`DataParallel::ready`](super::DataParallel::ready).
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::ready`](super::DataParallel::ready).
    pub fn ready<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("ready", parameter, gradient.memory(), true)
    }

    /// Passes a parameter's gradient and takes ownership of it, like [`DataParallel::give`](super::DataParallel::give).
    /// A gradient is copied if its elements cannot be divided evenly among the ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::give`](super::DataParallel::give).
    pub fn give<T: Float>(&mut self, parameter: usize, gradient: impl Into<Flat<T>>) -> Result<()> {
        self.buckets.give("give", parameter, gradient.into())
    }

    /// Launches the remaining buckets, and waits until this rank has its share of all averaged gradients. Collective.
    ///
    /// # Errors
    ///
    /// The errors of [`DataParallel::finish`](super::DataParallel::finish), and `InvalidArgument` if the values of a
    /// parameter were never loaded or broadcast. Only a rank without these values gets this `InvalidArgument`, and it
    /// does not wait for other ranks. Other ranks wait in `reduce` until that rank has loaded the values and calls
    /// `reduce` again, or until the timeout.
    pub fn reduce(&mut self) -> Result<Shards<'_>> {
        if let Some(index) = self.loaded.iter().position(|loaded| !loaded) {
            let name = self.buckets.parameter(index).map_or_else(String::new, Parameter::to_string);
            return Err(Error::argument("reduce", format!("parameter {index} {name} has no values yet: broadcast or load them first")));
        }
        self.buckets.finish("reduce")?;
        Ok(Shards { optimizer: self, done: Done::default() })
    }
}

/// This rank's shares of a step's averaged gradients; see [`ShardedOptimizer::reduce`].
#[must_use = "the parameters are updated by `update`"]
pub struct Shards<'a> {
    optimizer: &'a mut ShardedOptimizer,
    done: Done,
}

impl<'a> Shards<'a> {
    /// Returns the norm of all ranks' gradients together: the square root of the sum of all elements' squares, computed
    /// in `f64`. Every rank gets the same bits. Collective: makes one all-reduce of one number, on the host. On a
    /// device, this call first waits for this rank's sum of squares.
    ///
    /// # Errors
    ///
    /// The errors common to all collectives, and the errors of [`Averaged::norm`](super::Averaged::norm).
    pub fn norm(&self) -> Result<f64> {
        let buckets = &self.optimizer.buckets;
        let comm = buckets.comm();
        let mut squares = buckets.sum_of_squares(|layout| own_range(comm, layout))?;
        comm.all_reduce(&mut squares, ReduceOp::Sum)?;
        Ok(squares.sqrt())
    }

    /// Scales all ranks' shares of the gradients down to a common [`norm`](Self::norm) of `limit`, if their common norm
    /// is larger than `limit`. Returns the norm before scaling, like
    /// [`Averaged::clip_norm`](super::Averaged::clip_norm). Collective, like `norm`.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the limit is not a positive number.
    /// - The errors of [`norm`](Self::norm).
    pub fn clip_norm(&mut self, limit: f64) -> Result<f64> {
        let factor = clipping("clip_norm", limit)?;
        let norm = self.norm()?;
        self.scale(factor(norm))?;
        Ok(norm)
    }

    /// Clips this rank's shares of the gradients by a norm that the caller has computed, like
    /// [`Averaged::clip_to`](super::Averaged::clip_to). Makes no collective call.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the limit is not a positive number or the norm is negative. On a device, also `Cuda` if the
    /// driver fails.
    pub fn clip_to(&mut self, norm: f64, limit: f64) -> Result<()> {
        let factor = clipping("clip_to", limit)?;
        check_norm(norm)?;
        self.scale(factor(norm))
    }

    /// Multiplies this rank's shares by the factor, if there is one: the last part of clipping.
    fn scale(&mut self, factor: Option<f64>) -> Result<()> {
        self.done = Done::Clipped;
        let buckets = &mut self.optimizer.buckets;
        let comm = &buckets.comm().clone();
        factor.map_or(Ok(()), |factor| buckets.scale(|layout| own_range(comm, layout), factor))
    }

    /// Divides this rank's shares of the gradients by the scale of the loss, like
    /// [`Averaged::unscale`](super::Averaged::unscale). Later, [`LossScaler::update`] reports to the other ranks
    /// whether a gradient overflowed. Makes no collective call.
    ///
    /// # Errors
    ///
    /// The errors of [`Averaged::unscale`](super::Averaged::unscale).
    pub fn unscale(&mut self, scaler: &mut LossScaler) -> Result<()> {
        self.done.check("unscale", Done::Unscaled)?;
        self.done = Done::Unscaled;
        let buckets = &mut self.optimizer.buckets;
        let comm = &buckets.comm().clone();
        buckets.unscale(|layout| own_range(comm, layout), scaler)
    }

    /// Calls `update` for this rank's share of each bucket's parameters, and gathers the other ranks' shares.
    /// Collective.
    ///
    /// # Errors
    ///
    /// The errors of `update`, and the errors common to all collectives. If `update` returns an error or panics, no
    /// step can follow, because this rank's shares have changed and the other ranks' shares are unknown. If `update`
    /// fails on one rank, the other ranks are not notified. They wait for the failing rank's shares until the timeout,
    /// unless the failing rank aborts the communicator ([`Communicator::abort`](collectives::Communicator::abort)). So
    /// if `update` fails, it should fail on every rank, or abort the communicator.
    pub fn update(self, mut update: impl FnMut(&mut Shard<'_>) -> Result<()>) -> Result<Updated<'a>> {
        let ShardedOptimizer { buckets, .. } = self.optimizer;
        buckets.go_on(|buckets| {
            let comm = &buckets.comm().clone();
            for (index, bucket) in buckets.iter_mut().enumerate() {
                let Lent { layout, range, parameters, gradients } = bucket.lend(comm)?;
                let own_gradients = range.clone();
                update(&mut Shard { bucket: index, layout, range, parameters, gradients, own_gradients })?;
                bucket.gather(comm)?;
            }
            buckets.iter_mut().try_for_each(|bucket| bucket.gathered())
        })?;
        Ok(Updated { buckets })
    }
}

/// The updated parameters, which are the same on every rank. You can use the values until the next step begins.
pub struct Updated<'a> {
    buckets: &'a mut Buckets,
}

impl Updated<'_> {
    /// Returns a parameter's values.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such parameter, or `T` is not its type.
    pub fn parameter<T: Float>(&self, parameter: usize) -> Result<&[T]> {
        let (flat, range) = self.buckets.slot::<T>("parameter", parameter)?;
        Ok(&flat.host()?[range])
    }

    /// Returns a parameter's values if they are on a device.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such parameter, `T` is not its type, or the parameters are in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_parameter<T: Float>(&self, parameter: usize) -> Result<CudaView<'_, T>> {
        let (flat, range) = self.buckets.slot::<T>("device_parameter", parameter)?;
        flat.device_view(range).ok_or_else(|| Error::argument("device_parameter", "the parameters are in host memory: use `parameter`"))
    }

    /// Copies a parameter's values to a buffer of its type and length.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no such parameter, or the buffer has another type or length.
    /// - `InvalidArgument` unless the buffer and the buckets are both in host memory, or both in memory of the same
    ///   `CudaContext`.
    /// - On a device, also `Cuda` if the driver fails.
    pub fn copy_to<B>(&self, parameter: usize, destination: &mut B) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        self.buckets.copy_to("copy_to", parameter, destination)
    }
}

impl fmt::Debug for ShardedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parameters, buckets) = (self.buckets.len(), self.buckets.layouts().len());
        write!(f, "ShardedOptimizer({parameters} parameters in {buckets} buckets on {:?})", self.buckets.comm())
    }
}

impl fmt::Debug for Shards<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shards({} buckets)", self.optimizer.buckets.layouts().len())
    }
}

impl fmt::Debug for Updated<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Updated({} parameters)", self.buckets.len())
    }
}
