//! Tensors that came in, as buffers for any call, whatever their type and wherever they lie.

#![expect(unsafe_code, reason = "slices of memory that another library lends")]

use std::borrow::{Borrow, BorrowMut};
use std::sync::Arc;

use super::import::Tensor;
use super::refused;
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::AnyElement;
use crate::error::Result;

/// A tensor as a buffer for any call: its type is known at run time, as that of [`TypedBytes`](crate::TypedBytes). Made by [`Tensor::as_buffer`] and its kin.
#[derive(Debug)]
pub struct TensorBuffer<P> {
    /// It can be lent, and written where this may be written to.
    tensor: P,
}

impl Tensor {
    /// As a buffer that calls read. A tensor on a GPU must have been ordered first, by `Tensor::order_by`.
    ///
    /// ```
    /// use collectives::{Communicator, ReduceOp, interop::dlpack};
    ///
    /// /// Whatever the tensor's type.
    /// fn sum(comm: &Communicator, tensor: &mut dlpack::Tensor) -> collectives::Result<()> {
    ///     comm.all_reduce(&mut tensor.as_buffer_mut()?, ReduceOp::Sum)
    /// }
    ///
    /// let handed_over = dlpack::export(vec![1_i16, 2], &[2])?;
    /// // SAFETY: made just now, and nobody else uses it.
    /// let mut tensor = unsafe { dlpack::Tensor::from_versioned(handed_over) }?;
    /// sum(&Communicator::local(1)?.remove(0), &mut tensor)?;
    /// assert_eq!(tensor.as_slice::<i16>()?, [1, 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for memory of a device whose order is not known.
    pub fn as_buffer(&self) -> Result<TensorBuffer<&Self>> {
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: self })
    }

    /// As a buffer that calls also write.
    ///
    /// # Errors
    ///
    /// As for [`Tensor::as_buffer`], and for a tensor that is read-only.
    pub fn as_buffer_mut(&mut self) -> Result<TensorBuffer<&mut Self>> {
        self.writable()?;
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: self })
    }

    /// As a buffer for calls that are started, which own it: also ones that write.
    ///
    /// # Errors
    ///
    /// As for [`Tensor::as_buffer_mut`]; the tensor has then gone back to its library.
    pub fn into_buffer(self) -> Result<TensorBuffer<Self>> {
        self.writable()?;
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: self })
    }

    /// As a source for calls that are started, any number of them: it is only read, and goes back to its library when the last has ended.
    ///
    /// # Errors
    ///
    /// As for [`Tensor::as_buffer`]; the tensor has then gone back to its library.
    pub fn into_source(self) -> Result<TensorBuffer<Arc<Self>>> {
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: Arc::new(self) })
    }

    /// Refuses what neither backend can reach.
    fn can_be_lent(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.on_gpu.is_some() {
            return Ok(());
        }
        match self.host_bytes() {
            Some(_) => Ok(()),
            None => Err(refused("it lies on a device: say which stream its uses follow, with Tensor::order_by (feature `cuda`)")),
        }
    }

    /// Its bytes on the host; none where it lies elsewhere.
    fn bytes(&self) -> (*mut u8, usize) {
        let bytes = self.layout.elements * self.layout.dtype.size_bytes();
        self.host_bytes().map_or((std::ptr::NonNull::dangling().as_ptr(), 0), |first| (first, bytes))
    }
}

impl<P> TensorBuffer<P> {
    /// The tensor again.
    #[must_use]
    pub fn into_inner(self) -> P {
        self.tensor
    }
}

impl Clone for TensorBuffer<Arc<Tensor>> {
    fn clone(&self) -> Self {
        Self { tensor: Arc::clone(&self.tensor) }
    }
}

// SAFETY: `P` is the tensor or points at it (`as_buffer` and its kin make no other), whose layout was read once; where it lies on a GPU is
// said before.
unsafe impl<P: Borrow<Tensor>> StableMemory for TensorBuffer<P> {}

impl<P: Borrow<Tensor>> Buffer for TensorBuffer<P> {
    type Element = AnyElement;

    fn memory(&self) -> Memory<'_, AnyElement> {
        let tensor: &Tensor = self.tensor.borrow();
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = &tensor.on_gpu {
            return on_gpu.memory().typed(tensor.layout.dtype);
        }
        let (first, bytes) = tensor.bytes();
        // SAFETY: so many bytes, not null, in memory that stays until the tensor is dropped and that nobody else writes (promised when it was
        // taken); plain data, of which each byte is initialised.
        Memory::from(unsafe { std::slice::from_raw_parts(first.cast_const(), bytes) }).typed(tensor.layout.dtype)
    }
}

impl<P: BorrowMut<Tensor>> BufferMut for TensorBuffer<P> {
    fn memory_mut(&mut self) -> MemoryMut<'_, AnyElement> {
        let tensor: &mut Tensor = self.tensor.borrow_mut();
        let dtype = tensor.layout.dtype;
        let (first, bytes) = tensor.bytes();
        #[cfg(feature = "cuda")]
        if let Some(on_gpu) = &mut tensor.on_gpu {
            return on_gpu.memory_mut().typed(dtype);
        }
        // SAFETY: so many bytes, not null, in memory that stays until the tensor is dropped and that nobody else uses meanwhile (promised when
        // it was taken); it may be written (checked when this was made), and the borrow is exclusive. Any byte is a `u8`; of `bool` calls
        // make 0 or 1, and whoever makes a slice of it looks again.
        MemoryMut::from(unsafe { std::slice::from_raw_parts_mut(first, bytes) }).typed(dtype)
    }
}
