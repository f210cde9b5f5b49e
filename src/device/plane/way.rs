//! Which way a reduction goes: NCCL's own, or one of our kernels between two exchanges.

use std::fmt;

use nccl_sys::Version;

use crate::op::ReduceOp;
use crate::{DType, Result};

/// The first NCCL that reduces 8-bit floats, on devices from `FLOAT8_CAPABILITY` on.
const FLOAT8_VERSION: Version = Version::new(2, 24, 3);
const FLOAT8_CAPABILITY: (i32, i32) = (9, 0);

/// What the choice depends on. The same on every rank, so that all go the same way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    /// How many ranks there are.
    pub(crate) ranks: usize,
    /// The loaded NCCL.
    pub(crate) nccl: Version,
    /// The least compute capability among the ranks' devices.
    pub(crate) capability: (i32, i32),
    /// Whether everything is folded in rank order.
    pub(crate) reproducible: bool,
}

/// An op that NCCL has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NativeOp {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
    PreMulSum(f64),
}

/// An op that our kernels have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FoldOp {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
    And,
    Or,
    Xor,
}

impl FoldOp {
    /// Every op, in the order of their numbers.
    pub(crate) const ALL: [FoldOp; 8] =
        [FoldOp::Sum, FoldOp::Prod, FoldOp::Min, FoldOp::Max, FoldOp::Avg, FoldOp::And, FoldOp::Or, FoldOp::Xor];

    /// As kernels are named.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            FoldOp::Sum => "sum",
            FoldOp::Prod => "prod",
            FoldOp::Min => "min",
            FoldOp::Max => "max",
            FoldOp::Avg => "avg",
            FoldOp::And => "and",
            FoldOp::Or => "or",
            FoldOp::Xor => "xor",
        }
    }

    /// Whether it works on bits, whatever the type.
    pub(crate) const fn is_bitwise(self) -> bool {
        matches!(self, FoldOp::And | FoldOp::Or | FoldOp::Xor)
    }
}

/// How one reduction goes. For `n` ranks:
///
/// | op | types | way |
/// | --- | --- | --- |
/// | Sum, Prod, Min, Max | 8-, 32- and 64-bit integers, f16, bf16, f32, f64 | NCCL |
/// | | f8e4m3, f8e5m2 | NCCL from 2.24 on devices from 9.0; our fold otherwise |
/// | | i16, u16 | our fold |
/// | Sum, Max, BitOr | bool | NCCL's Max of bytes |
/// | Prod, Min, BitAnd | bool | NCCL's Min of bytes |
/// | BitAnd, BitOr, BitXor | integers, and BitXor of bool | our fold |
/// | Avg | 8-, 32- and 64-bit integers | NCCL: it sums and divides exactly |
/// | | f32, f64, f16, bf16 where `n` is a power of two | NCCL: it multiplies by 1/n first, which is exact but for subnormal results |
/// | | f32, f64 otherwise | NCCL's Sum, then our division: NCCL would multiply each input by a rounded 1/n |
/// | | f16, bf16 otherwise, f8e4m3, f8e5m2, i16, u16 | our fold: in f32, rounded once |
/// | PreMulSum | as for Sum | NCCL where it sums the type; else our multiplication, then our fold |
///
/// For reproducible results Sum, Prod, Avg and PreMulSum of floats are our folds, in rank order. The rest does not depend on the order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Way {
    /// NCCL reduces elements of this type.
    Native(NativeOp, DType),
    /// NCCL sums, then each element is divided by the number of ranks.
    SumThenDivide(DType),
    /// Every rank gets all inputs of its share, and folds them.
    Fold(FoldOp, DType),
    /// As a sum by `Fold`, of elements that were multiplied first.
    MultiplyThenFold(f64, DType),
}

impl Way {
    /// The way of an op on a type, for two ranks or more.
    ///
    /// # Errors
    ///
    /// `Unsupported` where the op cannot be done on the type at all.
    pub(crate) fn of(op: ReduceOp, dtype: DType, facts: &Facts) -> Result<Self> {
        op.check(dtype)?;
        let native = is_native(dtype, facts);
        let in_order = facts.reproducible && dtype.is_float();
        Ok(match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr if dtype == DType::Bool => Way::Native(NativeOp::Max, dtype),
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd if dtype == DType::Bool => Way::Native(NativeOp::Min, dtype),
            ReduceOp::BitAnd => Way::Fold(FoldOp::And, dtype),
            ReduceOp::BitOr => Way::Fold(FoldOp::Or, dtype),
            ReduceOp::BitXor => Way::Fold(FoldOp::Xor, dtype),
            ReduceOp::Sum if native && !in_order => Way::Native(NativeOp::Sum, dtype),
            ReduceOp::Sum => Way::Fold(FoldOp::Sum, dtype),
            ReduceOp::Prod if native && !in_order => Way::Native(NativeOp::Prod, dtype),
            ReduceOp::Prod => Way::Fold(FoldOp::Prod, dtype),
            ReduceOp::Min if native => Way::Native(NativeOp::Min, dtype),
            ReduceOp::Min => Way::Fold(FoldOp::Min, dtype),
            ReduceOp::Max if native => Way::Native(NativeOp::Max, dtype),
            ReduceOp::Max => Way::Fold(FoldOp::Max, dtype),
            ReduceOp::Avg => mean(dtype, native, in_order, facts.ranks),
            ReduceOp::PreMulSum(scalar) if native && !in_order => Way::Native(NativeOp::PreMulSum(scalar), dtype),
            ReduceOp::PreMulSum(scalar) => Way::MultiplyThenFold(scalar, dtype),
        })
    }
}

/// The way of a mean.
fn mean(dtype: DType, native: bool, in_order: bool, ranks: usize) -> Way {
    match dtype {
        DType::F8E4M3 | DType::F8E5M2 => Way::Fold(FoldOp::Avg, dtype),
        _ if !native || in_order => Way::Fold(FoldOp::Avg, dtype),
        DType::F32 | DType::F64 if !ranks.is_power_of_two() => Way::SumThenDivide(dtype),
        DType::F16 | DType::Bf16 if !ranks.is_power_of_two() => Way::Fold(FoldOp::Avg, dtype),
        _ => Way::Native(NativeOp::Avg, dtype),
    }
}

/// Whether NCCL reduces this type.
fn is_native(dtype: DType, facts: &Facts) -> bool {
    match dtype {
        DType::I16 | DType::U16 => false,
        DType::F8E4M3 | DType::F8E5M2 => facts.nccl >= FLOAT8_VERSION && facts.capability >= FLOAT8_CAPABILITY,
        _ => true,
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Native(op, DType::Bool) => write!(f, "NCCL's {op:?} of bytes"),
            Way::Native(NativeOp::PreMulSum(_), _) => write!(f, "NCCL's PreMulSum"),
            Way::Native(op, _) => write!(f, "NCCL's {op:?}"),
            Way::SumThenDivide(_) => write!(f, "NCCL's Sum, then our division"),
            Way::Fold(..) => write!(f, "exchange, our fold in rank order"),
            Way::MultiplyThenFold(..) => write!(f, "our multiplication, exchange, our fold in rank order"),
        }
    }
}

/// Which way each op goes for each type, in words: one line for each op and way.
pub(crate) fn explain(facts: &Facts) -> String {
    let mut lines = Vec::new();
    for op in ReduceOp::ALL {
        let mut ways: Vec<(String, Vec<&str>)> = Vec::new();
        for dtype in DType::ALL {
            let Ok(way) = Way::of(op, dtype, facts) else { continue };
            let words = way.to_string();
            match ways.iter_mut().find(|(known, _)| *known == words) {
                Some((_, types)) => types.push(dtype.name()),
                None => ways.push((words, vec![dtype.name()])),
            }
        }
        lines.extend(ways.into_iter().map(|(words, types)| format!("{op} of {}: {words}", types.join(" "))));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::device::kernels::has_fold;

    fn facts(ranks: usize) -> Facts {
        Facts { ranks, nccl: Version::new(2, 28, 9), capability: (9, 0), reproducible: false }
    }

    fn every() -> impl Iterator<Item = (ReduceOp, DType)> {
        ReduceOp::ALL.into_iter().flat_map(|op| DType::ALL.into_iter().map(move |dtype| (op, dtype)))
    }

    #[test]
    fn an_op_has_a_way_exactly_where_it_is_allowed() {
        for (op, dtype) in every() {
            assert_eq!(Way::of(op, dtype, &facts(3)).is_ok(), op.check(dtype).is_ok(), "{op} of {dtype}");
        }
    }

    #[test]
    fn every_fold_that_is_chosen_has_a_kernel() {
        for (op, dtype) in every() {
            for (ranks, capability, reproducible) in [(2, (7, 0), false), (3, (9, 0), false), (3, (8, 0), true), (8, (9, 0), true)] {
                match Way::of(op, dtype, &Facts { capability, reproducible, ..facts(ranks) }) {
                    Ok(Way::Fold(op, dtype)) => assert!(has_fold(op, dtype), "{op:?} of {dtype}"),
                    Ok(Way::MultiplyThenFold(_, dtype)) => assert!(has_fold(FoldOp::Sum, dtype), "{dtype}"),
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn nccl_gets_only_types_that_it_reduces() {
        for (op, dtype) in every() {
            for (old, capability) in [(Version::new(2, 18, 3), (9, 0)), (Version::new(2, 30, 7), (8, 9))] {
                let way = Way::of(op, dtype, &Facts { nccl: old, capability, ..facts(3) });
                let lacking = [DType::I16, DType::U16, DType::F8E4M3, DType::F8E5M2];
                if lacking.contains(&dtype) {
                    assert!(!matches!(way, Ok(Way::Native(..) | Way::SumThenDivide(_))), "{op} of {dtype}");
                }
            }
        }
    }

    #[test]
    fn a_mean_is_never_made_of_rounded_reciprocals() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2] {
            for ranks in [3, 5, 6, 7, 12] {
                assert!(!matches!(Way::of(ReduceOp::Avg, dtype, &facts(ranks)), Ok(Way::Native(..))), "{dtype}, {ranks} ranks");
            }
        }
        assert_eq!(Way::of(ReduceOp::Avg, DType::F32, &facts(8)).unwrap(), Way::Native(NativeOp::Avg, DType::F32));
        assert_eq!(Way::of(ReduceOp::Avg, DType::I64, &facts(7)).unwrap(), Way::Native(NativeOp::Avg, DType::I64));
        assert_eq!(Way::of(ReduceOp::Avg, DType::F64, &facts(6)).unwrap(), Way::SumThenDivide(DType::F64));
        assert_eq!(Way::of(ReduceOp::Avg, DType::Bf16, &facts(6)).unwrap(), Way::Fold(FoldOp::Avg, DType::Bf16));
    }

    #[test]
    fn reproducible_results_do_not_depend_on_the_order_of_others() {
        for (op, dtype) in every() {
            let way = Way::of(op, dtype, &Facts { reproducible: true, ..facts(8) });
            let ordered = matches!(op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg | ReduceOp::PreMulSum(_)) && dtype.is_float();
            assert!(!ordered || matches!(way, Ok(Way::Fold(..) | Way::MultiplyThenFold(..))), "{op} of {dtype}");
        }
    }

    #[test]
    fn truth_values_stay_truth_values() {
        for (op, native) in [
            (ReduceOp::Sum, NativeOp::Max),
            (ReduceOp::Max, NativeOp::Max),
            (ReduceOp::BitOr, NativeOp::Max),
            (ReduceOp::Prod, NativeOp::Min),
            (ReduceOp::Min, NativeOp::Min),
            (ReduceOp::BitAnd, NativeOp::Min),
        ] {
            assert_eq!(Way::of(op, DType::Bool, &facts(4)).unwrap(), Way::Native(native, DType::Bool));
        }
        assert_eq!(Way::of(ReduceOp::BitXor, DType::Bool, &facts(4)).unwrap(), Way::Fold(FoldOp::Xor, DType::Bool));
    }

    #[test]
    fn the_explanation_names_every_way() {
        let text = explain(&facts(6));
        assert!(text.contains("avg of f32 f64: NCCL's Sum, then our division"), "{text}");
        assert!(text.contains("band of i8 i16 i32 i64 u8 u16 u32 u64: exchange, our fold in rank order"), "{text}");
        assert!(text.contains("bor of bool: NCCL's Max of bytes"), "{text}");
    }
}
