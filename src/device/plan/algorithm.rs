//! The algorithm of a reduction: NCCL's own, or one of this crate's kernels between two exchanges.

use std::fmt;

use nccl_sys::Version;

use crate::base::tuning::device_folds::DIVIDES_RANKS;
use crate::call::element::DType;
use crate::call::op::ReduceOp;
use crate::error::Result;

/// The first NCCL that reduces 8-bit floats, on devices from `FLOAT8_CAPABILITY` on.
const FLOAT8_VERSION: Version = Version::new(2, 24, 3);
const FLOAT8_CAPABILITY: (i32, i32) = (9, 0);

/// The inputs of the choice. They are the same on every rank, so that all ranks make the same choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capabilities {
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// The loaded NCCL.
    pub(crate) nccl: Version,
    /// The least compute capability among the ranks' devices.
    pub(crate) capability: (i32, i32),
    /// Whether everything is folded in rank order.
    pub(crate) reproducible: bool,
    /// The number of bytes from which NCCL's sum followed by our own division is faster than NCCL's mean; `None` if it
    /// never is.
    pub(crate) divides_from: Option<usize>,
}

/// An op that NCCL has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NcclOp {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
    PreMulSum(f64),
}

/// An op that this crate's kernels have.
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

    /// Returns the op's name, as it appears in the names of kernels.
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

    /// Whether the op works on bits, regardless of the type.
    pub(crate) const fn is_bitwise(self) -> bool {
        matches!(self, FoldOp::And | FoldOp::Or | FoldOp::Xor)
    }
}

/// The algorithm of one reduction. For `n` ranks:
///
/// | op | types | algorithm |
/// | --- | --- | --- |
/// | Sum, Prod, Min, Max | 8-, 32- and 64-bit integers, f16, bf16, f32, f64 | NCCL |
/// | | f8e4m3, f8e5m2 | NCCL from 2.24 on devices from 9.0; our fold otherwise |
/// | | i16, u16 | our fold |
/// | Sum, Max, BitOr | bool | NCCL's Max of bytes |
/// | Prod, Min, BitAnd | bool | NCCL's Min of bytes |
/// | BitAnd, BitOr, BitXor | integers, and BitXor of bool | our fold |
/// | Avg | 8-, 32- and 64-bit integers | NCCL: it sums and divides exactly |
/// | | f32, f64, f16, bf16 if `n` is a power of two | NCCL: it multiplies by 1/n first, which is exact except for subnormal results |
/// | | f32, bf16 if `n` is a power of two, of large calls through the NVLink switch | NCCL's Sum, then our division: the switch only adds |
/// | | f32, f64 otherwise | NCCL's Sum, then our division: NCCL would multiply each input by a rounded 1/n |
/// | | f16, bf16 otherwise, f8e4m3, f8e5m2, i16, u16 | our fold: in f32, rounded once |
/// | PreMulSum | as for Sum | NCCL if it sums the type; else our multiplication, then our fold |
///
/// A sum of `f16` overflows at 65,504, so an `f16` mean is never computed from such a sum.
///
/// For reproducible results Sum, Prod, Avg and PreMulSum of floats are our folds, in rank order. The other ops do not
/// depend on the order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum DeviceAlgorithm {
    /// NCCL reduces elements of this type.
    Nccl(NcclOp, DType),
    /// NCCL sums the elements. Each sum is then divided by the number of ranks.
    SumThenDivide(DType),
    /// Every rank receives all inputs of its share, and folds them. If there is a scalar, each rank first multiplies
    /// the elements by the scalar.
    Fold(FoldOp, DType, Option<f64>),
}

impl DeviceAlgorithm {
    /// Chooses the algorithm of an op on a type, for two ranks or more. `in_switch` is the total number of bytes if a
    /// switch can do the call, and 0 otherwise.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the op cannot be done on the type at all.
    pub(crate) fn of(op: ReduceOp, dtype: DType, in_switch: usize, capabilities: &Capabilities) -> Result<Self> {
        op.check(dtype)?;
        let in_nccl = is_in_nccl(dtype, capabilities);
        let in_order = capabilities.reproducible && dtype.is_float();
        Ok(match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr if dtype == DType::Bool => DeviceAlgorithm::Nccl(NcclOp::Max, dtype),
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd if dtype == DType::Bool => DeviceAlgorithm::Nccl(NcclOp::Min, dtype),
            ReduceOp::BitAnd => DeviceAlgorithm::Fold(FoldOp::And, dtype, None),
            ReduceOp::BitOr => DeviceAlgorithm::Fold(FoldOp::Or, dtype, None),
            ReduceOp::BitXor => DeviceAlgorithm::Fold(FoldOp::Xor, dtype, None),
            ReduceOp::Sum if in_nccl && !in_order => DeviceAlgorithm::Nccl(NcclOp::Sum, dtype),
            ReduceOp::Sum => DeviceAlgorithm::Fold(FoldOp::Sum, dtype, None),
            ReduceOp::Prod if in_nccl && !in_order => DeviceAlgorithm::Nccl(NcclOp::Prod, dtype),
            ReduceOp::Prod => DeviceAlgorithm::Fold(FoldOp::Prod, dtype, None),
            ReduceOp::Min if in_nccl => DeviceAlgorithm::Nccl(NcclOp::Min, dtype),
            ReduceOp::Min => DeviceAlgorithm::Fold(FoldOp::Min, dtype, None),
            ReduceOp::Max if in_nccl => DeviceAlgorithm::Nccl(NcclOp::Max, dtype),
            ReduceOp::Max => DeviceAlgorithm::Fold(FoldOp::Max, dtype, None),
            ReduceOp::Avg if !in_nccl || in_order => DeviceAlgorithm::Fold(FoldOp::Avg, dtype, None),
            ReduceOp::Avg => mean(dtype, in_switch, capabilities),
            ReduceOp::PreMulSum(scalar) if in_nccl && !in_order => DeviceAlgorithm::Nccl(NcclOp::PreMulSum(scalar), dtype),
            ReduceOp::PreMulSum(scalar) => DeviceAlgorithm::Fold(FoldOp::Sum, dtype, Some(scalar)),
        })
    }
}

/// Chooses the algorithm of a mean of a type that NCCL reduces, in any order.
fn mean(dtype: DType, in_switch: usize, capabilities: &Capabilities) -> DeviceAlgorithm {
    let is_power = capabilities.ranks.is_power_of_two();
    let divides = capabilities.ranks >= DIVIDES_RANKS && capabilities.divides_from.is_some_and(|least| in_switch >= least);
    match dtype {
        DType::F8E4M3 | DType::F8E5M2 => DeviceAlgorithm::Fold(FoldOp::Avg, dtype, None),
        DType::F32 | DType::Bf16 if is_power && divides => DeviceAlgorithm::SumThenDivide(dtype),
        DType::F32 | DType::F64 if !is_power => DeviceAlgorithm::SumThenDivide(dtype),
        DType::F16 | DType::Bf16 if !is_power => DeviceAlgorithm::Fold(FoldOp::Avg, dtype, None),
        _ => DeviceAlgorithm::Nccl(NcclOp::Avg, dtype),
    }
}

/// Whether NCCL reduces this type.
fn is_in_nccl(dtype: DType, capabilities: &Capabilities) -> bool {
    match dtype {
        DType::I16 | DType::U16 => false,
        DType::F8E4M3 | DType::F8E5M2 => capabilities.nccl >= FLOAT8_VERSION && capabilities.capability >= FLOAT8_CAPABILITY,
        _ => true,
    }
}

impl fmt::Display for DeviceAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceAlgorithm::Nccl(op, DType::Bool) => write!(f, "NCCL's {op:?} of bytes"),
            DeviceAlgorithm::Nccl(NcclOp::PreMulSum(_), _) => write!(f, "NCCL's PreMulSum"),
            DeviceAlgorithm::Nccl(op, _) => write!(f, "NCCL's {op:?}"),
            DeviceAlgorithm::SumThenDivide(_) => write!(f, "NCCL's Sum, then our division"),
            DeviceAlgorithm::Fold(_, _, None) => write!(f, "exchange, then our fold in rank order"),
            DeviceAlgorithm::Fold(_, _, Some(_)) => write!(f, "our multiplication, then exchange, then our fold in rank order"),
        }
    }
}

/// Describes the algorithm of each op for each type, with one line for each op and algorithm.
pub(crate) fn explain(capabilities: &Capabilities) -> String {
    let mut lines = Vec::new();
    for op in ReduceOp::ALL {
        let mut algorithms: Vec<(String, Vec<&str>)> = Vec::new();
        for dtype in DType::ALL {
            let Ok(algorithm) = DeviceAlgorithm::of(op, dtype, 0, capabilities) else { continue };
            let mut words = algorithm.to_string();
            match (DeviceAlgorithm::of(op, dtype, usize::MAX, capabilities), capabilities.divides_from) {
                (Ok(large), Some(least)) if large != algorithm => {
                    words = format!("{words}; from {} MiB on, for all_reduce and reduce_scatter: {large}", least >> 20);
                }
                _ => {}
            }
            match algorithms.iter_mut().find(|(known, _)| *known == words) {
                Some((_, types)) => types.push(dtype.name()),
                None => algorithms.push((words, vec![dtype.name()])),
            }
        }
        lines.extend(algorithms.into_iter().map(|(words, types)| format!("{op} of {}: {words}", types.join(" "))));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::device::kernels::has_fold;

    fn capabilities(ranks: usize) -> Capabilities {
        Capabilities { ranks, nccl: Version::new(2, 28, 9), capability: (9, 0), reproducible: false, divides_from: None }
    }

    fn every() -> impl Iterator<Item = (ReduceOp, DType)> {
        ReduceOp::ALL.into_iter().flat_map(|op| DType::ALL.into_iter().map(move |dtype| (op, dtype)))
    }

    #[test]
    fn an_op_has_a_way_exactly_where_it_is_allowed() {
        for (op, dtype) in every() {
            assert_eq!(DeviceAlgorithm::of(op, dtype, 0, &capabilities(3)).is_ok(), op.check(dtype).is_ok(), "{op} of {dtype}");
        }
    }

    #[test]
    fn every_fold_that_is_chosen_has_a_kernel() {
        for (op, dtype) in every() {
            for (ranks, capability, reproducible) in [(2, (7, 0), false), (3, (9, 0), false), (3, (8, 0), true), (8, (9, 0), true)] {
                let capabilities = Capabilities { capability, reproducible, ..capabilities(ranks) };
                if let Ok(DeviceAlgorithm::Fold(op, dtype, _)) = DeviceAlgorithm::of(op, dtype, 0, &capabilities) {
                    assert!(has_fold(op, dtype), "{op:?} of {dtype}");
                }
            }
        }
    }

    #[test]
    fn nccl_gets_only_types_that_it_reduces() {
        for (op, dtype) in every() {
            for (old, capability) in [(Version::new(2, 18, 3), (9, 0)), (Version::new(2, 30, 7), (8, 9))] {
                let algorithm = DeviceAlgorithm::of(op, dtype, 0, &Capabilities { nccl: old, capability, ..capabilities(3) });
                let lacking = [DType::I16, DType::U16, DType::F8E4M3, DType::F8E5M2];
                if lacking.contains(&dtype) {
                    assert!(!matches!(algorithm, Ok(DeviceAlgorithm::Nccl(..) | DeviceAlgorithm::SumThenDivide(_))), "{op} of {dtype}");
                }
            }
        }
    }

    #[test]
    fn a_mean_is_never_made_of_rounded_reciprocals() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::F8E4M3, DType::F8E5M2] {
            for ranks in [3, 5, 6, 7, 12] {
                assert!(
                    !matches!(DeviceAlgorithm::of(ReduceOp::Avg, dtype, 0, &capabilities(ranks)), Ok(DeviceAlgorithm::Nccl(..))),
                    "{dtype}, {ranks} ranks"
                );
            }
        }
        assert_eq!(
            DeviceAlgorithm::of(ReduceOp::Avg, DType::F32, 0, &capabilities(8)).unwrap(),
            DeviceAlgorithm::Nccl(NcclOp::Avg, DType::F32)
        );
        assert_eq!(
            DeviceAlgorithm::of(ReduceOp::Avg, DType::I64, 0, &capabilities(7)).unwrap(),
            DeviceAlgorithm::Nccl(NcclOp::Avg, DType::I64)
        );
        assert_eq!(
            DeviceAlgorithm::of(ReduceOp::Avg, DType::F64, 0, &capabilities(6)).unwrap(),
            DeviceAlgorithm::SumThenDivide(DType::F64)
        );
        assert_eq!(
            DeviceAlgorithm::of(ReduceOp::Avg, DType::Bf16, 0, &capabilities(6)).unwrap(),
            DeviceAlgorithm::Fold(FoldOp::Avg, DType::Bf16, None)
        );
    }

    #[test]
    fn a_large_mean_is_a_sum_where_the_switch_adds() {
        let of = |dtype, in_switch, ranks, reproducible| {
            let capabilities = Capabilities { reproducible, divides_from: Some(1000), ..capabilities(ranks) };
            DeviceAlgorithm::of(ReduceOp::Avg, dtype, in_switch, &capabilities).unwrap()
        };
        for dtype in [DType::F32, DType::Bf16] {
            assert_eq!(of(dtype, 1000, 8, false), DeviceAlgorithm::SumThenDivide(dtype));
            assert_eq!(of(dtype, 999, 8, false), DeviceAlgorithm::Nccl(NcclOp::Avg, dtype));
            assert_eq!(of(dtype, 1000, 4, false), DeviceAlgorithm::Nccl(NcclOp::Avg, dtype));
            assert_eq!(of(dtype, 1000, 8, true), DeviceAlgorithm::Fold(FoldOp::Avg, dtype, None));
            let without = DeviceAlgorithm::of(ReduceOp::Avg, dtype, usize::MAX, &capabilities(8)).unwrap();
            assert_eq!(without, DeviceAlgorithm::Nccl(NcclOp::Avg, dtype));
        }
        for dtype in [DType::F16, DType::F64, DType::I32] {
            assert_eq!(of(dtype, usize::MAX, 8, false), DeviceAlgorithm::Nccl(NcclOp::Avg, dtype));
        }
        let text = explain(&Capabilities { divides_from: Some(32 << 20), ..capabilities(8) });
        let line = "avg of f32 bf16: NCCL's Avg; from 32 MiB on, for all_reduce and reduce_scatter: NCCL's Sum, then our division";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn reproducible_results_do_not_depend_on_the_order_of_others() {
        for (op, dtype) in every() {
            let algorithm = DeviceAlgorithm::of(op, dtype, 0, &Capabilities { reproducible: true, ..capabilities(8) });
            let ordered = matches!(op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg | ReduceOp::PreMulSum(_)) && dtype.is_float();
            assert!(!ordered || matches!(algorithm, Ok(DeviceAlgorithm::Fold(..))), "{op} of {dtype}");
        }
    }

    #[test]
    fn truth_values_stay_truth_values() {
        for (op, in_nccl) in [
            (ReduceOp::Sum, NcclOp::Max),
            (ReduceOp::Max, NcclOp::Max),
            (ReduceOp::BitOr, NcclOp::Max),
            (ReduceOp::Prod, NcclOp::Min),
            (ReduceOp::Min, NcclOp::Min),
            (ReduceOp::BitAnd, NcclOp::Min),
        ] {
            assert_eq!(DeviceAlgorithm::of(op, DType::Bool, 0, &capabilities(4)).unwrap(), DeviceAlgorithm::Nccl(in_nccl, DType::Bool));
        }
        assert_eq!(
            DeviceAlgorithm::of(ReduceOp::BitXor, DType::Bool, 0, &capabilities(4)).unwrap(),
            DeviceAlgorithm::Fold(FoldOp::Xor, DType::Bool, None)
        );
    }

    #[test]
    fn the_explanation_names_every_way() {
        let text = explain(&capabilities(6));
        assert!(text.contains("avg of f32 f64: NCCL's Sum, then our division"), "{text}");
        assert!(text.contains("band of i8 i16 i32 i64 u8 u16 u32 u64: exchange, then our fold in rank order"), "{text}");
        assert!(text.contains("bor of bool: NCCL's Max of bytes"), "{text}");
    }
}
