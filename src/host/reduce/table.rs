//! The choice of a loop for each operation and element type, and the multiplication that precedes a `PreMulSum`.

#![expect(unsafe_code, reason = "calls the function that is chosen here, on elements of a type known at run time")]

use std::num::NonZeroU64;
use std::ops::{Mul, Range};
use std::slice;

use super::block::Inputs;
use super::level::{FoldFunction, Level};
use super::numeric::{Bf16, Bool, F16, Numeric, Plain, SmallE4M3, SmallE5M2};
use super::operation::{And, Greatest, Least, Mean, MeanByShift, Operation, Or, Product, Sum, Xor};
use crate::call::element::DType;
use crate::call::element::{Data, Element};
use crate::call::op::ReductionKind;
use crate::call::op::{ReduceOp, Reduction};
use crate::error::Result;

/// The loops of one reduction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Functions {
    /// The loop for a fold whose result is folded again.
    pub(super) partial: FoldFunction,
    /// The loop for the last fold.
    pub(super) last: FoldFunction,
    /// The bytes that the loops count as one element: a power of two, and not always the element's size.
    pub(super) unit_bytes: usize,
}

impl Functions {
    /// Folds the bytes `range` of the inputs.
    ///
    /// # Safety
    ///
    /// As for [`Fold::fold`](crate::host::fold::Fold::fold); `into` is the destination of the first byte of the range.
    pub(super) unsafe fn fold(&self, into: *mut u8, pointers: &[*const u8], range: Range<usize>, (last, divisor): (bool, NonZeroU64)) {
        let function = if last { self.last } else { self.partial };
        let inputs = Inputs { pointers, start: range.start, count: range.len() >> self.unit_bytes.trailing_zeros() };
        // SAFETY: the caller's contract is the function's; the function was chosen for the element type, and its
        // instruction set was found to be available.
        unsafe { function(into, inputs, divisor) }
    }
}

/// Returns the loops for `op` on `dtype`. They may divide only by `divisor`.
///
/// # Errors
///
/// `Unsupported` if the op cannot be done on the type.
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
        // Bitwise ops are independent of the type: one loop over bytes serves every integer.
        ReduceOp::BitAnd => always(level.fold::<Plain<u8>, And>(), 1),
        ReduceOp::BitOr => always(level.fold::<Plain<u8>, Or>(), 1),
        ReduceOp::BitXor => always(level.fold::<Plain<u8>, Xor>(), 1),
    })
}

/// Uses one loop for every fold, last or not.
fn always(function: FoldFunction, unit_bytes: usize) -> Functions {
    Functions { partial: function, last: function, unit_bytes }
}

/// Returns the loop for `bool`: every permitted op is one of three.
fn bools(level: Level, op: ReduceOp) -> FoldFunction {
    match op {
        ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => level.fold::<Bool, And>(),
        ReduceOp::BitXor => level.fold::<Bool, Xor>(),
        _ => level.fold::<Bool, Or>(),
    }
}

/// Defines the choice for ops that are the same for both signs: wrapping sums and products.
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

/// Defines the choice for ops that depend on the sign.
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

/// Returns the loop for a float type. Called for no other type.
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

/// Replaces the content of `into` with a rank's contribution to `reduction`: for `PreMulSum` the elements times the
/// scalar, for anything else the elements themselves. The memory of `into` is reused if it suffices.
///
/// The scalar is first rounded to the element type, as on a device, and then each product is rounded once.
pub(crate) fn premultiply<T: Element>(reduction: &Reduction<T>, source: &[T], into: &mut Vec<T>) {
    into.clear();
    match reduction.kind {
        ReductionKind::Builtin(ReduceOp::PreMulSum(scalar)) if T::ELEMENT_TYPE.is_float() => {
            scaled_at(Level::best(), T::ELEMENT_TYPE, scalar, source, into);
        }
        _ => into.extend_from_slice(source),
    }
}

/// Does [`premultiply`] on an instruction set that the processor has. `into` is empty, and `dtype` is the float type of
/// the elements.
pub(super) fn scaled_at<T: Data>(level: Level, dtype: DType, scalar: f64, source: &[T], into: &mut Vec<T>) {
    // As on a device.
    let scalar = dtype.nearest(scalar);
    match dtype {
        DType::F64 => scaled::<T, Plain<f64>>(level, source, into, scalar),
        DType::F16 => scaled::<T, F16>(level, source, into, scalar as f32),
        DType::Bf16 => scaled::<T, Bf16>(level, source, into, scalar as f32),
        DType::F8E4M3 => scaled::<T, SmallE4M3>(level, source, into, scalar as f32),
        DType::F8E5M2 => scaled::<T, SmallE5M2>(level, source, into, scalar as f32),
        _ => scaled::<T, Plain<f32>>(level, source, into, scalar as f32),
    }
}

/// Appends `source * scalar` to the empty `into`.
fn scaled<T: Data, L: Numeric<Wide: Mul<Output = L::Wide>>>(level: Level, source: &[T], into: &mut Vec<T>, scalar: L::Wide) {
    assert_eq!(
        (size_of::<T>(), align_of::<T>()),
        (size_of::<L::Stored>(), align_of::<L::Stored>()),
        "the numeric type has the element's size and alignment"
    );
    into.reserve(source.len());
    let room = &mut into.spare_capacity_mut()[..source.len()];
    // SAFETY: an element and its numeric type's are plain data of the same size and alignment (asserted), valid for any
    // bytes that a product can have; the borrows are those of the two slices.
    unsafe {
        let elements = slice::from_raw_parts(source.as_ptr().cast::<L::Stored>(), source.len());
        let room = slice::from_raw_parts_mut(room.as_mut_ptr().cast(), source.len());
        level.scale::<L>()(room, elements, scalar);
    }
    // SAFETY: the multiplication has written as many elements as there are.
    unsafe { into.set_len(source.len()) };
}
