//! Folds by the caller's own function, with the element type forgotten.

#![expect(unsafe_code, reason = "the element type is given back to memory that comes as bytes")]

use std::mem::MaybeUninit;
use std::{ptr, slice};

use super::scratch::Scratch;
use crate::element::Data;
use crate::op::CustomOp;

/// A fold whose element type is known to its implementor alone.
pub(super) trait ErasedFold: Send + Sync {
    /// See [`Fold::fold`](crate::host::fold::Fold::fold).
    ///
    /// # Safety
    ///
    /// As there, for the type that the implementor was made with, and `bytes` is not 0.
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize);
}

impl<T: Data> ErasedFold for CustomOp<T> {
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize) {
        let Some((first, rest)) = inputs.split_first() else { return };
        let mut scratch = Scratch::new();
        let mut large = Vec::new();
        let room = match Scratch::capacity::<T>() {
            0 => {
                // One element is larger than a block, or aligned to more: rare enough to allocate for.
                large.push(MaybeUninit::uninit());
                large.as_mut_slice()
            }
            _ => scratch.room::<T>(),
        };
        let count = bytes / size_of::<T>();
        for start in (0..count).step_by(room.len()) {
            let length = room.len().min(count - start);
            // SAFETY: `start + length` is at most `count`, which every buffer covers.
            unsafe { fold_block(self, into.cast::<T>().add(start), *first, rest, start, &mut room[..length]) }
        }
    }
}

/// Folds one block in `room`, and writes it when the function has returned for all inputs: so `into` may be any of the inputs,
/// and a function that panics leaves it as it was.
///
/// # Safety
///
/// `into` is writable, and every input readable from element `start` on, for `room.len()` elements.
unsafe fn fold_block<T: Data>(
    op: &CustomOp<T>,
    into: *mut T,
    first: *const u8,
    rest: &[*const u8],
    start: usize,
    room: &mut [MaybeUninit<T>],
) {
    let length = room.len();
    let room: *mut T = room.as_mut_ptr().cast();
    // SAFETY: the caller vouches for the input; the room is ours and apart from it.
    unsafe { ptr::copy_nonoverlapping(first.cast::<T>().add(start), room, length) };
    // SAFETY: `length` elements, just initialised, and no other reference to them is alive.
    let folded = unsafe { slice::from_raw_parts_mut(room, length) };
    for input in rest {
        // SAFETY: the caller vouches for the input: valid elements, to which nobody writes now.
        op.apply(folded, unsafe { slice::from_raw_parts(input.cast::<T>().add(start), length) });
    }
    // SAFETY: the caller vouches for the destination; the room is apart from it.
    unsafe { ptr::copy_nonoverlapping(room, into, length) };
}
