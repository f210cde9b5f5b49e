//! The types that a call accepts as buffers, and the location of their memory.

#![expect(unsafe_code, reason = "an implementor of a buffer trait promises that its memory stays in place")]

#[cfg(feature = "cuda")]
pub(crate) mod device;
#[cfg(feature = "cuda")]
pub(crate) mod device_buffers;
#[cfg(feature = "cuda")]
pub(crate) mod device_events;
mod memory;
mod raw;
mod single;
mod typed_bytes;

use std::sync::Arc;

pub use self::memory::{HostMemory, HostMemoryMut, Memory, MemoryMut};
pub use self::raw::RawHostSlice;
pub use self::typed_bytes::TypedBytes;
use crate::call::element::Data;

/// A promise that a buffer keeps its memory, at the same address, while a call uses it. Implement this trait to make a
/// type of your own a [`Buffer`], such as an enum that holds one of two kinds of buffers.
///
/// # Safety
///
/// As long as the buffer is not moved or changed, `memory` and `memory_mut` must return the same memory each time. If
/// the buffer's element type is known only at run time, they must also return the same type each time.
pub unsafe trait StableMemory {}

/// A buffer that calls can read. Buffers are:
///
/// - slices, vectors, boxed slices, arrays and single elements
/// - cudarc's slices and views, on a GPU
/// - bytes with an element type that is known at run time ([`TypedBytes`])
/// - memory at raw addresses
///
/// A buffer's memory must not move or change size while a call uses it. The compiler cannot check this for a type of
/// another crate, so the type must promise it by implementing [`StableMemory`]. [`element!`](macro@crate::element)
/// implements `StableMemory` for your own element type.
pub trait Buffer: StableMemory {
    /// The type of its elements.
    type Element: Data;

    /// Returns the buffer's memory.
    fn memory(&self) -> Memory<'_, Self::Element>;
}

/// A buffer that calls can write.
pub trait BufferMut: Buffer {
    /// Returns the buffer's memory, for writing.
    fn memory_mut(&mut self) -> MemoryMut<'_, Self::Element>;
}

macro_rules! slice_buffers {
    ($([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        // SAFETY: it always returns the same slice.
        unsafe impl<$($generics)*> StableMemory for $buffer {}
        impl<$($generics)*> Buffer for $buffer {
            type Element = T;
            fn memory(&self) -> Memory<'_, T> {
                Memory::from(&self[..])
            }
        }
        impl<$($generics)*> BufferMut for $buffer {
            fn memory_mut(&mut self) -> MemoryMut<'_, T> {
                MemoryMut::from(&mut self[..])
            }
        }
    )*};
}

slice_buffers! {
    [T: Data] [T],
    [T: Data] Vec<T>,
    [T: Data] Box<[T]>,
    [T: Data, const N: usize] [T; N],
}

// SAFETY: the buffer that it points to promises the same.
unsafe impl<B: Buffer + ?Sized> StableMemory for &B {}
impl<B: Buffer + ?Sized> Buffer for &B {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}

// SAFETY: the buffer that it points to promises the same.
unsafe impl<B: Buffer + ?Sized> StableMemory for Arc<B> {}
/// Memory behind an [`Arc`], which a call only reads.
impl<B: Buffer + ?Sized> Buffer for Arc<B> {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}

// SAFETY: the buffer that it points to promises the same.
unsafe impl<B: Buffer + ?Sized> StableMemory for &mut B {}
impl<B: Buffer + ?Sized> Buffer for &mut B {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}
impl<B: BufferMut + ?Sized> BufferMut for &mut B {
    fn memory_mut(&mut self) -> MemoryMut<'_, Self::Element> {
        (**self).memory_mut()
    }
}
