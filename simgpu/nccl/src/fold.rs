//! NCCL's arithmetic, one element after another. Integers wrap. Floats are rounded to their type after every step. In
//! minimum and maximum a number takes precedence over a NaN. An average of floats multiplies each contribution by the
//! rounded reciprocal before the sum.

use crate::abi::Kind;
use crate::float8::{E4M3, E5M2, decode, encode};
use crate::operation::Fold;
use half::{bf16, f16};

/// An element, as NCCL computes with it.
trait Number: Copy {
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn largest(self, other: Self) -> Self;
    fn smallest(self, other: Self) -> Self;
    /// The factor of each contribution to an average, before the sum: floats only.
    fn reciprocal(ranks: usize) -> Option<Self>;
    /// Divides the sum of an average at the end: integers only.
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! integer {
    ($($type:ty, $wide:ty);*) => {$(
        impl Number for $type {
            fn read(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().expect("chunks have the size of the type"))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn largest(self, other: Self) -> Self {
                self.max(other)
            }
            fn smallest(self, other: Self) -> Self {
                self.min(other)
            }
            fn reciprocal(_: usize) -> Option<Self> {
                None
            }
            fn divide(self, ranks: usize) -> Self {
                (<$wide>::from(self) / ranks as $wide) as $type
            }
        }
    )*};
}
integer!(i8, i64; u8, u64; i32, i64; u32, u64; i64, i64; u64, u64);

macro_rules! float {
    ($($type:ty, $wide:ty, $name:ident, |$bytes:ident| $read:expr, |$value:ident| $bits:expr, |$exact:ident| $round:expr, |$element:ident| $widen:expr);*) => {$(
        #[derive(Clone, Copy)]
        struct $name($type);

        impl $name {
            fn round($exact: $wide) -> Self {
                $name($round)
            }
            fn widen(self) -> $wide {
                let $element = self.0;
                $widen
            }
        }

        impl Number for $name {
            fn read($bytes: &[u8]) -> Self {
                $name($read)
            }
            fn write(self, bytes: &mut [u8]) {
                let $value = self.0;
                bytes.copy_from_slice(&$bits);
            }
            fn add(self, other: Self) -> Self {
                Self::round(self.widen() + other.widen())
            }
            fn multiply(self, other: Self) -> Self {
                Self::round(self.widen() * other.widen())
            }
            fn largest(self, other: Self) -> Self {
                let (a, b) = (self.widen(), other.widen());
                // Of two zeros, the positive one is larger.
                if b.is_nan() || a > b || (a == b && a.is_sign_positive()) { self } else { other }
            }
            fn smallest(self, other: Self) -> Self {
                let (a, b) = (self.widen(), other.widen());
                if b.is_nan() || a < b || (a == b && a.is_sign_negative()) { self } else { other }
            }
            fn reciprocal(ranks: usize) -> Option<Self> {
                Some(Self::round(1.0 / ranks as $wide))
            }
            fn divide(self, _: usize) -> Self {
                self
            }
        }
    )*};
}

/// Returns the four or eight bytes of a chunk.
fn whole<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("chunks have the size of the type")
}

// 8-bit floats are computed in 16 bits and then shortened.
float!(
    f32, f32, Float32, |bytes| f32::from_ne_bytes(whole(bytes)), |value| value.to_ne_bytes(), |exact| exact, |element| element;
    f64, f64, Float64, |bytes| f64::from_ne_bytes(whole(bytes)), |value| value.to_ne_bytes(), |exact| exact, |element| element;
    f16, f32, Float16, |bytes| f16::from_ne_bytes(whole(bytes)), |value| value.to_ne_bytes(), |exact| f16::from_f32(exact), |element| element.to_f32();
    bf16, f32, Bf16, |bytes| bf16::from_ne_bytes(whole(bytes)), |value| value.to_ne_bytes(), |exact| bf16::from_f32(exact), |element| element.to_f32();
    u8, f32, Float8E4M3, |bytes| bytes[0], |value| [value], |exact| encode(E4M3, f16::from_f32(exact).to_f32()), |element| decode(E4M3, element);
    u8, f32, Float8E5M2, |bytes| bytes[0], |value| [value], |exact| encode(E5M2, f16::from_f32(exact).to_f32()), |element| decode(E5M2, element)
);

/// One rank's elements, and the bits of its scalar if the fold is `PreMulSum`.
pub(crate) struct Contribution<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) scalar: u64,
}

/// Folds the contributions of all ranks, in the order of the ranks. All have the same length.
pub(crate) fn fold(kind: Kind, fold: Fold, contributions: &[Contribution<'_>]) -> Vec<u8> {
    match kind {
        Kind::I8 => fold_as::<i8>(fold, contributions),
        Kind::U8 => fold_as::<u8>(fold, contributions),
        Kind::I32 => fold_as::<i32>(fold, contributions),
        Kind::U32 => fold_as::<u32>(fold, contributions),
        Kind::I64 => fold_as::<i64>(fold, contributions),
        Kind::U64 => fold_as::<u64>(fold, contributions),
        Kind::F16 => fold_as::<Float16>(fold, contributions),
        Kind::F32 => fold_as::<Float32>(fold, contributions),
        Kind::F64 => fold_as::<Float64>(fold, contributions),
        Kind::Bf16 => fold_as::<Bf16>(fold, contributions),
        Kind::E4m3 => fold_as::<Float8E4M3>(fold, contributions),
        Kind::E5m2 => fold_as::<Float8E5M2>(fold, contributions),
    }
}

fn fold_as<N: Number>(fold: Fold, contributions: &[Contribution<'_>]) -> Vec<u8> {
    let ranks = contributions.len();
    let scalars = contributions.iter().map(|contribution| match fold {
        Fold::Avg => N::reciprocal(ranks),
        Fold::PreMulSum => Some(N::read(&contribution.scalar.to_ne_bytes()[..size_of::<N>()])),
        _ => None,
    });
    let mut folded = Vec::new();
    for (contribution, scalar) in contributions.iter().zip(scalars) {
        let scaled = scalar.map(|scalar| scale(scalar, contribution.bytes));
        let bytes = scaled.as_deref().unwrap_or(contribution.bytes);
        if folded.is_empty() {
            folded.extend_from_slice(bytes);
            continue;
        }
        match fold {
            Fold::Prod => combine(&mut folded, bytes, N::multiply),
            Fold::Max => combine(&mut folded, bytes, N::largest),
            Fold::Min => combine(&mut folded, bytes, N::smallest),
            Fold::Sum | Fold::Avg | Fold::PreMulSum => combine(&mut folded, bytes, N::add),
        }
    }
    if fold == Fold::Avg {
        change::<N>(&mut folded, |element| element.divide(ranks));
    }
    folded
}

fn scale<N: Number>(scalar: N, bytes: &[u8]) -> Vec<u8> {
    let mut scaled = bytes.to_vec();
    change(&mut scaled, |element: N| element.multiply(scalar));
    scaled
}

fn change<N: Number>(bytes: &mut [u8], change: impl Fn(N) -> N) {
    for element in bytes.chunks_exact_mut(size_of::<N>()) {
        change(N::read(element)).write(element);
    }
}

fn combine<N: Number>(folded: &mut [u8], bytes: &[u8], combine: impl Fn(N, N) -> N) {
    for (into, from) in folded.chunks_exact_mut(size_of::<N>()).zip(bytes.chunks_exact(size_of::<N>())) {
        combine(N::read(into), N::read(from)).write(into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded<const N: usize>(kind: Kind, by: Fold, ranks: &[[u8; N]]) -> Vec<u8> {
        let contributions: Vec<_> = ranks.iter().map(|bytes| Contribution { bytes, scalar: 0 }).collect();
        fold(kind, by, &contributions)
    }

    #[test]
    fn integers_wrap_and_their_average_truncates_the_wrapped_sum() {
        assert_eq!(folded(Kind::I8, Fold::Sum, &[[127], [1]]), [0x80]);
        assert_eq!(folded(Kind::I8, Fold::Avg, &[[127], [1]]), [(-64i8) as u8]);
        assert_eq!(folded(Kind::I8, Fold::Avg, &[[0xfe], [0xff]]), [(-1i8) as u8]);
        assert_eq!(folded(Kind::U8, Fold::Prod, &[[16], [17]]), [16]);
        assert_eq!(folded(Kind::U64, Fold::Max, &[u64::MAX.to_ne_bytes(), 1u64.to_ne_bytes()]), u64::MAX.to_ne_bytes());
    }

    #[test]
    fn the_average_of_floats_multiplies_by_the_rounded_reciprocal_first() {
        let three = [bf16::from_f32(1.0).to_ne_bytes(); 3];
        let third = bf16::from_f32(1.0 / 3.0);
        let two = bf16::from_f32(third.to_f32() + third.to_f32());
        let expected = bf16::from_f32(two.to_f32() + third.to_f32());
        assert_eq!(folded(Kind::Bf16, Fold::Avg, &three), expected.to_ne_bytes());
        assert_eq!(expected.to_f32(), 1.0, "0.333984375 three times is 1.001953125, which rounds to 1");
        let six = [f16::from_f32(1.0).to_ne_bytes(); 6];
        assert_eq!(folded(Kind::F16, Fold::Avg, &six), f16::from_f32(0.9995117).to_ne_bytes(), "the bias shows");
    }

    #[test]
    fn a_number_beats_a_nan() {
        for by in [Fold::Max, Fold::Min] {
            for ranks in [[f32::NAN, 2.0], [2.0, f32::NAN]] {
                assert_eq!(folded(Kind::F32, by, &ranks.map(f32::to_ne_bytes)), 2f32.to_ne_bytes());
            }
        }
        assert_eq!(folded(Kind::F32, Fold::Max, &[(-0f32).to_ne_bytes(), 0f32.to_ne_bytes()]), 0f32.to_ne_bytes());
        assert_eq!(folded(Kind::F32, Fold::Min, &[0f32.to_ne_bytes(), (-0f32).to_ne_bytes()]), (-0f32).to_ne_bytes());
    }
}
