//! Instruction sets: the same loops compiled for each, and one chosen when a kernel is created.
//!
//! All of them produce the same bits: the compiler neither reorders nor fuses operations on floats.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "a function compiled for an instruction set may be called only where the processor has it")
)]

use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::ops::Mul;

use super::block::{self, Inputs};
use super::numeric::{F16, Numeric};
use super::operation::Operation;

/// A fold of one element type and operation: see [`block::fold`].
pub(super) type FoldFunction = unsafe fn(*mut u8, Inputs<'_>, NonZeroU64);

/// A multiplication by a scalar: see [`block::scale`].
pub(super) type ScaleFunction<S, W> = unsafe fn(&mut [MaybeUninit<S>], &[S], W);

/// An instruction set for the loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// The instructions that every processor of this architecture has.
    Baseline,
    /// 256-bit vectors, and conversion of `f16`.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Every level, lowest first.
    #[cfg(target_arch = "x86_64")]
    pub(super) const ALL: &[Level] = &[Level::Baseline, Level::Avx2, Level::Avx512];
    /// Every level.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) const ALL: &[Level] = &[Level::Baseline];

    /// Whether this processor has it.
    pub(super) fn is_available(self) -> bool {
        match self {
            Level::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    /// Returns its usual name.
    #[cfg(feature = "__internals")]
    pub(super) fn name(self) -> &'static str {
        match self {
            Level::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }

    /// Returns the highest level that this processor has.
    pub(super) fn best() -> Self {
        Self::ALL.iter().rev().copied().find(|level| level.is_available()).unwrap_or(Level::Baseline)
    }

    /// Returns the fold compiled for this level, which must be available when it is called.
    pub(super) fn fold<L: Numeric, O: Operation<L::Wide>>(self) -> FoldFunction {
        match self {
            Level::Baseline => block::fold::<L, O>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => fold_avx2::<L, O>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => fold_avx512::<L, O>,
        }
    }

    /// Returns the same as [`Level::fold`], for `f16`.
    pub(super) fn fold_f16<O: Operation<f32>>(self) -> FoldFunction {
        match self {
            Level::Baseline => block::fold::<F16, O>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => super::f16_x86::fold_avx2::<O>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => super::f16_x86::fold_avx512::<O>,
        }
    }

    /// Returns the same as [`Level::fold`], for `bf16`.
    pub(super) fn fold_bf16<O: Operation<f32>>(self) -> FoldFunction {
        match self {
            Level::Baseline => block::fold_bf16::<O>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => fold_bf16_avx2::<O>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => fold_bf16_avx512::<O>,
        }
    }

    /// Returns the multiplication compiled for this level, which must be available when it is called.
    pub(super) fn scale<L: Numeric<Wide: Mul<Output = L::Wide>>>(self) -> ScaleFunction<L::Stored, L::Wide> {
        match self {
            Level::Baseline => block::scale::<L>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => scale_avx2::<L>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => scale_avx512::<L>,
        }
    }
}

/// Folds on a processor of level `Avx2`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn fold_avx2<L: Numeric, O: Operation<L::Wide>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: the caller guarantees the buffers.
    unsafe { block::fold::<L, O>(into, inputs, divisor) }
}

/// Folds on a processor of level `Avx512`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn fold_avx512<L: Numeric, O: Operation<L::Wide>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: the caller guarantees the buffers.
    unsafe { block::fold::<L, O>(into, inputs, divisor) }
}

/// Folds `bf16` on a processor of level `Avx2`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn fold_bf16_avx2<O: Operation<f32>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: the caller guarantees the buffers.
    unsafe { block::fold_bf16::<O>(into, inputs, divisor) }
}

/// Folds `bf16` on a processor of level `Avx512`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn fold_bf16_avx512<O: Operation<f32>>(into: *mut u8, inputs: Inputs<'_>, divisor: NonZeroU64) {
    // SAFETY: the caller guarantees the buffers.
    unsafe { block::fold_bf16::<O>(into, inputs, divisor) }
}

/// Multiplies on a processor of level `Avx2`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn scale_avx2<L: Numeric<Wide: Mul<Output = L::Wide>>>(into: &mut [MaybeUninit<L::Stored>], from: &[L::Stored], scalar: L::Wide) {
    block::scale::<L>(into, from, scalar);
}

/// Multiplies on a processor of level `Avx512`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_avx512<L: Numeric<Wide: Mul<Output = L::Wide>>>(into: &mut [MaybeUninit<L::Stored>], from: &[L::Stored], scalar: L::Wide) {
    block::scale::<L>(into, from, scalar);
}
