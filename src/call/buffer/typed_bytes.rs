//! Bytes with an element type that is known at run time.

#![expect(unsafe_code, reason = "an implementor of a buffer trait promises that its memory stays in place")]

use super::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::{AnyElement, DType};
use crate::error::{Error, Result};

/// A buffer whose element type is known at run time: bytes in any memory, and a [`DType`]. With such a buffer, one
/// function can serve all element types, for example in bindings for other languages.
///
/// The bytes may be in any buffer: `&mut [u8]`, `Vec<u8>`, `Arc<[u8]>`, a [`SharedBuffer`](crate::SharedBuffer),
/// cudarc's slices and views, [`RawHostSlice`](crate::interop::RawHostSlice),
/// [`RawDeviceSlice`](crate::interop::RawDeviceSlice) … A call that accepts one of these buffers also accepts it
/// wrapped in `TypedBytes`. Other ranks see only the element type, so one rank may pass typed bytes, and another rank
/// `&mut [f32]`.
///
/// The elements must be aligned: a call refuses bytes whose address is not a multiple of the element's size. If the
/// type is `bool`, the bytes may have any value: a reduction treats every value except 0 as 1. (`BitXor` on a GPU works
/// bit by bit instead.) A call writes only 0 or 1 into a destination of type `bool`.
///
/// The element types in a call must match, by these rules:
///
/// - A [`ReduceOp`](crate::ReduceOp) takes its type from the buffer.
/// - A [`CustomOp`](crate::CustomOp) must have the buffer's type.
/// - The source and destination of a call must have the same type.
///
/// If the types do not match, the call does nothing and returns `InvalidArgument` or `Unsupported`.
///
/// ```
/// use collectives::{BufferMut, Communicator, DType, ReduceOp, Result, TypedBytes};
///
/// // Works for every element type, and for bytes in any memory.
/// fn mean(comm: &Communicator, dtype: DType, bytes: impl BufferMut<Element = u8>) -> Result<()> {
///     comm.all_reduce(&mut TypedBytes::new(dtype, bytes)?, ReduceOp::Avg)
/// }
///
/// let got = Communicator::run_local(2, |comm| {
///     let mut bytes = vec![comm.rank() as u8 * 8; 6];
///     mean(comm, DType::U8, &mut bytes)?;
///     Ok(bytes)
/// })?;
/// assert_eq!(got, [[4; 6]; 2]);
/// assert!(TypedBytes::new(DType::F64, vec![0_u8; 12]).is_err()); // one and a half
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct TypedBytes<B> {
    dtype: DType,
    bytes: B,
}

impl<B: Buffer<Element = u8>> TypedBytes<B> {
    /// Wraps the bytes as elements of this type.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the bytes are not a whole number of elements.
    pub fn new(dtype: DType, bytes: B) -> Result<Self> {
        let length = bytes.memory().len();
        if !length.is_multiple_of(dtype.size_bytes()) {
            let reason = format!("{length} bytes are not a whole number of elements: one {dtype} has {} B", dtype.size_bytes());
            return Err(Error::argument("TypedBytes::new", reason));
        }
        Ok(Self { dtype, bytes })
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.bytes.memory().len() / self.dtype.size_bytes()
    }
}

impl<B> TypedBytes<B> {
    /// Returns the type of the elements.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the buffer of bytes.
    #[must_use]
    pub const fn bytes(&self) -> &B {
        &self.bytes
    }

    /// Consumes this value and returns the buffer of bytes.
    #[must_use]
    pub fn into_inner(self) -> B {
        self.bytes
    }
}

// SAFETY: it has the memory of its bytes, which promise the same, and a type that never changes.
unsafe impl<B: Buffer<Element = u8>> StableMemory for TypedBytes<B> {}

impl<B: Buffer<Element = u8>> Buffer for TypedBytes<B> {
    type Element = AnyElement;

    fn memory(&self) -> Memory<'_, AnyElement> {
        self.bytes.memory().typed(self.dtype)
    }
}

impl<B: BufferMut<Element = u8>> BufferMut for TypedBytes<B> {
    fn memory_mut(&mut self) -> MemoryMut<'_, AnyElement> {
        self.bytes.memory_mut().typed(self.dtype)
    }
}
