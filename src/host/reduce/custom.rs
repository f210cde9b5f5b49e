//! Folds by the caller's own function, with the element type forgotten.

#![expect(unsafe_code, reason = "the element type is given back to memory that comes as bytes")]

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::{ptr, slice};

use super::block::Scratch;
use crate::call::element::{AnyElement, Data, Element, TypeTag};
use crate::call::op::{CustomOp, ErasedFold, ErasedOp, Function, Reduction, ReductionKind};
use crate::host::bools;

/// A caller's function.
struct CustomFold<T>(Arc<Function<T>>);

/// The op, with its type forgotten.
fn erased<T: Data>(op: &CustomOp<T>) -> ReductionKind {
    let fold = op.function().map(|function| Arc::new(CustomFold(Arc::clone(function))) as Arc<dyn ErasedFold>);
    ReductionKind::Custom(ErasedOp::of(op, fold))
}

impl<T: Data> From<&CustomOp<T>> for Reduction<T> {
    fn from(op: &CustomOp<T>) -> Self {
        Self::of(erased(op))
    }
}

impl<T: Data> From<CustomOp<T>> for Reduction<T> {
    fn from(op: CustomOp<T>) -> Self {
        Self::from(&op)
    }
}

impl<T: Element> From<&CustomOp<T>> for Reduction<AnyElement> {
    fn from(op: &CustomOp<T>) -> Self {
        Self::of(erased(op))
    }
}

impl<T: Element> From<CustomOp<T>> for Reduction<AnyElement> {
    fn from(op: CustomOp<T>) -> Self {
        Self::from(&op)
    }
}

impl<T: Data> ErasedFold for CustomFold<T> {
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize) {
        let Some((first, rest)) = inputs.split_first() else { return };
        let (mut scratch, mut large) = (Scratch::new(), Vec::new());
        let folded = room::<T>(&mut scratch, &mut large);
        let (mut scratch, mut large) = (Scratch::new(), Vec::new());
        // The crate's own memory is aligned to a cache line; elements aligned to more are brought to where they may lie. So are truth
        // values: what peers wrote may be none.
        let may_be_lent = |input: &*const u8| !TypeTag::of::<T>().is_bool() && input.cast::<T>().is_aligned();
        let staged = if rest.iter().all(may_be_lent) { None } else { Some(room::<T>(&mut scratch, &mut large)) };
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
    /// As long: an input, where some do not lie as their type demands, or may be no values of it.
    staged: Option<&'a mut [MaybeUninit<T>]>,
}

impl<T: Data> Block<'_, T> {
    /// Folds one block, and writes it when the function has returned for all inputs: so `into` may be any of the inputs, and a
    /// function that panics leaves it as it was.
    ///
    /// # Safety
    ///
    /// `bytes` is of whole elements, and at most what the room holds. `into` is writable for `bytes` bytes, and every input
    /// readable for as many from byte `start` on, all initialised, to which nobody writes now. `staged` is there if elements are made of
    /// bools, and unless all of `rest` are aligned.
    unsafe fn fold(&mut self, into: *mut u8, first: *const u8, rest: &[*const u8], start: usize, bytes: usize) {
        let count = bytes / size_of::<T>();
        // SAFETY: the caller vouches for the input from `start` on, and that the room holds as much.
        let folded = unsafe { bring(first.add(start), self.folded, bytes) };
        for input in rest {
            // SAFETY: the caller vouches for the input from `start` on.
            let input = unsafe { input.add(start) };
            let input = match &mut self.staged {
                // SAFETY: as many bytes of it; the room for it is as long as the one above.
                Some(staged) => &*unsafe { bring(input, staged, bytes) },
                // SAFETY: `count` elements, aligned, and initialised, which any bytes are: the caller gives a place to stage where that is
                // not so. Nobody writes to them now.
                None => unsafe { slice::from_raw_parts(input.cast::<T>(), count) },
            };
            (self.function)(folded, input);
        }
        // SAFETY: the caller vouches for the destination; what was folded is apart from it, in memory of this crate's own.
        unsafe { ptr::copy_nonoverlapping(folded.as_ptr().cast::<u8>(), into, bytes) };
    }
}

/// Copies elements to where they are values of their type, whatever their bytes were.
///
/// # Safety
///
/// `bytes` is of whole elements and no more than the room holds; as many are initialised at `from`, where nobody writes to them now.
unsafe fn bring<T: Data>(from: *const u8, room: &mut [MaybeUninit<T>], bytes: usize) -> &mut [T] {
    let into: *mut u8 = room.as_mut_ptr().cast();
    // SAFETY: the caller vouches for both lengths; the room is borrowed exclusively, so it is apart from what is read.
    unsafe { ptr::copy_nonoverlapping(from, into, bytes) };
    if TypeTag::of::<T>().is_bool() {
        // SAFETY: `bytes` bytes of the room, just initialised, which no other reference covers now.
        bools::normalise(unsafe { slice::from_raw_parts_mut(into, bytes) });
    }
    // SAFETY: whole elements, just initialised, aligned as the room is; any bytes are values of a type that is not made of bools,
    // and of one that is each byte is 0 or 1 now.
    unsafe { slice::from_raw_parts_mut(into.cast::<T>(), bytes / size_of::<T>()) }
}
