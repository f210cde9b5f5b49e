//! Gradients that travel as 16-bit floats.

use super::flat::{Flat, Place};
use super::float::Float;
use super::hook::{Hook, Progress, weight};
use super::layout::BucketLayout;
use super::pending::{Pending, not_started};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::op::ReduceOp;

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
/// # use collectives::train::{Compress, DataParallel, Options, Parameter};
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
    /// kernels of the crate's, and give the same bits as on the host, but for those of NaNs; what sums NCCL makes of them is NCCL's. This
    /// rank's own affair.
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
