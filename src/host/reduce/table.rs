//! Which loop does which operation on which element type.

#![expect(unsafe_code, reason = "what is chosen here is called here")]

use std::num::NonZeroU64;
use std::ops::Range;

use super::block::Inputs;
use super::level::{FoldFunction, Level};
use super::numeric::{Bool, Numeric, Plain, SmallE4M3, SmallE5M2};
use super::operation::{And, Greatest, Least, Mean, MeanByShift, Operation, Or, Product, Sum, Xor};
use crate::{DType, ReduceOp, Result};

/// The loops of one reduction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Functions {
    /// While more is to be folded into the result.
    pub(super) partial: FoldFunction,
    /// For the last fold.
    pub(super) last: FoldFunction,
    /// The bytes that the loops count as one element: a power of two, and not always the element's.
    pub(super) unit_bytes: usize,
}

impl Functions {
    /// Folds the bytes `range` of the inputs.
    ///
    /// # Safety
    ///
    /// As [`Fold::fold`](crate::host::fold::Fold::fold); `into` is where the first byte of the range goes.
    pub(super) unsafe fn fold(&self, into: *mut u8, pointers: &[*const u8], range: Range<usize>, (last, divisor): (bool, NonZeroU64)) {
        let function = if last { self.last } else { self.partial };
        let inputs = Inputs { pointers, start: range.start, count: range.len() >> self.unit_bytes.trailing_zeros() };
        // SAFETY: the caller's contract is the function's; the function was chosen for the element type, and its instruction set was
        // found to be there.
        unsafe { function(into, inputs, divisor) }
    }
}

/// The loops for `op` on `dtype`, which divide by no other number than `divisor`.
///
/// # Errors
///
/// `Unsupported` where the op cannot be done on the type.
pub(super) fn functions(level: Level, op: ReduceOp, dtype: DType, divisor: NonZeroU64) -> Result<Functions> {
    op.check(dtype)?;
    let unit_bytes = dtype.size_bytes();
    if dtype == DType::Bool {
        return Ok(always(bools(level, op), unit_bytes));
    }
    Ok(match op {
        ReduceOp::Sum | ReduceOp::PreMulSum(_) => always(sum(level, dtype), unit_bytes),
        ReduceOp::Avg => {
            let last = match dtype {
                DType::I64 if divisor.is_power_of_two() => level.fold::<Plain<i64>, MeanByShift>(),
                DType::U64 if divisor.is_power_of_two() => level.fold::<Plain<u64>, MeanByShift>(),
                _ => mean(level, dtype),
            };
            Functions { partial: sum(level, dtype), last, unit_bytes }
        }
        ReduceOp::Prod => always(product(level, dtype), unit_bytes),
        ReduceOp::Min => always(least(level, dtype), unit_bytes),
        ReduceOp::Max => always(greatest(level, dtype), unit_bytes),
        // Bits are bits: one loop over bytes serves every integer.
        ReduceOp::BitAnd => always(level.fold::<Plain<u8>, And>(), 1),
        ReduceOp::BitOr => always(level.fold::<Plain<u8>, Or>(), 1),
        ReduceOp::BitXor => always(level.fold::<Plain<u8>, Xor>(), 1),
    })
}

/// One loop, whether or not it is the last.
fn always(function: FoldFunction, unit_bytes: usize) -> Functions {
    Functions { partial: function, last: function, unit_bytes }
}

/// Truth values: every op that is allowed is one of three.
fn bools(level: Level, op: ReduceOp) -> FoldFunction {
    match op {
        ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => level.fold::<Bool, And>(),
        ReduceOp::BitXor => level.fold::<Bool, Xor>(),
        _ => level.fold::<Bool, Or>(),
    }
}

/// Wrapping sums and products are the same for both signs.
macro_rules! arithmetic {
    ($name:ident, $operation:ident) => {
        fn $name(level: Level, dtype: DType) -> FoldFunction {
            match dtype {
                DType::I8 | DType::U8 | DType::Bool => level.fold::<Plain<u8>, $operation>(),
                DType::I16 | DType::U16 => level.fold::<Plain<u16>, $operation>(),
                DType::I32 | DType::U32 => level.fold::<Plain<u32>, $operation>(),
                DType::I64 | DType::U64 => level.fold::<Plain<u64>, $operation>(),
                float => floats::<$operation>(level, float),
            }
        }
    };
}

/// These look at the sign.
macro_rules! signed {
    ($name:ident, $operation:ident) => {
        fn $name(level: Level, dtype: DType) -> FoldFunction {
            match dtype {
                DType::I8 => level.fold::<Plain<i8>, $operation>(),
                DType::I16 => level.fold::<Plain<i16>, $operation>(),
                DType::I32 => level.fold::<Plain<i32>, $operation>(),
                DType::I64 => level.fold::<Plain<i64>, $operation>(),
                DType::U8 | DType::Bool => level.fold::<Plain<u8>, $operation>(),
                DType::U16 => level.fold::<Plain<u16>, $operation>(),
                DType::U32 => level.fold::<Plain<u32>, $operation>(),
                DType::U64 => level.fold::<Plain<u64>, $operation>(),
                float => floats::<$operation>(level, float),
            }
        }
    };
}

arithmetic!(sum, Sum);
arithmetic!(product, Product);
signed!(least, Least);
signed!(greatest, Greatest);
signed!(mean, Mean);

/// The float types. Called for no other.
fn floats<O>(level: Level, dtype: DType) -> FoldFunction
where
    O: Operation<f32> + Operation<f64>,
{
    match dtype {
        DType::F64 => level.fold::<Plain<f64>, O>(),
        DType::F16 => level.fold_f16::<O>(),
        DType::Bf16 => level.fold_bf16::<O>(),
        DType::F8E4M3 => widened::<SmallE4M3, O>(level),
        DType::F8E5M2 => widened::<SmallE5M2, O>(level),
        _ => widened::<Plain<f32>, O>(level),
    }
}

/// Helps the compiler to see that `O` is meant on `f32`.
fn widened<L: Numeric<Wide = f32>, O: Operation<f32>>(level: Level) -> FoldFunction {
    level.fold::<L, O>()
}
