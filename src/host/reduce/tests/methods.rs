//! The ways to write a result: to one destination or to two, each with the bits of the oracle; and custom operations on
//! plain data of any shape.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::oracle::{expected, random_elements};
use super::{Buffer, Fold, Kernel, Random, levels, pairs};
use crate::call::element::TypeTag;
use crate::call::element::{DType, Data};
use crate::call::op::{CustomOp, ReduceOp, Reduction};

/// Numbers of elements and inputs: zero, less than a vector, odd lengths around blocks, few inputs and many.
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

/// Folds with one method, with every buffer at a different distance from a cache line, and returns the one or two
/// results.
fn write(kernel: &Kernel, method: Method, inputs: &[&[u8]], alias: Option<usize>, shift: usize) -> Vec<Vec<u8>> {
    let (element, bytes) = (kernel.element_bytes(), inputs[0].len());
    let start = |index: usize| (index * 3 + shift) * element;
    let mut buffers: Vec<Buffer> = inputs.iter().enumerate().map(|(index, input)| Buffer::new(input, start(index))).collect();
    let [mut apart, mut also] = [21, 22].map(|index| Buffer::new(&vec![0xee; bytes], start(index)));
    let pointers: Vec<*const u8> = buffers.iter_mut().map(|buffer| buffer.pointer().cast_const()).collect();
    let into = alias.map_or_else(|| apart.pointer(), |index| pointers[index].cast_mut());
    // SAFETY: every buffer holds `bytes` bytes, aligned to the elements; the destination is an input or overlaps none,
    // and the second one overlaps nothing; the inputs are elements, and this is the only thread.
    unsafe {
        match method {
            Method::One => kernel.fold(into, &pointers, bytes, true),
            Method::Two => kernel.fold_to_two((into, also.pointer()), crate::host::copy::copy, &pointers, bytes, true),
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

/// Checks all methods at all levels, into a separate buffer and into each input in turn.
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
            kernel.fold_to_two((into.pointer(), also.pointer()), crate::host::copy::copy, &[], 256, true);
        }
        assert!(into.bytes() == [0x11; 256] && also.bytes() == [0x22; 256], "{op} of {dtype}");
    }
}

#[test]
fn an_op_of_the_callers_own_has_all_ways() {
    let op = CustomOp::new("xor", |into: &mut [[u8; 3]], from: &[[u8; 3]]| {
        into.as_flattened_mut().iter_mut().zip(from.as_flattened()).for_each(|(into, from)| *into ^= from);
    });
    let kernel = Kernel::of(&Reduction::from(&op), TypeTag::of::<[u8; 3]>(), 2).unwrap();
    let [a, b] = [1, 2].map(|seed| random_elements(&mut Random(seed), DType::U8, if cfg!(miri) { 3000 } else { 30_000 }));
    let expected: Vec<u8> = a.iter().zip(&b).map(|(a, b)| a ^ b).collect();
    for method in [Method::One, Method::Two] {
        for alias in [None, Some(0), Some(1)] {
            assert!(write(&kernel, method, &[&a, &b], alias, 1).iter().all(|got| *got == expected), "{method:?} into {alias:?}");
        }
    }
}

/// Folds vectors of `T` with the operation, with a separate destination or one of the inputs, and returns the result.
fn fold<T: Data>(op: &CustomOp<T>, inputs: &[Vec<T>], alias: Option<usize>) -> Vec<T> {
    let kernel = Kernel::of(&Reduction::from(op), TypeTag::of::<T>(), inputs.len()).unwrap();
    let mut inputs = inputs.to_vec();
    let mut apart = inputs[inputs.len() - 1].clone();
    let bytes = size_of_val(&apart[..]);
    let mut pointers: Vec<*mut u8> = inputs.iter_mut().map(|input| input.as_mut_ptr().cast()).collect();
    let into = alias.map_or(apart.as_mut_ptr().cast(), |index| pointers[index]);
    let inputs_of: Vec<*const u8> = pointers.drain(..).map(|pointer| pointer.cast_const()).collect();
    // SAFETY: vectors of one length, the destination among them or separate; one thread.
    unsafe { kernel.fold(into, &inputs_of, bytes, true) };
    alias.map_or(apart, |index| inputs.swap_remove(index))
}

/// An intermediate state of a mean, without padding.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
struct Moment {
    sum: f64,
    least: f32,
    count: u32,
}

// SAFETY: plain numbers, no padding (8 + 4 + 4), any bytes are valid.
unsafe impl Data for Moment {}

#[test]
fn structs_are_folded_whatever_the_destination() {
    let merge = CustomOp::new("merge", |into: &mut [Moment], from: &[Moment]| {
        assert_eq!(into.len(), from.len());
        for (into, from) in into.iter_mut().zip(from) {
            *into = Moment { sum: into.sum + from.sum, least: into.least.min(from.least), count: into.count + from.count };
        }
    });
    for &length in if cfg!(miri) { &[0, 1, 257][..] } else { &[0, 1, 255, 256, 257, 1000] } {
        for world in [1usize, 2, 5] {
            let inputs: Vec<Vec<Moment>> = (0..world)
                .map(|rank| (0..length).map(|index| Moment { sum: (rank * index) as f64, least: -(rank as f32), count: 1 }).collect())
                .collect();
            let total = world * (world - 1) / 2;
            let least = -((world - 1) as f32);
            for alias in [None, Some(0), Some(world - 1)] {
                let got = fold(&merge, &inputs, alias);
                let right =
                    |(index, moment): (usize, &Moment)| *moment == Moment { sum: (total * index) as f64, least, count: world as u32 };
                assert!(got.len() == length && got.iter().enumerate().all(right), "{length} elements, {world} inputs, {alias:?}");
            }
        }
    }
}

/// Returns the product of two 2x2 matrices: associative, not commutative.
fn multiply(a: [u32; 4], b: [u32; 4]) -> [u32; 4] {
    let cell = |row: usize, column: usize| a[row * 2].wrapping_mul(b[column]).wrapping_add(a[row * 2 + 1].wrapping_mul(b[2 + column]));
    [cell(0, 0), cell(0, 1), cell(1, 0), cell(1, 1)]
}

#[test]
fn an_ordered_op_is_folded_from_left_to_right() {
    let product = CustomOp::ordered("matmul", |into: &mut [[u32; 4]], from: &[[u32; 4]]| {
        for (into, from) in into.iter_mut().zip(from) {
            *into = multiply(*into, *from);
        }
    });
    let input = |rank: u32| (0..700).map(|index| [rank + index, 1, index, rank * 3 + 1]).collect::<Vec<[u32; 4]>>();
    let inputs: Vec<_> = (0..4).map(input).collect();
    let expected: Vec<_> = (0..700).map(|index| inputs[1..].iter().fold(inputs[0][index], |a, b| multiply(a, b[index]))).collect();
    for alias in [None, Some(0), Some(1), Some(2), Some(3)] {
        assert_eq!(fold(&product, &inputs, alias), expected, "into {alias:?}");
    }
}

/// An element with a larger alignment than a block of scratch memory.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(256))]
struct Wide([u64; 32]);

// SAFETY: 256 bytes of numbers, no padding.
unsafe impl Data for Wide {}

#[test]
fn elements_may_be_huge_or_empty_or_widely_aligned() {
    let add = CustomOp::new("add", |into: &mut [[u64; 1000]], from: &[[u64; 1000]]| {
        into.as_flattened_mut().iter_mut().zip(from.as_flattened()).for_each(|(into, from)| *into += from);
    });
    assert_eq!(fold(&add, &[vec![[1; 1000]; 3], vec![[2; 1000]; 3]], Some(1)), [[3; 1000]; 3]);
    let wide = CustomOp::new("wide", |into: &mut [Wide], from: &[Wide]| {
        assert!(into.as_ptr().is_aligned());
        into.iter_mut().zip(from).for_each(|(into, from)| into.0[31] += from.0[31]);
    });
    assert_eq!(fold(&wide, &[vec![Wide([5; 32]); 3], vec![Wide([2; 32]); 3]], None)[2].0[30..], [5, 7]);
    let empty = CustomOp::new("empty", |_: &mut [[f32; 0]], _: &[[f32; 0]]| {});
    assert_eq!(Kernel::of(&Reduction::from(&empty), TypeTag::of::<[f32; 0]>(), 2).unwrap().element_bytes(), 1);
    assert_eq!(fold(&empty, &[vec![[]; 3], vec![[]; 3]], None).len(), 3);
}

#[test]
fn an_op_that_panics_leaves_the_destination_alone() {
    let op = CustomOp::new("panics", |into: &mut [u32], _: &[u32]| {
        into.fill(7);
        panic!("on purpose");
    });
    let kernel = Kernel::of(&Reduction::<u32>::from(&op), TypeTag::of::<u32>(), 2).unwrap();
    let (mut into, from) = ([1u32, 2, 3], [4u32, 5, 6]);
    let pointer: *mut u8 = into.as_mut_ptr().cast();
    // SAFETY: two arrays of twelve bytes.
    let fold = || unsafe { kernel.fold(pointer, &[pointer.cast_const(), from.as_ptr().cast()], 12, true) };
    assert!(catch_unwind(AssertUnwindSafe(fold)).is_err());
    assert_eq!(into, [1, 2, 3]);
}
