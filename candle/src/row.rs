//! Linear layers whose inputs are split over the ranks.

use candle_core::{Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::var_builder::ShardedVarBuilder;
use collectives::{Communicator, ReduceOp};

use crate::function::reduce_scatter;
use crate::regions::{copy_to_ranks, reduce_from_ranks};
use crate::share::{expect, part_of, shard, share};

/// A linear layer that takes this rank's share of the inputs. On every rank, an input of shape `[.., inputs / ranks]`
/// becomes an output of shape `[.., outputs]`.
#[derive(Debug, Clone)]
pub struct RowParallelLinear {
    comm: Communicator,
    linear: Linear,
    bias: Option<Tensor>,
    sequence: Option<usize>,
}

impl RowParallelLinear {
    /// Creates the layer from this rank's weight and the whole bias. The weight has the shape `[outputs, inputs /
    /// ranks]`, and the bias has the shape `[outputs]`. The bias must be the same on every rank. Weight and bias may be
    /// variables.
    ///
    /// # Errors
    ///
    /// Fails if the weight is not a matrix, or if the bias has the wrong length.
    pub fn new(comm: &Communicator, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (outputs, _) = weight.dims2()?;
        bias.iter().try_for_each(|bias| expect("the bias", bias, &[outputs]))?;
        Ok(Self { comm: comm.clone(), linear: Linear::new(weight, None), bias, sequence: None })
    }

    /// Creates the layer from this rank's part of a whole layer.
    ///
    /// # Errors
    ///
    /// Fails if the inputs cannot be split equally.
    pub fn split(comm: &Communicator, whole: &Linear) -> Result<Self> {
        Self::new(comm, part_of(comm, "inputs", whole.weight(), 1)?, whole.bias().cloned())
    }

    /// Reads this rank's part of the tensor `weight` from files that contain the whole tensor. If the argument `bias`
    /// is true, also reads the whole tensor `bias`.
    ///
    /// # Errors
    ///
    /// Fails if the inputs cannot be split equally, or if candle fails.
    pub fn load(comm: &Communicator, inputs: usize, outputs: usize, bias: bool, files: &ShardedVarBuilder<'_>) -> Result<Self> {
        let own = share("inputs", comm, inputs)?;
        let weight = files.get_with_hints((outputs, own), "weight", shard(comm, 1))?;
        expect("weight", &weight, &[outputs, own])?;
        let bias = bias.then(|| files.get(outputs, "bias")).transpose()?;
        Self::new(comm, weight, bias)
    }

    /// Gives each rank its part of the output along a dimension. A [`reduce_scatter`] in the forward pass and an
    /// [`all_gather`](crate::all_gather) in the backward pass replace the all-reduce of the forward pass.
    ///
    /// The layers up to the next [column-parallel](crate::ColumnParallelLinear::sequence_parallel) layer then work on
    /// this rank's part. If these layers have weights that are the same on all ranks, such as the weights of a
    /// normalisation layer, pass these weights through [`copy_to_ranks`].
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
            // Each rank adds the bias to different rows, so its gradient is the sum over the ranks.
            Some(dimension) => {
                let bias = self.bias.as_ref().map(|bias| copy_to_ranks(&self.comm, bias)).transpose()?;
                (reduce_scatter(&self.comm, &sum, dimension, ReduceOp::Sum)?, bias)
            }
            None => (reduce_from_ranks(&self.comm, &sum)?, self.bias.clone()),
        };
        match bias {
            Some(bias) => output.broadcast_add(&bias),
            None => Ok(output),
        }
    }
}
