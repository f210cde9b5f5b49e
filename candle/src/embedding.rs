//! Embeddings whose rows are split over the ranks.

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::var_builder::ShardedVarBuilder;
use collectives::{Communicator, ReduceOp};

use crate::function::reduce_scatter;
use crate::regions::reduce_from_ranks;
use crate::share::{expect, expect_same_part, part_of, shard, share};

/// An embedding that has this rank's share of the rows. On every rank, ids of shape `[..]` become an output of shape
/// `[.., width]`.
///
/// A vocabulary that cannot be split equally must be padded first. Add rows of zeros to the embedding and to the layer
/// that computes the logits. Give the layer that computes the logits a bias of `-inf` for each row of padding. Padding
/// tokens then have zero probability and do not affect the loss.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    comm: Communicator,
    /// This rank's rows × width.
    weight: Tensor,
    sequence: Option<usize>,
}

impl VocabParallelEmbedding {
    /// Creates the embedding from this rank's rows, a tensor of shape `[vocabulary / ranks, width]`. Every rank must
    /// have the same number of rows. The weight may be a variable.
    ///
    /// # Errors
    ///
    /// Fails if the weight is not a matrix.
    pub fn new(comm: &Communicator, weight: Tensor) -> Result<Self> {
        weight.dims2()?;
        Ok(Self { comm: comm.clone(), weight, sequence: None })
    }

    /// Creates the embedding from this rank's part of a whole embedding, which has the shape `[vocabulary, width]`.
    ///
    /// # Errors
    ///
    /// Fails if the rows cannot be split equally. The error says how many rows of padding to add.
    pub fn split(comm: &Communicator, whole: &Tensor) -> Result<Self> {
        Self::new(comm, part_of(comm, "rows", whole, 0)?)
    }

    /// Reads this rank's part of the tensor `weight` from files that contain the whole tensor.
    ///
    /// # Errors
    ///
    /// The errors of [`split`](Self::split) and of candle.
    pub fn load(comm: &Communicator, vocabulary: usize, width: usize, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let own = share("rows", comm, vocabulary)?;
        let weight = files.get_with_hints((own, width), "weight", shard(comm, 0))?;
        expect("weight", &weight, &[own, width])?;
        Self::new(comm, weight)
    }

    /// Makes the layer return only this rank's part of the output along a dimension, as a
    /// [sequence-parallel](crate::RowParallelLinear::sequence_parallel) layer does. A [`reduce_scatter`] in the forward
    /// pass and an [`all_gather`](crate::all_gather) in the backward pass replace the all-reduce of the forward pass.
    /// Every rank must still pass all ids.
    #[must_use]
    pub fn sequence_parallel(mut self, dimension: usize) -> Self {
        self.sequence = Some(dimension);
        self
    }
    /// Returns this rank's rows, for example for a layer that computes the logits with the same weight.
    #[must_use]
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Computes what [`forward`](Module::forward) computes, but makes its calls on another communicator, in which this
    /// rank has the same number: see [`RowParallelLinear::forward_on`](crate::RowParallelLinear::forward_on).
    ///
    /// # Errors
    ///
    /// Fails if this rank's number or the world size in `comm` differs from that in the layer's own communicator, if an
    /// id is outside the vocabulary, or if [`Communicator::all_reduce`] or candle fails.
    pub fn forward_on(&self, comm: &Communicator, ids: &Tensor) -> Result<Tensor> {
        expect_same_part(&self.comm, comm)?;
        let (rows, width) = self.weight.dims2()?;
        let (own, is_own) = own_ids(comm, ids, rows)?;
        let found = self.weight.embedding(&own.flatten_all()?)?;
        let is_own = is_own.flatten_all()?.to_dtype(self.weight.dtype())?.unsqueeze(D::Minus1)?;
        let shape: Vec<usize> = ids.dims().iter().copied().chain([width]).collect();
        let found = found.broadcast_mul(&is_own)?.reshape(shape)?;
        match self.sequence {
            Some(dimension) => reduce_scatter(comm, &found, dimension, ReduceOp::Sum),
            None => reduce_from_ranks(comm, &found),
        }
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_on(&self.comm, ids)
    }
}

/// Returns the ids relative to this rank's first id (0 for ids of other ranks), and whether each id is this rank's.
/// Reads two numbers from the device, to refuse ids outside the vocabulary.
pub(crate) fn own_ids(comm: &Communicator, ids: &Tensor, rows: usize) -> Result<(Tensor, Tensor)> {
    let vocabulary = rows * comm.world_size();
    let ids = ids.to_dtype(DType::I64)?.contiguous()?;
    if ids.elem_count() > 0 {
        let flat = ids.flatten_all()?;
        let (least, most) = (flat.min(0)?.to_scalar::<i64>()?, flat.max(0)?.to_scalar::<i64>()?);
        if least < 0 || most >= vocabulary as i64 {
            candle_core::bail!("the ids range from {least} to {most}, but the vocabulary has {vocabulary} entries, numbered from 0");
        }
    }
    let first = (comm.rank() * rows) as i64;
    let is_own = (ids.ge(first)? * ids.lt(first + rows as i64)?)?;
    let own = (ids.affine(1.0, -(first as f64))? * is_own.to_dtype(DType::I64)?)?;
    Ok((own.to_dtype(DType::U32)?, is_own))
}
