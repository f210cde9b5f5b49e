//! A little memory on the stack, in which a block of elements is folded before it goes where it belongs.

#![expect(unsafe_code, reason = "room for any type is cut out of bytes")]

use std::mem::MaybeUninit;

/// Small enough to stay in the first-level cache beside the inputs, large enough that the loops over it are long.
pub(super) const SCRATCH_BYTES: usize = 4096;

/// The memory: uninitialised, and aligned for anything the built-in folds put there.
#[repr(C, align(64))]
pub(super) struct Scratch([MaybeUninit<u8>; SCRATCH_BYTES]);

impl Scratch {
    /// The alignment of the memory.
    pub(super) const ALIGNMENT: usize = align_of::<Self>();

    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([MaybeUninit::uninit(); SCRATCH_BYTES])
    }

    /// How many `T` fit; 0 where `T` cannot lie here.
    pub(super) const fn capacity<T>() -> usize {
        if size_of::<T>() == 0 || align_of::<T>() > Self::ALIGNMENT { 0 } else { SCRATCH_BYTES / size_of::<T>() }
    }

    /// The memory as room for [`Scratch::capacity`] values.
    #[inline(always)]
    pub(super) fn room<T>(&mut self) -> &mut [MaybeUninit<T>] {
        let room: *mut MaybeUninit<T> = self.0.as_mut_ptr().cast();
        // SAFETY: the capacity is what fits into the array, and is 0 where the alignment would not do (the pointer is then
        // replaced by a dangling one that is aligned); `MaybeUninit` asks nothing of the bytes, and the borrow of `self` covers
        // the slice's life.
        unsafe {
            match Self::capacity::<T>() {
                0 => &mut [],
                capacity => std::slice::from_raw_parts_mut(room, capacity),
            }
        }
    }
}
