//! Collectives on the memory of candle's tensors, without a copy: on the host, and (feature `cuda`) on a GPU.

use std::cell::Cell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor};
use collectives::train::Averaged;
use collectives::{Buffer, BufferMut, Communicator, ReduceOp};

/// What is done with a contiguous `f32` tensor's memory: `tensor.inplace_op1(&Call::AllReduce(comm, ReduceOp::Sum))`.
pub enum Call<'a> {
    /// `Communicator::all_reduce`.
    AllReduce(&'a Communicator, ReduceOp),
    /// `Communicator::broadcast` of this rank's values.
    Broadcast(&'a Communicator, usize),
    /// `Communicator::all_gather_into`, from this tensor.
    AllGather(&'a Communicator, &'a Tensor),
    /// The mean gradient of a parameter.
    Mean(&'a Averaged<'a>, usize),
}

impl Call<'_> {
    fn make<B: BufferMut<Element = f32> + ?Sized>(&self, memory: &mut B) -> Result<()> {
        match self {
            Self::AllReduce(comm, op) => comm.all_reduce(memory, *op).map_err(failed),
            Self::Broadcast(comm, root) => comm.broadcast(memory, *root).map_err(failed),
            Self::AllGather(comm, part) => on_memory_of(part, Gather { comm, whole: memory }),
            Self::Mean(means, parameter) => means.copy_to(*parameter, memory).map_err(failed),
        }
    }
}

/// What is done with memory that is read, wherever it lies.
pub trait Read {
    /// Does it.
    ///
    /// # Errors
    ///
    /// Those of collectives.
    fn read<B: Buffer<Element = f32> + ?Sized>(self, memory: &B) -> collectives::Result<()>;
}

struct Gather<'a, B: ?Sized> {
    comm: &'a Communicator,
    whole: &'a mut B,
}

impl<W: BufferMut<Element = f32> + ?Sized> Read for Gather<'_, W> {
    fn read<B: Buffer<Element = f32> + ?Sized>(self, part: &B) -> collectives::Result<()> {
        self.comm.all_gather_into(part, self.whole)
    }
}

/// Lends a contiguous `f32` tensor's memory.
///
/// # Errors
///
/// Another type or layout, and those of `read`.
pub fn on_memory_of(tensor: &Tensor, read: impl Read) -> Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (from, to) = extent(layout)?;
    match &*storage {
        Storage::Cpu(storage) => read.read(&storage.as_slice::<f32>()?[from..to]).map_err(failed),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => read.read(&storage.as_cuda_slice::<f32>()?.slice(from..to)).map_err(failed),
        _ => candle_core::bail!("collectives need a tensor in host memory or on a CUDA device"),
    }
}

impl InplaceOp1 for Call<'_> {
    fn name(&self) -> &'static str {
        "collective"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (from, to) = extent(layout)?;
        match storage {
            CpuStorage::F32(elements) => self.make(&mut elements[from..to]),
            other => {
                candle_core::bail!("collectives in this example take f32, not {:?}", candle_core::backend::BackendStorage::dtype(other))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        let (from, to) = extent(layout)?;
        self.make(&mut storage.as_cuda_slice_mut::<f32>()?.slice_mut(from..to))
    }
}

/// Moves a tensor's elements out of host memory, where they fill their storage, or copies them.
struct MoveOut(Cell<Vec<f32>>);

impl InplaceOp1 for MoveOut {
    fn name(&self) -> &'static str {
        "move out"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (from, to) = extent(layout)?;
        match storage {
            CpuStorage::F32(elements) if (from, to) == (0, elements.len()) => self.0.set(std::mem::take(elements)),
            CpuStorage::F32(elements) => self.0.set(elements[from..to].to_vec()),
            other => {
                candle_core::bail!("gradients in this example are f32, not {:?}", candle_core::backend::BackendStorage::dtype(other))
            }
        }
        Ok(())
    }
}

/// The elements of a contiguous `f32` tensor in host memory that shares its storage with no other, as a fresh gradient does.
///
/// # Errors
///
/// Another type, layout or place.
pub fn into_elements(tensor: Tensor) -> Result<Vec<f32>> {
    let out = MoveOut(Cell::default());
    tensor.inplace_op1(&out)?;
    Ok(out.0.into_inner())
}

/// Where a tensor's elements lie in its storage.
fn extent(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(extent) => Ok(extent),
        None => candle_core::bail!("collectives need a contiguous tensor, not strides {:?}", layout.stride()),
    }
}

/// An error of a collective as one of candle's.
pub(crate) fn failed(error: collectives::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
