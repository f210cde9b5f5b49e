//! Memory of tensors as buffers.

#![expect(unsafe_code, reason = "Python passes addresses")]

use collectives::interop::RawHostSlice;
use collectives::{DType, Result, TypedBytes};
use pyo3::FromPyObject;

/// A tensor's memory: where it begins, how many bytes it has, and the number of its type ([`DType`]).
#[derive(Debug, Clone, Copy, FromPyObject)]
pub(crate) struct Tensor(usize, usize, u8);

/// The bytes of a tensor, with their type.
pub(crate) type Buffer = TypedBytes<RawHostSlice<u8>>;

impl Tensor {
    /// The memory as a buffer.
    ///
    /// # Safety
    ///
    /// It is memory of a tensor, contiguous and initialised, that lives and is left alone until the call on it has ended: whoever makes the call
    /// keeps the tensor, and whoever wrote the Python program uses no tensor of a call before its work has been waited for, as PyTorch asks.
    pub(crate) unsafe fn buffer(self) -> Result<Buffer> {
        let Self(address, bytes, dtype) = self;
        let dtype = DType::ALL.get(usize::from(dtype)).copied().unwrap_or(DType::U8);
        // SAFETY: this function's own contract.
        let bytes = unsafe { RawHostSlice::new(std::ptr::with_exposed_provenance_mut(address), bytes) }?;
        TypedBytes::new(dtype, bytes)
    }
}
