//! Gradients averaged over all ranks during the backward pass, and the results of a finished step: means, their norm,
//! clipping.

use std::fmt;

use super::bucket::Ending;
use super::buckets::Buckets;
use super::flat::{Flat, Place};
use super::hook::Hook;
use super::layout::{BucketLayout, Options};
use super::loss_scaler::LossScaler;
use super::parameter::{Float, Parameter};
use super::step_order::Done;
use collectives::Communicator;
use collectives::{Buffer, BufferMut};
use collectives::{Error, Result};

/// Averages a model's gradients over all ranks, in buckets, while the backward pass computes further gradients.
///
/// In each step every gradient is passed to [`ready`](Self::ready), in any order, and [`finish`](Self::finish) returns
/// the means:
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::{DataParallel, Options, Parameter};
///
/// let results = Communicator::run_local(2, |comm| {
///     let (mut weight, mut bias) = (vec![comm.rank() as f32; 6], [0.5_f32; 2]);
///     let parameters = vec![Parameter::new::<f32>("weight", &[3, 2]), Parameter::new::<f32>("bias", &[2])];
///     let mut model = DataParallel::new(comm, parameters, Options::default())?;
///     model.broadcast(0, &mut weight, 0)?; // all ranks start with rank 0's
///     model.broadcast(1, &mut bias, 0)?;
///     for _step in 0..10 {
///         let slope = comm.rank() as f32; // … what the backward pass says
///         model.ready(1, &[slope; 2])?; // goes to the other ranks while the next is computed
///         model.ready(0, &[2.0 * slope; 6])?;
///         let mean = model.finish()?;
///         weight.iter_mut().zip(mean.gradient::<f32>(0)?).for_each(|(x, slope)| *x -= 0.1 * slope);
///         bias.iter_mut().zip(mean.gradient::<f32>(1)?).for_each(|(x, slope)| *x -= 0.1 * slope);
///     }
///     Ok((weight[0], bias[0]))
/// })?;
/// assert_eq!(results[0], results[1]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// If a framework returns all gradients at once, [`average`](Self::average) does the same in one call.
///
/// **Order.** Every rank launches the buckets in the order of their numbers, so parameters may become ready in
/// different orders on different ranks. Other collectives on the same communicator, between the first `ready` and
/// `finish`, must come at the same place on every rank, which holds only if all ranks have the same order. Otherwise
/// make them on a communicator of their own ([`Communicator::duplicate`]).
///
/// **Errors.** A wrong length or type, and a gradient given twice, are refused by that call, which then has no effect.
/// Errors in the background are returned by `finish`. After a lost peer, a timeout or a mismatch every later call
/// returns `Poisoned`: make a new `DataParallel` with the result of [`Communicator::shrink`].
///
/// **Memory.** The buckets hold every gradient once: the bytes of all gradients, from [`Communicator::alloc`]. Hooks
/// document what they add. The caller's own gradients are copied and can be freed as soon as `ready` returns. A
/// gradient that is [given](Self::give) lives, in addition to its bucket's own memory, until it is
/// [taken](Averaged::take) or replaced by the next step's.
///
/// On one rank a step makes no communicator calls, except for `PreMulSum`, which weights, and the calls of your own
/// hook.
pub struct DataParallel {
    buckets: Buckets,
}

/// A trainer keeps it with the communicator, and moves both into a thread.
const _: () = {
    const fn sendable<T: Send + 'static>() {}
    sendable::<DataParallel>();
};

impl DataParallel {
    /// Makes the buckets of a model's parameters, listed in the order in which the forward pass uses them. The backward
    /// pass uses them in the opposite order. Collective.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming the first parameter or setting in which two ranks differ, `InvalidArgument` for types that
    /// gradients cannot have, `Unsupported` for an op that is not a sum, and those of [`Communicator::alloc`].
    #[doc(alias = "DistributedDataParallel")]
    pub fn new(comm: &Communicator, parameters: Vec<Parameter>, options: Options) -> Result<Self> {
        let buckets = Buckets::new(comm, "DataParallel::new", parameters, &options, &Place::Host, Ending::Whole)?;
        Ok(Self { buckets })
    }

    /// Does the same as [`new`](Self::new), but with the buckets on the stream's device, which must be the
    /// communicator's. Gradients are copied into them on `stream`, on which the backward pass runs. Reductions run
    /// beside it on the communicator's stream ([`Device::stream`](collectives::Device::stream), or that of
    /// [`Communicator::with_stream`]). The buckets' events order the two, so `finish` waits for no device. Use the
    /// results of [`Averaged`] on `stream`, or order their use by cudarc's events.
    ///
    /// Accumulation, norms and clipping are done by the crate's kernels on `stream`. Of the hooks,
    /// [`Compress`](super::Compress) has its own `on_device`, and [`PowerSgd`](super::PowerSgd) is for host memory.
    ///
    /// The first buckets on a device load those kernels, for which the driver may wait until work already started there
    /// has ended. So make them while no device call is in progress.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and errors of the driver: `NoDevice` if a communicator of several ranks has no
    /// device backend, `InvalidArgument` for a stream of another device, `Cuda`. If one rank fails, all fail, the
    /// others with an `Io` that names it.
    #[cfg(feature = "cuda")]
    pub fn on_device(
        comm: &Communicator,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
        parameters: Vec<Parameter>,
        options: Options,
    ) -> Result<Self> {
        let place = Place::on_device(stream);
        let buckets = Buckets::new(comm, "DataParallel::on_device", parameters, &options, &place, Ending::Whole)?;
        Ok(Self { buckets })
    }

    /// Replaces the hooks that average the buckets of type `T`. `make` is called once for each bucket, between two
    /// steps. The hooks of all ranks must make the same calls. A hook that panics ends the steps, as one that fails
    /// does.
    ///
    /// # Errors
    ///
    /// Those of `make`, after which all hooks are unchanged; `InvalidArgument` once a gradient of a step was given, and
    /// `Poisoned` after a step that failed.
    #[doc(alias = "register_comm_hook")]
    pub fn set_hooks<T: Float>(&mut self, make: impl FnMut(&BucketLayout) -> Result<Box<dyn Hook<T>>>) -> Result<()> {
        self.buckets.set_hooks(make)
    }

    /// Returns the buckets, in the order in which they are launched.
    pub fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.buckets.layouts()
    }

    /// Returns the communicator it was made with.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        self.buckets.comm()
    }

    /// Copies the root's values of a parameter to every rank, so that all start with the same. Collective. On host and
    /// device.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for another length or type than the parameter's, and those of [`Communicator::broadcast`].
    pub fn broadcast<B: BufferMut + ?Sized>(&self, parameter: usize, values: &mut B, root: usize) -> Result<()> {
        self.buckets.broadcast(parameter, values, root)
    }

    /// Adds a part of a parameter's gradient, which stays on this rank for now. If a batch has several parts,
    /// accumulate all but the last. The mean is over ranks, not over parts: divide by the number of parts yourself.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a length or type that is not the parameter's, and if it is ready already; `Poisoned` after
    /// a step that failed.
    #[doc(alias = "no_sync")]
    pub fn accumulate<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("accumulate", parameter, gradient.memory(), false)
    }

    /// Passes a parameter's gradient, or, after [`accumulate`](Self::accumulate), the last part of it. If that fills a
    /// bucket, and all buckets before it have been launched, the bucket is launched. Does not wait for other ranks.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a length or type that is not the parameter's, and if it was ready already in this step;
    /// `Poisoned` after a step that failed; those of a hook.
    pub fn ready<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("ready", parameter, gradient.memory(), true)
    }

    /// Does the same as [`ready`](Self::ready), but takes ownership of the gradient: a vector, memory from
    /// [`Communicator::alloc`], a cudarc slice. The buffer becomes the bucket's, without a copy, if three conditions
    /// hold:
    ///
    /// - It is alone in its bucket ([`Options::own_bucket_bytes`]).
    /// - Nothing was accumulated.
    /// - A cudarc slice belongs to the same `CudaContext` as the buckets' stream.
    ///
    /// Otherwise it is copied and freed. [`Averaged::take`] moves the mean out again. Ranks may differ: one may give
    /// and another copy.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use collectives_train::{DataParallel, Options, Parameter};
    /// let same_memory = Communicator::run_local(2, |comm| {
    ///     let options = Options { own_bucket_bytes: Some(4000), ..Options::default() };
    ///     let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("weight", &[1000])], options)?;
    ///     let gradient = vec![comm.rank() as f32; 1000];
    ///     let address = gradient.as_ptr();
    ///     model.give(0, gradient)?;
    ///     let mean = model.finish()?.take::<f32>(0)?.into_vec()?;
    ///     assert_eq!(mean[999], 0.5);
    ///     Ok(mean.as_ptr() == address)
    /// })?;
    /// assert_eq!(same_memory, [true, true]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`ready`](Self::ready). A gradient that is refused is freed.
    pub fn give<T: Float>(&mut self, parameter: usize, gradient: impl Into<Flat<T>>) -> Result<()> {
        self.buckets.give("give", parameter, gradient.into())
    }

    /// Ends the step: launches the remaining buckets, waits for all, and returns the means. Collective.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` on every rank if one gave no gradient for a parameter ([`Missing`](super::Missing) can change
    /// that), and those of collectives.
    pub fn finish(&mut self) -> Result<Averaged<'_>> {
        self.buckets.finish("finish")?;
        Ok(Averaged { buckets: &mut self.buckets, done: Done::default() })
    }

    /// Averages all gradients in place: calls [`ready`](Self::ready) for each, the last first, and
    /// [`finish`](Self::finish). Takes one gradient for each parameter, in order. Collective.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use collectives_train::{DataParallel, Options, Parameter};
    /// let results = Communicator::run_local(2, |comm| {
    ///     let parameters = vec![Parameter::new::<f32>("weight", &[3, 2]), Parameter::new::<f32>("bias", &[2])];
    ///     let mut model = DataParallel::new(comm, parameters, Options::default())?;
    ///     let mut gradients = [vec![comm.rank() as f32; 6], vec![1.0; 2]];
    ///     model.average(&mut gradients)?;
    ///     Ok(gradients)
    /// })?;
    /// assert_eq!(results[0], [vec![0.5; 6], vec![1.0; 2]]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of these two calls, and `InvalidArgument` if the number of gradients is not that of the parameters. If one
    /// gradient is refused, none is taken, and this rank can call again with others.
    pub fn average<B>(&mut self, gradients: &mut [B]) -> Result<()>
    where
        B: BufferMut<Element: Float>,
    {
        self.buckets.take_all("average", gradients)?;
        self.buckets.finish("average")?;
        gradients.iter_mut().enumerate().try_for_each(|(index, gradient)| self.buckets.copy_to("average", index, gradient))
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parameters, buckets) = (self.buckets.len(), self.buckets.layouts().len());
        write!(f, "DataParallel({parameters} parameters in {buckets} buckets on {:?})", self.buckets.comm())
    }
}

/// The averaged gradients of a step, the same bits on every rank, until the next step begins; see
/// [`DataParallel::finish`].
pub struct Averaged<'a> {
    buckets: &'a mut Buckets,
    done: Done,
}

impl Averaged<'_> {
    /// Returns a parameter's gradient.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such parameter, or `T` is not its type.
    pub fn gradient<T: Float>(&self, parameter: usize) -> Result<&[T]> {
        let (flat, range) = self.buckets.slot::<T>("gradient", parameter)?;
        Ok(&flat.host()?[range])
    }

    /// Returns a parameter's gradient if the buckets are on a device.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such parameter, `T` is not its type, or the buckets are in host memory.
    #[cfg(feature = "cuda")]
    pub fn device_gradient<T: Float>(&self, parameter: usize) -> Result<cudarc::driver::CudaView<'_, T>> {
        let (flat, range) = self.buckets.slot::<T>("device_gradient", parameter)?;
        flat.device_view(range).ok_or_else(|| Error::argument("device_gradient", "the buckets are in host memory: use `gradient`"))
    }

    /// Copies a parameter's gradient to a buffer of its type and length.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for any other buffer.
    pub fn copy_to<B>(&self, parameter: usize, destination: &mut B) -> Result<()>
    where
        B: BufferMut<Element: Float> + ?Sized,
    {
        self.buckets.copy_to("copy_to", parameter, destination)
    }

    /// Moves a parameter's gradient out: the buffer that was [given](DataParallel::give) for it (or the buffer that a
    /// hook returned instead), else a copy. On a device, allocating a copy waits for the caller's stream, without a
    /// limit.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if there is no such parameter, or `T` is not its type; on a device `Cuda`. Once a gradient was
    /// taken, this, [`gradient`](Self::gradient), [`copy_to`](Self::copy_to) and [`norm`](Self::norm) refuse it until
    /// the next step.
    pub fn take<T: Float>(&mut self, parameter: usize) -> Result<Flat<T>> {
        self.buckets.move_out("take", parameter)
    }

    /// Returns the norm of all gradients together: the root of the sum of all squares, summed in `f64`. Every rank gets
    /// the same bits.
    ///
    /// On a device, kernels on the caller's stream sum the squares, and this waits for that stream. Each gradient is
    /// read once. The order of the sum differs from the host's: for n elements the two norms differ by at most (n +
    /// 2)·2⁻⁵³ of the norm.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if a gradient was [taken](Self::take). On a device `Cuda`, and those of the wait: `Timeout`
    /// after the communicator's, `Poisoned`.
    pub fn norm(&self) -> Result<f64> {
        self.buckets.check_all_there("norm")?;
        self.buckets.sum_of_squares(|layout| 0..layout.len).map(f64::sqrt)
    }

    /// Scales all gradients so that their [`norm`](Self::norm) is `limit`, if it is larger. Returns the norm before. If
    /// that is not finite, the gradients stay unchanged: skip the step. Each product is computed in `f64` and rounded
    /// once.
    ///
    /// On a device it waits as [`norm`](Self::norm) does, and queues the products.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a limit that is not a positive number, and those of [`norm`](Self::norm).
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_norm(&mut self, limit: f64) -> Result<f64> {
        let factor = clipping("clip_norm", limit)?;
        let norm = self.norm()?;
        self.scale(factor(norm))?;
        Ok(norm)
    }

    /// Clips by a norm over more gradients than these, otherwise like [`clip_norm`](Self::clip_norm): scales these so
    /// that a norm of `norm` becomes `limit`, if it is larger. If `norm` is not finite, they stay unchanged. Makes no
    /// call: every rank must pass the same bits, so that all ranks compute the same.
    ///
    /// With tensor parallelism each rank has other parameters than its neighbours, and the norm is that of all:
    ///
    /// ```
    /// use collectives_train::{DataParallel, Mesh, Options, Parameter};
    /// use collectives::{Communicator, ReduceOp};
    ///
    /// let clipped = Communicator::run_local(4, |comm| {
    ///     let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)])?;
    ///     let (dp, tp) = (mesh.dimension("dp")?, mesh.dimension("tp")?);
    ///     // Half of the columns of a weight.
    ///     let mut model = DataParallel::new(dp, vec![Parameter::new::<f32>("columns", &[2, 2])], Options::default())?;
    ///     model.ready(0, &[if tp.rank() == 0 { 3.0_f32 } else { 4.0 }; 4])?;
    ///     let mut mean = model.finish()?;
    ///     let mut squares = mean.norm()?.powi(2);
    ///     tp.all_reduce(&mut squares, ReduceOp::Sum)?; // those of all columns
    ///     dp.broadcast(&mut squares, 0)?; // the ranks of another tp may have added up in another order
    ///     mean.clip_to(squares.sqrt(), 1.0)?;
    ///     Ok(mean.gradient::<f32>(0)?[0])
    /// })?;
    /// assert_eq!(clipped, [0.3, 0.4, 0.3, 0.4], "the norm was 10");
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// Parameters that all ranks of `tp` share, such as biases, count once. Keep them in a [`DataParallel`] of their
    /// own, and add its square after the all-reduce.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a limit that is not a positive number, a negative norm, and if a gradient was
    /// [taken](Self::take). On a device `Cuda`.
    pub fn clip_to(&mut self, norm: f64, limit: f64) -> Result<()> {
        let factor = clipping("clip_to", limit)?;
        check_norm(norm)?;
        self.buckets.check_all_there("clip_to")?;
        self.scale(factor(norm))
    }

    /// Multiplies all gradients by the factor, if there is one: the last part of clipping.
    fn scale(&mut self, factor: Option<f64>) -> Result<()> {
        self.done = Done::Clipped;
        factor.map_or(Ok(()), |factor| self.buckets.scale(|layout| 0..layout.len, factor))
    }

    /// Divides all gradients by a loss's scale. The scaler records whether one is infinite, NaN, or so large that an
    /// `f64` cannot hold its square. Call it once a step, before [`clip_norm`](Self::clip_norm). Each quotient is
    /// computed in `f64` and rounded once. On a device it waits as [`norm`](Self::norm) does.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if this step's gradients were unscaled or clipped already, and those of [`norm`](Self::norm).
    pub fn unscale(&mut self, scaler: &mut LossScaler) -> Result<()> {
        self.done.check("unscale", Done::Unscaled)?;
        self.buckets.check_all_there("unscale")?;
        self.done = Done::Unscaled;
        self.buckets.unscale(|layout| 0..layout.len, scaler)
    }
}

/// Returns the factor that scales gradients of a norm down to `limit`; `None` if they stay unchanged.
pub(super) fn clipping(call: &'static str, limit: f64) -> Result<impl Fn(f64) -> Option<f64>> {
    if !(limit > 0.0 && limit.is_finite()) {
        return Err(Error::argument(call, format!("a limit of {limit}; it must be a positive number")));
    }
    Ok(move |norm: f64| (norm.is_finite() && norm > limit).then_some(limit / norm))
}

/// Refuses a value that is not a norm. A norm that is not finite belongs to gradients that are not finite, and is
/// accepted.
pub(super) fn check_norm(norm: f64) -> Result<()> {
    match norm < 0.0 {
        false => Ok(()),
        true => Err(Error::argument("clip_to", format!("a norm of {norm}; it is the root of a sum of squares"))),
    }
}

impl fmt::Debug for Averaged<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Averaged({} gradients)", self.buckets.len())
    }
}
