//! Folds by the caller's own function, with the element type erased.

#![expect(unsafe_code, reason = "restores the element type of memory that comes as bytes")]

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::{ptr, slice};

use super::block::Scratch;
use crate::call::element::{AnyElement, Data, Element, TypeTag};
use crate::call::op::{CustomOp, ErasedFold, ErasedOp, Function, Reduction, ReductionKind};
use crate::host::bools;

/// A caller's function.
struct CustomFold<T>(Arc<Function<T>>);

/// Erases the type of the op.
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
        // The crate's own memory is aligned to a cache line; elements with a larger alignment are copied to aligned
        // memory. So are `bool`s, because bytes from peers may be invalid values.
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

/// Returns room for a block of elements. If an element is larger than a block, or has a larger alignment, room for one
/// element is allocated; this is rare.
fn room<'a, T>(scratch: &'a mut Scratch, large: &'a mut Vec<MaybeUninit<T>>) -> &'a mut [MaybeUninit<T>] {
    if Scratch::capacity::<T>() > 0 {
        return scratch.room();
    }
    large.push(MaybeUninit::uninit());
    large
}

/// The memory in which blocks of elements are folded.
struct Block<'a, T> {
    function: &'a Function<T>,
    /// The result so far.
    folded: &'a mut [MaybeUninit<T>],
    /// Room of the same length for an input, needed if some inputs are misaligned or may hold invalid values.
    staged: Option<&'a mut [MaybeUninit<T>]>,
}

impl<T: Data> Block<'_, T> {
    /// Folds one block, and writes it after the function has returned for all inputs. So `into` may be any of the
    /// inputs, and a function that panics leaves it unchanged.
    ///
    /// # Safety
    ///
    /// `bytes` is a whole number of elements, and at most what the room holds. `into` is writable for `bytes` bytes,
    /// and every input is readable for as many from byte `start` on, all initialised, to which nothing writes now.
    /// `staged` is present if elements consist of `bool`s, or if not all of `rest` are aligned.
    unsafe fn fold(&mut self, into: *mut u8, first: *const u8, rest: &[*const u8], start: usize, bytes: usize) {
        let count = bytes / size_of::<T>();
        // SAFETY: the caller guarantees the input from `start` on, and that the room holds as much.
        let folded = unsafe { bring(first.add(start), self.folded, bytes) };
        for input in rest {
            // SAFETY: the caller guarantees the input from `start` on.
            let input = unsafe { input.add(start) };
            let input = match &mut self.staged {
                // SAFETY: `bytes` bytes of the input; the room for it is as long as the one above.
                Some(staged) => &*unsafe { bring(input, staged, bytes) },
                // SAFETY: `count` elements, aligned, and initialised, for which any bytes suffice: otherwise the caller
                // provides `staged`. Nothing writes to them now.
                None => unsafe { slice::from_raw_parts(input.cast::<T>(), count) },
            };
            (self.function)(folded, input);
        }
        // SAFETY: the caller guarantees the destination; the result does not overlap it, being in memory of this crate.
        unsafe { ptr::copy_nonoverlapping(folded.as_ptr().cast::<u8>(), into, bytes) };
    }
}

/// Copies elements to a place where they are valid values of their type, whatever their bytes were.
///
/// # Safety
///
/// `bytes` is a whole number of elements and no more than the room holds; as many are initialised at `from`, where
/// nothing writes to them now.
unsafe fn bring<T: Data>(from: *const u8, room: &mut [MaybeUninit<T>], bytes: usize) -> &mut [T] {
    let into: *mut u8 = room.as_mut_ptr().cast();
    // SAFETY: the caller guarantees both lengths; the room is borrowed exclusively, so it does not overlap what is
    // read.
    unsafe { ptr::copy_nonoverlapping(from, into, bytes) };
    if TypeTag::of::<T>().is_bool() {
        // SAFETY: `bytes` bytes of the room, just initialised, which no other reference covers now.
        bools::normalise(unsafe { slice::from_raw_parts_mut(into, bytes) });
    }
    // SAFETY: whole elements, just initialised, aligned as the room is; any bytes are values of a type that does not
    // consist of `bool`s, and for one that does, each byte is now 0 or 1.
    unsafe { slice::from_raw_parts_mut(into.cast::<T>(), bytes / size_of::<T>()) }
}
