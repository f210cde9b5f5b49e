//! Conversion between elements and bytes.

#![expect(unsafe_code, reason = "elements are read and written as bytes")]

use collectives::Data;
#[cfg(feature = "checkpoint")]
use collectives::{DType, Element};

/// Returns the bytes of elements, as in memory.
pub(crate) fn bytes_of<T: Data>(elements: &[T]) -> &[u8] {
    // SAFETY: `Data` promises that every byte is initialised; the borrow is the same.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Copies bytes into elements. Returns `false`, and writes nothing, if the lengths differ or a byte of a `bool` is
/// neither 0 nor 1.
#[cfg(feature = "checkpoint")]
pub(crate) fn copy_from_bytes<T: Element>(elements: &mut [T], bytes: &[u8]) -> bool {
    let fits = bytes.len() == size_of_val(elements) && (T::ELEMENT_TYPE != DType::Bool || bytes.iter().all(|byte| *byte < 2));
    if fits {
        // SAFETY: as many bytes, in borrows that cannot overlap. `Element` promises that bytes which are a value of its
        // type are a value of `T`. For `bool`, these are 0 and 1 (checked above); for the other types, any bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast(), bytes.len()) }
    }
    fits
}
