//! The built-in operations on two values of one type, and the division that ends a mean.

#![expect(unsafe_code, reason = "a checked conversion to an integer does not vectorise")]

use std::num::NonZeroU64;

/// An operation that combines two values into one, and finally turns one value into the result.
pub(super) trait Operation<W>: 'static {
    /// Whether `finish` does anything.
    const DIVIDES: bool = false;

    fn combine(a: W, b: W) -> W;

    /// Finishes the result once, after the last `combine`. `divisor` is the divisor of a mean.
    #[inline(always)]
    fn finish(value: W, _divisor: NonZeroU64) -> W {
        value
    }
}

pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Least;
pub(super) struct Greatest;
/// The sum, followed by the division.
pub(super) struct Mean;
/// The mean of integers whose division does not vectorise, if the divisor is a power of two.
pub(super) struct MeanByShift;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;

/// Two values, each of which is folded separately.
#[derive(Clone, Copy)]
pub(super) struct Pair(pub(super) f32, pub(super) f32);

/// An operation on both values of a pair.
pub(super) struct Both<O>(O);

impl<O: Operation<f32>> Operation<Pair> for Both<O> {
    const DIVIDES: bool = O::DIVIDES;

    #[inline(always)]
    fn combine(a: Pair, b: Pair) -> Pair {
        Pair(O::combine(a.0, b.0), O::combine(a.1, b.1))
    }

    #[inline(always)]
    fn finish(value: Pair, divisor: NonZeroU64) -> Pair {
        Pair(O::finish(value.0, divisor), O::finish(value.1, divisor))
    }
}

macro_rules! integer_operations {
    ($($int:ty),*) => {$(
        impl Operation<$int> for Sum {
            #[inline(always)]
            fn combine(a: $int, b: $int) -> $int {
                a.wrapping_add(b)
            }
        }

        impl Operation<$int> for Product {
            #[inline(always)]
            fn combine(a: $int, b: $int) -> $int {
                a.wrapping_mul(b)
            }
        }

        impl Operation<$int> for Least {
            #[inline(always)]
            fn combine(a: $int, b: $int) -> $int {
                if b < a { b } else { a }
            }
        }

        impl Operation<$int> for Greatest {
            #[inline(always)]
            fn combine(a: $int, b: $int) -> $int {
                if b > a { b } else { a }
            }
        }

        impl Operation<$int> for Mean {
            const DIVIDES: bool = true;

            #[inline(always)]
            fn combine(a: $int, b: $int) -> $int {
                a.wrapping_add(b)
            }

            #[inline(always)]
            fn finish(value: $int, divisor: NonZeroU64) -> $int {
                value.divided_by(divisor)
            }
        }
    )*};
}

integer_operations!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! float_operations {
    ($($float:ty),*) => {$(
        impl Operation<$float> for Sum {
            #[inline(always)]
            fn combine(a: $float, b: $float) -> $float {
                a + b
            }
        }

        impl Operation<$float> for Product {
            #[inline(always)]
            fn combine(a: $float, b: $float) -> $float {
                a * b
            }
        }

        /// If one value is a NaN, the result is the other. -0 counts as less than +0, so the order of the operands does
        /// not matter.
        impl Operation<$float> for Least {
            #[inline(always)]
            fn combine(a: $float, b: $float) -> $float {
                // A comparison with NaN is false, which leaves b.
                let less = if a < b { a } else { b };
                // Equal numbers have equal bits, except for the zeros: the union of their bits is -0.
                let equal = if a == b { <$float>::from_bits(a.to_bits() | b.to_bits()) } else { less };
                if b.is_nan() { a } else { equal }
            }
        }

        /// If one value is a NaN, the result is the other. +0 counts as greater than -0, so the order of the operands
        /// does not matter.
        impl Operation<$float> for Greatest {
            #[inline(always)]
            fn combine(a: $float, b: $float) -> $float {
                let greater = if a > b { a } else { b };
                let equal = if a == b { <$float>::from_bits(a.to_bits() & b.to_bits()) } else { greater };
                if b.is_nan() { a } else { equal }
            }
        }

        impl Operation<$float> for Mean {
            const DIVIDES: bool = true;

            #[inline(always)]
            fn combine(a: $float, b: $float) -> $float {
                a + b
            }

            #[inline(always)]
            fn finish(value: $float, divisor: NonZeroU64) -> $float {
                value / divisor.get() as $float
            }
        }
    )*};
}

float_operations!(f32, f64);

macro_rules! bitwise_operations {
    ($($name:ident $operator:tt;)*) => {$(
        impl Operation<u8> for $name {
            #[inline(always)]
            fn combine(a: u8, b: u8) -> u8 {
                a $operator b
            }
        }
    )*};
}

bitwise_operations! {
    And &;
    Or |;
    Xor ^;
}

/// Division of an integer, truncating toward zero, for any divisor.
trait DividedBy {
    fn divided_by(self, divisor: NonZeroU64) -> Self;
}

/// Processors can divide vectors of floats, but not of integers. The division of floats is exact here. The nearest
/// float to the quotient `x / n` can reach the integer `k` above it only if `k * n`, which is at most `|x| + n`, needs
/// more bits than the float's mantissa has. If `n` is greater than every `|x|`, the quotient stays below 1.
macro_rules! divided_as_float {
    ($($int:ty, $float:ty, $whole:ty;)*) => {$(
        impl DividedBy for $int {
            #[inline(always)]
            fn divided_by(self, divisor: NonZeroU64) -> Self {
                let quotient = <$float>::from(self) / divisor.get() as $float;
                // `as` would vectorise badly, because it also handles quotients that do not fit.
                // SAFETY: the divisor is at least 1, so the quotient is finite and no larger than the dividend, which fits.
                unsafe { quotient.to_int_unchecked::<$whole>() as $int }
            }
        }
    )*};
}

divided_as_float! {
    i8, f32, i32;
    i16, f32, i32;
    u8, f32, i32;
    u16, f32, i32;
    i32, f64, i32;
    u32, f64, u32;
}

impl DividedBy for u64 {
    #[inline(always)]
    fn divided_by(self, divisor: NonZeroU64) -> Self {
        self / divisor
    }
}

impl DividedBy for i64 {
    #[inline(always)]
    fn divided_by(self, divisor: NonZeroU64) -> Self {
        with_sign(self, self.unsigned_abs() / divisor)
    }
}

/// Gives the magnitude of a quotient the sign of the dividend, and returns the result. Only `i64::MIN / 1` wraps, and
/// its result is `i64::MIN`.
#[inline(always)]
fn with_sign(dividend: i64, magnitude: u64) -> i64 {
    if dividend < 0 { (magnitude as i64).wrapping_neg() } else { magnitude as i64 }
}

impl Operation<u64> for MeanByShift {
    const DIVIDES: bool = true;

    #[inline(always)]
    fn combine(a: u64, b: u64) -> u64 {
        a.wrapping_add(b)
    }

    #[inline(always)]
    fn finish(value: u64, divisor: NonZeroU64) -> u64 {
        value >> divisor.trailing_zeros()
    }
}

impl Operation<i64> for MeanByShift {
    const DIVIDES: bool = true;

    #[inline(always)]
    fn combine(a: i64, b: i64) -> i64 {
        a.wrapping_add(b)
    }

    #[inline(always)]
    fn finish(value: i64, divisor: NonZeroU64) -> i64 {
        with_sign(value, value.unsigned_abs() >> divisor.trailing_zeros())
    }
}
