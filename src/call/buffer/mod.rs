//! What a call may be given as a buffer, and where it lives.

#![expect(unsafe_code, reason = "whoever is a buffer promises that its memory stays")]

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

/// Promises that a buffer's memory stays the same, and at the same address, while a call uses it. A type of your own needs it to be a [`Buffer`],
/// such as one that holds one of two buffers.
///
/// # Safety
///
/// `memory` and `memory_mut` give the same memory each time, as long as the buffer lies where it does and nobody changes it; and
/// where it holds elements whose type is known at run time, the same type.
pub unsafe trait StableMemory {}

/// A buffer that calls can read: slices, vectors, boxed slices, arrays and single elements; on a GPU, cudarc's slices and views; bytes
/// whose type is known at run time ([`TypedBytes`]); and views over raw addresses.
///
/// Memory stays what and where it is while a call uses it, which no check could tell of a foreign type: [`StableMemory`]
/// promises it, and [`element!`](macro@crate::call::element) does so for your own element.
pub trait Buffer: StableMemory {
    /// What it holds.
    type Element: Data;

    /// Where it lives.
    fn memory(&self) -> Memory<'_, Self::Element>;
}

/// A buffer that calls can write.
pub trait BufferMut: Buffer {
    /// Where it lives.
    fn memory_mut(&mut self) -> MemoryMut<'_, Self::Element>;
}

macro_rules! slice_buffers {
    ($([$($generics:tt)*] $buffer:ty),* $(,)?) => {$(
        // SAFETY: it lends one slice.
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

// SAFETY: what it points at promises the same.
unsafe impl<B: Buffer + ?Sized> StableMemory for &B {}
impl<B: Buffer + ?Sized> Buffer for &B {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}

// SAFETY: what it points at promises the same.
unsafe impl<B: Buffer + ?Sized> StableMemory for Arc<B> {}
/// Memory that others share, which a call only reads.
impl<B: Buffer + ?Sized> Buffer for Arc<B> {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}

// SAFETY: what it points at promises the same.
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
