//! The fold loops: one body for all element types, operations and instruction sets.
//!
//! Everything here is inlined into the wrappers of [`super::level`], so each copy is compiled for its instruction set.

#![expect(unsafe_code, reason = "buffers come as pointers: one of the inputs may be the destination")]

use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::{ptr, slice};

use super::numeric::{Bf16, Bf16Pair, Numeric};
use super::operation::{Both, Operation};
use crate::base::tuning::reduce::BLOCK_BYTES;

/// The inputs of a fold: `count` elements of each, starting at byte `start`.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) pointers: &'a [*const u8],
    pub(super) start: usize,
    pub(super) count: usize,
}

/// Computes `into = inputs[0] op inputs[1] op …`. Does nothing if there are no inputs.
///
/// # Safety
///
/// As for [`Fold::fold`](super::super::fold::Fold::fold), with elements of the size and alignment of `L::Stored`: every
/// input covers `start` bytes and `count` elements, and `into` covers `count` elements.
#[inline(always)]
pub(super) unsafe fn fold<L: Numeric, O: Operation<L::Wide>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    let count = inputs.count;
    let into: *mut L::Stored = into.cast();
    // SAFETY: every input covers `start` bytes (promised by the caller).
    let at = |input: *const u8| unsafe { input.add(inputs.start).cast::<L::Stored>() };
    let end = |wide| L::narrow(O::finish(wide, divisor));
    match *inputs.pointers {
        [] => {}
        // SAFETY: both cover `count` elements; they may be the same memory, which `copy` allows.
        [only] if L::COPIES && !O::DIVIDES => unsafe { ptr::copy(at(only), into, count) },
        // SAFETY: both cover `count` elements, and are the same or do not overlap (promised by the caller).
        [only] => unsafe { fold_one(into, at(only), count, |a| end(L::widen(a))) },
        [a, b] if ptr::eq(a, b) && ptr::eq(into, at(a)) => {
            // SAFETY: all three are the same memory of `count` elements.
            unsafe { fold_one(into, at(a), count, |a| end(O::combine(L::widen(a), L::widen(a)))) }
        }
        // SAFETY: all cover `count` elements, and each input is the destination or does not overlap it; not all three
        // are the same.
        [a, b] => unsafe { fold_two(into, at(a), at(b), count, |a, b| end(O::combine(L::widen(a), L::widen(b)))) },
        // SAFETY: every input covers `start` bytes and `count` elements, and `into` as many elements (promised by the
        // caller).
        [first, second, ref rest @ .., last] => unsafe { fold_many::<L, O>(into, [first, second], rest, last, inputs, divisor) },
    }
}

/// Folds the rare cases: one input, or two that are both the destination.
///
/// # Safety
///
/// Both cover `count` elements, and are the same or do not overlap.
#[inline(always)]
unsafe fn fold_one<S: Copy>(into: *mut S, from: *const S, count: usize, one: impl Fn(S) -> S) {
    for index in 0..count {
        // SAFETY: within both.
        unsafe { into.add(index).write(one(*from.add(index))) }
    }
}

/// Folds two inputs directly into the destination. The loop is written three times, because it is vectorised only if
/// the compiler can see that its slices are either the same or disjoint.
///
/// # Safety
///
/// All cover `count` elements; the destination may be one of the inputs, but not both.
#[inline(always)]
unsafe fn fold_two<S: Copy>(into: *mut S, a: *const S, b: *const S, count: usize, one: impl Fn(S, S) -> S) {
    if ptr::eq(into, a) {
        // SAFETY: `count` elements each, initialised; `b` does not overlap the destination, and nothing writes to it.
        let (into, b) = unsafe { (slice::from_raw_parts_mut(into, count), slice::from_raw_parts(b, count)) };
        into.iter_mut().zip(b).for_each(|(into, b)| *into = one(*into, *b));
    } else {
        // SAFETY: `count` elements each; the destination is not the first input, so does not overlap it, and may be
        // the last.
        unsafe { fold_last(into, slice::from_raw_parts(a, count), b, one) }
    }
}

/// Folds the result so far, or a first input, with the last input.
///
/// # Safety
///
/// `into` and `last` cover as many elements as there are in `folded`, which does not overlap the destination; `last`
/// may be the destination.
#[inline(always)]
unsafe fn fold_last<W: Copy, S: Copy>(into: *mut S, folded: &[W], last: *const S, one: impl Fn(W, S) -> S) {
    let count = folded.len();
    if ptr::eq(into, last) {
        // SAFETY: `count` elements, initialised, to which no other reference exists.
        let into = unsafe { slice::from_raw_parts_mut(into, count) };
        into.iter_mut().zip(folded).for_each(|(into, folded)| *into = one(*folded, *into));
    } else {
        // SAFETY: the input does not overlap the destination, which need not be initialised; nothing writes to the
        // input.
        let (into, last) = unsafe { (slice::from_raw_parts_mut(into.cast::<MaybeUninit<S>>(), count), slice::from_raw_parts(last, count)) };
        into.iter_mut().zip(folded).zip(last).for_each(|((into, folded), last)| _ = into.write(one(*folded, *last)));
    }
}

/// Folds three or more inputs, in blocks. Each block is folded in scratch memory, two or three inputs in one pass. Only
/// the last pass writes to the destination, which may be an input that was read before.
///
/// # Safety
///
/// As for [`fold`].
#[inline(always)]
unsafe fn fold_many<L: Numeric, O: Operation<L::Wide>>(
    into: *mut L::Stored,
    [first, second]: [*const u8; 2],
    rest: &[*const u8],
    last: *const u8,
    inputs: Inputs<'_>,
    divisor: NonZeroU64,
) {
    let mut scratch = Scratch::new();
    let room = scratch.room::<L::Wide>();
    let mut done = 0;
    while done < inputs.count {
        let length = room.len().min(inputs.count - done);
        // SAFETY: every input covers `done + length` elements.
        let at = |input: *const u8| unsafe { input.add(inputs.start).cast::<L::Stored>().add(done) };
        // SAFETY: `length` elements of an input, initialised, to which nothing writes before the last pass: only then
        // is `into`, which may be the same memory, written, and these slices are no longer used.
        let block = |input| unsafe { slice::from_raw_parts(at(input), length) };
        let folded = fold_early::<L, O>(&mut room[..length], [first, second].map(block), rest, block);
        // SAFETY: as many elements of the destination, and of the last input; the scratch memory overlaps nothing else.
        unsafe {
            fold_last(into.add(done), folded, at(last), |sum, last| L::narrow(O::finish(O::combine(sum, L::widen(last)), divisor)));
        }
        done += length;
    }
}

/// Folds a block of all inputs except the last into `room`, which has the same length.
#[inline(always)]
fn fold_early<'a, 'b, L: Numeric, O: Operation<L::Wide>>(
    room: &'a mut [MaybeUninit<L::Wide>],
    [first, second]: [&[L::Stored]; 2],
    rest: &[*const u8],
    block: impl Fn(*const u8) -> &'b [L::Stored],
) -> &'a mut [L::Wide] {
    let two = |a: &L::Stored, b: &L::Stored| O::combine(L::widen(*a), L::widen(*b));
    let pairs = room.iter_mut().zip(first).zip(second);
    let (odd, rest) = rest.split_at(rest.len() % 2);
    match odd {
        [third] => pairs.zip(block(*third)).for_each(|(((sum, a), b), c)| _ = sum.write(O::combine(two(a, b), L::widen(*c)))),
        _ => pairs.for_each(|((sum, a), b)| _ = sum.write(two(a, b))),
    }
    // SAFETY: the inputs are as long as the room, so every element was written.
    let sums = unsafe { &mut *(ptr::from_mut(room) as *mut [L::Wide]) };
    for pair in rest.chunks_exact(2) {
        let (a, b) = (block(pair[0]), block(pair[1]));
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum = O::combine(O::combine(*sum, L::widen(*a)), L::widen(*b));
        }
    }
    sums
}

/// Folds `bf16` like [`fold`], in pairs.
///
/// # Safety
///
/// As for [`fold`].
#[inline(always)]
pub(super) unsafe fn fold_bf16<O: Operation<f32>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: the first `count - count % 2` elements of all buffers; a pair requires no more alignment than its halves.
    unsafe { fold::<Bf16Pair, Both<O>>(into, Inputs { count: inputs.count / 2, ..inputs }, divisor) }
    if inputs.count % 2 == 1 {
        let last = 2 * (inputs.count - 1);
        // SAFETY: the last element of each input.
        let mut values = inputs.pointers.iter().map(|input| unsafe { *input.add(inputs.start + last).cast::<u16>() });
        let one = match inputs.pointers {
            [_] if !O::DIVIDES => values.next(),
            _ => values.map(Bf16::widen).reduce(O::combine).map(|sum| Bf16::narrow(O::finish(sum, divisor))),
        };
        if let Some(one) = one {
            // SAFETY: the last element of the destination.
            unsafe { into.add(last).cast::<u16>().write(one) }
        }
    }
}

/// Computes `into = from * scalar`, with each product rounded once. The two do not overlap.
#[inline(always)]
pub(super) fn scale<L: Numeric<Wide: std::ops::Mul<Output = L::Wide>>>(
    into: &mut [MaybeUninit<L::Stored>],
    from: &[L::Stored],
    scalar: L::Wide,
) {
    for (into, from) in into.iter_mut().zip(from) {
        into.write(L::narrow(L::widen(*from) * scalar));
    }
}

/// A small block of stack memory in which elements are folded before they go to their destination. It is uninitialised,
/// and aligned for everything that the built-in folds put there.
#[repr(C, align(64))]
pub(super) struct Scratch([MaybeUninit<u8>; BLOCK_BYTES]);

impl Scratch {
    /// The alignment of the memory.
    pub(super) const ALIGNMENT: usize = align_of::<Self>();

    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([MaybeUninit::uninit(); BLOCK_BYTES])
    }

    /// Returns how many `T` fit; 0 if a `T` cannot be placed here.
    pub(super) const fn capacity<T>() -> usize {
        if size_of::<T>() == 0 || align_of::<T>() > Self::ALIGNMENT { 0 } else { BLOCK_BYTES / size_of::<T>() }
    }

    /// Returns the memory as room for [`Scratch::capacity`] values.
    #[inline(always)]
    pub(super) fn room<T>(&mut self) -> &mut [MaybeUninit<T>] {
        let room: *mut MaybeUninit<T> = self.0.as_mut_ptr().cast();
        // SAFETY: the capacity is what fits into the array, and is 0 if the alignment is insufficient (the pointer is
        // then replaced by a dangling one that is aligned); `MaybeUninit` requires nothing of the bytes, and the borrow
        // of `self` covers the slice's life.
        unsafe {
            match Self::capacity::<T>() {
                0 => &mut [],
                capacity => std::slice::from_raw_parts_mut(room, capacity),
            }
        }
    }
}
