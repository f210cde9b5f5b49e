//! The ways to write a result: to one destination or to two, with the bits of the oracle from each.

use super::oracle::{expected, random_elements};
use super::{Buffer, Fold, Kernel, Random, levels, pairs};
use crate::{CustomOp, DType, ReduceOp, Reduction};

/// Elements and inputs: nothing, less than a vector, odd lengths around blocks, inputs up to many.
const SHAPES: &[(usize, usize)] = if cfg!(miri) {
    &[(0, 2), (1, 1), (3, 3), (33, 2)]
} else {
    &[(0, 2), (1, 1), (1, 2), (3, 3), (7, 2), (33, 4), (127, 6), (257, 5), (300, 16), (600, 1), (700, 8), (1501, 2), (4501, 3), (17_001, 2)]
};
/// The most elements of a shape, and of one with more than two inputs.
const MOST: [usize; 2] = if cfg!(miri) { [33, 33] } else { [17_001, 4501] };

#[derive(Debug, Clone, Copy)]
enum Method {
    One,
    Two,
}

/// Folds one way, with every buffer at another distance from a line, and returns the one or two results.
fn write(kernel: &Kernel, method: Method, inputs: &[&[u8]], alias: Option<usize>, shift: usize) -> Vec<Vec<u8>> {
    let (element, bytes) = (kernel.element_bytes(), inputs[0].len());
    let start = |index: usize| (index * 3 + shift) * element;
    let mut buffers: Vec<Buffer> = inputs.iter().enumerate().map(|(index, input)| Buffer::new(input, start(index))).collect();
    let [mut apart, mut also] = [21, 22].map(|index| Buffer::new(&vec![0xee; bytes], start(index)));
    let pointers: Vec<*const u8> = buffers.iter_mut().map(|buffer| buffer.pointer().cast_const()).collect();
    let into = alias.map_or_else(|| apart.pointer(), |index| pointers[index].cast_mut());
    // SAFETY: every buffer holds `bytes` bytes, aligned to the elements; the destination is an input or apart, and the second one is
    // apart; the inputs are elements, and this is the only thread.
    unsafe {
        match method {
            Method::One => kernel.fold(into, &pointers, bytes, true),
            Method::Two => kernel.fold_to_two(into, also.pointer(), &pointers, bytes, true),
        }
    }
    for (index, buffer) in buffers.iter_mut().enumerate() {
        let now = buffer.bytes();
        assert!(alias == Some(index) || now == inputs[index], "input {index} was written to");
    }
    let mut results = vec![alias.map_or(&mut apart, |index| &mut buffers[index]).bytes().to_vec()];
    if let Method::Two = method {
        results.push(also.bytes().to_vec());
    } else {
        assert!(also.bytes().iter().all(|byte| *byte == 0xee), "the second destination was written to");
    }
    results
}

/// All ways at all levels, into a buffer apart and into each input in turn.
fn check(op: ReduceOp, dtype: DType, inputs: &[&[u8]], seed: u64) {
    let world = inputs.len();
    let expected = expected(op, dtype, inputs, (op == ReduceOp::Avg).then_some(world));
    for level in levels() {
        let kernel = Kernel::builtin(level, op, dtype, world).unwrap();
        for (shift, alias) in [None].into_iter().chain((0..world).map(Some)).enumerate() {
            for method in [Method::One, Method::Two] {
                for got in write(&kernel, method, inputs, alias, shift) {
                    let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
                    assert!(
                        wrong.is_none() && got.len() == expected.len(),
                        "{op} of {dtype} on {level:?}, {method:?} into {alias:?}: {world} inputs of {} B differ at {wrong:?}, seed {seed:#x}",
                        expected.len()
                    );
                }
            }
        }
    }
}

#[test]
fn every_way_gives_the_same_bits_at_every_level() {
    const SEED: u64 = 0x5eed_0003;
    let mut random = Random(SEED);
    for dtype in DType::ALL {
        let pool: Vec<Vec<u8>> = (0..16).map(|_| random_elements(&mut random, dtype, MOST[1])).collect();
        let long: Vec<Vec<u8>> = (0..2).map(|_| random_elements(&mut random, dtype, MOST[0])).collect();
        for (op, _) in pairs().filter(|pair| pair.1 == dtype) {
            for &(count, world) in SHAPES {
                let from = if count > MOST[1] { &long } else { &pool };
                let inputs: Vec<&[u8]> = from[..world].iter().map(|input| &input[..count * dtype.size_bytes()]).collect();
                check(op, dtype, &inputs, SEED);
            }
        }
    }
}

#[test]
fn no_inputs_write_nothing_whatever_the_way() {
    for (op, dtype) in pairs() {
        let kernel = Kernel::builtin(super::Level::best(), op, dtype, 2).unwrap();
        let [mut into, mut also] = [0x11, 0x22].map(|byte| Buffer::new(&[byte; 256], 0));
        // SAFETY: two buffers of 256 bytes.
        unsafe {
            kernel.fold_to_two(into.pointer(), also.pointer(), &[], 256, true);
        }
        assert!(into.bytes() == [0x11; 256] && also.bytes() == [0x22; 256], "{op} of {dtype}");
    }
}

#[test]
fn an_op_of_the_callers_own_has_all_ways() {
    let op = CustomOp::new("xor", |into: &mut [[u8; 3]], from: &[[u8; 3]]| {
        into.as_flattened_mut().iter_mut().zip(from.as_flattened()).for_each(|(into, from)| *into ^= from);
    });
    let kernel = Kernel::of(&Reduction::from(&op), 2).unwrap();
    let [a, b] = [1, 2].map(|seed| random_elements(&mut Random(seed), DType::U8, if cfg!(miri) { 3000 } else { 30_000 }));
    let expected: Vec<u8> = a.iter().zip(&b).map(|(a, b)| a ^ b).collect();
    for method in [Method::One, Method::Two] {
        for alias in [None, Some(0), Some(1)] {
            assert!(write(&kernel, method, &[&a, &b], alias, 1).iter().all(|got| *got == expected), "{method:?} into {alias:?}");
        }
    }
}
