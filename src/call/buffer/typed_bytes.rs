//! Bytes with a type that is known at run time.

#![expect(unsafe_code, reason = "whoever is a buffer promises that its memory stays")]

use super::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::{AnyElement, DType};
use crate::error::{Error, Result};

/// A buffer whose element type is known at run time: bytes, anywhere, and a [`DType`]. What bindings and engines with tensors of any type
/// give to calls: one function serves all types.
///
/// The bytes may be in any buffer: `&mut [u8]`, `Vec<u8>`, `Arc<[u8]>`, a [`SharedBuffer`](crate::SharedBuffer), cudarc's slices and views,
/// [`RawHostSlice`](crate::interop::RawHostSlice), [`RawDeviceSlice`](crate::interop::RawDeviceSlice) … Every call takes it where it takes that buffer. Other ranks see
/// the type alone: a rank may pass such bytes where another passes `&mut [f32]`.
///
/// The elements must be aligned: a call refuses bytes that do not lie at a multiple of the element's size. Bytes of `bool` are any: where they
/// are folded all but 0 count as 1 (a GPU's `BitXor` takes them bit by bit), and what a call brings into a destination is 0 or 1.
///
/// A [`ReduceOp`](crate::ReduceOp) takes its type from the buffer, a [`CustomOp`](crate::CustomOp) must be of the buffer's type, and the
/// types of a call's source and destination must be the same: `InvalidArgument` or `Unsupported` otherwise, and nothing has happened.
///
/// ```
/// use collectives::{BufferMut, Communicator, DType, ReduceOp, Result, TypedBytes};
///
/// // Whatever the type, and wherever the bytes are.
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
    /// The bytes as elements of this type.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where they are not a whole number of elements.
    pub fn new(dtype: DType, bytes: B) -> Result<Self> {
        let length = bytes.memory().len();
        if !length.is_multiple_of(dtype.size_bytes()) {
            let reason = format!("{length} bytes are no whole number of elements: {dtype} has {} B", dtype.size_bytes());
            return Err(Error::argument("TypedBytes::new", reason));
        }
        Ok(Self { dtype, bytes })
    }

    /// How many elements they are.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.bytes.memory().len() / self.dtype.size_bytes()
    }
}

impl<B> TypedBytes<B> {
    /// What the elements are.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The buffer of bytes.
    #[must_use]
    pub const fn bytes(&self) -> &B {
        &self.bytes
    }

    /// The buffer of bytes again.
    #[must_use]
    pub fn into_inner(self) -> B {
        self.bytes
    }
}

// SAFETY: the memory of its bytes, which promise the same, and a type that nobody changes.
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
