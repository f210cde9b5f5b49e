//! The expected results of reductions, computed plainly, and inputs for which every order of reduction gives the same
//! bits.

use collectives::{Element, F8E4M3, F8E5M2, ReduceOp, bf16, f16};

use super::random::Random;

/// Returns a number that depends on seed, rank and place.
pub fn hash(seed: u64, rank: usize, index: usize) -> u64 {
    Random(seed ^ (rank as u64 + 1).wrapping_mul(0xc2b2_ae3d_27d4_eb4f) ^ (index as u64).wrapping_mul(0xd1b5_4a32_d192_ed03)).next()
}

/// An element type whose results can be predicted.
pub trait Predict: Element {
    /// Returns a rank's contribution at `index`, different for each rank and place.
    fn input(op: ReduceOp, seed: u64, rank: usize, index: usize, ranks: usize) -> Self;

    /// Returns the result over all ranks' contributions, in rank order.
    fn fold(op: ReduceOp, inputs: &[Self]) -> Self;

    /// Returns its bits, for comparison.
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($integer:ty),*) => {$(
        impl Predict for $integer {
            fn input(_: ReduceOp, seed: u64, rank: usize, index: usize, _: usize) -> Self {
                hash(seed, rank, index) as $integer
            }

            fn fold(op: ReduceOp, inputs: &[Self]) -> Self {
                // Modulo 2^128 and then modulo the type's size is modulo the type's size.
                let wide = inputs.iter().map(|input| i128::from(*input));
                match op {
                    ReduceOp::Sum => wide.sum::<i128>() as $integer,
                    ReduceOp::Prod => wide.fold(1_i128, i128::wrapping_mul) as $integer,
                    ReduceOp::Min => wide.min().unwrap() as $integer,
                    ReduceOp::Max => wide.max().unwrap() as $integer,
                    ReduceOp::Avg => (i128::from(wide.sum::<i128>() as $integer) / inputs.len() as i128) as $integer,
                    ReduceOp::BitAnd => wide.fold(-1, |a, b| a & b) as $integer,
                    ReduceOp::BitOr => wide.fold(0, |a, b| a | b) as $integer,
                    ReduceOp::BitXor => wide.fold(0, |a, b| a ^ b) as $integer,
                    other => panic!("{other} of integers"),
                }
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}

integers!(i8, i16, i32, i64, u8, u16, u32, u64);

impl Predict for bool {
    fn input(_: ReduceOp, seed: u64, rank: usize, index: usize, _: usize) -> Self {
        hash(seed, rank, index) & 1 == 1
    }

    fn fold(op: ReduceOp, inputs: &[Self]) -> Self {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => inputs.contains(&true),
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => !inputs.contains(&false),
            ReduceOp::BitXor => inputs.iter().filter(|input| **input).count() % 2 == 1,
            other => panic!("{other} of truth values"),
        }
    }

    fn bits(self) -> u64 {
        u64::from(self)
    }
}

/// The scalar that rank contributions are multiplied by in the tests of `PreMulSum`.
pub const SCALAR: f64 = 0.5;

/// Returns a float contribution for which no partial result is ever rounded. `exact` is the largest integer up to which
/// the type holds every integer.
fn float_input(op: ReduceOp, seed: u64, rank: usize, index: usize, ranks: usize, exact: usize) -> f64 {
    let h = hash(seed, rank, index);
    let sign = if h & 1 == 1 { -1.0 } else { 1.0 };
    match op {
        // At most `exact` ranks contribute ±1 (or ±2, if halves are summed), the others 0.
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => {
            let contributors = ranks.div_ceil(exact);
            let unit = if matches!(op, ReduceOp::PreMulSum(_)) { 2.0 } else { 1.0 };
            if (rank + index).is_multiple_of(contributors) { sign * unit } else { 0.0 }
        }
        // Powers of two whose exponents add up to within ±2.
        ReduceOp::Prod => match rank {
            0 | 1 => sign * 2.0,
            2 | 3 => sign * 0.5,
            _ => sign,
        },
        _ => sign * (h >> 8 & 7) as f64,
    }
}

/// Returns the exact result of a reduction, before the division of an average.
fn float_fold(op: ReduceOp, inputs: impl Iterator<Item = f64>) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => inputs.sum::<f64>() + 0.0,
        ReduceOp::PreMulSum(scalar) => inputs.map(|input| input * scalar).sum::<f64>() + 0.0,
        ReduceOp::Prod => inputs.product(),
        ReduceOp::Min => inputs.fold(f64::INFINITY, |a, b| if a.total_cmp(&b).is_lt() { a } else { b }),
        ReduceOp::Max => inputs.fold(f64::NEG_INFINITY, |a, b| if a.total_cmp(&b).is_gt() { a } else { b }),
        other => panic!("{other} of floats"),
    }
}

macro_rules! floats {
    ($($float:ty, $exact:expr, $bits:expr, |$divide_sum:ident, $divide_n:ident| $divide:expr;)*) => {$(
        impl Predict for $float {
            fn input(op: ReduceOp, seed: u64, rank: usize, index: usize, ranks: usize) -> Self {
                narrow(float_input(op, seed, rank, index, ranks, $exact))
            }

            fn fold(op: ReduceOp, inputs: &[Self]) -> Self {
                let result = float_fold(op, inputs.iter().map(|input| widen(*input)));
                if op == ReduceOp::Avg {
                    let ($divide_sum, $divide_n) = (result, inputs.len());
                    return $divide;
                }
                narrow(result)
            }

            fn bits(self) -> u64 {
                // A sum of zeros may have either sign, depending on the order.
                let zero = widen(self) == 0.0;
                let bits: fn($float) -> u64 = $bits;
                if zero { 0 } else { bits(self) }
            }
        }
    )*};
}

/// Conversions to and from f64, exact for the values used here.
trait Wide: Copy {
    fn wide(self) -> f64;
    fn narrow(value: f64) -> Self;
}

fn widen<T: Wide>(value: T) -> f64 {
    value.wide()
}

fn narrow<T: Wide>(value: f64) -> T {
    T::narrow(value)
}

macro_rules! wide {
    ($($float:ty, |$value:ident| $wide:expr, |$number:ident| $narrow:expr;)*) => {$(
        impl Wide for $float {
            fn wide(self) -> f64 { let $value = self; $wide }
            fn narrow($number: f64) -> Self { $narrow }
        }
    )*};
}

wide! {
    f32, |x| f64::from(x), |x| x as f32;
    f64, |x| x, |x| x;
    f16, |x| x.to_f64(), |x| f16::from_f64(x);
    bf16, |x| x.to_f64(), |x| bf16::from_f64(x);
    F8E4M3, |x| f64::from(x.to_f32()), |x| F8E4M3::from_f32(x as f32);
    F8E5M2, |x| f64::from(x.to_f32()), |x| F8E5M2::from_f32(x as f32);
}

floats! {
    f32, 1 << 20, |x| u64::from(x.to_bits()), |sum, n| sum as f32 / n as f32;
    f64, 1 << 20, |x| x.to_bits(), |sum, n| sum / n as f64;
    f16, 1024, |x| u64::from(x.to_bits()), |sum, n| f16::from_f32(sum as f32 / n as f32);
    bf16, 128, |x| u64::from(x.to_bits()), |sum, n| bf16::from_f32(sum as f32 / n as f32);
    F8E4M3, 16, |x| u64::from(x.to_bits()), |sum, n| F8E4M3::from_f32(sum as f32 / n as f32);
    F8E5M2, 8, |x| u64::from(x.to_bits()), |sum, n| F8E5M2::from_f32(sum as f32 / n as f32);
}

/// Returns every rank's contribution of `count` elements.
pub fn inputs<T: Predict>(op: ReduceOp, seed: u64, ranks: usize, count: usize) -> Vec<Vec<T>> {
    (0..ranks).map(|rank| (0..count).map(|index| T::input(op, seed, rank, index, ranks)).collect()).collect()
}

/// Returns the result of reducing them.
pub fn folded<T: Predict>(op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
    let count = inputs.first().map_or(0, Vec::len);
    (0..count).map(|index| T::fold(op, &inputs.iter().map(|input| input[index]).collect::<Vec<_>>())).collect()
}

/// Asserts equal bits and prints where they differ.
#[track_caller]
pub fn assert_bits<T: Predict>(what: &str, got: &[T], expected: &[T]) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    let wrong = got.iter().zip(expected).filter(|(got, expected)| got.bits() != expected.bits()).count();
    if let Some(index) = got.iter().zip(expected).position(|(got, expected)| got.bits() != expected.bits()) {
        panic!("{what}: {wrong} wrong, first at {index}: got {:?}, expected {:?}", got[index], expected[index]);
    }
}
