//! Tensor memory as buffers for calls.

#![expect(unsafe_code, reason = "Python passes addresses")]

use collectives::interop::RawHostSlice;
use collectives::{DType, Result, TypedBytes};
use pyo3::FromPyObject;

/// A tensor's memory: its address, its length in bytes, and the index of its type in [`DType::ALL`].
#[derive(Debug, Clone, Copy, FromPyObject)]
pub(crate) struct Tensor(usize, usize, u8);

/// The bytes of a tensor, with their type.
pub(crate) type Buffer = TypedBytes<RawHostSlice<u8>>;

impl Tensor {
    /// Returns the memory as a buffer.
    ///
    /// # Safety
    ///
    /// The memory must belong to a contiguous, initialised tensor. Until the call on it has ended, the tensor must stay
    /// alive and nothing else may access it. The caller that makes the call keeps the tensor alive. The Python program
    /// uses no tensor of a call before it has waited for the call's work, as PyTorch requires.
    pub(crate) unsafe fn buffer(self) -> Result<Buffer> {
        let Self(address, bytes, dtype) = self;
        let dtype = DType::ALL.get(usize::from(dtype)).copied().unwrap_or(DType::U8);
        // SAFETY: the caller upholds this function's contract.
        let bytes = unsafe { RawHostSlice::new(std::ptr::with_exposed_provenance_mut(address), bytes) }?;
        TypedBytes::new(dtype, bytes)
    }
}
