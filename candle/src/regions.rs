//! The operations that begin and end a part of a model that is split over ranks. Outside this part every rank has the
//! same tensors and computes the same loss. The gradient of the part's output is therefore already the same on every
//! rank, and is not summed again.

use candle_core::{Result, Tensor};
use collectives::{Communicator, ReduceOp};

use crate::function::{Function, Step};

fn region(comm: &Communicator, tensor: &Tensor, dimension: usize, forward: Step, backward: Step) -> Result<Tensor> {
    Function { comm: comm.clone(), forward, backward: Some(backward) }.apply(tensor, dimension)
}

/// Begins a split part of a model. The input of this part is the whole tensor on every rank. The forward pass makes no
/// collective call, and copies the tensor only if candle tracks the tensor for a backward pass. The backward pass sums
/// the gradients over the ranks.
///
/// # Errors
///
/// Fails if candle fails. The backward pass also fails if [`Communicator::all_reduce`] fails.
pub fn copy_to_ranks(comm: &Communicator, tensor: &Tensor) -> Result<Tensor> {
    if !tensor.track_op() {
        return Ok(tensor.clone());
    }
    region(comm, tensor, 0, Step::Identity, Step::AllReduce(ReduceOp::Sum))
}

/// Ends a split part of a model, and returns the sum of the ranks' tensors. The backward pass leaves the gradient
/// unchanged.
///
/// # Errors
///
/// The errors of [`Communicator::all_reduce`] and of candle.
pub fn reduce_from_ranks(comm: &Communicator, tensor: &Tensor) -> Result<Tensor> {
    region(comm, tensor, 0, Step::AllReduce(ReduceOp::Sum), Step::Identity)
}

/// Ends a split part of a model, and returns the ranks' tensors, concatenated along a dimension. In the backward pass,
/// each rank takes its part of the gradient.
///
/// # Errors
///
/// The errors of [`all_gather`](crate::all_gather).
pub fn gather_from_ranks(comm: &Communicator, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
    region(comm, tensor, dimension, Step::AllGather, Step::Part)
}

/// Begins a split part of a model, and returns this rank's part of a tensor along a dimension. The backward pass
/// gathers all ranks' gradients.
///
/// # Errors
///
/// Fails if the dimension does not exist or cannot be split equally, or if candle fails. The backward pass also fails
/// if [`Communicator::all_gather`] fails.
pub fn scatter_to_ranks(comm: &Communicator, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
    region(comm, tensor, dimension, Step::Part, Step::AllGather)
}
