//! The loops: one body for all element types, operations and instruction sets.
//!
//! Everything here is inlined into the wrappers of [`super::level`], so that each copy is compiled for its instruction set.

#![expect(unsafe_code, reason = "buffers come as pointers: one of the inputs may be the destination")]

use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::{ptr, slice};

use super::lane::Lane;
use super::operation::Operation;
use super::scratch::Scratch;

/// `into = inputs[0] op inputs[1] op …` for `count` elements. With no inputs it does nothing.
///
/// # Safety
///
/// As [`Fold::fold`](super::super::fold::Fold::fold), with elements of the size and alignment of `L::Stored`.
#[inline(always)]
pub(super) unsafe fn fold<L: Lane, O: Operation<L::Wide>>(into: *mut u8, inputs: &[*const u8], count: usize, divisor: NonZeroU64) {
    let into: *mut L::Stored = into.cast();
    match *inputs {
        // SAFETY: both cover `count` elements; they may be the same memory, which `copy` allows.
        [only] if L::COPIES && !O::DIVIDES => unsafe { ptr::copy(only.cast(), into, count) },
        // SAFETY: passed on.
        [a, b] if !ptr::eq(a, b) => unsafe { fold_two::<L, O>(into, a.cast(), b.cast(), count, divisor) },
        [first, ref rest @ ..] => {
            // SAFETY: passed on.
            unsafe { fold_many::<L, O>(into, first, rest, count, divisor) }
        }
        [] => {}
    }
}

/// Two inputs that are not the same memory: straight from them to the destination. Written three times, since a loop is only
/// vectorised where the compiler can see that its slices are either the same or apart.
///
/// # Safety
///
/// As [`fold`].
#[inline(always)]
unsafe fn fold_two<L: Lane, O: Operation<L::Wide>>(
    into: *mut L::Stored,
    a: *const L::Stored,
    b: *const L::Stored,
    count: usize,
    divisor: NonZeroU64,
) {
    let one = |a, b| L::narrow(O::finish(O::combine(L::widen(a), L::widen(b)), divisor));
    if ptr::eq(into, a) {
        // SAFETY: `count` elements each, initialised; `b` is apart from the destination, and nobody writes to it.
        let (into, b) = unsafe { (slice::from_raw_parts_mut(into, count), slice::from_raw_parts(b, count)) };
        into.iter_mut().zip(b).for_each(|(into, b)| *into = one(*into, *b));
    } else if ptr::eq(into, b) {
        // SAFETY: as above, the other way about.
        let (into, a) = unsafe { (slice::from_raw_parts_mut(into, count), slice::from_raw_parts(a, count)) };
        into.iter_mut().zip(a).for_each(|(into, a)| *into = one(*a, *into));
    } else {
        // SAFETY: both inputs are apart from the destination, which need not be initialised.
        let (into, a, b) = unsafe {
            (
                slice::from_raw_parts_mut(into.cast::<MaybeUninit<L::Stored>>(), count),
                slice::from_raw_parts(a, count),
                slice::from_raw_parts(b, count),
            )
        };
        into.iter_mut().zip(a).zip(b).for_each(|((into, a), b)| _ = into.write(one(*a, *b)));
    }
}

/// Any number of inputs, by blocks: each is folded in scratch memory and only then written, when all inputs have been read.
///
/// # Safety
///
/// As [`fold`].
#[inline(always)]
unsafe fn fold_many<L: Lane, O: Operation<L::Wide>>(
    into: *mut L::Stored,
    first: *const u8,
    rest: &[*const u8],
    count: usize,
    divisor: NonZeroU64,
) {
    let mut scratch = Scratch::new();
    let room = scratch.room::<L::Wide>();
    let mut start = 0;
    while start < count {
        let length = room.len().min(count - start);
        let sums = &mut room[..length];
        // SAFETY: `start + length` is at most `count`, and the inputs cover `count` elements.
        let block = |input: *const u8| unsafe { slice::from_raw_parts(input.cast::<L::Stored>().add(start), length) };
        sums.iter_mut().zip(block(first)).for_each(|(sum, element)| _ = sum.write(L::widen(*element)));
        for input in rest {
            for (sum, element) in sums.iter_mut().zip(block(*input)) {
                // SAFETY: the loop over the first input has written every element of the block.
                let so_far = unsafe { sum.assume_init() };
                sum.write(O::combine(so_far, L::widen(*element)));
            }
        }
        // SAFETY: as for the inputs; the scratch memory is apart from everything, and no slice of an input is alive.
        let into = unsafe { slice::from_raw_parts_mut(into.cast::<MaybeUninit<L::Stored>>().add(start), length) };
        for (into, sum) in into.iter_mut().zip(sums) {
            // SAFETY: as above.
            into.write(L::narrow(O::finish(unsafe { sum.assume_init() }, divisor)));
        }
        start += length;
    }
}

/// `into = from * scalar`, each product rounded once. They are apart.
#[inline(always)]
pub(super) fn scale<L: Lane<Wide: std::ops::Mul<Output = L::Wide>>>(
    into: &mut [MaybeUninit<L::Stored>],
    from: &[L::Stored],
    scalar: L::Wide,
) {
    for (into, from) in into.iter_mut().zip(from) {
        into.write(L::narrow(L::widen(*from) * scalar));
    }
}
