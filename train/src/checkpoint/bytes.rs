//! Elements as bytes of files, and back.

#![expect(unsafe_code, reason = "elements are seen as the bytes that they are")]

use collectives::{DType, Element};

/// The bytes of elements, as they lie in memory.
pub(super) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: `Data` promises that every byte is initialised; the borrow is the same.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// Makes elements of as many bytes. `false`, and nothing is written, where there are more or fewer, or one is no truth value that should be.
pub(super) fn copy_from_bytes<T: Element>(elements: &mut [T], bytes: &[u8]) -> bool {
    let fits = bytes.len() == size_of_val(elements) && (T::ELEMENT_TYPE != DType::Bool || bytes.iter().all(|byte| *byte < 2));
    if fits {
        // SAFETY: as many bytes, in borrows that cannot overlap. `Element` promises that bytes which are a value of its type are one of `T`: of
        // `bool`s 0 and 1 are, which was looked at; of the others any are.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast(), bytes.len()) }
    }
    fits
}
