//! Folds of `f16` with the conversion instructions that every x86 processor with 256-bit vectors has.

#![expect(unsafe_code, reason = "vector loads and stores through pointers, and instructions that the processor must have")]

use std::arch::x86_64::{
    _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_storeu_ps, _mm256_storeu_si256, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_storeu_ps,
};
use std::num::NonZeroU64;
use std::ptr;

use super::block::Inputs;
use super::numeric::{F16, Numeric, Plain};
use super::operation::Operation;

/// The conversions of one instruction set, for as many elements as are folded at a time: few enough for the registers.
/// They are inlined into the function that is compiled for it.
trait Convert<const STEP: usize> {
    /// # Safety
    ///
    /// `from` must point to `STEP` elements, of any alignment. The processor must have this instruction set.
    unsafe fn widen(from: *const u16) -> [f32; STEP];

    /// # Safety
    ///
    /// `into` must point to room for `STEP` elements, of any alignment. The processor must have this instruction set.
    unsafe fn narrow(from: &[f32; STEP], into: *mut u16);
}

struct Avx2;
struct Avx512;

macro_rules! convert {
    ($name:ident, $lanes:literal, $widen:ident, $narrow:ident, $load:ident, $store:ident, $load_halves:ident, $store_halves:ident) => {
        impl<const STEP: usize> Convert<STEP> for $name {
            #[inline(always)]
            unsafe fn widen(from: *const u16) -> [f32; STEP] {
                let mut floats = [0.0; STEP];
                for (index, into) in floats.chunks_exact_mut($lanes).enumerate() {
                    // SAFETY: within the step, and a vector's floats; the caller guarantees the instructions.
                    unsafe { $store(into.as_mut_ptr(), $widen($load_halves(from.add(index * $lanes).cast()))) }
                }
                floats
            }

            #[inline(always)]
            unsafe fn narrow(from: &[f32; STEP], into: *mut u16) {
                for (index, from) in from.chunks_exact($lanes).enumerate() {
                    // SAFETY: a vector's floats are read, and a vector's halves written within the step; the caller
                    // guarantees the instructions.
                    unsafe {
                        let halves = $narrow::<_MM_FROUND_TO_NEAREST_INT>($load(from.as_ptr()));
                        $store_halves(into.add(index * $lanes).cast(), halves);
                    }
                }
            }
        }
    };
}

convert!(Avx2, 8, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps, _mm_loadu_si128, _mm_storeu_si128);
convert!(Avx512, 16, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_storeu_ps, _mm256_loadu_si256, _mm256_storeu_si256);

/// Folds like [`super::block::fold`] of [`F16`], with the same bits.
///
/// # Safety
///
/// As for [`super::block::fold`], on a processor with AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn fold_avx2<O: Operation<f32>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: it requires what this function's caller has promised.
    unsafe { fold::<Avx2, O, 32, 8>(into.cast(), inputs, divisor) }
}

/// Folds like [`fold_avx2`], with vectors twice as long.
///
/// # Safety
///
/// As for [`super::block::fold`], on a processor that also has AVX-512F.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn fold_avx512<O: Operation<f32>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: it requires what this function's caller has promised.
    unsafe { fold::<Avx512, O, 64, 16>(into.cast(), inputs, divisor) }
}

/// Folds with the conversions of `C`. The compiler inlines this function into [`fold_avx2`] and [`fold_avx512`].
///
/// # Safety
///
/// As for [`super::block::fold`]. The processor must have the instruction set of `C`.
#[inline(always)]
unsafe fn fold<C: Convert<STEP> + Convert<LANES>, O: Operation<f32>, const STEP: usize, const LANES: usize>(
    into: *mut u16,
    inputs: Inputs<'_>,
    divisor: NonZeroU64,
) {
    let Inputs { pointers, start, count } = inputs;
    // SAFETY: the inputs cover `start` bytes and `count` elements.
    let at = |input: *const u8, index: usize| unsafe { input.add(start).cast::<u16>().add(index) };
    if let ([only], false) = (pointers, O::DIVIDES) {
        // SAFETY: both cover `count` elements; they may be the same memory, which `copy` allows.
        return unsafe { ptr::copy(at(*only, 0), into, count) };
    }
    let (steps, vectors) = (count - count % STEP, count - count % LANES);
    for done in (0..steps).step_by(STEP) {
        // SAFETY: all buffers cover the step; the destination is written after all inputs have been read.
        unsafe { fold_step::<C, O, STEP>(into.add(done), pointers, |input| at(input, done), divisor) }
    }
    for done in (steps..vectors).step_by(LANES) {
        // SAFETY: all buffers cover the vector; the destination is written after all inputs have been read.
        unsafe { fold_step::<C, O, LANES>(into.add(done), pointers, |input| at(input, done), divisor) }
    }
    for index in vectors..count {
        // SAFETY: all buffers cover the element.
        unsafe { fold_single::<O>(into.add(index), pointers, |input| at(input, index), divisor) }
    }
}

/// Folds one element of each input.
///
/// # Safety
///
/// For each input, `at` must return the address of an element. There must be room for one element at `into`.
#[inline(always)]
unsafe fn fold_single<O: Operation<f32>>(
    into: *mut u16,
    pointers: &[*const u8],
    at: impl Fn(*const u8) -> *const u16,
    divisor: NonZeroU64,
) {
    // SAFETY: promised by the caller.
    let values = pointers.iter().map(|input| F16::widen(unsafe { *at(*input) }));
    if let Some(sum) = values.reduce(O::combine) {
        // SAFETY: promised by the caller.
        unsafe { into.write(F16::narrow(O::finish(sum, divisor))) }
    }
}

/// Folds `STEP` elements of each input.
///
/// # Safety
///
/// For each input, `at` must return the address of `STEP` elements. There must be room for `STEP` elements at `into`.
/// The processor must have the instruction set of `C`.
#[inline(always)]
unsafe fn fold_step<C: Convert<STEP>, O: Operation<f32>, const STEP: usize>(
    into: *mut u16,
    pointers: &[*const u8],
    at: impl Fn(*const u8) -> *const u16,
    divisor: NonZeroU64,
) {
    let [first, rest @ ..] = pointers else { return };
    // SAFETY: promised by the caller.
    let mut sums: [f32; STEP] = unsafe { C::widen(at(*first)) };
    for input in rest {
        // SAFETY: promised by the caller.
        let values: [f32; STEP] = unsafe { C::widen(at(*input)) };
        for (sum, value) in sums.iter_mut().zip(&values) {
            *sum = O::combine(*sum, *value);
        }
    }
    for sum in &mut sums {
        *sum = Plain::<f32>::narrow(O::finish(*sum, divisor));
    }
    // SAFETY: promised by the caller.
    unsafe { C::narrow(&sums, into) }
}
