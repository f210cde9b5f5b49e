//! The division that ends a mean of integers: by float arithmetic, so checked where that could go wrong.

use super::{Kernel, fold, levels};
use crate::{DType, ReduceOp};

/// World sizes around everything that a mantissa or a type can hold.
const WORLDS: &[usize] = if cfg!(miri) {
    &[1, 3, 16_777_217]
} else {
    &[1, 2, 3, 5, 7, 10, 13, 64, 100, 127, 128, 129, 200, 255, 256, 257, 32769, 65537, 16_777_217, 4_294_967_297]
};

/// From one probe of a 16-bit type to the next.
const STEP: usize = if cfg!(miri) { 1999 } else { 11 };

/// The mean over one input at every level, against the processor's own division in 128 bits.
fn check<const N: usize>(dtype: DType, values: &[i128]) {
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

/// Multiples of every world size with their neighbours, and the ends of the range.
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
    check::<1>(DType::I8, &(-128..128).collect::<Vec<_>>());
    check::<1>(DType::U8, &(0..256).collect::<Vec<_>>());
}

#[test]
fn a_mean_of_wider_integers_is_exact_at_the_edges() {
    check::<2>(DType::I16, &(-32768..32768).step_by(STEP).chain(edges(-32768, 32767)).collect::<Vec<_>>());
    check::<2>(DType::U16, &(0..65536).step_by(STEP).chain(edges(0, 65535)).collect::<Vec<_>>());
    check::<4>(DType::I32, &edges(i32::MIN.into(), i32::MAX.into()));
    check::<4>(DType::U32, &edges(0, u32::MAX.into()));
    check::<8>(DType::I64, &edges(i64::MIN.into(), i64::MAX.into()));
    check::<8>(DType::U64, &edges(0, u64::MAX.into()));
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
