//! Folds of `f16` with the conversion instructions that every x86 processor with 256-bit vectors has.

#![expect(unsafe_code, reason = "vector loads and stores through pointers, and instructions that must be there")]

use std::arch::x86_64::{
    __m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps,
    _mm256_storeu_ps,
};
use std::num::NonZeroU64;
use std::ptr;

use super::lane::{Half, Lane, Plain};
use super::operation::Operation;

/// Elements in one vector.
const LANES: usize = 8;
/// Vectors that are folded side by side.
const VECTORS: usize = 4;
/// Elements folded at a time.
const STEP: usize = LANES * VECTORS;

/// [`super::block::fold`] of [`Half`], bit for bit.
///
/// # Safety
///
/// As [`super::block::fold`], on a processor with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn fold<O: Operation<f32>>(into: *mut u8, inputs: &[*const u8], count: usize, divisor: NonZeroU64) {
    let (first, rest) = match *inputs {
        [] => return,
        // SAFETY: both cover `count` elements; they may be the same memory, which `copy` allows.
        [only] if !O::DIVIDES => return unsafe { ptr::copy(only.cast::<u16>(), into.cast::<u16>(), count) },
        [first, ref rest @ ..] => (first, rest),
    };
    let whole = count - count % STEP;
    for start in (0..whole).step_by(STEP) {
        // SAFETY: `start + STEP` is at most `count`, which all buffers cover. All inputs of a step are read before the destination
        // is written, so they may be the same memory.
        unsafe {
            let mut sums = load(first, start);
            for input in rest {
                let values = load(*input, start);
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = combine::<O>(*sum, value);
                }
            }
            store::<O>(into, start, sums, divisor);
        }
    }
    if whole < count {
        // SAFETY: the rest of each buffer; the contract is the caller's.
        unsafe { fold_rest::<O>(into, inputs, whole, count, divisor) }
    }
}

/// The elements from `start` to `count`, which are too few for a step.
///
/// # Safety
///
/// As [`fold`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn fold_rest<O: Operation<f32>>(into: *mut u8, inputs: &[*const u8], start: usize, count: usize, divisor: NonZeroU64) {
    for index in start..count {
        // SAFETY: `index` is below `count`, which all buffers cover.
        let widened = |input: *const u8| Half::widen(unsafe { *input.cast::<u16>().add(index) });
        let Some(sum) = inputs.iter().map(|input| widened(*input)).reduce(O::combine) else { return };
        // SAFETY: as above.
        unsafe { into.cast::<u16>().add(index).write(Half::narrow(O::finish(sum, divisor))) };
    }
}

/// A step's elements of one input, as `f32`.
///
/// # Safety
///
/// The input covers `start + STEP` elements.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load(input: *const u8, start: usize) -> [__m256; VECTORS] {
    std::array::from_fn(|vector| {
        // SAFETY: within the step.
        let address = unsafe { input.cast::<u16>().add(start + vector * LANES) };
        // SAFETY: 16 bytes there, of any alignment.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(address.cast::<__m128i>()) })
    })
}

/// One operation on the elements of two vectors.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn combine<O: Operation<f32>>(a: __m256, b: __m256) -> __m256 {
    let (a, b) = (to_array(a), to_array(b));
    from_array(std::array::from_fn(|lane| O::combine(a[lane], b[lane])))
}

/// Ends the operation, rounds, and writes a step's elements.
///
/// # Safety
///
/// The destination covers `start + STEP` elements.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn store<O: Operation<f32>>(into: *mut u8, start: usize, sums: [__m256; VECTORS], divisor: NonZeroU64) {
    for (vector, sum) in sums.into_iter().enumerate() {
        let values = to_array(sum).map(|value| Plain::<f32>::narrow(O::finish(value, divisor)));
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(from_array(values));
        // SAFETY: within the step.
        let address = unsafe { into.cast::<u16>().add(start + vector * LANES) };
        // SAFETY: 16 bytes there, of any alignment.
        unsafe { _mm_storeu_si128(address.cast::<__m128i>(), halves) };
    }
}

/// A vector's elements. (The compiler keeps them in the register.)
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn to_array(vector: __m256) -> [f32; LANES] {
    let mut array = [0.0; LANES];
    // SAFETY: the array is as large as the vector.
    unsafe { _mm256_storeu_ps(array.as_mut_ptr(), vector) };
    array
}

/// The reverse of [`to_array`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn from_array(array: [f32; LANES]) -> __m256 {
    // SAFETY: the array is as large as the vector.
    unsafe { _mm256_loadu_ps(array.as_ptr()) }
}
