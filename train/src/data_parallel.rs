//! Gradients averaged over all ranks while the backward pass goes on, and what a finished step gives: means, their norm, clipping.

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

/// Averages a model's gradients over all ranks, in buckets, while the backward pass still computes others.
///
/// In each step every gradient is handed in with [`ready`](Self::ready), in any order, and [`finish`](Self::finish) gives the means:
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
/// Where a framework hands out all gradients at once, [`average`](Self::average) does the same in one call.
///
/// **Order.** Buckets are launched in the order of their numbers on every rank, so parameters may become ready in different orders on
/// different ranks. Other collectives on the same communicator, between the first `ready` and `finish`, must come at the same place on
/// every rank, which only ranks with the same order can promise: make them on one of their own ([`Communicator::split`]).
///
/// **Errors.** A wrong length or type, and a gradient given twice, are refused by the call that brings them, and nothing has happened.
/// What goes wrong in the background comes out of `finish`; after a lost peer, a deadline or a mismatch every later call says `Poisoned`:
/// make another one from what [`Communicator::shrink`] gives.
///
/// **Memory.** The buckets hold every gradient once: the bytes of all gradients, from [`Communicator::alloc`]. Hooks add what they
/// say. The caller's own gradients are copied and can be freed as soon as `ready` returns; one that is [given](Self::give) lives,
/// beside its bucket's own memory, until it is [taken](Averaged::take), or the next step's comes.
///
/// On one rank a step makes no call of the communicator's, but for `PreMulSum`, which weights, and what a hook of one's own calls.
pub struct DataParallel {
    buckets: Buckets,
}

/// A trainer keeps it beside the communicator, and moves both into a thread.
const _: () = {
    const fn sendable<T: Send + 'static>() {}
    sendable::<DataParallel>();
};

impl DataParallel {
    /// Makes the buckets of a model's parameters, listed in the order in which the forward pass uses them: the backward pass comes
    /// the other way. Collective.
    ///
    /// # Errors
    ///
    /// `Mismatch` naming the first parameter or setting in which two ranks differ, `InvalidArgument` for types that gradients do not
    /// have, `Unsupported` for an op that does not add up, and those of [`Communicator::alloc`].
    #[doc(alias = "DistributedDataParallel")]
    pub fn new(comm: &Communicator, parameters: Vec<Parameter>, options: Options) -> Result<Self> {
        let buckets = Buckets::new(comm, "DataParallel::new", parameters, &options, &Place::Host, Ending::Whole)?;
        Ok(Self { buckets })
    }

    /// As [`new`](Self::new), with the buckets on the stream's device, which is the communicator's. Gradients are copied into them on
    /// `stream`, on which the backward pass runs; reductions are queued on the communicator's own
    /// ([`Device::stream`](collectives::Device::stream), or that of [`Communicator::with_stream`]) and run beside it, ordered by the buckets' events; so
    /// `finish` waits for no device. What [`Averaged`] gives is to be used on `stream`, or ordered by events of cudarc's.
    ///
    /// Accumulating, norms and clipping are done there, by kernels of the crate's on `stream`. Of the hooks, [`Compress`](super::Compress)
    /// has an `on_device` of its own, and [`PowerSgd`](super::PowerSgd) is for host memory.
    ///
    /// The first buckets on a device load those kernels, for which the driver may wait until what was started there has ended: make them
    /// while no device call is under way.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new), and what the driver refuses: `NoDevice` where the communicator of several ranks has no device backend,
    /// `InvalidArgument` for a stream of another device, `Cuda`. Where one rank fails all do, the others with an `Io` that names it.
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

    /// Has the buckets of type `T` averaged in another way. `make` is called once for each, between two steps. Every rank must give
    /// hooks that make the same calls. A hook that panics ends the steps, as one that fails does.
    ///
    /// # Errors
    ///
    /// Those of `make`: all hooks stay as they were; `InvalidArgument` once a gradient of a step was given, and `Poisoned` after a
    /// step that failed.
    #[doc(alias = "register_comm_hook")]
    pub fn set_hooks<T: Float>(&mut self, make: impl FnMut(&BucketLayout) -> Result<Box<dyn Hook<T>>>) -> Result<()> {
        self.buckets.set_hooks(make)
    }

    /// The buckets, in the order in which they are launched.
    pub fn layouts(&self) -> impl ExactSizeIterator<Item = &BucketLayout> {
        self.buckets.layouts()
    }

    /// The communicator it was made with.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        self.buckets.comm()
    }

    /// Copies the root's values of a parameter to every rank, so that all start alike. Collective. On the host and on devices.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for another length or type than the parameter's, and those of [`Communicator::broadcast`].
    pub fn broadcast<B: BufferMut + ?Sized>(&self, parameter: usize, values: &mut B, root: usize) -> Result<()> {
        self.buckets.broadcast(parameter, values, root)
    }

    /// Adds a part of a parameter's gradient, which stays on this rank for now: of a batch in several parts, all but the last are
    /// accumulated. The mean is over ranks, not over parts: divide by their number yourself.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a length or type that is not the parameter's, and where it is ready already; `Poisoned` after a step that failed.
    #[doc(alias = "no_sync")]
    pub fn accumulate<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("accumulate", parameter, gradient.memory(), false)
    }

    /// Hands in a parameter's gradient, or, after [`accumulate`](Self::accumulate), the last part of it. Where that fills a bucket,
    /// and all buckets before it have been launched, it is launched. Does not wait for other ranks.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a length or type that is not the parameter's, and where it was ready already in this step; `Poisoned` after a
    /// step that failed; those of a hook.
    pub fn ready<B>(&mut self, parameter: usize, gradient: &B) -> Result<()>
    where
        B: Buffer<Element: Float> + ?Sized,
    {
        self.buckets.take("ready", parameter, gradient.memory(), true)
    }

    /// As [`ready`](Self::ready), with a gradient that nobody else needs any more: a vector, what [`Communicator::alloc`] gave, a slice of
    /// cudarc's. Where it is alone in its bucket ([`Options::own_bucket_bytes`]), nothing was accumulated, and a slice belongs to the very
    /// `CudaContext` of the buckets' stream, its buffer becomes the
    /// bucket's, without a copy; else it is copied and freed. [`Averaged::take`] moves the mean out again. Ranks may do as they like: one may
    /// give where another copies.
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
    /// As for [`ready`](Self::ready). A gradient that is refused is freed.
    pub fn give<T: Float>(&mut self, parameter: usize, gradient: impl Into<Flat<T>>) -> Result<()> {
        self.buckets.give("give", parameter, gradient.into())
    }

    /// Ends the step: launches the other buckets, waits for all, and gives the means. Collective.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` on every rank where one gave no gradient for a parameter ([`Missing`](super::Missing) has the choice), and
    /// those of collectives.
    pub fn finish(&mut self) -> Result<Averaged<'_>> {
        self.buckets.finish("finish")?;
        Ok(Averaged { buckets: &mut self.buckets, done: Done::default() })
    }

    /// Averages all gradients in place: [`ready`](Self::ready) for each, the last first, and [`finish`](Self::finish). One for each
    /// parameter, in order. Collective.
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
    /// As for these two, and `InvalidArgument` for another number of gradients than parameters. Where one cannot be taken none is: this
    /// rank can call again with others.
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

    /// Moves a parameter's gradient out: the buffer that was [given](DataParallel::give) for it, else a copy (or what a hook
    /// gave back in its place). On a device making room for a copy waits for the caller's stream, without a limit.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there is no such parameter, or `T` is not its type; on a device `Cuda`. Once a gradient was taken, this,
    /// [`gradient`](Self::gradient), [`copy_to`](Self::copy_to) and [`norm`](Self::norm) refuse it until the next step.
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

    /// Multiplies all gradients so that their [`norm`](Self::norm) is `limit`, where it is larger. Gives the norm that was there before.
    /// Where that is not finite the gradients stay as they are: skip the step. Each product is made in `f64` and rounded once.
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

    /// As [`clip_norm`](Self::clip_norm) by a norm of more gradients than these: multiplies these so that a norm of `norm` becomes `limit`, where it is larger.
    /// Where `norm` is not finite they stay as they are. Makes no call: every rank passes the same bits, so that all ranks go on alike.
    ///
    /// With tensor parallelism each rank has other parameters than the ranks beside it, and the norm is that of all:
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
    /// What all ranks of `tp` have alike, as biases, counts once: keep it in a [`DataParallel`] of its own, and add its square behind the all-reduce.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a limit that is not a positive number, a negative norm, and where a gradient was [taken](Self::take). On a device `Cuda`.
    pub fn clip_to(&mut self, norm: f64, limit: f64) -> Result<()> {
        let factor = clipping("clip_to", limit)?;
        check_norm(norm)?;
        self.buckets.check_all_there("clip_to")?;
        self.scale(factor(norm))
    }

    /// Multiplies all gradients, where there is a factor: the end of clipping.
    fn scale(&mut self, factor: Option<f64>) -> Result<()> {
        self.done = Done::Clipped;
        factor.map_or(Ok(()), |factor| self.buckets.scale(|layout| 0..layout.len, factor))
    }

    /// Divides all gradients by a loss's scale, and has the scaler note where one is infinite or no number, or so large that an `f64` cannot hold its
    /// square. Comes once a step, before [`clip_norm`](Self::clip_norm). Each quotient is made in `f64` and rounded once. On a device it waits as
    /// [`norm`](Self::norm) does.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where this step's gradients were unscaled or clipped already, and those of [`norm`](Self::norm).
    pub fn unscale(&mut self, scaler: &mut LossScaler) -> Result<()> {
        self.done.check("unscale", Done::Unscaled)?;
        self.buckets.check_all_there("unscale")?;
        self.done = Done::Unscaled;
        self.buckets.unscale(|layout| 0..layout.len, scaler)
    }
}

/// The factor that brings gradients of a norm down to `limit`; `None` where they stay as they are.
pub(super) fn clipping(call: &'static str, limit: f64) -> Result<impl Fn(f64) -> Option<f64>> {
    if !(limit > 0.0 && limit.is_finite()) {
        return Err(Error::argument(call, format!("a limit of {limit}; it must be a positive number")));
    }
    Ok(move |norm: f64| (norm.is_finite() && norm > limit).then_some(limit / norm))
}

/// Refuses what is no norm. One that is not finite is that of gradients that are not.
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
