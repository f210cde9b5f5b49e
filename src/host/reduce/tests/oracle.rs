//! The expected result of a fold. It is computed in `f64`, where sums, products and quotients of `f32` are exact or
//! rounded innocuously, and in `i128`.

use half::{bf16, f16};

use super::Random;
use crate::call::element::{DType, F8E4M3, F8E5M2};
use crate::call::op::ReduceOp;

/// Returns one float element as `f64`.
pub(super) fn read_float(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        DType::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        DType::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        // Both are checked against their definition in the tests of their own code.
        DType::F8E4M3 => F8E4M3::from_bits(bytes[0]).to_f64(),
        DType::F8E5M2 => F8E5M2::from_bits(bytes[0]).to_f64(),
        other => panic!("{other} is no float"),
    }
}

/// Appends the element nearest to a float that an `f32` holds (unless it is an `f64` element), or the positive quiet
/// NaN for any NaN.
pub(super) fn write_float(dtype: DType, value: f64, into: &mut Vec<u8>) {
    match (dtype, value.is_nan()) {
        (DType::F64, true) => into.extend(0x7ff8_0000_0000_0000_u64.to_le_bytes()),
        (DType::F64, false) => into.extend(value.to_le_bytes()),
        (DType::F32, true) => into.extend(0x7fc0_0000_u32.to_le_bytes()),
        (DType::F32, false) => into.extend((value as f32).to_le_bytes()),
        (DType::F16, true) => into.extend(0x7e00_u16.to_le_bytes()),
        (DType::F16, false) => into.extend(f16::from_f32(value as f32).to_le_bytes()),
        (DType::Bf16, true) => into.extend(0x7fc0_u16.to_le_bytes()),
        (DType::Bf16, false) => into.extend(bf16::from_f32(value as f32).to_le_bytes()),
        (DType::F8E4M3, true) => into.push(0x7f),
        (DType::F8E4M3, false) => {
            let bits = F8E4M3::from_f64(value).to_bits();
            into.push(if bits == 0xff { 0x7f } else { bits });
        }
        (DType::F8E5M2, true) => into.push(0x7e),
        (DType::F8E5M2, false) => into.push(F8E5M2::from_f64(value).to_bits()),
        (other, _) => panic!("{other} is no float"),
    }
}

/// Returns the least and the greatest value of an integer type.
fn range(dtype: DType) -> (i128, i128) {
    match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::Bool => (0, 1),
        other => panic!("{other} is no integer"),
    }
}

/// Returns the congruent value in the type's range.
fn wrap(dtype: DType, value: i128) -> i128 {
    let (least, greatest) = range(dtype);
    (value - least).rem_euclid(greatest - least + 1) + least
}

/// Returns one integer element.
pub(super) fn read_integer(dtype: DType, bytes: &[u8]) -> i128 {
    let magnitude = bytes.iter().rev().fold(0, |sum, byte| sum << 8 | i128::from(*byte));
    wrap(dtype, magnitude)
}

/// Returns the fold of the float elements at one position.
fn fold_floats(op: ReduceOp, dtype: DType, values: &[f64], divisor: Option<usize>) -> f64 {
    let rounded = |value: f64| if dtype == DType::F64 { value } else { f64::from(value as f32) };
    let numbers = || values.iter().copied().filter(|value| !value.is_nan());
    match op {
        ReduceOp::Min => numbers().min_by(f64::total_cmp).unwrap_or(f64::NAN),
        ReduceOp::Max => numbers().max_by(f64::total_cmp).unwrap_or(f64::NAN),
        ReduceOp::Prod => values.iter().copied().reduce(|a, b| rounded(a * b)).unwrap(),
        _ => {
            let sum = values.iter().copied().reduce(|a, b| rounded(a + b)).unwrap();
            divisor.map_or(sum, |divisor| rounded(sum / divisor as f64))
        }
    }
}

/// Returns the fold of the integers or bools at one position.
fn fold_integers(op: ReduceOp, dtype: DType, values: &[i128], divisor: Option<usize>) -> i128 {
    let values = values.iter().copied();
    if dtype == DType::Bool {
        let (count, ones) = (values.len(), values.filter(|value| *value == 1).count());
        return match op {
            ReduceOp::BitXor => (ones % 2) as i128,
            ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd => i128::from(ones == count),
            _ => i128::from(ones > 0),
        };
    }
    match op {
        ReduceOp::Min => values.min().unwrap(),
        ReduceOp::Max => values.max().unwrap(),
        ReduceOp::Prod => values.reduce(|a, b| wrap(dtype, a.wrapping_mul(b))).unwrap(),
        ReduceOp::BitAnd => values.reduce(|a, b| a & b).unwrap(),
        ReduceOp::BitOr => values.reduce(|a, b| a | b).unwrap(),
        ReduceOp::BitXor => values.reduce(|a, b| a ^ b).unwrap(),
        _ => {
            let sum = wrap(dtype, values.sum());
            divisor.map_or(sum, |divisor| sum / divisor as i128)
        }
    }
}

/// Returns the result of a fold. `divisor` is the world size if a mean ends here.
pub(super) fn expected(op: ReduceOp, dtype: DType, inputs: &[&[u8]], divisor: Option<usize>) -> Vec<u8> {
    if inputs.len() == 1 && divisor.is_none() {
        return inputs[0].to_vec();
    }
    let size = dtype.size_bytes();
    let mut result = Vec::with_capacity(inputs[0].len());
    let (mut floats, mut integers) = (Vec::new(), Vec::new());
    for start in (0..inputs[0].len()).step_by(size) {
        let elements = inputs.iter().map(|input| &input[start..start + size]);
        if dtype.is_float() {
            floats.clear();
            floats.extend(elements.map(|element| read_float(dtype, element)));
            write_float(dtype, fold_floats(op, dtype, &floats, divisor), &mut result);
        } else {
            integers.clear();
            integers.extend(elements.map(|element| read_integer(dtype, element)));
            let value = fold_integers(op, dtype, &integers, divisor);
            result.extend(&value.to_le_bytes()[..size]);
        }
    }
    result
}

/// Returns elements for which rounding matters, sometimes an extreme one, and sometimes arbitrary bits.
pub(super) fn random_elements(random: &mut Random, dtype: DType, count: usize) -> Vec<u8> {
    let size = dtype.size_bytes();
    let specials = special_elements(dtype);
    let mut bytes = Vec::with_capacity(count * size);
    for _ in 0..count {
        match (random.below(8), dtype) {
            (_, DType::Bool) => bytes.push((random.next() & 1) as u8),
            (0, _) => bytes.extend(&specials[random.below(specials.len())]),
            (1..=5, _) if dtype.is_float() => {
                let value = (random.next() as i64 as f64 / 2f64.powi(63)) * 2f64.powi(random.below(9) as i32 - 3);
                write_float(dtype, value, &mut bytes);
            }
            _ => bytes.extend(&random.next().to_le_bytes()[..size]),
        }
    }
    bytes
}

/// Returns the special elements, little-endian.
pub(super) fn special_elements(dtype: DType) -> Vec<Vec<u8>> {
    let size = dtype.size_bytes();
    if !dtype.is_float() {
        let (least, greatest) = range(dtype);
        let values = [least, least + 1, -1, 0, 1, greatest / 2, greatest - 1, greatest];
        let allowed = values.into_iter().filter(|value| (least..=greatest).contains(value));
        return allowed.map(|value| value.to_le_bytes()[..size].to_vec()).collect();
    }
    let mut specials = Vec::new();
    // The layout: bits of the mantissa, and whether there are infinities.
    let (mantissa, infinite) = match dtype {
        DType::F64 => (52, true),
        DType::F32 => (23, true),
        DType::F16 => (10, true),
        DType::Bf16 => (7, true),
        DType::F8E5M2 => (2, true),
        _ => (3, false),
    };
    let bits = size as u32 * 8;
    let sign = 1u64 << (bits - 1);
    let nan = sign - 1;
    let infinity = (nan >> mantissa) << mantissa;
    let one = ((infinity / 2) >> mantissa) << mantissa;
    let largest = if infinite { infinity - 1 } else { nan - 1 };
    let least_normal = 1 << mantissa;
    let mut magnitudes = vec![0, 1, 3, least_normal - 1, least_normal, least_normal + 1, one, one + 1, largest, largest - 1, nan];
    if infinite {
        magnitudes.extend([infinity, infinity + 1, infinity | 1 << (mantissa - 1)]);
    }
    for magnitude in magnitudes {
        specials.push(magnitude.to_le_bytes()[..size].to_vec());
        specials.push((magnitude | sign).to_le_bytes()[..size].to_vec());
    }
    specials
}
