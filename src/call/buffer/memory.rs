//! The memory of a buffer: its location, its number of elements, and their type.

#![expect(unsafe_code, reason = "views bytes as elements of the type that they contain")]

#[cfg(feature = "cuda")]
use super::device::{DeviceMemory, DeviceMemoryMut};
use crate::call::element::{AnyElement, DType, Data, Element, TypeTag};

/// Memory that a call reads. Its location determines the backend that runs the call.
#[derive(Debug)]
#[non_exhaustive]
pub enum Memory<'a, T> {
    /// Host memory: the call runs on the host backend.
    Host(HostMemory<'a, T>),
    /// Device memory: the call is queued on the device backend.
    #[cfg(feature = "cuda")]
    Device(DeviceMemory<'a, T>),
}

/// Memory that a call writes. Its location determines the backend that runs the call.
#[derive(Debug)]
#[non_exhaustive]
pub enum MemoryMut<'a, T> {
    /// Host memory: the call runs on the host backend.
    Host(HostMemoryMut<'a, T>),
    /// Device memory: the call is queued on the device backend.
    #[cfg(feature = "cuda")]
    Device(DeviceMemoryMut<'a, T>),
}

/// Host memory that a call reads.
#[derive(Debug)]
pub struct HostMemory<'a, T> {
    slice: &'a [T],
    /// The type of [`AnyElement`]s; meaningless for other elements.
    dtype: Option<DType>,
}

/// Host memory that a call writes.
#[derive(Debug)]
pub struct HostMemoryMut<'a, T> {
    slice: &'a mut [T],
    /// See [`HostMemory`].
    dtype: Option<DType>,
}

impl<T> Clone for Memory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Memory<'_, T> {}

impl<T> Clone for HostMemory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for HostMemory<'_, T> {}

impl<'a, T> From<&'a [T]> for HostMemory<'a, T> {
    #[inline]
    fn from(slice: &'a [T]) -> Self {
        Self { slice, dtype: None }
    }
}

impl<'a, T> From<&'a mut [T]> for HostMemoryMut<'a, T> {
    #[inline]
    fn from(slice: &'a mut [T]) -> Self {
        Self { slice, dtype: None }
    }
}

impl<'a, T> From<&'a [T]> for Memory<'a, T> {
    #[inline]
    fn from(slice: &'a [T]) -> Self {
        Memory::Host(slice.into())
    }
}

impl<'a, T> From<&'a mut [T]> for MemoryMut<'a, T> {
    #[inline]
    fn from(slice: &'a mut [T]) -> Self {
        MemoryMut::Host(slice.into())
    }
}

impl<'a, T> HostMemory<'a, T> {
    /// Returns the elements, or their bytes if the element type is known only at run time.
    #[must_use]
    #[inline]
    pub fn as_slice(self) -> &'a [T] {
        self.slice
    }
}

impl<'a, T> HostMemoryMut<'a, T> {
    /// Returns the elements, or their bytes if the element type is known only at run time.
    #[must_use]
    #[inline]
    pub fn into_slice(self) -> &'a mut [T] {
        self.slice
    }
}

/// The queries that [`HostMemory`] and [`HostMemoryMut`] have in common. Results that depend only on `T` are constant
/// at compile time.
macro_rules! asked {
    ($($memory:ident),*) => {$(
        impl<T: Data> $memory<'_, T> {
            /// Returns the number of elements.
            #[inline]
            pub(crate) fn len(&self) -> usize {
                if T::KNOWN_AT_RUN_TIME { self.slice.len() / self.element_bytes() } else { self.slice.len() }
            }

            /// Returns the type of its elements.
            #[inline]
            pub(crate) fn element(&self) -> TypeTag {
                TypeTag::held::<T>(self.dtype)
            }

            /// Returns the size of one element.
            #[inline]
            pub(crate) fn element_bytes(&self) -> usize {
                TypeTag::held_bytes::<T>(self.dtype)
            }

            /// Returns the start address if it is misaligned for the elements. Elements with a compile-time type are
            /// always aligned.
            #[inline]
            pub(crate) fn misplaced(&self) -> Option<u64> {
                if !T::KNOWN_AT_RUN_TIME {
                    return None;
                }
                let address = self.slice.as_ptr().addr();
                (!self.slice.is_empty() && !address.is_multiple_of(self.element_bytes())).then_some(address as u64)
            }
        }
    )*};
}

asked!(HostMemory, HostMemoryMut);

impl<'a, T: Data> HostMemory<'a, T> {
    /// Returns the start address, and the number of bytes.
    #[inline]
    pub(crate) fn parts(self) -> (*const u8, usize) {
        (self.slice.as_ptr().cast(), self.len() * self.element_bytes())
    }

    /// Returns the elements if their element type is that of `E`, and not `bool`. Also returns `None` if they are
    /// [misplaced](Self::misplaced).
    pub(crate) fn elements<E: Element>(self) -> Option<&'a [E]> {
        let element = self.element();
        if element != TypeTag::Scalar(E::ELEMENT_TYPE) || element.is_bool() {
            return None;
        }
        if self.slice.is_empty() {
            return Some(&[]);
        }
        if !self.slice.as_ptr().cast::<E>().is_aligned() {
            return None;
        }
        // SAFETY: - `T` is an element of this type, or bytes that make up `len` elements, and each byte is initialised
        // (`Data`);
        // - the start is aligned (checked), and any bytes are a value of an element type except `bool` (excluded
        //   above);
        // - the slice has the borrow's lifetime.
        Some(unsafe { std::slice::from_raw_parts(self.slice.as_ptr().cast(), self.len()) })
    }
}

impl<T: Data> HostMemoryMut<'_, T> {
    /// Returns the start address, and the number of bytes.
    #[inline]
    pub(crate) fn parts(&mut self) -> (*mut u8, usize) {
        (self.slice.as_mut_ptr().cast(), self.len() * self.element_bytes())
    }

    /// Returns the same memory, to be read.
    pub(crate) fn read(&self) -> HostMemory<'_, T> {
        HostMemory { slice: self.slice, dtype: self.dtype }
    }
}

/// The queries that [`Memory`] and [`MemoryMut`] have in common.
macro_rules! asked_anywhere {
    ($($memory:ident),*) => {$(
        impl<T: Data> $memory<'_, T> {
            /// Returns the number of elements.
            #[must_use]
            #[inline]
            pub fn len(&self) -> usize {
                match self {
                    $memory::Host(memory) => memory.len(),
                    #[cfg(feature = "cuda")]
                    $memory::Device(memory) => memory.len(),
                }
            }

            /// Returns whether there are no elements.
            #[must_use]
            #[inline]
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Returns the type of its elements.
            #[inline]
            pub(crate) fn element(&self) -> TypeTag {
                match self {
                    $memory::Host(memory) => memory.element(),
                    #[cfg(feature = "cuda")]
                    $memory::Device(memory) => memory.element(),
                }
            }

            /// Does the same as [`HostMemory::misplaced`] for host memory. The address of device memory is not known yet.
            #[inline]
            pub(crate) fn misplaced(&self) -> Option<u64> {
                match self {
                    $memory::Host(memory) => memory.misplaced(),
                    #[cfg(feature = "cuda")]
                    $memory::Device(_) => None,
                }
            }
        }
    )*};
}

asked_anywhere!(Memory, MemoryMut);

impl<'a> Memory<'a, u8> {
    /// Returns the bytes as elements of a type.
    pub(crate) fn typed(self, dtype: DType) -> Memory<'a, AnyElement> {
        match self {
            Memory::Host(HostMemory { slice, .. }) => Memory::Host(HostMemory { slice: AnyElement::of(slice), dtype: Some(dtype) }),
            #[cfg(feature = "cuda")]
            Memory::Device(memory) => Memory::Device(memory.typed(dtype)),
        }
    }
}

impl<'a> MemoryMut<'a, u8> {
    /// Returns the bytes as elements of a type.
    pub(crate) fn typed(self, dtype: DType) -> MemoryMut<'a, AnyElement> {
        match self {
            MemoryMut::Host(HostMemoryMut { slice, .. }) => {
                MemoryMut::Host(HostMemoryMut { slice: AnyElement::of_mut(slice), dtype: Some(dtype) })
            }
            #[cfg(feature = "cuda")]
            MemoryMut::Device(memory) => MemoryMut::Device(memory.typed(dtype)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_whose_type_is_known_at_run_time_is_no_burden_for_the_rest() {
        // As large as device memory and one word.
        assert!(size_of::<Memory<'_, f32>>() <= 4 * size_of::<usize>());
        assert!(size_of::<MemoryMut<'_, f32>>() <= 4 * size_of::<usize>());
        let typed: Memory<'_, f32> = (&[1.0_f32][..]).into();
        assert_eq!((typed.len(), typed.element()), (1, TypeTag::of::<f32>()));
    }

    #[test]
    fn bytes_are_counted_in_elements_and_must_lie_right() {
        let bytes = [0_u64; 3];
        // SAFETY: the same bytes.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), 24) };
        let memory = |from: usize, dtype| Memory::from(&bytes[from..]).typed(dtype);
        assert_eq!((memory(0, DType::F64).len(), memory(0, DType::F64).misplaced()), (3, None));
        assert_eq!(memory(8, DType::I16).len(), 8);
        assert!(memory(4, DType::U64).misplaced().is_some() && memory(4, DType::U32).misplaced().is_none());
        assert_eq!(memory(24, DType::F32).misplaced().or(memory(1, DType::Bool).misplaced()), None);
        assert_eq!(memory(0, DType::Bf16).element(), TypeTag::Scalar(DType::Bf16));
        #[cfg_attr(not(feature = "cuda"), allow(irrefutable_let_patterns, reason = "all memory is the host's"))]
        let Memory::Host(host) = memory(8, DType::F32) else { panic!("it lies on the host") };
        assert_eq!(host.elements::<f32>(), Some(&[0.0; 4][..]));
        assert_eq!((host.elements::<i32>(), host.elements::<f64>()), (None, None));
    }
}
