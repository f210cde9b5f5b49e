//! Cases in which rounding is delicate: all pairs of special floats and of 8-bit floats, all 16-bit patterns, the
//! scalar, and the division that ends a mean of integers.

use half::f16;

use super::oracle::{expected, random_elements, read_float, special_elements, write_float};
use super::{Kernel, Random, fold, levels};
use crate::call::element::TypeTag;
use crate::call::element::{DType, F8E4M3, F8E5M2};
use crate::call::op::{ReduceOp, Reduction};
use crate::host::reduce::premultiply;
use crate::host::reduce::table::scaled_at;
use half::bf16;

/// Returns the six float types.
fn floats() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.is_float())
}

/// The ops that differ on floats.
const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

/// Returns all pairs of the elements, as two inputs.
fn all_pairs(elements: &[Vec<u8>]) -> (Vec<u8>, Vec<u8>) {
    let pairs = || elements.iter().flat_map(|a| elements.iter().map(move |b| (a, b)));
    (pairs().flat_map(|pair| pair.0.clone()).collect(), pairs().flat_map(|pair| pair.1.clone()).collect())
}

/// Checks all ops on all pairs, on every level, with a separate result and over the second input.
fn check_pairs(dtype: DType, elements: &[Vec<u8>]) {
    let (a, b) = all_pairs(elements);
    let size = dtype.size_bytes();
    for op in OPS {
        let expected = expected(op, dtype, &[&a, &b], (op == ReduceOp::Avg).then_some(2));
        for level in levels() {
            let kernel = Kernel::builtin(level, op, dtype, 2).unwrap();
            for alias in [None, Some(1)] {
                let got = fold(&kernel, &[&a, &b], alias, true);
                let wrong = got.chunks(size).zip(expected.chunks(size)).position(|(got, expected)| got != expected);
                if let Some(index) = wrong {
                    let at = |bytes: &[u8]| format!("{:02x?}", &bytes[index * size..(index + 1) * size]);
                    panic!("{op} of {dtype} on {level:?}: {} and {} gave {}, not {}", at(&a), at(&b), at(&got), at(&expected));
                }
            }
            // The order of two operands never matters.
            assert_eq!(fold(&kernel, &[&b, &a], None, true), expected, "{op} of {dtype} on {level:?}, swapped");
        }
    }
}

#[test]
fn all_pairs_of_special_values() {
    for dtype in floats() {
        check_pairs(dtype, &special_elements(dtype));
    }
}

#[test]
fn all_pairs_of_8_bit_floats() {
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        check_pairs(dtype, &(0..=255).map(|bits| vec![bits]).collect::<Vec<_>>());
    }
}

#[test]
fn zeros_and_nan_in_words() {
    let both = |op, a: f32, b: f32| {
        let kernel = Kernel::of(&Reduction::<f32>::from(op), TypeTag::of::<f32>(), 2).unwrap();
        let bytes = fold(&kernel, &[&a.to_le_bytes(), &b.to_le_bytes()], None, true);
        f32::from_le_bytes(bytes.try_into().unwrap()).to_bits()
    };
    assert_eq!(both(ReduceOp::Min, 0.0, -0.0), (-0.0f32).to_bits());
    assert_eq!(both(ReduceOp::Min, -0.0, 0.0), (-0.0f32).to_bits());
    assert_eq!(both(ReduceOp::Max, 0.0, -0.0), 0);
    assert_eq!(both(ReduceOp::Max, -0.0, 0.0), 0);
    assert_eq!(both(ReduceOp::Min, f32::NAN, 3.0), 3f32.to_bits());
    assert_eq!(both(ReduceOp::Max, f32::NEG_INFINITY, -f32::NAN), f32::NEG_INFINITY.to_bits());
    assert_eq!(both(ReduceOp::Max, -f32::NAN, -f32::NAN), 0x7fc0_0000);
    assert_eq!(both(ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY), 0x7fc0_0000);
    assert_eq!(both(ReduceOp::Sum, 1.0, -f32::NAN), 0x7fc0_0000);
}

#[test]
fn every_narrow_pattern_survives_the_wide_type() {
    for (dtype, quiet) in [(DType::F16, 0x7e00), (DType::Bf16, 0x7fc0)] {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for level in levels() {
            // A mean over one rank computes, whereas a sum would copy.
            let kernel = Kernel::builtin(level, ReduceOp::Avg, dtype, 1).unwrap();
            let got = fold(&kernel, &[&bytes], None, true);
            for (bits, got) in (0..=u16::MAX).zip(got.chunks_exact(2)) {
                let expected = if read_float(dtype, &bits.to_le_bytes()).is_nan() { quiet } else { bits };
                assert_eq!(u16::from_le_bytes([got[0], got[1]]), expected, "{dtype} {bits:#x} on {level:?}");
            }
            // A sum of one input copies, even a NaN.
            let kernel = Kernel::builtin(level, ReduceOp::Sum, dtype, 1).unwrap();
            assert_eq!(fold(&kernel, &[&bytes], None, true), bytes);
        }
    }
}

#[test]
fn narrow_floats_are_rounded_once() {
    // 2048 + 1 + 1: if it were rounded after each step, it would stay at 2048.
    let [large, one] = [2048.0, 1.0].map(|value| f16::from_f32(value).to_le_bytes());
    let kernel = Kernel::of(&Reduction::<f16>::from(ReduceOp::Sum), TypeTag::of::<f16>(), 3).unwrap();
    assert_eq!(fold(&kernel, &[&large, &one, &one], Some(2), true), f16::from_f32(2050.0).to_le_bytes());
    // 448 + 448 is more than the type holds; their mean is not.
    let kernel = Kernel::of(&Reduction::<F8E4M3>::from(ReduceOp::Avg), TypeTag::of::<F8E4M3>(), 2).unwrap();
    assert_eq!(fold(&kernel, &[&[0x7e], &[0x7e]], None, true), [0x7e]);
    assert_eq!(fold(&kernel, &[&[0x7e], &[0x7e]], None, false), [0x7f]);
}

/// Returns the scalar as the element type represents it.
fn rounded(dtype: DType, scalar: f64) -> f64 {
    let mut bytes = Vec::new();
    write_float(dtype, scalar, &mut bytes);
    read_float(dtype, &bytes)
}

/// Returns `T`s read from bytes.
fn elements<T: Copy>(bytes: &[u8]) -> Vec<T> {
    let at = |index: usize| bytes[index * size_of::<T>()..].as_ptr().cast::<T>();
    // SAFETY: within the bytes; called for floats, for which any bytes are valid.
    (0..bytes.len() / size_of::<T>()).map(|index| unsafe { at(index).read_unaligned() }).collect()
}

/// Checks the products at every level against the oracle.
fn check_scalar<T: crate::call::element::Element>(dtype: DType, scalar: f64, seed: u64) {
    let size = size_of::<T>();
    let bytes = random_elements(&mut Random(seed), dtype, if cfg!(miri) { 20 } else { 777 });
    let mut expected = Vec::new();
    for element in bytes.chunks(size) {
        let product = read_float(dtype, element) * rounded(dtype, scalar);
        write_float(dtype, if dtype == DType::F64 { product } else { f64::from(product as f32) }, &mut expected);
    }
    for level in levels() {
        let mut into = Vec::<T>::new();
        scaled_at(level, dtype, scalar, &elements::<T>(&bytes), &mut into);
        // SAFETY: the bytes of floats.
        let got = unsafe { std::slice::from_raw_parts(into.as_ptr().cast::<u8>(), into.len() * size) };
        let wrong = got.chunks(size).zip(expected.chunks(size)).position(|(got, expected)| got != expected);
        assert_eq!((wrong, got.len()), (None, expected.len()), "{dtype} times {scalar} on {level:?}, seed {seed:#x}");
    }
}

#[test]
fn products_with_a_scalar_are_rounded_once() {
    for (seed, scalar) in [(1, 0.5), (2, 1.0 / 3.0), (3, -7.0), (4, 1e-3), (5, f64::INFINITY), (6, f64::NAN), (7, -0.0), (8, 1e300)] {
        check_scalar::<f32>(DType::F32, scalar, seed);
        check_scalar::<f64>(DType::F64, scalar, seed);
        check_scalar::<f16>(DType::F16, scalar, seed);
        check_scalar::<bf16>(DType::Bf16, scalar, seed);
        check_scalar::<F8E4M3>(DType::F8E4M3, scalar, seed);
        check_scalar::<F8E5M2>(DType::F8E5M2, scalar, seed);
    }
}

#[test]
fn the_scalar_is_rounded_once_too() {
    // Above the tie between 1 and the next number by less than an `f32` can distinguish, then below it.
    let mut into = Vec::new();
    for (beyond, steps) in [(2f64.powi(-40), 1.0), (-2f64.powi(-40), 0.0)] {
        premultiply(&ReduceOp::PreMulSum(1.0 + 2f64.powi(-8) + beyond).into(), &[bf16::ONE], &mut into);
        assert_eq!(into[0].to_f32(), 1.0 + steps * 2f32.powi(-7));
        let mut into = Vec::new();
        premultiply(&ReduceOp::PreMulSum(1.0 + 2f64.powi(-11) + beyond).into(), &[f16::ONE], &mut into);
        assert_eq!(into[0].to_f32(), 1.0 + steps * 2f32.powi(-10));
    }
}

#[test]
fn premultiply_replaces_what_was_there() {
    let mut into = vec![9.0f32; 3];
    premultiply(&ReduceOp::PreMulSum(0.25).into(), &[1.0, 2.0, 4.0, 8.0], &mut into);
    assert_eq!(into, [0.25, 0.5, 1.0, 2.0]);
    premultiply(&ReduceOp::Sum.into(), &[3.0], &mut into);
    assert_eq!(into, [3.0]);
    premultiply(&ReduceOp::PreMulSum(0.25).into(), &[], &mut into);
    assert!(into.is_empty());
}

/// World sizes around every limit of a mantissa or a type.
const WORLDS: &[usize] = if cfg!(miri) {
    &[1, 3, 16_777_217]
} else {
    &[1, 2, 3, 5, 7, 10, 13, 64, 100, 127, 128, 129, 200, 255, 256, 257, 32769, 65537, 16_777_217, 4_294_967_297]
};

/// The distance between two probes of a 16-bit type.
const STEP: usize = if cfg!(miri) { 1999 } else { 11 };

/// Checks the mean of integers over one input at every level, which is computed by float arithmetic, against the
/// processor's own division in 128 bits.
fn check_mean<const N: usize>(dtype: DType, values: &[i128]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()[..N].to_vec()).collect();
    for level in levels() {
        for &world in WORLDS {
            let kernel = Kernel::builtin(level, ReduceOp::Avg, dtype, world).unwrap();
            let got = fold(&kernel, &[&bytes], None, true);
            for (value, got) in values.iter().zip(got.chunks_exact(N)) {
                let expected = value / world as i128;
                assert_eq!(got, &expected.to_le_bytes()[..N], "{dtype} {value} / {world} on {level:?}");
            }
        }
    }
}

/// Returns multiples of every world size with their neighbours, and the ends of the range.
fn edges(least: i128, greatest: i128) -> Vec<i128> {
    let mut edges: Vec<i128> = [least, 0, greatest].into_iter().flat_map(|end| end - 2..=end + 2).collect();
    for &world in WORLDS {
        let world = world as i128;
        for near in [world, greatest / 2, greatest, least, greatest / 3] {
            let multiple = near / world * world;
            edges.extend([multiple - 1, multiple, multiple + 1, -multiple]);
        }
    }
    edges.retain(|edge| (least..=greatest).contains(edge));
    edges
}

#[test]
fn a_mean_of_bytes_is_exact_for_all_of_them() {
    check_mean::<1>(DType::I8, &(-128..128).collect::<Vec<_>>());
    check_mean::<1>(DType::U8, &(0..256).collect::<Vec<_>>());
}

#[test]
fn a_mean_of_wider_integers_is_exact_at_the_edges() {
    check_mean::<2>(DType::I16, &(-32768..32768).step_by(STEP).chain(edges(-32768, 32767)).collect::<Vec<_>>());
    check_mean::<2>(DType::U16, &(0..65536).step_by(STEP).chain(edges(0, 65535)).collect::<Vec<_>>());
    check_mean::<4>(DType::I32, &edges(i32::MIN.into(), i32::MAX.into()));
    check_mean::<4>(DType::U32, &edges(0, u32::MAX.into()));
    check_mean::<8>(DType::I64, &edges(i64::MIN.into(), i64::MAX.into()));
    check_mean::<8>(DType::U64, &edges(0, u64::MAX.into()));
}

#[test]
fn a_sum_of_bytes_wraps_before_it_is_divided() {
    let kernel = Kernel::builtin(super::Level::best(), ReduceOp::Avg, DType::I8, 3).unwrap();
    // 100 + 100 + 1 = 201, which is -55 in eight bits.
    assert_eq!(fold(&kernel, &[&[100], &[100], &[1]], None, true), [(-55i8 / 3) as u8]);
}

#[test]
fn no_ranks_is_not_a_division_by_zero() {
    let kernel = Kernel::builtin(super::Level::best(), ReduceOp::Avg, DType::U64, 0).unwrap();
    assert_eq!(fold(&kernel, &[&7u64.to_le_bytes()], None, true), 7u64.to_le_bytes());
}
