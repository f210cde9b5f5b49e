//! Buffers whose element type is known at run time, in memory that an engine of the test owns.

#![allow(unsafe_code, reason = "the tests play the part of a binding, which knows addresses")]

use std::cell::RefCell;

use collectives::{
    DType, ReduceOp, Reduction, TypedBytes,
    interop::{AnyElement, RawHostSlice},
};

use super::cases::Memory;
use super::oracle::Predict;

/// A buffer of such memory.
pub type Typed = TypedBytes<RawHostSlice<u8>>;

/// Returns the bytes of elements.
pub fn bytes_of<T: Predict>(elements: &[T]) -> Vec<u8> {
    // SAFETY: elements are plain data.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) }.to_vec()
}

/// Converts bytes to elements.
pub fn elements_of<T: Predict>(bytes: &[u8]) -> Vec<T> {
    assert!(T::ELEMENT_TYPE != DType::Bool || bytes.iter().all(|byte| *byte < 2), "{bytes:?} are no truth values");
    let mut elements = vec![T::default(); bytes.len() / size_of::<T>()];
    // SAFETY: as many bytes, which are values of the type: any bytes are, except for `bool`, whose bytes were checked.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast(), bytes.len()) };
    elements
}

/// The memory of an engine. Dropping this value frees all of it.
#[derive(Default)]
pub struct Engine(RefCell<Vec<Vec<u64>>>);

impl Engine {
    /// Creates a buffer of a type from bytes, aligned for any type.
    pub fn bytes(&self, dtype: DType, bytes: &[u8]) -> Typed {
        // One word more, so that an empty buffer also has an address.
        let mut room = vec![0_u64; bytes.len() / 8 + 1];
        let address: *mut u8 = room.as_mut_ptr().cast();
        self.0.borrow_mut().push(room);
        // SAFETY: the allocation has at least that many bytes. The engine keeps it and uses it for nothing else. Tests
        // wait for their calls.
        let slice = unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len());
            RawHostSlice::new(address, bytes.len())
        };
        TypedBytes::new(dtype, slice.unwrap()).unwrap()
    }

    /// Returns the bytes of a buffer.
    pub fn read(&self, buffer: &Typed) -> Vec<u8> {
        // SAFETY: a buffer of this engine, whose calls have ended.
        unsafe { std::slice::from_raw_parts(buffer.bytes().as_ptr(), buffer.bytes().len()) }.to_vec()
    }
}

impl Memory for Engine {
    type Element<T: Predict> = AnyElement;
    type Buffer<T: Predict> = Typed;

    fn reduction<T: Predict>(&self, op: ReduceOp) -> Reduction<AnyElement> {
        op.into()
    }

    fn put<T: Predict>(&self, elements: &[T]) -> Typed {
        self.bytes(T::ELEMENT_TYPE, &bytes_of(elements))
    }

    fn get<T: Predict>(&self, buffer: &Typed) -> Vec<T> {
        assert_eq!(buffer.dtype(), T::ELEMENT_TYPE);
        elements_of(&self.read(buffer))
    }
}

/// Returns the bytes of one element for each number. All are finite, and different numbers give different elements.
pub fn from_numbers(dtype: DType, numbers: &[u32]) -> Vec<u8> {
    let mask = if dtype == DType::Bool { 1 } else { 0x3f };
    let element = |number: &u32| (0..dtype.size_bytes()).map(|at| (number >> (8 * (at % 4))) as u8 & mask).collect::<Vec<_>>();
    numbers.iter().flat_map(element).collect()
}

/// Returns a number for each element. Different elements give different numbers.
pub fn to_numbers(dtype: DType, bytes: &[u8]) -> Vec<u32> {
    let number = |element: &[u8]| element.iter().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    bytes.chunks(dtype.size_bytes()).map(number).collect()
}
