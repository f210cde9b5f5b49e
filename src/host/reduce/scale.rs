//! The multiplication that comes before a `PreMulSum`.

#![expect(unsafe_code, reason = "elements of a type known at run time are reached through their bytes")]

use std::ops::Mul;
use std::slice;

use super::level::Level;
use super::numeric::{Bf16, F16, Numeric, Plain, SmallE4M3, SmallE5M2};
use crate::element::Data;
use crate::op::ReductionKind;
use crate::{DType, ReduceOp, Reduction};

/// Puts a rank's contribution to `reduction` into `into`, replacing what was there: for `PreMulSum` the elements times the
/// scalar, for anything else the elements themselves. The memory of `into` is used again where it suffices.
///
/// The scalar is rounded to the element type first, as it is on a device, and then each product once.
pub(crate) fn premultiply<T: Data>(reduction: &Reduction<T>, source: &[T], into: &mut Vec<T>) {
    into.clear();
    match reduction.0 {
        ReductionKind::Builtin(ReduceOp::PreMulSum(scalar), dtype) if dtype.is_float() => {
            scaled_at(Level::best(), dtype, scalar, source, into);
        }
        _ => into.extend_from_slice(source),
    }
}

/// [`premultiply`] on an instruction set that the processor has. `into` is empty, `dtype` is the type of the elements, a float.
pub(super) fn scaled_at<T: Data>(level: Level, dtype: DType, scalar: f64, source: &[T], into: &mut Vec<T>) {
    // As a device has it.
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
    assert_eq!((size_of::<T>(), align_of::<T>()), (size_of::<L::Stored>(), align_of::<L::Stored>()), "the numeric type is the element's");
    into.reserve(source.len());
    let room = &mut into.spare_capacity_mut()[..source.len()];
    // SAFETY: an element and its numeric type's are plain data of the same size and alignment (asserted), valid for any bytes that
    // a product can have; the borrows are those of the two slices.
    unsafe {
        let elements = slice::from_raw_parts(source.as_ptr().cast::<L::Stored>(), source.len());
        let room = slice::from_raw_parts_mut(room.as_mut_ptr().cast(), source.len());
        level.scale::<L>()(room, elements, scalar);
    }
    // SAFETY: the multiplication has written as many elements as there are.
    unsafe { into.set_len(source.len()) };
}
