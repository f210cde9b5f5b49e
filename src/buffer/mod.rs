//! What a call may be given as a buffer, and where it lives.

#[cfg(feature = "cuda")]
pub(crate) mod device;
#[cfg(feature = "cuda")]
pub(crate) mod device_buffers;

use std::sync::Arc;

use crate::element::{Data, F8E4M3, F8E5M2};
use half::{bf16, f16};

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Memory that a call reads, and the plane that reads it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Memory<'a, T> {
    /// Ordinary memory: the call runs on the host plane.
    Host(&'a [T]),
    /// Memory of a GPU: the call is queued on the device plane.
    #[cfg(feature = "cuda")]
    Device(device::DeviceMemory<'a, T>),
}

/// Memory that a call writes, and the plane that writes it.
#[derive(Debug)]
#[non_exhaustive]
pub enum MemoryMut<'a, T> {
    /// Ordinary memory: the call runs on the host plane.
    Host(&'a mut [T]),
    /// Memory of a GPU: the call is queued on the device plane.
    #[cfg(feature = "cuda")]
    Device(device::DeviceMemoryMut<'a, T>),
}

impl<T> Clone for Memory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Memory<'_, T> {}

impl<T> Memory<'_, T> {
    /// How many elements it has.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Memory::Host(slice) => slice.len(),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => memory.len(),
        }
    }
}

impl<T> MemoryMut<'_, T> {
    /// How many elements it has.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            MemoryMut::Host(slice) => slice.len(),
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => memory.len(),
        }
    }
}

/// A buffer that calls can read: slices, vectors, boxed slices, arrays and single elements; and, on a GPU, cudarc's slices and views,
/// and views over raw addresses.
///
/// Sealed: which plane a call runs on is decided by the type, at compile time.
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
                Memory::Host(self)
            }
        }
        impl<$($generics)*> BufferMut for $buffer {
            fn memory_mut(&mut self) -> MemoryMut<'_, T> {
                MemoryMut::Host(self)
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
                Memory::Host(std::slice::from_ref(self))
            }
        }
        impl BufferMut for $element {
            fn memory_mut(&mut self) -> MemoryMut<'_, $element> {
                MemoryMut::Host(std::slice::from_mut(self))
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
