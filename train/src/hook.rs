//! The operation on a full bucket: an all-reduce, in the bucket's own type or with 16-bit floats, or a reduce-scatter.

use super::flat::{Flat, Pending, Place, not_started};
use super::layout::BucketLayout;
use super::parameter::Float;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Averages one bucket's gradients. Each bucket has its own hook, so a hook's state between steps belongs to one
/// bucket.
///
/// Every rank must make the same calls on `comm` in the same order, and calls should run in the background. So
/// [`start`](Hook::start) is called once for each full bucket, in the order of the buckets. After every bucket has been
/// started, [`advance`](Hook::advance) is called in rounds. Each round calls `advance` once for every bucket that is
/// not done, in the order of the buckets. In each round, a hook that makes several calls waits for one call, and starts
/// the next call. For an empty bucket, `start` and `advance` are not called.
///
/// If buckets are on a device, calls on `comm` are queued on the communicator's stream. A hook does its own work on the
/// stream of the slice that [`Flat::device_mut`] returns. This is the caller's stream. cudarc's events order the work
/// on the two streams, so neither `start` nor `advance` needs to wait for the device.
pub trait Hook<T: Float>: Send {
    /// Takes this rank's gradients and starts the first call.
    ///
    /// # Errors
    ///
    /// If the hook returns an error, the step fails, and no other step can follow.
    fn start(&mut self, comm: &Communicator, gradients: Flat<T>) -> Result<()>;

    /// Waits for the call that was started last. Then either starts the next call or returns the averaged gradients.
    /// The returned buffer must be the buffer that `start` took, or another buffer of the same length.
    ///
    /// # Errors
    ///
    /// If the hook returns an error, the step fails, and no other step can follow.
    fn advance(&mut self, comm: &Communicator) -> Result<Progress<T>>;
}

/// The progress of a bucket.
#[derive(Debug)]
pub enum Progress<T: Float> {
    /// Another call was started.
    Started,
    /// The averaged gradients.
    Done(Flat<T>),
}

/// Returns the factor by which each rank's gradients are multiplied in the sum. Returns `Unsupported` for ops that are
/// not sums, because their results are not gradients.
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
    /// Creates a hook that reduces with `op`.
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

/// One reduce-scatter of the bucket. The result replaces only this rank's share of the bucket.
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

/// A hook that converts gradients of type `T` to type `C` before they are sent. If `C` is `f16` or `bf16`, the hook
/// sends half as many bytes as an all-reduce of `f32`.
///
/// Each rank's gradient is converted to `f32`, weighted (by 1/n for a mean), rounded to `f32` and then to `C`. The
/// ranks' values are summed as `C`, and the sum is converted back to `T` via `f32`. Consider a mean over n ranks, of
/// numbers in `C`'s normal range. The error of this mean, divided by the sum of the weighted magnitudes, is at most the
/// sum of:
///
/// - 2⁻¹¹ (`f16`) or 2⁻⁸ (`bf16`) for the rounding to `C`,
/// - 2⁻¹¹ (`f16`) or 2⁻⁸ (`bf16`) for each partial sum that is sent,
/// - 2⁻²³ for the roundings to `f32`. So a `Compress<f64, f64>` has the precision and range of `f32`.
///
/// Numbers below `C`'s normal range are rounded to multiples of the smallest positive number of type `C`. In `f16`,
/// this smallest number is 6·10⁻⁸, and the normal range begins at 6·10⁻⁵. In `bf16`, it is 9·10⁻⁴¹, and the normal
/// range begins at 10⁻³⁸. A number whose magnitude is at most half of the smallest number becomes zero. In `f16`,
/// values that would be rounded to more than 65504 become infinite.
///
/// For each bucket, this hook needs another buffer, which has the bucket's length and elements of type `C`.
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
    /// The bucket's buffer, while its gradients are in the narrow buffer.
    wide: Option<Flat<T>>,
    /// The buffer to send, except while a call has it.
    narrow: Option<Flat<C>>,
    pending: Pending<Flat<C>>,
}

impl<T: Float, C: Float> Compress<T, C> {
    /// Creates the hook for one bucket. Collective.
    ///
    /// # Errors
    ///
    /// `Unsupported` for an op other than `Avg`, `Sum` and `PreMulSum`, and the errors of [`Communicator::alloc`].
    pub fn new(comm: &Communicator, layout: &BucketLayout, op: ReduceOp) -> Result<Self> {
        Self::in_place(comm, &Place::Host, layout, op)
    }

    /// Creates the hook for one bucket of a `DataParallel` made with [`on_device`](super::DataParallel::on_device).
    /// Pass the stream that you passed there. The crate's kernels convert elements on this stream, and give the same
    /// bits as on the host, except for NaNs. NCCL decides how the sums are rounded. Not collective.
    ///
    /// # Errors
    ///
    /// `Unsupported` for an op other than `Avg`, `Sum` and `PreMulSum`, and the errors of [`Flat::on_device`].
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
