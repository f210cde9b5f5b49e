//! Where a part of a model begins that is split over ranks, and where it ends. Outside it every rank has the same tensors, and computes the same loss:
//! so a gradient of what left it is every rank's already, and is not added up again.

use candle_core::{Result, Tensor};
use collectives::{Communicator, ReduceOp};

use crate::function::{Function, Step};

fn region(comm: &Communicator, tensor: &Tensor, dimension: usize, forward: Step, backward: Step) -> Result<Tensor> {
    Function { comm: comm.clone(), forward, backward: Some(backward) }.apply(tensor, dimension)
}

/// Begins it with the whole tensor on every rank: nothing happens forward, but a copy where there will be a gradient; gradients are summed.
///
/// # Errors
///
/// Those of candle; backward those of [`Communicator::all_reduce`].
pub fn copy_to_ranks(comm: &Communicator, tensor: &Tensor) -> Result<Tensor> {
    if !tensor.track_op() {
        return Ok(tensor.clone());
    }
    region(comm, tensor, 0, Step::Identity, Step::AllReduce(ReduceOp::Sum))
}

/// Ends it with the sum of the ranks' tensors; a gradient goes on as it is.
///
/// # Errors
///
/// Those of [`Communicator::all_reduce`], and of candle.
pub fn reduce_from_ranks(comm: &Communicator, tensor: &Tensor) -> Result<Tensor> {
    region(comm, tensor, 0, Step::AllReduce(ReduceOp::Sum), Step::Identity)
}

/// Ends it with the ranks' tensors one behind the other along a dimension; of a gradient a rank takes its part.
///
/// # Errors
///
/// Those of [`all_gather`](crate::all_gather).
pub fn gather_from_ranks(comm: &Communicator, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
    region(comm, tensor, dimension, Step::AllGather, Step::Part)
}

/// Begins it with this rank's part of a tensor along a dimension; gradients are gathered.
///
/// # Errors
///
/// A dimension that there is not or that cannot be split equally, and those of candle; backward those of [`Communicator::all_gather`].
pub fn scatter_to_ranks(comm: &Communicator, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
    region(comm, tensor, dimension, Step::Part, Step::AllGather)
}
