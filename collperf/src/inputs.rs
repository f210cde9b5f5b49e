//! Makes inputs whose reduction is exact in any order, and computes the exact result.
//!
//! Every element is made from a hash of (seed, index, rank), so any rank can compute every other rank's input.
//!
//! - Sums of floats: integer multiples of one power of two. The magnitudes of all ranks' integers add up to no more
//!   than the mantissa holds. So every partial sum, in any order and grouping, is exact in the element's type.
//! - Averages of floats: the same inputs. An exact sum divided by the number of ranks has only one correctly rounded
//!   value.
//! - Products of floats: one rank's factor has a full mantissa, a few factors are two or a half, and the rest are one.
//!   All may be negative.
//! - Minimum and maximum of floats: any finite value except negative zero: which of two zeros is smaller is not
//!   defined.
//! - Integers wrap, so every result is exact. Values are chosen so that no rank's input is masked by the others'.

use collectives::{DType, F8E4M3, F8E5M2, ReduceOp, bf16, f16};

/// Element types that inputs can be made of.
pub(crate) trait Sample: collectives::Element {
    /// Returns this rank's input at this index.
    fn input(recipe: &Recipe, rank: usize, index: usize) -> Self;
    /// Returns the reduction over all ranks at this index.
    fn folded(recipe: &Recipe, index: usize) -> Self;
    /// Returns a value that differs from `self` and from every correct result.
    fn poisoned(self) -> Self;
    /// Returns the bits of this value, for comparisons.
    fn bits(self) -> u64;
}

/// The call for which inputs are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipe {
    /// A number that makes the inputs of two checks of the same call differ.
    pub(crate) seed: u64,
    /// The op; `None` if data is only moved.
    pub(crate) op: Option<ReduceOp>,
    pub(crate) world_size: usize,
    /// The number of elements after which inputs repeat.
    pub(crate) period: usize,
}

/// Returns the scalar of `PreMulSum` on this rank: alternately 1 and 2, as in nccl-tests.
pub(crate) fn premultiplier(rank: usize) -> f64 {
    if rank.is_multiple_of(2) { 1.0 } else { 2.0 }
}

/// Mixes the bits of a number (the finaliser of MurmurHash3, with other multipliers).
fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits = (bits ^ bits >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits ^ bits >> 32
}

/// Returns the bits of one rank at an index. `common` has the bits that all ranks share at this index.
fn own(common: u64, rank: usize) -> u64 {
    mixed(common.wrapping_add((rank as u64 + 1).wrapping_mul(0xc2b2_ae3d_27d4_eb4f)))
}

impl Recipe {
    /// Returns the bits that all ranks share at this index.
    fn common(&self, index: usize) -> u64 {
        let index = if index < self.period { index } else { index % self.period };
        mixed(self.seed.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Returns a rank's place in the shuffled order of ranks at an index.
    fn place(&self, common: u64, rank: usize) -> usize {
        (rank + (common >> 20) as usize % self.world_size) % self.world_size
    }

    /// Returns this rank's input for a float with this many mantissa bits, including the hidden bit.
    #[inline(always)]
    fn float_input(&self, mantissa_bits: u32, rank: usize, index: usize) -> f64 {
        self.float_of(mantissa_bits, rank, self.common(index))
    }

    /// Returns the same input as [`Recipe::float_input`], from the bits that all ranks share at the index (`common`).
    #[inline(always)]
    fn float_of(&self, mantissa_bits: u32, rank: usize, common: u64) -> f64 {
        let own = own(common, rank);
        let place = || self.place(common, rank);
        match self.op {
            Some(ReduceOp::Sum | ReduceOp::Avg) => self.addend(1_u64 << mantissa_bits, own, place) * unit(common),
            // Half of the budget: some ranks' addends are doubled.
            Some(ReduceOp::PreMulSum(_)) => self.addend(1_u64 << (mantissa_bits - 1), own, place) * unit(common),
            Some(ReduceOp::Prod) => factor(mantissa_bits, own, place()),
            _ if own >> 58 == 0 => 0.0,
            _ => signed(own, full_mantissa(mantissa_bits, own) * power_of_two((own >> 1 & 7) as i32 - 4)),
        }
    }

    /// Returns an integer such that the magnitudes of all ranks' integers add up to no more than `budget`.
    #[inline(always)]
    fn addend(&self, budget: u64, own: u64, place: impl Fn() -> usize) -> f64 {
        let limit = budget / self.world_size as u64;
        if limit > 0 {
            // The upper half of a product is as evenly distributed as a remainder, in a tenth of the time.
            let choice = (u128::from(own) * u128::from(2 * limit + 1)) >> 64;
            return (choice as i64 - limit as i64) as f64;
        }
        // More ranks than budget: each of the first ranks adds one, the others nothing.
        if (place() as u64) < budget { signed(own, 1.0) } else { 0.0 }
    }

    /// Returns the reduction of all ranks' floats at this index. The result is exact, except that `Avg` is rounded once,
    /// to `f64`.
    fn float_folded(&self, mantissa_bits: u32, index: usize) -> f64 {
        let common = self.common(index);
        let inputs = (0..self.world_size).map(|rank| (rank, self.float_of(mantissa_bits, rank, common)));
        match self.op {
            Some(ReduceOp::Avg) => inputs.map(|(_, input)| input).sum::<f64>() / self.world_size as f64,
            Some(ReduceOp::PreMulSum(_)) => inputs.map(|(rank, input)| input * premultiplier(rank)).sum(),
            Some(ReduceOp::Prod) => inputs.map(|(_, input)| input).product(),
            Some(ReduceOp::Min) => inputs.map(|(_, input)| input).fold(f64::INFINITY, f64::min),
            Some(ReduceOp::Max) => inputs.map(|(_, input)| input).fold(f64::NEG_INFINITY, f64::max),
            // In Rust, the sum of no floats is negative zero; our results never are.
            _ => inputs.map(|(_, input)| input).fold(0.0, |sum, input| sum + input),
        }
    }

    /// Returns this rank's input for an integer of `width` bits, in the lower `width` bits. A `bool` has one bit.
    fn integer_input(&self, width: u32, rank: usize, index: usize) -> u64 {
        let common = self.common(index);
        let own = own(common, rank);
        let place = || self.place(common, rank);
        // The sum of truth values is an OR, their product an AND.
        let op = match self.op {
            Some(ReduceOp::Sum | ReduceOp::Max) if width == 1 => Some(ReduceOp::BitOr),
            Some(ReduceOp::Prod | ReduceOp::Min) if width == 1 => Some(ReduceOp::BitAnd),
            op => op,
        };
        match op {
            // With more than two random operands, nearly all bits of the result would be zeros, or ones.
            Some(ReduceOp::BitAnd) if place() > 1 => u64::MAX,
            Some(ReduceOp::BitOr) if place() > 1 => 0,
            // Factors of two would accumulate until the product is zero; only one rank may have them.
            Some(ReduceOp::Prod) if place() > 0 => own | 1,
            _ => own,
        }
    }

    /// Returns the reduction of all ranks' integers at this index, in the lower `width` bits.
    fn integer_folded(&self, width: u32, is_signed: bool, index: usize) -> u64 {
        let widened = |bits: u64| widen(bits, width, is_signed);
        let inputs = (0..self.world_size).map(|rank| self.integer_input(width, rank, index));
        match self.op {
            Some(ReduceOp::Sum | ReduceOp::Max) if width == 1 => inputs.fold(0, |a, b| a | b),
            Some(ReduceOp::Prod | ReduceOp::Min) if width == 1 => inputs.fold(u64::MAX, |a, b| a & b),
            Some(ReduceOp::Sum) => inputs.fold(0, u64::wrapping_add),
            Some(ReduceOp::Avg) => (widened(inputs.fold(0, u64::wrapping_add)) / self.world_size as i128) as u64,
            Some(ReduceOp::Prod) => inputs.fold(1, u64::wrapping_mul),
            Some(ReduceOp::Min) => inputs.map(widened).fold(i128::MAX, i128::min) as u64,
            Some(ReduceOp::Max) => inputs.map(widened).fold(i128::MIN, i128::max) as u64,
            Some(ReduceOp::BitAnd) => inputs.fold(u64::MAX, |a, b| a & b),
            Some(ReduceOp::BitOr) => inputs.fold(0, |a, b| a | b),
            _ => inputs.fold(0, |a, b| a ^ b),
        }
    }
}

/// Returns the value of the integer in the lower `width` bits of `bits`.
fn widen(bits: u64, width: u32, is_signed: bool) -> i128 {
    let shift = 128 - width;
    let raised = u128::from(bits) << shift;
    if is_signed { raised as i128 >> shift } else { (raised >> shift) as i128 }
}

/// Returns a power of two. All addends at an index are multiples of this power, which is small enough that no sum
/// overflows the narrowest type.
fn unit(common: u64) -> f64 {
    power_of_two((common & 3) as i32 - 1)
}

/// Returns two to the power of a small exponent.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// Returns `value` or its negative, depending on a bit of `own`.
fn signed(own: u64, value: f64) -> f64 {
    if own & 1 == 1 { -value } else { value }
}

/// Returns a number from 1 to 2 that uses all mantissa bits.
fn full_mantissa(mantissa_bits: u32, own: u64) -> f64 {
    let hidden = 1_u64 << (mantissa_bits - 1);
    ((own >> 5) % hidden + hidden) as f64 / hidden as f64
}

/// Returns one rank's factor of a product.
fn factor(mantissa_bits: u32, own: u64, place: usize) -> f64 {
    let magnitude = match place {
        0 => full_mantissa(mantissa_bits, own),
        1..=4 if own & 2 == 0 => 0.5,
        1..=4 => 2.0,
        _ => 1.0,
    };
    signed(own, magnitude)
}

macro_rules! float_samples {
    ($($float:ty, $mantissa_bits:literal, $from:expr;)*) => {$(
        impl Sample for $float {
            fn input(recipe: &Recipe, rank: usize, index: usize) -> Self {
                $from(recipe.float_input($mantissa_bits, rank, index))
            }

            fn folded(recipe: &Recipe, index: usize) -> Self {
                $from(recipe.float_folded($mantissa_bits, index))
            }

            fn poisoned(self) -> Self {
                // No input and no result is NaN.
                $from(f64::NAN)
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    )*};
}

float_samples! {
    f64, 53, |value: f64| value;
    f32, 24, |value: f64| value as f32;
    f16, 11, f16::from_f64;
    bf16, 8, bf16::from_f64;
    F8E4M3, 4, F8E4M3::from_f64;
    F8E5M2, 3, F8E5M2::from_f64;
}

macro_rules! integer_samples {
    ($($integer:ty, $is_signed:literal;)*) => {$(
        impl Sample for $integer {
            fn input(recipe: &Recipe, rank: usize, index: usize) -> Self {
                recipe.integer_input(<$integer>::BITS, rank, index) as $integer
            }

            fn folded(recipe: &Recipe, index: usize) -> Self {
                recipe.integer_folded(<$integer>::BITS, $is_signed, index) as $integer
            }

            fn poisoned(self) -> Self {
                !self
            }

            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}

integer_samples! {
    i8, true;
    i16, true;
    i32, true;
    i64, true;
    u8, false;
    u16, false;
    u32, false;
    u64, false;
}

impl Sample for bool {
    fn input(recipe: &Recipe, rank: usize, index: usize) -> Self {
        recipe.integer_input(1, rank, index) & 1 == 1
    }

    fn folded(recipe: &Recipe, index: usize) -> Self {
        recipe.integer_folded(1, false, index) & 1 == 1
    }

    fn poisoned(self) -> Self {
        !self
    }

    fn bits(self) -> u64 {
        u64::from(self)
    }
}

/// Runs `$body` with `$T` as the type that `$dtype` names, or `$other` if this program does not know the type.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr, $other:expr) => {
        with_element!(@arms $dtype, $T, $body, $other;
            F32 f32, F64 f64, F16 collectives::f16, Bf16 collectives::bf16, F8E4M3 collectives::F8E4M3, F8E5M2 collectives::F8E5M2,
            I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16, U32 u32, U64 u64, Bool bool)
    };
    (@arms $dtype:expr, $T:ident, $body:expr, $other:expr; $($name:ident $rust:ty),*) => {
        match $dtype {
            $(collectives::DType::$name => {
                type $T = $rust;
                $body
            })*
            _ => $other,
        }
    };
}
pub(crate) use with_element;

/// Returns the name of a type in nccl-tests' tables.
pub(crate) fn table_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::F16 => "half",
        DType::Bf16 => "bfloat16",
        DType::I8 => "int8",
        DType::I16 => "int16",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::U8 => "uint8",
        DType::U16 => "uint16",
        DType::U32 => "uint32",
        DType::U64 => "uint64",
        other => other.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oracle: the library's definition of an op, applied to one operand at a time and rounded after each.
    trait Fold: Sample {
        fn fold(self, op: ReduceOp, other: Self) -> Self;
        fn prepared(self, op: ReduceOp, rank: usize) -> Self;
        fn finished(self, op: ReduceOp, world_size: usize) -> Self;
    }

    macro_rules! float_folds {
        ($($float:ty, $to:expr, $from:expr;)*) => {$(
            impl Fold for $float {
                fn fold(self, op: ReduceOp, other: Self) -> Self {
                    let (a, b): (f64, f64) = ($to(self), $to(other));
                    $from(match op {
                        ReduceOp::Prod => a * b,
                        ReduceOp::Min => a.min(b),
                        ReduceOp::Max => a.max(b),
                        _ => a + b,
                    })
                }
                fn prepared(self, op: ReduceOp, rank: usize) -> Self {
                    if let ReduceOp::PreMulSum(_) = op { $from($to(self) * premultiplier(rank)) } else { self }
                }
                fn finished(self, op: ReduceOp, world_size: usize) -> Self {
                    // Like an implementation that computes in f32 and rounds once more.
                    let narrow = size_of::<$float>() < 4;
                    match op {
                        ReduceOp::Avg if narrow => $from(f64::from($to(self) as f32 / world_size as f32)),
                        ReduceOp::Avg => $from($to(self) / world_size as f64),
                        _ => self,
                    }
                }
            }
        )*};
    }

    float_folds! {
        f64, |a: f64| a, |a: f64| a;
        f32, f64::from, |a: f64| a as f32;
        f16, f64::from, |a: f64| f16::from_f32(a as f32);
        bf16, f64::from, |a: f64| bf16::from_f32(a as f32);
        F8E4M3, |a: F8E4M3| f64::from(a.to_f32()), |a: f64| F8E4M3::from_f32(a as f32);
        F8E5M2, |a: F8E5M2| f64::from(a.to_f32()), |a: f64| F8E5M2::from_f32(a as f32);
    }

    macro_rules! integer_folds {
        ($($integer:ty)*) => {$(
            impl Fold for $integer {
                fn fold(self, op: ReduceOp, other: Self) -> Self {
                    match op {
                        ReduceOp::Prod => self.wrapping_mul(other),
                        ReduceOp::Min => self.min(other),
                        ReduceOp::Max => self.max(other),
                        ReduceOp::BitAnd => self & other,
                        ReduceOp::BitOr => self | other,
                        ReduceOp::BitXor => self ^ other,
                        _ => self.wrapping_add(other),
                    }
                }
                fn prepared(self, _: ReduceOp, _: usize) -> Self { self }
                fn finished(self, op: ReduceOp, world_size: usize) -> Self {
                    if op == ReduceOp::Avg { (i128::from(self) / world_size as i128) as $integer } else { self }
                }
            }
        )*};
    }

    integer_folds! { i8 i16 i32 i64 u8 u16 u32 u64 }

    impl Fold for bool {
        fn fold(self, op: ReduceOp, other: Self) -> Self {
            match op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => self | other,
                ReduceOp::BitXor => self ^ other,
                _ => self & other,
            }
        }
        fn prepared(self, _: ReduceOp, _: usize) -> Self {
            self
        }
        fn finished(self, _: ReduceOp, _: usize) -> Self {
            self
        }
    }

    const INDICES: usize = 150;

    /// Reduces in a given order: in a chain, or as two halves that are then combined.
    fn folded_in_order<T: Fold>(recipe: &Recipe, op: ReduceOp, order: &[usize], index: usize, halves: bool) -> T {
        let value = |rank: &usize| T::input(recipe, *rank, index).prepared(op, *rank);
        let chain = |ranks: &[usize]| ranks.iter().map(value).reduce(|a, b| a.fold(op, b)).unwrap();
        let result = match order.split_at(order.len() / 2) {
            (first, second) if halves && !first.is_empty() => chain(first).fold(op, chain(second)),
            _ => chain(order),
        };
        result.finished(op, order.len())
    }

    fn check_orders<T: Fold>(op: ReduceOp, world_size: usize, seed: u64) {
        let recipe = Recipe { seed, op: Some(op), world_size, period: usize::MAX };
        let mut order: Vec<usize> = (0..world_size).collect();
        for round in 0..4_u64 {
            for i in (1..world_size).rev() {
                order.swap(i, (mixed(seed ^ round << 40 ^ i as u64) % (i as u64 + 1)) as usize);
            }
            for index in 0..INDICES {
                let expected = T::folded(&recipe, index);
                for halves in [false, true] {
                    let found: T = folded_in_order(&recipe, op, &order, index, halves);
                    assert_eq!(
                        found.bits(),
                        expected.bits(),
                        "{op} of {} over {world_size}, seed {seed}, index {index}, order {order:?}: {found:?}, not {expected:?}",
                        T::ELEMENT_TYPE
                    );
                }
            }
        }
    }

    #[test]
    fn every_order_gives_the_same_bits() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
                for world_size in [1, 2, 3, 7, 13, 40] {
                    with_element!(dtype, T => check_orders::<T>(op, world_size, 17 + world_size as u64), unreachable!());
                }
            }
        }
    }

    /// Returns how many of the expected results differ from the first one.
    fn variety<T: Sample>(recipe: &Recipe) -> usize {
        (0..INDICES).filter(|index| T::folded(recipe, *index).bits() != T::folded(recipe, 0).bits()).count()
    }

    #[test]
    fn results_are_not_all_alike() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
                for world_size in [1, 2, 13] {
                    let recipe = Recipe { seed: 5, op: Some(op), world_size, period: usize::MAX };
                    let variety = with_element!(dtype, T => variety::<T>(&recipe), unreachable!());
                    assert!(variety > INDICES / 8, "{op} of {dtype} over {world_size}: {variety}");
                }
            }
        }
    }

    /// Leaves out one rank and returns how often that would be noticed.
    fn noticed<T: Fold>(op: ReduceOp, world_size: usize, left_out: usize) -> usize {
        let recipe = Recipe { seed: 9, op: Some(op), world_size, period: usize::MAX };
        let others: Vec<usize> = (0..world_size).filter(|rank| *rank != left_out).collect();
        let differs = |index: &usize| folded_in_order::<T>(&recipe, op, &others, *index, false).bits() != T::folded(&recipe, *index).bits();
        (0..INDICES).filter(differs).count()
    }

    #[test]
    fn a_rank_that_is_left_out_is_noticed() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.check(dtype).is_ok()) {
                for (world_size, left_out) in [(2, 0), (2, 1), (5, 3), (13, 7)] {
                    let noticed = with_element!(dtype, T => noticed::<T>(op, world_size, left_out), unreachable!());
                    assert!(noticed > 0, "{op} of {dtype} over {world_size} without rank {left_out}");
                }
            }
        }
    }

    fn check_poison<T: Sample>(op: Option<ReduceOp>) {
        let recipe = Recipe { seed: 3, op, world_size: 3, period: usize::MAX };
        for index in 0..INDICES {
            let expected = if op.is_some() { T::folded(&recipe, index) } else { T::input(&recipe, 1, index) };
            assert_ne!(expected.poisoned().bits(), expected.bits(), "{expected:?}");
        }
    }

    #[test]
    fn poison_is_never_right() {
        for dtype in DType::ALL {
            for op in [None, Some(ReduceOp::Sum), Some(ReduceOp::Min)] {
                with_element!(dtype, T => check_poison::<T>(op), unreachable!());
            }
        }
    }

    #[test]
    fn inputs_repeat_themselves_where_asked() {
        let recipe = Recipe { seed: 5, op: Some(ReduceOp::Sum), world_size: 3, period: 7 };
        let endless = Recipe { period: usize::MAX, ..recipe };
        for index in 0..50 {
            assert_eq!(i64::input(&recipe, 1, index), i64::input(&endless, 1, index % 7));
            assert_eq!(i64::folded(&recipe, index), i64::folded(&endless, index % 7));
        }
    }

    fn check_move<T: Sample>() {
        let recipe = Recipe { seed: 4, op: None, world_size: 4, period: usize::MAX };
        let other = Recipe { seed: 5, ..recipe };
        let differ = |a: &dyn Fn(usize) -> u64, b: &dyn Fn(usize) -> u64| (0..INDICES).filter(|index| a(*index) != b(*index)).count();
        let mine = |index| T::input(&recipe, 0, index).bits();
        assert!(differ(&mine, &|index| T::input(&recipe, 1, index).bits()) > INDICES / 4, "ranks differ");
        assert!(differ(&mine, &|index| T::input(&recipe, 0, index + 1).bits()) > INDICES / 4, "indices differ");
        assert!(differ(&mine, &|index| T::input(&other, 0, index).bits()) > INDICES / 4, "seeds differ");
    }

    #[test]
    fn moved_data_shows_where_it_comes_from() {
        for dtype in DType::ALL {
            with_element!(dtype, T => check_move::<T>(), unreachable!());
        }
    }
}
