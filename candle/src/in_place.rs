//! Collectives on a tensor's own memory.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use collectives::{BufferMut, Communicator, Element, ReduceOp};

use crate::memory::{Change, change, extent};

/// What is done with a tensor in place.
struct InPlace<'a> {
    comm: &'a Communicator,
    call: Call,
}

#[derive(Clone, Copy)]
enum Call {
    AllReduce(ReduceOp),
    Broadcast(usize),
}

impl Change for InPlace<'_> {
    fn run<B: BufferMut<Element: Element> + ?Sized>(&self, elements: &mut B) -> collectives::Result<()> {
        match self.call {
            Call::AllReduce(op) => self.comm.all_reduce(elements, op),
            Call::Broadcast(root) => self.comm.broadcast(elements, root),
        }
    }
}

impl InplaceOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        match self.call {
            Call::AllReduce(_) => "all_reduce_in_place",
            Call::Broadcast(_) => "broadcast_in_place",
        }
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        change(storage, extent(layout)?, self)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        crate::cuda::change(storage, extent(layout)?, self)
    }
}

/// Reduces a contiguous tensor over all ranks, in its own memory: whatever shares that sees it. No gradient flows through this.
///
/// # Errors
///
/// A tensor that is not contiguous, those of [`Communicator::all_reduce`], and of candle.
pub fn all_reduce_in_place(comm: &Communicator, tensor: &Tensor, op: ReduceOp) -> Result<()> {
    tensor.inplace_op1(&InPlace { comm, call: Call::AllReduce(op) })
}

/// Gives a contiguous tensor the root's values, in its own memory: weights at the start of training. No gradient flows through this.
///
/// # Errors
///
/// A tensor that is not contiguous, those of [`Communicator::broadcast`], and of candle.
pub fn broadcast_in_place(comm: &Communicator, tensor: &Tensor, root: usize) -> Result<()> {
    tensor.inplace_op1(&InPlace { comm, call: Call::Broadcast(root) })
}
