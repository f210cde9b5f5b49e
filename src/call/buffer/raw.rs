//! Host memory that other code owns, given by its address.

#![expect(unsafe_code, reason = "views over addresses that the caller vouches for")]

use std::ptr::NonNull;

use super::{Buffer, BufferMut, Memory, MemoryMut, StableMemory};
use crate::call::element::Data;
use crate::error::{Error, Result};

/// Elements in host memory that other code owns. With this type, bindings for Python or C pass their language's memory
/// to calls.
///
/// With [`TypedBytes`](crate::TypedBytes), one function serves every element type:
///
/// ```
/// use collectives::{Communicator, DType, ReduceOp, Result, TypedBytes, interop::RawHostSlice};
///
/// /// # Safety
/// ///
/// /// `count` elements of this type lie at `data`, which no other code uses until the function returns.
/// pub unsafe fn all_reduce(comm: &Communicator, data: *mut std::ffi::c_void, count: usize, dtype: DType, op: ReduceOp) -> Result<()> {
///     // SAFETY: the caller's promise; a count too large for memory saturates, and is refused.
///     let bytes = unsafe { RawHostSlice::<u8>::new(data.cast(), count.saturating_mul(dtype.size_bytes())) }?;
///     comm.all_reduce(&mut TypedBytes::new(dtype, bytes)?, op)
/// }
///
/// let got = Communicator::run_local(2, |comm| {
///     let mut tensor = vec![comm.rank() as f64; 3];
///     // SAFETY: a vector of three, which no other code knows.
///     unsafe { all_reduce(comm, tensor.as_mut_ptr().cast(), 3, DType::F64, ReduceOp::Max) }?;
///     Ok(tensor)
/// })?;
/// assert_eq!(got, [[1.0; 3]; 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug)]
pub struct RawHostSlice<T> {
    address: NonNull<T>,
    length: usize,
}

// SAFETY: it stands for plain data, which may be read and written on any thread. Its constructor's caller promises that
// no other code does so meanwhile.
unsafe impl<T: Data> Send for RawHostSlice<T> {}
// SAFETY: a shared reference only reads plain data.
unsafe impl<T: Data> Sync for RawHostSlice<T> {}

impl<T: Data> RawHostSlice<T> {
    /// Wraps `length` elements at `address`, which may be null if `length` is 0.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` in each of these cases:
    ///
    /// - `address` is null, and `length` is not 0.
    /// - `address` is misaligned.
    /// - The elements do not fit into the address space.
    ///
    /// # Safety
    ///
    /// As long as this value lives:
    ///
    /// - The elements must be allocated.
    /// - Each byte of the elements must be initialised, even if calls only write the elements. (Memory from another
    ///   language's allocator counts as initialised.)
    /// - No other code may write the elements. If a call writes the elements, no other code may read them.
    ///
    /// A blocking call has ended when it returns. A call in a group has ended when the group has returned. A background
    /// call keeps this value until it has ended: then its [`Work`](crate::Work) returns this value or an error. If the
    /// program drops the `Work`, or stops waiting, the call continues. In any case, a call has ended once the last
    /// handle of its communicator has been closed or dropped.
    pub unsafe fn new(address: *mut T, length: usize) -> Result<Self> {
        let bytes = length.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let refused = |reason: String| Err(Error::argument("RawHostSlice::new", reason));
        match NonNull::new(address) {
            _ if length == 0 => Ok(Self { address: NonNull::dangling(), length }),
            None => refused(format!("{length} elements cannot be at a null address")),
            Some(_) if bytes.is_none_or(|bytes| address.addr().checked_add(bytes).is_none()) => {
                refused(format!("{length} elements of {} B at {address:p} do not fit into the address space", size_of::<T>()))
            }
            Some(_) if !address.is_aligned() => {
                refused(format!("elements that must be at multiples of {} B cannot be at {address:p}", align_of::<T>()))
            }
            Some(address) => Ok(Self { address, length }),
        }
    }

    /// Returns the address of the elements.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut T {
        self.address.as_ptr()
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }
}

// SAFETY: an address and a length, which never change.
unsafe impl<T: Data> StableMemory for RawHostSlice<T> {}

impl<T: Data> Buffer for RawHostSlice<T> {
    type Element = T;

    fn memory(&self) -> Memory<'_, T> {
        // SAFETY: this many initialised elements lie there, aligned (checked), in no more than an address space
        // (checked), and no code writes them as long as this lives (promised when it was made).
        Memory::from(unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.length) })
    }
}

impl<T: Data> BufferMut for RawHostSlice<T> {
    fn memory_mut(&mut self) -> MemoryMut<'_, T> {
        // SAFETY: as many initialised elements, aligned and no more than an address space holds (both checked). If a
        // call writes, no other code reads or writes them as long as this lives (promised), and the borrow of this
        // value is exclusive.
        MemoryMut::from(unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.length) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_lie_there_is_refused() {
        let mut words = [0_u32; 2];
        let place = words.as_mut_ptr();
        for (address, length, what) in [
            (std::ptr::null_mut(), 1, "null"),
            (place.cast::<u8>().wrapping_add(2).cast(), 1, "multiples of 4 B"),
            (place, usize::MAX, "address space"),
            (place, isize::MAX as usize / 4 + 1, "address space"),
        ] {
            // SAFETY: it is refused.
            let error = unsafe { RawHostSlice::new(address, length) }.unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        // SAFETY: there are no elements.
        let none = unsafe { RawHostSlice::<u32>::new(std::ptr::null_mut(), 0) }.unwrap();
        assert!(none.is_empty() && none.memory().is_empty());
        // SAFETY: an array of two, which outlives it.
        let mut two = unsafe { RawHostSlice::new(place, 2) }.unwrap();
        #[cfg_attr(not(feature = "cuda"), allow(irrefutable_let_patterns, reason = "all memory is the host's"))]
        let MemoryMut::Host(memory) = two.memory_mut() else { panic!("it lies on the host") };
        memory.into_slice().fill(7);
        assert_eq!((two.len(), two.as_ptr(), words), (2, place, [7; 2]));
    }
}
