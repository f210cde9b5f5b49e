//! Collectives that return a new tensor, each with the collective that computes its gradient.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use collectives::{Buffer, BufferMut, Communicator, Element, ReduceOp};

use crate::memory::{Compute, compute, extent};

/// An operation on a tensor, along its first dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Step {
    /// Does nothing.
    Identity,
    AllReduce(ReduceOp),
    /// Broadcasts from rank `.0` to all ranks.
    Broadcast(usize),
    /// Returns the sum of all ranks' tensors on rank `.0`, and zeros on the other ranks.
    SumTo(usize),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
    /// Returns this rank's part.
    Part,
}

/// An operation of the forward pass, and the operation that computes its gradient.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) comm: Communicator,
    pub(crate) forward: Step,
    /// `None` if it has no gradient.
    pub(crate) backward: Option<Step>,
}

impl Function {
    /// Applies the forward operation along a dimension.
    pub(crate) fn apply(self, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
        if dimension == 0 || tensor.rank() == 0 {
            return tensor.contiguous()?.apply_op1(self);
        }
        if dimension >= tensor.rank() {
            candle_core::bail!("a tensor of shape {:?} has no dimension {dimension}: dimensions are numbered from 0", tensor.shape());
        }
        tensor.transpose(0, dimension)?.contiguous()?.apply_op1(self)?.transpose(0, dimension)
    }

    /// Returns the shape of the result.
    fn shape_behind(&self, shape: &Shape) -> Result<Shape> {
        let ranks = self.comm.world_size();
        let mut dimensions = shape.dims().to_vec();
        let is_split = matches!(self.forward, Step::ReduceScatter(_) | Step::AllToAll | Step::Part);
        if !is_split && self.forward != Step::AllGather {
            return Ok(shape.clone());
        }
        let Some(first) = dimensions.first_mut() else { candle_core::bail!("{}: a scalar has no dimension to split or join", self.name()) };
        if is_split && !first.is_multiple_of(ranks) {
            candle_core::bail!("{}: a dimension of length {first} cannot be split equally between {ranks} ranks", self.name());
        }
        match self.forward {
            Step::AllGather => *first *= ranks,
            Step::ReduceScatter(_) | Step::Part => *first /= ranks,
            _ => {}
        }
        Ok(Shape::from(dimensions))
    }
}

impl Compute for Function {
    fn copied_from(&self, len: usize) -> Option<usize> {
        match self.forward {
            Step::Identity => Some(0),
            Step::Part => Some(self.comm.rank() * len),
            _ => None,
        }
    }

    fn run<S, D>(&self, source: &S, destination: &mut D) -> collectives::Result<()>
    where
        S: Buffer<Element: Element> + ?Sized,
        D: BufferMut<Element = S::Element> + ?Sized,
    {
        let comm = &self.comm;
        match self.forward {
            Step::AllReduce(op) => comm.all_reduce_into(source, destination, op),
            Step::Broadcast(root) => comm.broadcast_into((comm.rank() == root).then_some(source), destination, root),
            Step::SumTo(root) => comm.reduce_into(source, (comm.rank() == root).then_some(destination), root, ReduceOp::Sum),
            Step::AllGather => comm.all_gather_into(source, destination),
            Step::ReduceScatter(op) => comm.reduce_scatter_into(source, destination, op),
            Step::AllToAll => comm.all_to_all_into(source, destination),
            // These are copies.
            Step::Identity | Step::Part => Ok(()),
        }
    }
}

impl CustomOp1 for Function {
    fn name(&self) -> &'static str {
        match self.forward {
            Step::Identity => "identity",
            Step::AllReduce(_) => "all_reduce",
            Step::Broadcast(_) => "broadcast",
            Step::SumTo(_) => "reduce",
            Step::AllGather => "all_gather",
            Step::ReduceScatter(_) => "reduce_scatter",
            Step::AllToAll => "all_to_all",
            Step::Part => "scatter",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = self.shape_behind(layout.shape())?;
        Ok((compute(storage, extent(layout)?, shape.elem_count(), self)?, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &candle_core::CudaStorage, layout: &Layout) -> Result<(candle_core::CudaStorage, Shape)> {
        let shape = self.shape_behind(layout.shape())?;
        Ok((crate::cuda::compute(storage, extent(layout)?, shape.elem_count(), self)?, shape))
    }

    fn bwd(&self, _argument: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let Some(backward) = self.backward else {
            candle_core::bail!("{} has no gradient with this op: use Sum or Avg, or detach the tensor", self.name());
        };
        let mean = self.forward == Step::ReduceScatter(ReduceOp::Avg);
        let forward = if mean { Step::ReduceScatter(ReduceOp::Sum) } else { self.forward };
        let function = Self { comm: self.comm.clone(), forward: backward, backward: Some(forward) };
        let gradient = if mean { &(gradient / self.comm.world_size() as f64)? } else { gradient };
        function.apply(gradient, 0).map(Some)
    }
}

/// Reduces a tensor over all ranks, and returns the result as a new tensor. With `Sum` and `Avg`, the call is
/// differentiable. The backward pass makes the same call on the gradient. The backward pass thus returns the gradient
/// of the sum of all ranks' losses.
///
/// # Errors
///
/// The errors of [`Communicator::all_reduce`] and of candle.
pub fn all_reduce(comm: &Communicator, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
    let backward = matches!(op, ReduceOp::Sum | ReduceOp::Avg).then_some(Step::AllReduce(op));
    Function { comm: comm.clone(), forward: Step::AllReduce(op), backward }.apply(tensor, 0)
}

/// Returns the root's tensor on all ranks. Every rank must pass a tensor of the same type and shape. On the root, the
/// gradient is the sum of all ranks' gradients. On other ranks, the gradient is zero.
///
/// # Errors
///
/// The errors of [`Communicator::broadcast`] and of candle.
pub fn broadcast(comm: &Communicator, tensor: &Tensor, root: usize) -> Result<Tensor> {
    Function { comm: comm.clone(), forward: Step::Broadcast(root), backward: Some(Step::SumTo(root)) }.apply(tensor, 0)
}

/// Concatenates all ranks' tensors along a dimension, in rank order: `[.., d, ..]` becomes `[.., d × ranks, ..]`. The
/// backward pass computes the gradient with a [`reduce_scatter`].
///
/// If the dimension is not the first, tensors are copied before and after the call.
///
/// # Errors
///
/// Fails if the dimension does not exist, or if [`Communicator::all_gather`] or candle fails.
pub fn all_gather(comm: &Communicator, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
    Function { comm: comm.clone(), forward: Step::AllGather, backward: Some(Step::ReduceScatter(ReduceOp::Sum)) }.apply(tensor, dimension)
}

/// Reduces all ranks' tensors and returns this rank's part along a dimension: `[.., d, ..]` becomes
/// `[.., d / ranks, ..]`. With `Sum` and `Avg`, the call is differentiable. The backward pass makes an [`all_gather`]
/// of the gradient. For `Avg`, the backward pass also divides the gradient by the number of ranks.
///
/// # Errors
///
/// Fails if the dimension does not exist or cannot be split equally, or if [`Communicator::reduce_scatter`] or candle
/// fails.
pub fn reduce_scatter(comm: &Communicator, tensor: &Tensor, dimension: usize, op: ReduceOp) -> Result<Tensor> {
    let backward = matches!(op, ReduceOp::Sum | ReduceOp::Avg).then_some(Step::AllGather);
    Function { comm: comm.clone(), forward: Step::ReduceScatter(op), backward }.apply(tensor, dimension)
}

/// Divides the tensor along a dimension into one equal part for each rank, in rank order. Sends each part to its rank,
/// and returns the parts that this rank receives, concatenated in rank order. The backward pass computes the gradient
/// with another all-to-all.
///
/// # Errors
///
/// The errors of [`reduce_scatter`].
pub fn all_to_all(comm: &Communicator, tensor: &Tensor, dimension: usize) -> Result<Tensor> {
    Function { comm: comm.clone(), forward: Step::AllToAll, backward: Some(Step::AllToAll) }.apply(tensor, dimension)
}
