//! Averages gradients over all ranks during the backward pass. Then provides the results of the step: means, their
//! norm, and clipping.

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
/// In each step, pass every gradient to [`ready`](Self::ready), in any order. Then [`finish`](Self::finish) returns the
/// means:
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
///         let slope = comm.rank() as f32; // … what the backward pass computes
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
/// If a framework returns all gradients together after the backward pass, pass them to [`average`](Self::average),
/// which calls `ready` and `finish`.
///
/// **Order.** Every rank launches the buckets in the order of their numbers, so parameters may become ready in
/// different orders on different ranks. If you make other collectives on the same communicator between the first
/// `ready` and `finish`, every rank must make these collectives at the same point of the step. Ranks can do so only if
/// parameters become ready in the same order on all ranks. Otherwise, make these collectives on a separate communicator
/// ([`Communicator::duplicate`]).
///
/// **Errors.** A call that passes a wrong length or type, or the same gradient again, is refused and has no effect.
/// `finish` returns the errors of background calls. After a lost peer, a timeout or a mismatch, every later call
/// returns `Poisoned`. After such an error, make a new model ([`resized`](Self::resized)) with the communicator that
/// [`Communicator::shrink`] or [`Communicator::admit`] returns.
///
/// **Memory.** The buckets hold every gradient once, in memory from [`Communicator::alloc`]. The documentation of each
/// hook says how much memory the hook adds. `ready` copies a gradient, so the caller can free it as soon as `ready`
/// returns. A [given](Self::give) gradient occupies memory in addition to its bucket, until it is
/// [taken](Averaged::take) or the next step's gradient replaces it.
///
/// If there is only one rank, a step makes no communicator calls, with two exceptions: the calls that apply the weight
/// of a `PreMulSum`, and the calls of your own hooks.
pub struct DataParallel {
    buckets: Buckets,
}

/// Checks that a trainer can move it into a thread.
const _: () = {
    const fn sendable<T: Send + 'static>() {}
    sendable::<DataParallel>();
};

impl DataParallel {
    /// Makes the buckets of a model's parameters. List the parameters in the order in which the forward pass uses them.
    /// The backward pass then uses them in the reverse order. Collective.
    ///
    /// # Errors
    ///
    /// - `Mismatch` if two ranks pass different parameters or settings. The error names the first difference.
    /// - `InvalidArgument` if a parameter has a type that gradients cannot have.
    /// - `Unsupported` if the op is not `Avg`, `Sum` or `PreMulSum`.
    /// - The errors of [`Communicator::alloc`].
    #[doc(alias = "DistributedDataParallel")]
    pub fn new(comm: &Communicator, parameters: Vec<Parameter>, options: Options) -> Result<Self> {
        let buckets = Buckets::new(comm, "DataParallel::new", parameters, &options, &Place::Host, Ending::Whole)?;
        Ok(Self { buckets })
    }

    /// Makes the buckets like [`new`](Self::new), but on the device of `stream`. This device must be the communicator's
    /// device. Gradients are copied into the buckets on `stream`, on which the backward pass runs. Meanwhile,
    /// reductions run on the communicator's stream ([`Device::stream`](collectives::Device::stream), or the stream that
    /// was passed to [`Communicator::with_stream`]). The buckets' events order the work on the two streams, so `finish`
    /// does not wait for the device. Use the results of [`Averaged`] on `stream`, or order their use by cudarc's
    /// events.
    ///
    /// The crate's kernels accumulate gradients, compute norms and clip gradients on `stream`. The hook
    /// [`Compress`](super::Compress) has its own constructor `on_device`. The hook [`PowerSgd`](super::PowerSgd)
    /// supports only host memory.
    ///
    /// When the first buckets on a device are made, the crate loads its kernels. The driver may then wait for work in
    /// progress on the device. So make the buckets while no device call is in progress.
    ///
    /// # Errors
    ///
    /// - The errors of [`new`](Self::new).
    /// - `NoDevice` if a communicator of several ranks has no device backend.
    /// - `InvalidArgument` if the stream is not on the communicator's device.
    /// - `Cuda` if the driver fails.
    ///
    /// If one rank fails, all fail: the others get an `Io` that names the failing rank.
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

    /// Makes a model with the same parameters and options for the ranks of another communicator, for example after
    /// [`Communicator::admit`]. Newcomers call [`new`](Self::new) or [`on_device`](Self::on_device) instead, with the
    /// same arguments as the members. This model stays unchanged, even if it is in the middle of a step, or a step has
    /// failed. The new model has the plain hooks: call [`set_hooks`](Self::set_hooks) again if you have your own. If the
    /// op is a `PreMulSum`, the weight stays the same too. Collective over `comm`.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use collectives_train::{DataParallel, Options, Parameter};
    /// let means = Communicator::run_local(3, |comm| {
    ///     let parameters = vec![Parameter::new::<f32>("weight", &[1])];
    ///     let mut model = DataParallel::new(comm, parameters, Options::default())?;
    ///     let mut gradient = [[comm.rank() as f32]];
    ///     model.average(&mut gradient)?; // over three ranks
    ///     let Some(pair) = comm.split((comm.rank() < 2).then_some(0), 0)? else { return Ok((gradient[0][0], None)) };
    ///     let mut again = [[comm.rank() as f32]];
    ///     model = model.resized(&pair)?;
    ///     model.average(&mut again)?; // over two ranks
    ///     Ok((gradient[0][0], Some(again[0][0])))
    /// })?;
    /// assert_eq!(means, [(1.0, Some(0.5)), (1.0, Some(0.5)), (1.0, None)]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new) or [`on_device`](Self::on_device).
    pub fn resized(&self, comm: &Communicator) -> Result<Self> {
        let what = self.buckets.place_of_memory().either("DataParallel::new", "DataParallel::on_device");
        Ok(Self { buckets: self.buckets.resized(comm, what)? })
    }

    /// Replaces the hooks that average the buckets of type `T`. Calls `make` once for each of these buckets. Call
    /// `set_hooks` between two steps. The hooks of all ranks must make the same calls. If a hook fails or panics, no
    /// further step is possible.
    ///
    /// # Errors
    ///
    /// - The errors of `make`. If `make` fails, all hooks stay unchanged.
    /// - `InvalidArgument` if you have already passed a gradient of the current step.
    /// - `Poisoned` after a step that failed.
    #[doc(alias = "register_comm_hook")]
    pub fn set_hooks<T: Float>(&mut self, make: impl FnMut(&BucketLayout) -> Result<Box<dyn Hook<T>>>) -> Result<()> {
        self.buckets.set_hooks(make)
    }

    /// Returns the buckets' layouts, in the order in which the buckets are launched.
    pub fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.buckets.layouts()
    }

    /// Returns the communicator of the ranks over which gradients are averaged.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        self.buckets.comm()
    }

    /// Copies the root's values of a parameter to every rank, so that all ranks start with the same values. `values`
    /// may be in host or device memory. Collective.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the length or the type of `values` is not the parameter's.
    /// - The errors of [`Communicator::broadcast`].
    pub fn broadcast<B: BufferMut + ?Sized>(&self, parameter: usize, values: &mut B, root: usize) -> Result<()> {
        self.buckets.broadcast(parameter, values, root)
    }

    /// Adds a part of a parameter's gradient to the parts that were passed before in this step. Sends nothing to other
    /// ranks. If a batch has several parts, call `accumulate` for all parts except the last, and [`ready`](Self::ready)
    /// for the last part. The result is a mean over ranks, but a sum over parts. For a mean over parts, divide by the
    /// number of parts yourself.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no such parameter, or if the gradient does not have the parameter's length and
    ///   type.
    /// - `InvalidArgument` unless the gradient and the buckets are both in host memory, or both in memory of the same
    ///   `CudaContext`.
    /// - `InvalidArgument` if you have already passed this step's gradient of the parameter to [`ready`](Self::ready).
    /// - `Poisoned` after a step that failed.
    /// - On a device, also `Cuda` if the driver fails.
    #[doc(alias = "no_sync")]
    pub fn accumulate<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("accumulate", parameter, gradient.memory(), false)
    }

    /// Passes a parameter's gradient. If you called [`accumulate`](Self::accumulate) for the parameter, pass the last
    /// part of the gradient. A bucket is launched when it has all its gradients and all earlier buckets have been
    /// launched. Does not wait for other ranks.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no such parameter, or if the gradient does not have the parameter's length and
    ///   type.
    /// - `InvalidArgument` unless the gradient and the buckets are both in host memory, or both in memory of the same
    ///   `CudaContext`.
    /// - `InvalidArgument` if this step's gradient of the parameter was already passed.
    /// - `Poisoned` after a step that failed.
    /// - The errors of a hook.
    /// - On a device, also `Cuda` if the driver fails.
    pub fn ready<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("ready", parameter, gradient.memory(), true)
    }

    /// Passes a parameter's gradient like [`ready`](Self::ready), but takes ownership of it. The gradient can be a
    /// vector, memory from [`Communicator::alloc`], or a cudarc slice. The gradient's buffer becomes the bucket's
    /// buffer, without a copy, if three conditions are met:
    ///
    /// - The gradient is alone in its bucket ([`Options::own_bucket_bytes`]).
    /// - No part of the gradient was accumulated.
    /// - If the gradient is a cudarc slice, the slice belongs to the same `CudaContext` as the buckets' stream.
    ///
    /// Otherwise, the gradient is copied and freed. After [`finish`](Self::finish), [`Averaged::take`] returns the
    /// mean. Ranks need not make the same choice: one rank may give a gradient that another rank passes to
    /// [`ready`](Self::ready).
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
    /// The errors of [`ready`](Self::ready). A gradient that is refused is freed.
    pub fn give<T: Float>(&mut self, parameter: usize, gradient: impl Into<Flat<T>>) -> Result<()> {
        self.buckets.give("give", parameter, gradient.into())
    }

    /// Ends the step: launches the remaining buckets, waits for all buckets, and returns the means. Collective.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` on every rank if one rank passed no gradient for a parameter. With
    ///   [`Missing::Zeros`](super::Missing::Zeros), a missing gradient is not an error.
    /// - The errors common to all collectives.
    pub fn finish(&mut self) -> Result<Averaged<'_>> {
        self.buckets.finish("finish")?;
        Ok(Averaged { buckets: &mut self.buckets, done: Done::default() })
    }

    /// Averages all gradients in place. Calls [`ready`](Self::ready) for each gradient, from the last to the first, and
    /// then [`finish`](Self::finish). `gradients` must have one gradient for each parameter, in the order of the
    /// parameters. Collective.
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
    /// The errors of [`ready`](Self::ready) and [`finish`](Self::finish), and `InvalidArgument` if the number of
    /// gradients is not the number of parameters. If one gradient is refused, `average` takes no gradient, and this
    /// rank can call `average` again with correct gradients.
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

/// The averaged gradients of a step, with the same bits on every rank. You can use the gradients until the next step
/// begins. See [`DataParallel::finish`].
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

    /// Moves a parameter's averaged gradient out of the buckets. If the buffer that was [given](DataParallel::give) for
    /// the gradient became the bucket's buffer, returns that buffer, or the buffer that a hook returned instead.
    /// Otherwise returns a copy. On a device, the allocation of a copy waits for the caller's stream, without a time
    /// limit.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if there is no such parameter, or `T` is not its type.
    /// - `InvalidArgument` if the parameter's gradient was already taken.
    /// - On a device, also `Cuda` if the driver fails.
    ///
    /// After a gradient was taken, [`gradient`](Self::gradient), [`copy_to`](Self::copy_to) and [`norm`](Self::norm)
    /// also return `InvalidArgument` until the next step.
    pub fn take<T: Float>(&mut self, parameter: usize) -> Result<Flat<T>> {
        self.buckets.move_out("take", parameter)
    }

    /// Returns the norm of all gradients together: the square root of the sum of all elements' squares, computed in
    /// `f64`. Every rank gets the same bits.
    ///
    /// On a device, kernels on the caller's stream sum the squares, and this call waits for that stream. Each gradient
    /// is read once. The kernels and the host add the squares in different orders. For n elements, the norm on the
    /// device differs from the norm on the host by at most (n + 2)·2⁻⁵³ times the norm.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if a gradient was [taken](Self::take). On a device, also `Cuda` or `Poisoned`, and `Timeout`
    /// if the communicator's timeout passes.
    pub fn norm(&self) -> Result<f64> {
        self.buckets.check_all_there("norm")?;
        self.buckets.sum_of_squares(|layout| 0..layout.len).map(f64::sqrt)
    }

    /// Checks that all gradients are finite. Refuses a gradient with an element that is infinite, NaN, or so large that an
    /// `f64` cannot hold its square. Makes no collective call: every rank has the same gradients, so every rank gets
    /// the same result.
    ///
    /// If the check fails, do not use these gradients: skip the step, or continue from a checkpoint. The next step can
    /// follow. To find out which rank computed such a gradient, call [`check_finite`](crate::check_finite) with the
    /// gradients before they are averaged.
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use collectives_train::{DataParallel, Options, Parameter};
    /// let errors = Communicator::run_local(2, |comm| {
    ///     let parameters = vec![Parameter::new::<f32>("weight", &[2]), Parameter::new::<f32>("bias", &[])];
    ///     let mut model = DataParallel::new(comm, parameters, Options::default())?;
    ///     model.ready(0, &[1.0_f32, 2.0])?;
    ///     model.ready(1, &[if comm.rank() == 1 { f32::NAN } else { 0.0 }])?;
    ///     Ok(model.finish()?.check_finite().unwrap_err().to_string())
    /// })?;
    /// assert!(errors[0].contains("parameter 1 \"bias\" (f32[])") && errors[0] == errors[1]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// Reads each gradient once. On a device, this call waits for the caller's stream like [`norm`](Self::norm).
    ///
    /// # Errors
    ///
    /// `InvalidArgument`, which names the first parameter with such a gradient, and the errors of [`norm`](Self::norm).
    pub fn check_finite(&self) -> Result<()> {
        self.buckets.check_all_there("check_finite")?;
        let Some(index) = self.buckets.first_not_finite()? else { return Ok(()) };
        let parameter = self.buckets.parameter(index).map(ToString::to_string).unwrap_or_default();
        let reason = "its averaged gradient is NaN, infinite or too large; skip this step, or continue from an earlier checkpoint";
        Err(Error::argument("check_finite", format!("parameter {index} {parameter}: {reason}")))
    }

    /// Scales all gradients down to a [`norm`](Self::norm) of `limit`, if their norm is larger than `limit`. Returns
    /// the norm before scaling. If that norm is not finite, the gradients stay unchanged. In that case, skip the step.
    /// Each product is computed in `f64` and rounded once.
    ///
    /// On a device, this call waits for the caller's stream like [`norm`](Self::norm), and then queues the
    /// multiplications.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the limit is not a positive number.
    /// - The errors of [`norm`](Self::norm).
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_norm(&mut self, limit: f64) -> Result<f64> {
        let factor = clipping("clip_norm", limit)?;
        let norm = self.norm()?;
        self.scale(factor(norm))?;
        Ok(norm)
    }

    /// Clips these gradients by a norm that covers other gradients too. If `norm` is larger than `limit`, multiplies
    /// these gradients by `limit / norm`, as [`clip_norm`](Self::clip_norm) does. If `norm` is not finite, these
    /// gradients stay unchanged. Makes no collective call. Every rank must pass a `norm` with the same bits, so that
    /// all ranks get the same gradients.
    ///
    /// With tensor parallelism, ranks have different parameters, and the norm must cover the parameters of all ranks:
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
    ///     tp.all_reduce(&mut squares, ReduceOp::Sum)?; // now those of all columns
    ///     dp.broadcast(&mut squares, 0)?; // other tp slices may have summed in another order
    ///     mean.clip_to(squares.sqrt(), 1.0)?;
    ///     Ok(mean.gradient::<f32>(0)?[0])
    /// })?;
    /// assert_eq!(clipped, [0.3, 0.4, 0.3, 0.4], "the norm was 10");
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// If all ranks of `tp` have a copy of a parameter, such as a bias, count the parameter's gradient only once. To do
    /// so, keep such parameters in a separate [`DataParallel`], and add the square of the norm of their gradients after
    /// the all-reduce.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the limit is not a positive number, the norm is negative, or a gradient was
    /// [taken](Self::take). On a device, also `Cuda` if the driver fails.
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

    /// Divides all gradients by a loss's scale. The scaler records whether a gradient is infinite, NaN, or so large
    /// that an `f64` cannot hold its square. Call this method once per step, before [`clip_norm`](Self::clip_norm).
    /// Each quotient is computed in `f64` and rounded once. On a device, this call waits for the caller's stream like
    /// [`norm`](Self::norm).
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if this step's gradients were already unscaled or clipped.
    /// - The errors of [`norm`](Self::norm).
    pub fn unscale(&mut self, scaler: &mut LossScaler) -> Result<()> {
        self.done.check("unscale", Done::Unscaled)?;
        self.buckets.check_all_there("unscale")?;
        self.done = Done::Unscaled;
        self.buckets.unscale(|layout| 0..layout.len, scaler)
    }
}

/// Returns a function that computes, from a norm, the factor that scales gradients down to `limit`. It returns `None`
/// if they stay unchanged.
pub(super) fn clipping(call: &'static str, limit: f64) -> Result<impl Fn(f64) -> Option<f64>> {
    if !(limit > 0.0 && limit.is_finite()) {
        return Err(Error::argument(call, format!("the limit is {limit}; it must be a positive number")));
    }
    Ok(move |norm: f64| (norm.is_finite() && norm > limit).then_some(limit / norm))
}

/// Refuses a value that is not a norm. A norm that is not finite belongs to gradients that are not finite, and is
/// accepted.
pub(super) fn check_norm(norm: f64) -> Result<()> {
    match norm < 0.0 {
        false => Ok(()),
        true => Err(Error::argument("clip_to", format!("the norm is {norm}; it must not be negative"))),
    }
}

impl fmt::Debug for Averaged<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Averaged({} gradients)", self.buckets.len())
    }
}
