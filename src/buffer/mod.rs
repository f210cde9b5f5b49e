//! What a call may be given as a buffer, and where it lives.

#[cfg(feature = "cuda")]
pub(crate) mod device;
#[cfg(feature = "cuda")]
pub(crate) mod device_buffers;
mod memory;
mod raw;
mod typed_bytes;

use std::sync::Arc;

use half::{bf16, f16};

pub use self::memory::{HostMemory, HostMemoryMut, Memory, MemoryMut};
pub use self::raw::RawHostSlice;
pub use self::typed_bytes::TypedBytes;
use crate::element::{Data, F8E4M3, F8E5M2};

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// A buffer that calls can read: slices, vectors, boxed slices, arrays and single elements; on a GPU, cudarc's slices and views; bytes
/// whose type is known at run time ([`TypedBytes`]); and views over raw addresses.
///
/// Sealed: memory stays what and where it is while a call uses it, which no check could tell of a foreign type.
pub trait Buffer: sealed::Sealed {
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
        impl<$($generics)*> sealed::Sealed for $buffer {}
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

macro_rules! single_elements {
    ($($element:ty),* $(,)?) => {$(
        impl sealed::Sealed for $element {}
        impl Buffer for $element {
            type Element = $element;
            fn memory(&self) -> Memory<'_, $element> {
                Memory::from(std::slice::from_ref(self))
            }
        }
        impl BufferMut for $element {
            fn memory_mut(&mut self) -> MemoryMut<'_, $element> {
                MemoryMut::from(std::slice::from_mut(self))
            }
        }
    )*};
}

single_elements!(f32, f64, f16, bf16, F8E4M3, F8E5M2, i8, i16, i32, i64, u8, u16, u32, u64, bool);

impl<B: Buffer + ?Sized> sealed::Sealed for &B {}
impl<B: Buffer + ?Sized> Buffer for &B {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}

/// Memory that others share, which a call only reads.
impl<B: Buffer + ?Sized> sealed::Sealed for Arc<B> {}
impl<B: Buffer + ?Sized> Buffer for Arc<B> {
    type Element = B::Element;
    fn memory(&self) -> Memory<'_, Self::Element> {
        (**self).memory()
    }
}

impl<B: Buffer + ?Sized> sealed::Sealed for &mut B {}
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
