//! Every op, every type, many shapes; and every instruction set against the baseline.

use super::oracle::{expected, random_elements};
use super::{Fold, Kernel, Random, fold, levels, pairs};
use crate::call::element::DType;
use crate::call::element::TypeTag;
use crate::call::op::{CustomOp, ReduceOp, Reduction};
use crate::host::reduce::level::Level;

/// The numbers of elements, and below them the numbers of inputs.
const COUNTS: &[usize] = if cfg!(miri) { &[3, 20] } else { &[0, 1, 2, 3, 7, 31, 64, 257, 1000, 4097] };
const WORLDS: &[usize] = if cfg!(miri) { &[1, 2, 3] } else { &[1, 2, 3, 4, 8, 13] };

/// Returns enough elements of one type for all of its tests.
fn pool(random: &mut Random, dtype: DType, inputs: usize, count: usize) -> Vec<Vec<u8>> {
    (0..inputs).map(|_| random_elements(random, dtype, count)).collect()
}

#[test]
fn every_op_on_every_type_agrees_with_plain_code() {
    const SEED: u64 = 0x5eed_0001;
    let mut random = Random(SEED);
    for dtype in DType::ALL {
        let pool = pool(&mut random, dtype, WORLDS[WORLDS.len() - 1], COUNTS[COUNTS.len() - 1]);
        for (op, _) in pairs().filter(|pair| pair.1 == dtype) {
            for &count in COUNTS {
                for &world in WORLDS {
                    let inputs: Vec<&[u8]> = pool[..world].iter().map(|input| &input[..count * dtype.size_bytes()]).collect();
                    check(op, dtype, &inputs, SEED);
                }
            }
        }
    }
}

/// Checks one shape, with a separate destination, the first input and the last input, as the last fold and, if that
/// differs, as an earlier one.
fn check(op: ReduceOp, dtype: DType, inputs: &[&[u8]], seed: u64) {
    let world = inputs.len();
    let kernel = Kernel::builtin(Level::best(), op, dtype, world).unwrap();
    assert_eq!(kernel.element_bytes(), dtype.size_bytes());
    let mean = op == ReduceOp::Avg;
    for last in [true, false] {
        if !last && !mean {
            continue;
        }
        let expected = expected(op, dtype, inputs, (mean && last).then_some(world));
        for alias in [None, Some(0), Some(world - 1)] {
            let got = fold(&kernel, inputs, alias, last);
            assert_same(dtype, &got, &expected, || {
                format!("{op} of {dtype}: {} B, {world} inputs, into {alias:?}, last {last}, seed {seed:#x}", inputs[0].len())
            });
        }
    }
}

/// Compares bits, and reports the position of a difference.
fn assert_same(dtype: DType, got: &[u8], expected: &[u8], what: impl Fn() -> String) {
    assert_eq!(got.len(), expected.len());
    if got != expected {
        let size = dtype.size_bytes();
        let index = got.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b).unwrap();
        let range = index * size..(index + 1) * size;
        panic!("{}: element {index} is {:x?}, not {:x?}", what(), &got[range.clone()], &expected[range]);
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    const SEED: u64 = 0x5eed_0002;
    let mut random = Random(SEED);
    for dtype in DType::ALL {
        let pool = pool(&mut random, dtype, 5, if cfg!(miri) { 40 } else { 1537 });
        for (op, _) in pairs().filter(|pair| pair.1 == dtype) {
            for &(count, world) in if cfg!(miri) { &[(40, 2)][..] } else { &[(1537, 2), (1537, 5), (61, 3), (1537, 1), (9, 2)] } {
                let inputs: Vec<&[u8]> = pool[..world].iter().map(|input| &input[..count * dtype.size_bytes()]).collect();
                let base = Kernel::builtin(Level::Baseline, op, dtype, world).unwrap();
                let expected = fold(&base, &inputs, None, true);
                for level in levels() {
                    let kernel = Kernel::builtin(level, op, dtype, world).unwrap();
                    for alias in [None, Some(0), Some(world - 1)] {
                        let got = fold(&kernel, &inputs, alias, true);
                        assert_same(dtype, &got, &expected, || {
                            format!("{op} of {dtype} on {level:?}: {count} elements, {world} inputs, into {alias:?}, seed {SEED:#x}")
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn one_buffer_may_be_every_input_and_none_is_no_work() {
    for (op, dtype) in pairs() {
        let mut random = Random(3);
        let elements = random_elements(&mut random, dtype, if cfg!(miri) { 20 } else { 100 });
        for world in [2, 3] {
            let kernel = Kernel::builtin(Level::best(), op, dtype, world).unwrap();
            let expected = expected(op, dtype, &vec![&elements[..]; world], (op == ReduceOp::Avg).then_some(world));
            let mut buffer = super::Buffer::new(&elements, 0);
            let into = buffer.pointer();
            // SAFETY: one aligned buffer of that length, used by this thread alone.
            unsafe { kernel.fold(into, &vec![into.cast_const(); world], elements.len(), true) };
            assert_same(dtype, buffer.bytes(), &expected, || format!("{op} of {dtype}"));
            // SAFETY: the same buffer, used by this thread alone; there are no inputs.
            unsafe { kernel.fold(into, &[], elements.len(), true) };
            assert_same(dtype, buffer.bytes(), &expected, || format!("{op} of {dtype} without inputs"));
        }
    }
}

#[test]
fn what_cannot_be_done_is_refused_with_both_names() {
    let mut refused = 0;
    for op in ReduceOp::ALL {
        for dtype in DType::ALL {
            let expected = match op {
                ReduceOp::Avg => dtype == DType::Bool,
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => dtype.is_float(),
                ReduceOp::PreMulSum(_) => !dtype.is_float(),
                _ => false,
            };
            let result = Kernel::builtin(Level::best(), op, dtype, 4);
            assert_eq!(result.is_err(), expected, "{op} of {dtype}");
            if let Err(error) = result {
                assert!(error.is_unsupported());
                let text = error.to_string();
                assert!(text.contains(op.name()) && text.contains(dtype.name()), "{text}");
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 1 + 3 * 6 + 9);
    assert!(Kernel::of(&Reduction::<bool>::from(ReduceOp::Avg), TypeTag::of::<bool>(), 2).unwrap_err().is_unsupported());
}

#[test]
fn a_kernel_says_what_it_is() {
    fn shared<T: Clone + Send + Sync + 'static>(_: &T) {}
    let sum = Kernel::of(&Reduction::<i64>::from(ReduceOp::Sum), TypeTag::of::<i64>(), 2).unwrap();
    shared(&sum);
    assert!(sum.is_commutative() && !sum.needs_premultiply() && sum.element_bytes() == 8);
    assert!(Kernel::of(&Reduction::<f32>::from(ReduceOp::PreMulSum(2.0)), TypeTag::of::<f32>(), 2).unwrap().needs_premultiply());
    let ordered = CustomOp::ordered("left", |_: &mut [[u16; 3]], _: &[[u16; 3]]| {});
    let ordered = Kernel::of(&Reduction::from(&ordered), TypeTag::of::<[u16; 3]>(), 2).unwrap();
    assert!(!ordered.is_commutative() && !ordered.needs_premultiply() && ordered.element_bytes() == 6);
}
