//! Linear layers and embeddings whose weights are split over the ranks, for inference and for training.
//!
//! A column-parallel layer has a share of the outputs, a row-parallel one a share of the inputs. One after the other they need one all-reduce
//! forward, behind the second, and one backward, before the first.

use candle_core::{D, DType, Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::var_builder::{Shard, ShardedVarBuilder};
use collectives::Communicator;

use crate::function::{all_gather, reduce_scatter};
use crate::regions::{copy_to_ranks, gather_from_ranks, reduce_from_ranks};

/// This rank's part of a dimension.
fn part_of(comm: &Communicator, whole: &Tensor, dimension: usize) -> Result<Tensor> {
    let length = whole.dim(dimension)?;
    if !length.is_multiple_of(comm.world_size()) {
        candle_core::bail!("dimension {dimension} of {:?} cannot be split between {} ranks", whole.shape(), comm.world_size());
    }
    let each = length / comm.world_size();
    whole.narrow(dimension, comm.rank() * each, each)?.contiguous()
}

/// A rank's part of a tensor in a file.
fn shard(comm: &Communicator, dim: usize) -> Shard {
    Shard { dim, rank: comm.rank(), world_size: comm.world_size() }
}

/// Refuses a part of another shape than expected.
fn expect(what: &str, part: &Tensor, shape: &[usize]) -> Result<()> {
    if part.dims() == shape {
        return Ok(());
    }
    candle_core::bail!("{what} of this rank has the shape {:?}, and {shape:?} was expected", part.dims())
}

/// How many of a dimension a rank has.
fn share(what: &str, comm: &Communicator, whole: usize) -> Result<usize> {
    if whole.is_multiple_of(comm.world_size()) {
        return Ok(whole / comm.world_size());
    }
    candle_core::bail!("{whole} {what} cannot be split between {} ranks", comm.world_size())
}

/// A linear layer that has this rank's share of the outputs: `[.., inputs]` on every rank becomes `[.., outputs / ranks]`.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear {
    comm: Communicator,
    linear: Linear,
    gathers: bool,
    sequence: Option<usize>,
}

impl ColumnParallelLinear {
    /// The layer of this rank's weight, `[outputs / ranks, inputs]`, and bias, `[outputs / ranks]`. They may be variables.
    ///
    /// # Errors
    ///
    /// A bias of another length.
    pub fn new(comm: &Communicator, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let outputs = weight.dim(0)?;
        bias.iter().try_for_each(|bias| expect("the bias", bias, &[outputs]))?;
        Ok(Self { comm: comm.clone(), linear: Linear::new(weight, bias), gathers: false, sequence: None })
    }

    /// This rank's part of a whole layer.
    ///
    /// # Errors
    ///
    /// Outputs that cannot be split equally.
    pub fn split(comm: &Communicator, whole: &Linear) -> Result<Self> {
        let bias = whole.bias().map(|bias| part_of(comm, bias, 0)).transpose()?;
        Self::new(comm, part_of(comm, whole.weight(), 0)?, bias)
    }

    /// Reads this rank's part of `weight`, and of `bias` where there is to be one, from files of whole tensors. Nothing else is read.
    ///
    /// # Errors
    ///
    /// Outputs that cannot be split equally, and those of candle.
    pub fn load(comm: &Communicator, inputs: usize, outputs: usize, bias: bool, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let own = share("outputs", comm, outputs)?;
        let weight = files.get_with_hints((own, inputs), "weight", shard(comm, 0))?;
        expect("weight", &weight, &[own, inputs])?;
        let bias = bias.then(|| files.get_with_hints(own, "bias", shard(comm, 0))).transpose()?;
        Self::new(comm, weight, bias)
    }

    /// Gives every rank all outputs: a gather forward.
    #[must_use]
    pub fn gathering(mut self) -> Self {
        self.gathers = true;
        self
    }

    /// Takes this rank's part of the input along a dimension, as a [sequence-parallel](RowParallelLinear::sequence_parallel) layer leaves it: an
    /// [`all_gather`] forward, a [`reduce_scatter`] backward, in place of the all-reduce.
    #[must_use]
    pub fn sequence_parallel(mut self, dimension: usize) -> Self {
        self.sequence = Some(dimension);
        self
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let input = match self.sequence {
            Some(dimension) => all_gather(&self.comm, input, dimension)?,
            None => copy_to_ranks(&self.comm, input)?,
        };
        let output = self.linear.forward(&input.contiguous()?)?;
        if self.gathers { gather_from_ranks(&self.comm, &output, output.rank() - 1) } else { Ok(output) }
    }
}

/// A linear layer that takes this rank's share of the inputs: `[.., inputs / ranks]` becomes `[.., outputs]` on every rank.
#[derive(Debug, Clone)]
pub struct RowParallelLinear {
    comm: Communicator,
    linear: Linear,
    bias: Option<Tensor>,
    sequence: Option<usize>,
}

impl RowParallelLinear {
    /// The layer of this rank's weight, `[outputs, inputs / ranks]`, and the whole bias, `[outputs]`, the same on every rank. They may be
    /// variables.
    ///
    /// # Errors
    ///
    /// A bias of another length.
    pub fn new(comm: &Communicator, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let outputs = weight.dim(0)?;
        bias.iter().try_for_each(|bias| expect("the bias", bias, &[outputs]))?;
        Ok(Self { comm: comm.clone(), linear: Linear::new(weight, None), bias, sequence: None })
    }

    /// This rank's part of a whole layer.
    ///
    /// # Errors
    ///
    /// Inputs that cannot be split equally.
    pub fn split(comm: &Communicator, whole: &Linear) -> Result<Self> {
        Self::new(comm, part_of(comm, whole.weight(), 1)?, whole.bias().cloned())
    }

    /// Reads this rank's part of `weight`, and the whole of `bias` where there is to be one, from files of whole tensors.
    ///
    /// # Errors
    ///
    /// Inputs that cannot be split equally, and those of candle.
    pub fn load(comm: &Communicator, inputs: usize, outputs: usize, bias: bool, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let own = share("inputs", comm, inputs)?;
        let weight = files.get_with_hints((outputs, own), "weight", shard(comm, 1))?;
        expect("weight", &weight, &[outputs, own])?;
        let bias = bias.then(|| files.get(outputs, "bias")).transpose()?;
        Self::new(comm, weight, bias)
    }

    /// Leaves each rank its part of the output along a dimension: a [`reduce_scatter`] forward, an [`all_gather`] backward, in place of the
    /// all-reduce. What follows, up to the next [column-parallel](ColumnParallelLinear::sequence_parallel) layer, works on parts; weights that all ranks
    /// have, as a norm's, go through [`copy_to_ranks`](crate::copy_to_ranks) there.
    #[must_use]
    pub fn sequence_parallel(mut self, dimension: usize) -> Self {
        self.sequence = Some(dimension);
        self
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let sum = self.linear.forward(input)?;
        let (output, bias) = match self.sequence {
            // Each rank adds the bias to other rows, so its gradient is the ranks' sum.
            Some(dimension) => {
                let bias = self.bias.as_ref().map(|bias| copy_to_ranks(&self.comm, bias)).transpose()?;
                (reduce_scatter(&self.comm, &sum, dimension)?, bias)
            }
            None => (reduce_from_ranks(&self.comm, &sum)?, self.bias.clone()),
        };
        match bias {
            Some(bias) => output.broadcast_add(&bias),
            None => Ok(output),
        }
    }
}

/// An embedding that has this rank's share of the rows: `[..]` of ids becomes `[.., width]` on every rank.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    comm: Communicator,
    /// This rank's rows × width.
    weight: Tensor,
}

impl VocabParallelEmbedding {
    /// The embedding of this rank's rows, `[vocabulary / ranks, width]`, as many on every rank. They may be a variable.
    ///
    /// # Errors
    ///
    /// A weight of another rank than two.
    pub fn new(comm: &Communicator, weight: Tensor) -> Result<Self> {
        weight.dims2()?;
        Ok(Self { comm: comm.clone(), weight })
    }

    /// This rank's part of a whole embedding, `[vocabulary, width]`.
    ///
    /// # Errors
    ///
    /// Rows that cannot be split equally.
    pub fn split(comm: &Communicator, whole: &Tensor) -> Result<Self> {
        Self::new(comm, part_of(comm, whole, 0)?)
    }

    /// Reads this rank's part of `weight` from files of whole tensors.
    ///
    /// # Errors
    ///
    /// Rows that cannot be split equally, and those of candle.
    pub fn load(comm: &Communicator, vocabulary: usize, width: usize, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let own = share("rows", comm, vocabulary)?;
        let weight = files.get_with_hints((own, width), "weight", shard(comm, 0))?;
        expect("weight", &weight, &[own, width])?;
        Self::new(comm, weight)
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (rows, width) = self.weight.dims2()?;
        let (own, is_own) = own_ids(&self.comm, ids, rows)?;
        let found = self.weight.embedding(&own.flatten_all()?)?;
        let is_own = is_own.flatten_all()?.to_dtype(self.weight.dtype())?.unsqueeze(D::Minus1)?;
        let shape: Vec<usize> = ids.dims().iter().copied().chain([width]).collect();
        reduce_from_ranks(&self.comm, &found.broadcast_mul(&is_own)?.reshape(shape)?)
    }
}

/// Ids counted from this rank's first one, 0 where they are another rank's, and whether they are this rank's. Reads two numbers from the device, to
/// refuse ids that are nobody's.
pub(crate) fn own_ids(comm: &Communicator, ids: &Tensor, rows: usize) -> Result<(Tensor, Tensor)> {
    let vocabulary = rows * comm.world_size();
    let ids = ids.to_dtype(DType::I64)?.contiguous()?;
    if ids.elem_count() > 0 {
        let flat = ids.flatten_all()?;
        let (least, most) = (flat.min(0)?.to_scalar::<i64>()?, flat.max(0)?.to_scalar::<i64>()?);
        if least < 0 || most >= vocabulary as i64 {
            candle_core::bail!("ids from {least} to {most}, of {vocabulary} that there are");
        }
    }
    let first = (comm.rank() * rows) as i64;
    let is_own = (ids.ge(first)? * ids.lt(first + rows as i64)?)?;
    let own = (ids.affine(1.0, -(first as f64))? * is_own.to_dtype(DType::I64)?)?;
    Ok((own.to_dtype(DType::U32)?, is_own))
}
