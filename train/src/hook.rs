//! What is done with a full bucket: an all-reduce, as it is or with 16-bit floats, or a reduce-scatter.

use super::flat::{Flat, Pending, Place, not_started};
use super::layout::BucketLayout;
use super::parameter::Float;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// How one bucket's gradients are averaged. Each bucket has a hook of its own, so what a hook remembers from step to step is its bucket's.
///
/// Every rank must make the same calls on `comm` in the same order, and calls should run in the background. So
/// [`start`](Hook::start) is called in the order of the buckets, as they are filled. Once every bucket has been started,
/// [`advance`](Hook::advance) is called for one bucket after the other, round after round, until each is done. A hook of several calls
/// waits for one of them each time and starts the next. Neither function is called for a bucket without elements.
///
/// Where buckets are on a device, calls on `comm` are queued on its stream. A hook does its own work on the stream of the slice
/// ([`Flat::device_mut`]), which is the caller's. cudarc's events order the two, so neither function need wait for the device.
pub trait Hook<T: Float>: Send {
    /// Takes this rank's gradients and starts what there is to be done.
    ///
    /// # Errors
    ///
    /// The step fails, and no other can follow.
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()>;

    /// Waits for what was started last; starts what comes next, or gives the averaged gradients back: in the buffer that was taken, or
    /// one as long.
    ///
    /// # Errors
    ///
    /// As for [`start`](Hook::start).
    fn advance(&mut self, comm: &Communicator) -> Result<Progress<T>>;
}

/// How far a bucket is.
#[derive(Debug)]
pub enum Progress<T: Float> {
    /// Another call was started.
    Started,
    /// The averaged gradients.
    Done(Flat<T>),
}

/// The factor of each rank's gradients in the sum. `Unsupported` for ops that do not add up: what they give is no gradient.
pub(super) fn weight(op: ReduceOp, world_size: usize) -> Result<f64> {
    match op {
        ReduceOp::Avg => Ok(1.0 / world_size as f64),
        ReduceOp::Sum => Ok(1.0),
        ReduceOp::PreMulSum(weight) => Ok(weight),
        other => {
            let reason = "gradients are added up: use ReduceOp::Avg, ReduceOp::Sum or ReduceOp::PreMulSum with a weight for each rank";
            Err(Error::unsupported(format!("averaging gradients by {other}"), reason))
        }
    }
}

/// The plain hook: one all-reduce of the bucket.
#[derive(Debug)]
pub struct AllReduce<T: Float> {
    op: ReduceOp,
    pending: Pending<Flat<T>>,
}

impl<T: Float> AllReduce<T> {
    /// Reduces with `op`.
    #[must_use]
    pub fn new(op: ReduceOp) -> Self {
        Self { op, pending: Pending::Idle }
    }
}

impl<T: Float> Hook<T> for AllReduce<T> {
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()> {
        self.pending = gradients.all_reduce(comm, self.op)?;
        Ok(())
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<T>> {
        self.pending.wait().map(Progress::Done)
    }
}

/// One reduce-scatter of the bucket: this rank's share ends where it lies.
pub(super) struct ReduceScatter<T: Float> {
    op: ReduceOp,
    pending: Pending<Flat<T>>,
}

impl<T: Float> ReduceScatter<T> {
    pub(super) fn new(op: ReduceOp) -> Self {
        Self { op, pending: Pending::Idle }
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

/// A hook that sends gradients of type `T` as `C`s: half the bytes of `f32` with `f16` or `bf16`.
///
/// Each rank's gradient is taken as `f32`s, weighted (by 1/n for a mean), rounded to `f32` and then to `C`; then they are added up as `C`s, and
/// widened again, by way of `f32`. So for n ranks a mean of numbers in `C`'s normal range is off by at most 2⁻¹¹ (`f16`) or 2⁻⁸ (`bf16`) of the
/// weighted magnitudes' sum for the rounding to `C`, at most that again for each partial sum that travels, and 2⁻²³ of it for the roundings
/// to `f32`: so a `Compress<f64, f64>` has the precision and range of `f32`. Small numbers are rounded to multiples of `C`'s smallest: in
/// `f16` of 6·10⁻⁸ below 6·10⁻⁵, in `bf16` of 9·10⁻⁴¹ below 10⁻³⁸; up to half of that becomes zero. In `f16` what rounds beyond 65504
/// becomes infinite.
///
/// Costs a buffer of as many `C`s beside each bucket.
///
/// ```
/// # use collectives::{Communicator, ReduceOp, bf16};
/// # use collectives_train::{Compress, DataParallel, Options, Parameter};
/// Communicator::run_local(2, |comm| {
///     let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("weight", &[1000])], Options::default())?;
///     model.set_hooks::<f32>(|layout| Ok(Box::new(Compress::<f32, bf16>::new(comm, layout, ReduceOp::Avg)?)))?;
///     model.ready(0, &[1.0 + comm.rank() as f32; 1000])?;
///     assert_eq!(model.finish()?.gradient::<f32>(0)?[999], 1.5);
///     Ok(())
/// })?;
/// # Ok::<(), collectives::Error>(())
/// ```
#[doc(alias("fp16_compress_hook", "bf16_compress_hook"))]
#[derive(Debug)]
pub struct Compress<T: Float, C: Float> {
    weight: f64,
    /// The bucket, while its gradients are elsewhere.
    wide: Option<Flat<T>>,
    /// What travels, while nothing does.
    narrow: Option<Flat<C>>,
    pending: Pending<Flat<C>>,
}

impl<T: Float, C: Float> Compress<T, C> {
    /// For one bucket. Collective.
    ///
    /// # Errors
    ///
    /// `Unsupported` for an op that does not add up, and those of [`Communicator::alloc`].
    pub fn new(comm: &Communicator, layout: &BucketLayout, op: ReduceOp) -> Result<Self> {
        Self::in_place(comm, &Place::Host, layout, op)
    }

    /// For one bucket of a [`DataParallel::on_device`](super::DataParallel::on_device), with its stream. Conversions are queued there, by
    /// kernels of the crate's, and give the same bits as on the host, but for those of NaNs; how their sums are rounded is NCCL's matter.
    /// Not collective.
    ///
    /// # Errors
    ///
    /// `Unsupported` for an op that does not add up, and those of [`Flat::on_device`].
    #[cfg(feature = "cuda")]
    pub fn on_device(
        comm: &Communicator,
        stream: &std::sync::Arc<cudarc::driver::CudaStream>,
        layout: &BucketLayout,
        op: ReduceOp,
    ) -> Result<Self> {
        Self::in_place(comm, &Place::on_device(stream), layout, op)
    }

    fn in_place(comm: &Communicator, place: &Place, layout: &BucketLayout, op: ReduceOp) -> Result<Self> {
        let weight = weight(op, comm.world_size())?;
        Ok(Self { weight, wide: None, narrow: Some(Flat::in_place(comm, place, layout.len)?), pending: Pending::Idle })
    }
}

impl<T: Float, C: Float> Hook<T> for Compress<T, C> {
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()> {
        let mut narrow = self.narrow.take().ok_or_else(not_started)?;
        narrow.convert_from(&gradients, self.weight)?;
        self.wide = Some(gradients);
        self.pending = narrow.all_reduce(comm, ReduceOp::Sum)?;
        Ok(())
    }

    fn advance(&mut self, _comm: &Communicator) -> Result<Progress<T>> {
        let narrow = self.pending.wait()?;
        let mut wide = self.wide.take().ok_or_else(not_started)?;
        wide.convert_from(&narrow, 1.0)?;
        self.narrow = Some(narrow);
        Ok(Progress::Done(wide))
    }
}
