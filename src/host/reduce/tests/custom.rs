//! Operations of the caller's own, on plain data of any shape.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Fold, Kernel};
use crate::{CustomOp, Data, Reduction};

/// Folds vectors of `T` by the operation, with the destination apart or one of the inputs, and returns it.
fn fold<T: Data>(op: &CustomOp<T>, inputs: &[Vec<T>], alias: Option<usize>) -> Vec<T> {
    let kernel = Kernel::of(&Reduction::from(op), inputs.len()).unwrap();
    let mut inputs = inputs.to_vec();
    let mut apart = inputs[inputs.len() - 1].clone();
    let bytes = size_of_val(&apart[..]);
    let mut pointers: Vec<*mut u8> = inputs.iter_mut().map(|input| input.as_mut_ptr().cast()).collect();
    let into = alias.map_or(apart.as_mut_ptr().cast(), |index| pointers[index]);
    let inputs_of: Vec<*const u8> = pointers.drain(..).map(|pointer| pointer.cast_const()).collect();
    // SAFETY: vectors of one length, the destination among them or apart; one thread.
    unsafe { kernel.fold(into, &inputs_of, bytes, true) };
    alias.map_or(apart, |index| inputs.swap_remove(index))
}

/// A mean in the making, without padding.
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

/// The product of two matrices with two rows: associative, not commutative.
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

/// Aligned to more than a block of scratch memory is.
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
    assert_eq!(Kernel::of(&Reduction::from(&empty), 2).unwrap().element_bytes(), 1);
    assert_eq!(fold(&empty, &[vec![[]; 3], vec![[]; 3]], None).len(), 3);
}

#[test]
fn an_op_that_panics_leaves_the_destination_alone() {
    let op = CustomOp::new("panics", |into: &mut [u32], _: &[u32]| {
        into.fill(7);
        panic!("on purpose");
    });
    let kernel = Kernel::of(&Reduction::from(&op), 2).unwrap();
    let (mut into, from) = ([1u32, 2, 3], [4u32, 5, 6]);
    let pointer: *mut u8 = into.as_mut_ptr().cast();
    // SAFETY: two arrays of twelve bytes.
    let fold = || unsafe { kernel.fold(pointer, &[pointer.cast_const(), from.as_ptr().cast()], 12, true) };
    assert!(catch_unwind(AssertUnwindSafe(fold)).is_err());
    assert_eq!(into, [1, 2, 3]);
}
