//! Losses over logits that are split over the ranks.

use candle_core::{D, DType, Result, Tensor};
use collectives::{Communicator, ReduceOp};

use crate::embedding::own_ids;
use crate::function::all_reduce;
use crate::regions::reduce_from_ranks;

/// Returns the mean cross-entropy of logits that are split over the ranks along the last dimension. Each rank passes
/// logits of shape `[rows, vocabulary / ranks]`. The targets have the shape `[rows]`. The targets must be the same on
/// every rank, and every rank gets the same loss. No rank ever has a whole row of logits in memory.
///
/// Logits may be `-inf`, for example for padding. If logits are `f16` or `bf16`, the function makes an `f32` copy of
/// the logits, because a sum over a vocabulary would stop growing in `f16` or `bf16`. The loss is then `f32`, and the
/// gradient has the type of the logits.
///
/// # Cost
///
/// The forward pass makes three all-reduces, each of `rows` numbers. The backward pass does not communicate.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use collectives_candle::{run_local, vocab_parallel_cross_entropy};
///
/// let losses = run_local(2, |comm| {
///     let logits = Tensor::zeros((3, 5), candle_core::DType::F32, &Device::Cpu)?; // 5 of 10, all equal
///     let targets = Tensor::new(&[0_u32, 4, 9], &Device::Cpu)?;
///     vocab_parallel_cross_entropy(comm, &logits, &targets)?.to_scalar::<f32>()
/// })?;
/// assert!((losses[0] - 10.0_f32.ln()).abs() < 1e-6 && losses[0] == losses[1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Fails if a target is outside the vocabulary, or if [`Communicator::all_reduce`] or candle fails.
pub fn vocab_parallel_cross_entropy(comm: &Communicator, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (rows, own) = logits.dims2()?;
    if targets.dims() != [rows] {
        candle_core::bail!("{rows} rows of logits need one target each, but the targets have shape {:?}", targets.dims());
    }
    let (targets, is_own) = own_ids(comm, targets, own)?;
    let logits = &if matches!(logits.dtype(), DType::F16 | DType::BF16) { logits.to_dtype(DType::F32)? } else { logits.clone() };
    let largest = all_reduce(comm, &logits.detach().max_keepdim(D::Minus1)?, ReduceOp::Max)?.detach();
    let shifted = logits.broadcast_sub(&largest)?;
    let sums = reduce_from_ranks(comm, &shifted.exp()?.sum(D::Minus1)?)?;
    let chosen = shifted.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?;
    // Selected, not multiplied by a mask: the value in the place of another rank's target may be -inf.
    let chosen = is_own.where_cond(&chosen, &chosen.zeros_like()?)?;
    (sums.log()? - reduce_from_ranks(comm, &chosen)?)?.mean_all()
}
