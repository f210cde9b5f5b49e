//! Folds by the caller's own function, with the element type forgotten.

#![expect(unsafe_code, reason = "the element type is given back to memory that comes as bytes")]

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::{ptr, slice};

use super::scratch::Scratch;
use crate::element::Data;
use crate::op::Function;

/// A fold whose element type is known to its implementor alone.
pub(super) trait ErasedFold: Send + Sync {
    /// See [`Fold::fold`](crate::host::fold::Fold::fold).
    ///
    /// # Safety
    ///
    /// As there, for the type that the implementor was made with, and `bytes` is not 0.
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize);
}

/// A caller's function.
pub(super) struct CustomFold<T>(pub(super) Arc<Function<T>>);

impl<T: Data> ErasedFold for CustomFold<T> {
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize) {
        let Some((first, rest)) = inputs.split_first() else { return };
        let (mut scratch, mut large) = (Scratch::new(), Vec::new());
        let folded = room::<T>(&mut scratch, &mut large);
        let (mut scratch, mut large) = (Scratch::new(), Vec::new());
        // The crate's own memory is aligned to a cache line; elements aligned to more are brought to where they may lie.
        let is_aligned = |input: &*const u8| input.cast::<T>().is_aligned();
        let staged = if rest.iter().all(is_aligned) { None } else { Some(room::<T>(&mut scratch, &mut large)) };
        let mut block = Block { function: &*self.0, folded, staged };
        let step = block.folded.len() * size_of::<T>();
        for start in (0..bytes).step_by(step) {
            // SAFETY: `start` plus the length is at most `bytes`, which every buffer covers.
            unsafe { block.fold(into.add(start), *first, rest, start, step.min(bytes - start)) }
        }
    }
}

/// Room for a block of elements, or for one where it is larger than a block, or aligned to more: rare enough to allocate for.
fn room<'a, T>(scratch: &'a mut Scratch, large: &'a mut Vec<MaybeUninit<T>>) -> &'a mut [MaybeUninit<T>] {
    if Scratch::capacity::<T>() > 0 {
        return scratch.room();
    }
    large.push(MaybeUninit::uninit());
    large
}

/// Where blocks of elements are folded.
struct Block<'a, T> {
    function: &'a Function<T>,
    /// The result so far.
    folded: &'a mut [MaybeUninit<T>],
    /// As long: an input, where some do not lie as their type demands.
    staged: Option<&'a mut [MaybeUninit<T>]>,
}

impl<T: Data> Block<'_, T> {
    /// Folds one block, and writes it when the function has returned for all inputs: so `into` may be any of the inputs, and a
    /// function that panics leaves it as it was.
    ///
    /// # Safety
    ///
    /// `bytes` is of whole elements, and at most what the room holds. `into` is writable for `bytes` bytes, and every input
    /// readable for as many from byte `start` on: valid elements, to which nobody writes now. `staged` is there unless all of
    /// `rest` are aligned.
    unsafe fn fold(&mut self, into: *mut u8, first: *const u8, rest: &[*const u8], start: usize, bytes: usize) {
        let count = bytes / size_of::<T>();
        let room: *mut T = self.folded.as_mut_ptr().cast();
        // SAFETY: the caller vouches for the input; the room is ours, long enough, and apart from it.
        unsafe { ptr::copy_nonoverlapping(first.add(start), room.cast(), bytes) };
        // SAFETY: `count` elements, just initialised, and no other reference to them is alive.
        let folded = unsafe { slice::from_raw_parts_mut(room, count) };
        for input in rest {
            // SAFETY: the caller vouches for the input.
            let mut input = unsafe { input.add(start) }.cast::<T>();
            if let Some(staged) = &mut self.staged {
                let room: *mut T = staged.as_mut_ptr().cast();
                // SAFETY: as for the first input.
                unsafe { ptr::copy_nonoverlapping(input.cast::<u8>(), room.cast(), bytes) };
                input = room;
            }
            // SAFETY: `count` valid elements, aligned: the caller's word, or just copied to where they are.
            (self.function)(folded, unsafe { slice::from_raw_parts(input, count) });
        }
        // SAFETY: the caller vouches for the destination; the room is apart from it.
        unsafe { ptr::copy_nonoverlapping(room.cast::<u8>(), into, bytes) };
    }
}
