//! Imported tensors as buffers for any call, whatever their type and device.

#![expect(unsafe_code, reason = "slices of memory that another library lends")]

use std::borrow::{Borrow, BorrowMut};
use std::sync::Arc;

use super::import::Tensor;
use super::refused;
use crate::call::buffer::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::AnyElement;
use crate::error::Result;

/// A tensor as a buffer for any call, made by [`Tensor::as_buffer`] and similar methods. The tensor's element type is
/// known only at run time, as for [`TypedBytes`](crate::TypedBytes).
#[derive(Debug)]
pub struct TensorBuffer<P> {
    /// The tensor. It can be lent, and if this buffer may be written, it can be lent for writing.
    tensor: P,
}

impl Tensor {
    /// Returns the tensor as a buffer that calls can read. For a tensor on a GPU, call `Tensor::order_by` first.
    ///
    /// ```
    /// use collectives::{Communicator, ReduceOp, interop::dlpack};
    ///
    /// /// Works for a tensor of any type.
    /// fn sum(comm: &Communicator, tensor: &mut dlpack::Tensor) -> collectives::Result<()> {
    ///     comm.all_reduce(&mut tensor.as_buffer_mut()?, ReduceOp::Sum)
    /// }
    ///
    /// let handed_over = dlpack::export(vec![1_i16, 2], &[2])?;
    /// // SAFETY: made just now, and no other code uses it.
    /// let mut tensor = unsafe { dlpack::Tensor::from_versioned(handed_over) }?;
    /// sum(&Communicator::local(1)?.remove(0), &mut tensor)?;
    /// assert_eq!(tensor.as_slice::<i16>()?, [1, 2]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for device memory whose stream is not known.
    pub fn as_buffer(&self) -> Result<TensorBuffer<&Self>> {
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: self })
    }

    /// Returns the tensor as a buffer that calls can read and write.
    ///
    /// # Errors
    ///
    /// The errors of [`Tensor::as_buffer`], and `InvalidArgument` for a read-only tensor.
    pub fn as_buffer_mut(&mut self) -> Result<TensorBuffer<&mut Self>> {
        self.writable()?;
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: self })
    }

    /// Turns the tensor into a buffer for a background call. The call owns the buffer, and can read and write it.
    ///
    /// # Errors
    ///
    /// The errors of [`Tensor::as_buffer_mut`]. If there is an error, the tensor is returned to its library.
    pub fn into_buffer(self) -> Result<TensorBuffer<Self>> {
        self.writable()?;
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: self })
    }

    /// Turns the tensor into a source for any number of background calls, which only read it. The tensor is returned to
    /// its library when the last call has ended.
    ///
    /// # Errors
    ///
    /// The errors of [`Tensor::as_buffer`]. If there is an error, the tensor is returned to its library.
    pub fn into_source(self) -> Result<TensorBuffer<Arc<Self>>> {
        self.can_be_lent()?;
        Ok(TensorBuffer { tensor: Arc::new(self) })
    }

    /// Refuses memory that neither backend can access.
    fn can_be_lent(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.on_gpu.is_some() {
            return Ok(());
        }
        match self.host_bytes() {
            Some(_) => Ok(()),
            None => Err(refused("it is on a device: call Tensor::order_by (feature `cuda`) to name the stream that orders its uses")),
        }
    }

    /// Returns the tensor's bytes on the host; none if the tensor is on a device.
    fn bytes(&self) -> (*mut u8, usize) {
        let bytes = self.layout.elements * self.layout.dtype.size_bytes();
        self.host_bytes().map_or((std::ptr::NonNull::dangling().as_ptr(), 0), |first| (first, bytes))
    }
}

impl<P> TensorBuffer<P> {
    /// Returns the tensor.
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

// SAFETY: `P` is the tensor or points to it (`as_buffer` and similar methods make no other), whose layout was read
// once; its place on a GPU is set before.
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
        // SAFETY: this many bytes, not null, in memory that stays valid until the tensor is dropped and that no other
        // code writes (promised when it was taken); plain data, of which each byte is initialised.
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
        // SAFETY: this many bytes, not null, in memory that stays valid until the tensor is dropped and that no other
        // code uses meanwhile (promised when it was taken); it may be written (checked when this was made), and the
        // borrow is exclusive. Any byte is a `u8`; calls write 0 or 1 for `bool`, and making a slice of it checks
        // again.
        MemoryMut::from(unsafe { std::slice::from_raw_parts_mut(first, bytes) }).typed(dtype)
    }
}
