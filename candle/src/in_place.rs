//! Collectives in a tensor's own memory.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use collectives::{BufferMut, Communicator, Element, ReduceOp};

use crate::memory::{Change, change, extent};

/// A call that writes its result to the tensor itself.
struct InPlace<'a> {
    comm: &'a Communicator,
    call: Call,
}

#[derive(Clone, Copy)]
enum Call {
    AllReduce(ReduceOp),
    Broadcast(usize),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
}

impl Change for InPlace<'_> {
    fn run<B: BufferMut<Element: Element> + ?Sized>(&self, elements: &mut B) -> collectives::Result<()> {
        match self.call {
            Call::AllReduce(op) => self.comm.all_reduce(elements, op),
            Call::Broadcast(root) => self.comm.broadcast(elements, root),
            Call::AllGather => self.comm.all_gather(elements),
            Call::ReduceScatter(op) => self.comm.reduce_scatter(elements, op),
            Call::AllToAll => self.comm.all_to_all(elements),
        }
    }
}

impl InplaceOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        match self.call {
            Call::AllReduce(_) => "all_reduce_in_place",
            Call::Broadcast(_) => "broadcast_in_place",
            Call::AllGather => "all_gather_in_place",
            Call::ReduceScatter(_) => "reduce_scatter_in_place",
            Call::AllToAll => "all_to_all_in_place",
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

/// Reduces a contiguous tensor over all ranks, in its own memory. Tensors that share this memory change too. No
/// gradient flows through this call.
///
/// # Errors
///
/// Fails if the tensor is not contiguous, or if [`Communicator::all_reduce`] or candle fails.
pub fn all_reduce_in_place(comm: &Communicator, tensor: &Tensor, op: ReduceOp) -> Result<()> {
    tensor.inplace_op1(&InPlace { comm, call: Call::AllReduce(op) })
}

/// Overwrites a contiguous tensor with the root's values, for example to start training with the same weights on every
/// rank. No gradient flows through this call.
///
/// # Errors
///
/// Fails if the tensor is not contiguous, or if [`Communicator::broadcast`] or candle fails.
pub fn broadcast_in_place(comm: &Communicator, tensor: &Tensor, root: usize) -> Result<()> {
    tensor.inplace_op1(&InPlace { comm, call: Call::Broadcast(root) })
}

/// Makes a call on a tensor whose first dimension has an equal part for each rank.
fn on_parts(comm: &Communicator, tensor: &Tensor, call: Call) -> Result<()> {
    let (call, ranks) = (InPlace { comm, call }, comm.world_size());
    match tensor.dims().first() {
        None => candle_core::bail!("{}: a scalar has no dimension to split between the ranks", call.name()),
        Some(first) if !first.is_multiple_of(ranks) => {
            candle_core::bail!("{}: a dimension of length {first} cannot be split equally between {ranks} ranks", call.name())
        }
        Some(_) => tensor.inplace_op1(&call),
    }
}

/// Gathers all ranks' parts of a contiguous tensor of shape `[ranks × d, ..]`, in the tensor's own memory. This rank's
/// part, which starts at row `rank × d`, must already be there. No gradient flows through this call.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use collectives_candle::{all_gather_in_place, run_local};
///
/// let all = run_local(3, |comm| {
///     let all = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu)?;
///     all.slice_set(&Tensor::new(&[comm.rank() as f32 + 1.0], &Device::Cpu)?, 0, comm.rank())?;
///     all_gather_in_place(comm, &all)?;
///     all.to_vec1::<f32>()
/// })?;
/// assert_eq!(all, [[1.0, 2.0, 3.0]; 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Fails in these cases:
///
/// - The tensor is not contiguous.
/// - The first dimension cannot be split equally between the ranks.
/// - [`Communicator::all_gather`] or candle fails.
pub fn all_gather_in_place(comm: &Communicator, tensor: &Tensor) -> Result<()> {
    on_parts(comm, tensor, Call::AllGather)
}

/// Reduces a contiguous tensor of shape `[ranks × d, ..]` over all ranks, in its own memory. Each rank gets its part,
/// which starts at row `rank × d`; the other rows keep their values. No gradient flows through this call.
///
/// # Errors
///
/// Fails in these cases:
///
/// - The tensor is not contiguous.
/// - The first dimension cannot be split equally between the ranks.
/// - [`Communicator::reduce_scatter`] or candle fails.
pub fn reduce_scatter_in_place(comm: &Communicator, tensor: &Tensor, op: ReduceOp) -> Result<()> {
    on_parts(comm, tensor, Call::ReduceScatter(op))
}

/// Exchanges parts of a contiguous tensor of shape `[ranks × d, ..]` between all ranks, in the tensor's own memory. The
/// part for each rank starts at row `rank × d`. This rank sends each part to its rank, and replaces it with the part
/// that it receives from that rank. No gradient flows through this call.
///
/// # Errors
///
/// Fails in these cases:
///
/// - The tensor is not contiguous.
/// - The first dimension cannot be split equally between the ranks.
/// - [`Communicator::all_to_all`] or candle fails.
pub fn all_to_all_in_place(comm: &Communicator, tensor: &Tensor) -> Result<()> {
    on_parts(comm, tensor, Call::AllToAll)
}
