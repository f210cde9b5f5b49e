//! Every reduction by every op on every type, compared with the folds of the host.

use super::*;
use crate::call::Kind;
use crate::host::fold::Fold;
use crate::host::reduce::{Kernel, premultiply};
use crate::{Element, F8E4M3, F8E5M2, bf16, f16};

const KINDS: [Kind; 4] = [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter, Kind::ReduceScatterV];
const SCALAR: f64 = 0.5;

fn ops() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().map(|op| if matches!(op, ReduceOp::PreMulSum(_)) { ReduceOp::PreMulSum(SCALAR) } else { op })
}

/// The bytes of a number as an element of a float type.
fn float(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
        DType::F8E4M3 => vec![F8E4M3::from_f64(value).to_bits()],
        DType::F8E5M2 => vec![F8E5M2::from_f64(value).to_bits()],
        other => panic!("{other} is no float"),
    }
}

/// An element for which every order of folding gives the same bits.
fn exact(op: ReduceOp, dtype: DType, random: &mut Random) -> Vec<u8> {
    if !dtype.is_float() {
        let bound = if dtype == DType::Bool { 2 } else { 256 };
        return (0..dtype.size_bytes()).map(|_| random.below(bound) as u8).collect();
    }
    let value = match op {
        ReduceOp::Prod => [1.0, 2.0, -1.0][random.below(3)],
        ReduceOp::Min | ReduceOp::Max => random.below(15) as f64 - 7.0,
        _ => random.below(3) as f64 - 1.0,
    };
    float(dtype, value)
}

/// An element for which the order shows.
fn inexact(op: ReduceOp, dtype: DType, random: &mut Random) -> Vec<u8> {
    let value = (random.below(2001) as f64 - 1000.0) / 997.0;
    float(dtype, if op == ReduceOp::Prod { 1.0 + value / 8.0 } else { value })
}

/// The fold of the host, in rank order.
fn folded<T: Element>(op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let reduction = crate::Reduction::<T>::from(op);
    let kernel = Kernel::of(&reduction, inputs.len()).unwrap();
    let elements = |bytes: &Vec<u8>| -> Vec<T> {
        let mut elements = vec![T::default(); bytes.len() / size_of::<T>()];
        // SAFETY: plain data of as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), elements.as_mut_ptr().cast(), bytes.len()) };
        elements
    };
    let inputs: Vec<Vec<T>> = inputs.iter().map(elements).collect();
    let contribution = |input: &Vec<T>| {
        let mut multiplied = Vec::new();
        premultiply(&reduction, input, &mut multiplied);
        multiplied
    };
    let contributions: Vec<Vec<T>> = inputs.iter().map(contribution).collect();
    let pointers: Vec<*const u8> = contributions.iter().map(|input| input.as_ptr().cast()).collect();
    let mut result = contributions[0].clone();
    let bytes = size_of_val(&result[..]);
    let mut out = vec![0; bytes];
    // SAFETY: all are vectors of as many elements; the bytes go to a vector as long.
    unsafe {
        kernel.fold(result.as_mut_ptr().cast(), &pointers, bytes, true);
        std::ptr::copy_nonoverlapping(result.as_ptr().cast(), out.as_mut_ptr(), bytes);
    }
    out
}

/// The host's fold of a type.
fn fold_of(dtype: DType) -> fn(ReduceOp, &[Vec<u8>]) -> Vec<u8> {
    match dtype {
        DType::F32 => folded::<f32>,
        DType::F64 => folded::<f64>,
        DType::F16 => folded::<f16>,
        DType::Bf16 => folded::<bf16>,
        DType::F8E4M3 => folded::<F8E4M3>,
        DType::F8E5M2 => folded::<F8E5M2>,
        DType::I8 => folded::<i8>,
        DType::I16 => folded::<i16>,
        DType::I32 => folded::<i32>,
        DType::I64 => folded::<i64>,
        DType::U8 => folded::<u8>,
        DType::U16 => folded::<u16>,
        DType::U32 => folded::<u32>,
        DType::U64 => folded::<u64>,
        DType::Bool => folded::<bool>,
    }
}

/// Every kind, op and type on one plane.
fn everything(plane: &DevicePlane, seed: u64, dtypes: &[DType], element: impl Fn(ReduceOp, DType, &mut Random) -> Vec<u8>) {
    let n = plane.comm().world_size();
    let mut random = Random(seed);
    for &dtype in dtypes {
        for op in ops().filter(|op| op.check(dtype).is_ok()) {
            for kind in KINDS {
                for in_place in [true, false] {
                    let mut case = Case::some(kind, in_place, dtype.size_bytes(), 200, &mut random);
                    case.root %= n;
                    (case.n, case.blocks) = (n, case.blocks.iter().copied().cycle().take(n).collect());
                    let memories = memories(&case, &mut random, |random, _| element(op, dtype, random));
                    println!("{op} of {dtype}, seed {seed}: {case:?}");
                    run(plane, &case, &memories, dtype, Some(Reduction::Builtin(op)), &|inputs| fold_of(dtype)(op, inputs));
                }
            }
        }
    }
}

#[test]
fn every_reduction_gives_the_bits_of_the_host() {
    let sim = Sim::new();
    for n in [1, 2, 3, 4, 8] {
        ranks(n, &options(), |plane| everything(plane, 50 + n as u64, &DType::ALL, exact));
    }
    sim.finish();
}

#[test]
fn folds_of_old_devices_give_the_bits_of_the_host() {
    let sim = Sim::new();
    let old = Options { least_capability: (8, 0), ..options() };
    for n in [2, 3] {
        ranks(n, &old, |plane| everything(plane, 60 + n as u64, &[DType::F8E4M3, DType::F8E5M2], exact));
    }
    sim.finish();
}

#[test]
fn reproducible_reductions_give_the_bits_of_a_fold_in_rank_order() {
    let sim = Sim::new();
    let reproducible = Options { reproducible: true, ..options() };
    for n in [2, 3, 8] {
        ranks(n, &reproducible, |plane| {
            let floats = DType::ALL.into_iter().filter(|dtype| dtype.is_float());
            let unordered = |op| matches!(op, ReduceOp::Min | ReduceOp::Max);
            let element =
                |op, dtype, random: &mut Random| if unordered(op) { exact(op, dtype, random) } else { inexact(op, dtype, random) };
            everything(plane, 70 + n as u64, &floats.collect::<Vec<_>>(), element);
        });
    }
    sim.finish();
}

#[test]
fn large_folds_in_slabs_give_the_bits_of_the_host() {
    let sim = Sim::new();
    let little = Options { scratch_bytes: 64 << 10, ..options() };
    for n in [2, 3, 4] {
        ranks(n, &little, |plane| {
            let mut random = Random(80 + n as u64);
            for (op, dtype) in [(ReduceOp::BitXor, DType::U64), (ReduceOp::Avg, DType::U16), (ReduceOp::Sum, DType::I16)] {
                for kind in KINDS {
                    let mut case = Case::some(kind, random.below(2) == 0, dtype.size_bytes(), 1, &mut random);
                    case.root %= n;
                    let share = if matches!(kind, Kind::AllReduce | Kind::Reduce) { 300_008 } else { 300_008 / n };
                    let block = |rank: usize| (share / 8 + if kind == Kind::ReduceScatterV { rank } else { 0 }) * 8;
                    (case.n, case.blocks) = (n, (0..n).map(block).collect());
                    let memories = memories(&case, &mut random, |random, _| exact(op, dtype, random));
                    run(plane, &case, &memories, dtype, Some(Reduction::Builtin(op)), &|inputs| fold_of(dtype)(op, inputs));
                }
            }
        });
    }
    sim.finish();
}
