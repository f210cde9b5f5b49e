//! The folds and copies used by collectives on the host, by instruction set, type, operation, inputs and size. Each
//! result is checked once.
//!
//! `cargo bench --features __internals --bench kernels`, or with a filter: `-- avx512/f32`, `-- copy`. Rates count the
//! bytes of one input.

mod common;

use std::hint::black_box;

use collectives::internals::{self, Kernel};
use collectives::{DType, Element, ReduceOp, bf16, f16};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};

const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
/// A size that fits into the second-level cache, and one that does not.
const TWO_SIZES: [usize; 2] = [64 << 10, 4 << 20];
const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Max];

/// Measures the ways to fold one size. `value` returns small numbers, whose results are exact.
fn ways<T: Element + PartialEq>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    kernel: &Kernel<T>,
    name: &str,
    bytes: usize,
    value: fn(usize) -> T,
) {
    let count = bytes / size_of::<T>();
    let input = |rank: usize| (0..count).map(|index| value(index % 3 + rank % 2)).collect::<Vec<T>>();
    let [mut a, b, c, d, mut into, mut also] = [0, 1, 2, 3, 4, 5].map(input);
    let mut expected = input(0);
    kernel.in_place(&mut expected, &[&b]);
    kernel.apart(&mut into, &[&a, &b]);
    assert!(into == expected, "{name}");
    kernel.to_two(&mut a.clone(), &mut also, &[&a, &b]);
    assert!(into == expected && also == expected, "{name}");

    group.throughput(Throughput::Bytes(bytes as u64));
    let mut way = |way: &str, fold: &mut dyn FnMut()| {
        group.bench_function(format!("{name}/{way}/{bytes}"), |bencher| bencher.iter(&mut *fold));
    };
    way("2 apart", &mut || kernel.apart(&mut into, &[black_box(&a), &b]));
    way("2 to two", &mut || kernel.to_two(&mut into, &mut also, &[black_box(&a), &b]));
    way("4 apart", &mut || kernel.apart(&mut into, &[black_box(&a), &b, &c, &d]));
    way("2 in place", &mut || kernel.in_place(black_box(&mut a), &[&b]));
}

/// Measures sums on every level, and the other ops on the best one.
fn folds_of<T: Element + PartialEq>(criterion: &mut Criterion, dtype: DType, sizes: &[usize], value: fn(usize) -> T) {
    let levels = internals::levels();
    for level in &levels {
        let mut group = criterion.benchmark_group(format!("{level}/{dtype}"));
        let (ops, sizes) = if Some(level) == levels.last() { (&OPS[..], sizes) } else { (&OPS[..1], &sizes[..1]) };
        for op in ops {
            let kernel = Kernel::new(*op, dtype, level).expect("the op is for numbers");
            let sizes = if *op == ReduceOp::Sum { sizes } else { &sizes[..1] };
            sizes.iter().for_each(|bytes| ways(&mut group, &kernel, op.name(), *bytes, value));
        }
        group.finish();
    }
}

fn folds(criterion: &mut Criterion) {
    folds_of::<f32>(criterion, DType::F32, &SIZES, |index| index as f32);
    folds_of::<bf16>(criterion, DType::Bf16, &TWO_SIZES, |index| bf16::from_f32(index as f32));
    folds_of::<f16>(criterion, DType::F16, &TWO_SIZES, |index| f16::from_f32(index as f32));
    folds_of::<i32>(criterion, DType::I32, &TWO_SIZES, |index| index as i32);
    folds_of::<f64>(criterion, DType::F64, &TWO_SIZES, |index| index as f64);
    folds_of::<i8>(criterion, DType::I8, &TWO_SIZES, |index| index as i8);
}

fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("copy");
    for bytes in SIZES {
        let from: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
        let mut into = vec![0; bytes];
        group.throughput(Throughput::Bytes(bytes as u64));
        let mut way = |way: &str, copy: fn(&[u8], &mut [u8])| {
            into.fill(0);
            copy(&from, &mut into);
            assert!(into == from, "{way}");
            group.bench_function(format!("{way}/{bytes}"), |bencher| bencher.iter(|| copy(black_box(&from), &mut into)));
        };
        way("plain", internals::copy);
        way("streaming", internals::copy_streaming);
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = common::brief_criterion();
    targets = folds, copies
}
criterion_main!(benches);
