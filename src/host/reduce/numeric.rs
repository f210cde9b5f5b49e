//! Numeric types: how elements of one type are read from memory, computed with, and written back.
//!
//! A numeric type reads its element as a plain number of the same size (`f16` as `u16`, `bool` as `u8`), so no byte
//! pattern in a buffer can be invalid. It then converts the number to the type of the computation. Each conversion is a
//! few operations without a branch, so a loop over it vectorises.

use super::operation::Pair;
use crate::call::element::F8E4M3;
use crate::call::float8::{expand, round};

/// One element type, as the loops use it.
pub(super) trait Numeric: 'static {
    /// The element in memory.
    type Stored: Copy;
    /// The type of the computation.
    type Wide: Copy;
    /// Whether a fold of one input may copy its bytes.
    const COPIES: bool = true;

    /// Returns the exact value of an element.
    fn widen(stored: Self::Stored) -> Self::Wide;

    /// Returns the element nearest to a value, ties to even. A NaN becomes the type's positive quiet NaN, so that every
    /// rank ends with the same bits. Without this rule, the result of an addition of two NaNs would depend on the order
    /// in which the compiler places the operands.
    fn narrow(wide: Self::Wide) -> Self::Stored;
}

/// Integers and floats, computed with in their own width. Bitwise ops use this type on bytes, whatever the element
/// type.
pub(super) struct Plain<T>(T);

macro_rules! plain_integers {
    ($($int:ty),*) => {$(
        impl Numeric for Plain<$int> {
            type Stored = $int;
            type Wide = $int;

            #[inline(always)]
            fn widen(stored: $int) -> $int {
                stored
            }

            #[inline(always)]
            fn narrow(wide: $int) -> $int {
                wide
            }
        }
    )*};
}

plain_integers!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! plain_floats {
    ($($float:ty, $quiet:expr;)*) => {$(
        impl Numeric for Plain<$float> {
            type Stored = $float;
            type Wide = $float;

            #[inline(always)]
            fn widen(stored: $float) -> $float {
                stored
            }

            #[inline(always)]
            fn narrow(wide: $float) -> $float {
                if wide.is_nan() { <$float>::from_bits($quiet) } else { wide }
            }
        }
    )*};
}

plain_floats! {
    f32, 0x7fc0_0000;
    f64, 0x7ff8_0000_0000_0000;
}

/// `f16` by integer arithmetic, which every processor supports.
pub(super) struct F16;

impl Numeric for F16 {
    type Stored = u16;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        expand::<5, 10>(u32::from(stored))
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        round::<5, 10>(Plain::<f32>::narrow(wide)) as u16
    }
}

/// `bf16`: the upper half of an `f32`.
pub(super) struct Bf16;

impl Bf16 {
    /// Returns the bits of `wide` with the upper half rounded; the caller drops the lower half.
    #[inline(always)]
    fn rounded(wide: f32) -> u32 {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        if wide.is_nan() { 0x7fc0_0000 } else { rounded }
    }
}

impl Numeric for Bf16 {
    type Stored = u16;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        f32::from_bits(u32::from(stored) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u16 {
        (Bf16::rounded(wide) >> 16) as u16
    }
}

/// Two `bf16` at once: the upper and the lower half of a word become two vectors of `f32` without a shuffle.
pub(super) struct Bf16Pair;

/// A word with the alignment of its halves.
#[derive(Clone, Copy)]
#[repr(C, packed(2))]
pub(super) struct Word(u32);

impl Numeric for Bf16Pair {
    type Stored = Word;
    type Wide = Pair;

    #[inline(always)]
    fn widen(Word(word): Word) -> Pair {
        Pair(f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000))
    }

    #[inline(always)]
    fn narrow(Pair(low, high): Pair) -> Word {
        Word(Bf16::rounded(low) >> 16 | Bf16::rounded(high) & 0xffff_0000)
    }
}

/// The 8-bit float with 4 exponent bits.
pub(super) struct SmallE4M3;

impl Numeric for SmallE4M3 {
    type Stored = u8;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u8) -> f32 {
        F8E4M3::from_bits(stored).to_f32()
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u8 {
        let bits = F8E4M3::from_f32(wide).to_bits();
        // For this type overflow becomes NaN too, so the test is on the result.
        if bits & 0x7f == 0x7f { 0x7f } else { bits }
    }
}

/// The 8-bit float with 5 exponent bits.
pub(super) struct SmallE5M2;

impl Numeric for SmallE5M2 {
    type Stored = u8;
    type Wide = f32;

    #[inline(always)]
    fn widen(stored: u8) -> f32 {
        expand::<5, 2>(u32::from(stored))
    }

    #[inline(always)]
    fn narrow(wide: f32) -> u8 {
        round::<5, 2>(Plain::<f32>::narrow(wide)) as u8
    }
}

/// Booleans: any byte except 0 counts as 1, and only 0 and 1 are written.
pub(super) struct Bool;

impl Numeric for Bool {
    type Stored = u8;
    type Wide = u8;
    const COPIES: bool = false;

    #[inline(always)]
    fn widen(stored: u8) -> u8 {
        u8::from(stored != 0)
    }

    #[inline(always)]
    fn narrow(wide: u8) -> u8 {
        wide
    }
}
