//! Linear layers whose weight is split over the ranks, as inference engines split models that are too large for one device.
//!
//! A column-parallel layer has a share of the outputs, a row-parallel one a share of the inputs. One after the other they need a single
//! all-reduce, behind the second: `row.forward(&column.forward(x)?.gelu()?)`.

use candle_core::{DType, Module, Result, Tensor};
use collectives::{Communicator, ReduceOp};

use crate::collective::Call;

/// A linear layer that has this rank's share of the outputs.
pub struct ColumnParallel {
    comm: Communicator,
    /// Inputs × this rank's outputs.
    weight: Tensor,
    bias: Tensor,
    gathers: bool,
}

/// A linear layer that takes this rank's share of the inputs.
pub struct RowParallel {
    comm: Communicator,
    /// This rank's inputs × outputs.
    weight: Tensor,
    bias: Tensor,
}

/// The part of a dimension that is this rank's.
fn share(comm: &Communicator, whole: &Tensor, dimension: usize) -> Result<Tensor> {
    let length = whole.dim(dimension)?;
    if !length.is_multiple_of(comm.world_size()) {
        candle_core::bail!("dimension {dimension} of {:?} cannot be split between {} ranks", whole.shape(), comm.world_size());
    }
    let each = length / comm.world_size();
    whole.narrow(dimension, comm.rank() * each, each)?.contiguous()
}

impl ColumnParallel {
    /// This rank's part of a layer with that weight (inputs × outputs) and bias. Where it `gathers`, every rank gets all outputs.
    ///
    /// # Errors
    ///
    /// Outputs that cannot be shared out equally, and those of candle.
    pub fn new(comm: &Communicator, weight: &Tensor, bias: &Tensor, gathers: bool) -> Result<Self> {
        Ok(Self { comm: comm.clone(), weight: share(comm, weight, 1)?, bias: share(comm, bias, 0)?, gathers })
    }
}

impl RowParallel {
    /// This rank's part of a layer with that weight (inputs × outputs) and bias.
    ///
    /// # Errors
    ///
    /// Inputs that cannot be shared out equally, and those of candle.
    pub fn new(comm: &Communicator, weight: &Tensor, bias: &Tensor) -> Result<Self> {
        Ok(Self { comm: comm.clone(), weight: share(comm, weight, 0)?, bias: bias.clone() })
    }
}

impl Module for ColumnParallel {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let part = input.matmul(&self.weight)?.broadcast_add(&self.bias)?;
        if !self.gathers {
            return Ok(part);
        }
        let (rows, columns) = part.dims2()?;
        let ranks = self.comm.world_size();
        let whole = Tensor::zeros((ranks, rows, columns), DType::F32, part.device())?;
        whole.inplace_op1(&Call::AllGather(&self.comm, &part))?;
        // Rank by rank, as it comes, to row by row.
        whole.transpose(0, 1)?.contiguous()?.reshape((rows, ranks * columns))
    }
}

impl Module for RowParallel {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let sum = input.matmul(&self.weight)?;
        sum.inplace_op1(&Call::AllReduce(&self.comm, ReduceOp::Sum))?;
        sum.broadcast_add(&self.bias)
    }
}
