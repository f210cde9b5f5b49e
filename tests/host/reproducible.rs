//! Floats that round, so that their last bits show the order of reduction. With `Config::reproducible` that is the
//! order of ranks, in any wiring. Without it, it is at least the same on every rank and in every run.

use crate::common::oracle::hash;
use crate::common::ranks::{Wiring, threads, threads_with};

use collectives::{Algorithm, AlgorithmRanges, Communicator, CustomOp, Element, ReduceOp, bf16, f16};

const SEED: u64 = 0xf10a7;

/// Counts from one element to several chunks on every path, odd if possible.
const COUNTS: [usize; 4] = [1, 13, 2000, 40_009];

/// Returns a float of either sign between 2^-8 and 2^8. The sum of a few of them is rounded differently in every order.
fn float(rank: usize, index: usize) -> f32 {
    let h = hash(SEED, rank, index);
    let sign = ((h & 1) as u32) << 31;
    let exponent = (119 + (h >> 1 & 15) as u32) << 23;
    f32::from_bits(sign | exponent | (h >> 8) as u32 & 0x7f_ffff)
}

/// A type whose reduction is computed plainly here: left to right in rank order, in `f32` for short types, rounded
/// once.
trait Rounding: Element + PartialEq {
    fn input(rank: usize, index: usize) -> Self;
    fn fold(op: ReduceOp, inputs: &[Self]) -> Self;
    fn bits(self) -> u64;
}

macro_rules! rounding {
    ($($float:ty, $wide:ty, |$value:ident| $widen:expr, |$result:ident| $narrow:expr;)*) => {$(
        impl Rounding for $float {
            fn input(rank: usize, index: usize) -> Self {
                let $result = <$wide>::from(float(rank, index));
                $narrow
            }

            fn fold(op: ReduceOp, inputs: &[Self]) -> Self {
                let mut wide = inputs.iter().map(|input| -> $wide {
                    let $value = *input;
                    $widen
                });
                let first = wide.next().unwrap();
                let $result = match op {
                    ReduceOp::Sum => wide.fold(first, |a, b| a + b),
                    ReduceOp::Prod => wide.fold(first, |a, b| a * b),
                    ReduceOp::Avg => wide.fold(first, |a, b| a + b) / inputs.len() as $wide,
                    other => panic!("{other} does not round"),
                };
                $narrow
            }

            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    )*};
}

rounding! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, |x| x.to_f32(), |x| f16::from_f32(x);
    bf16, f32, |x| x.to_f32(), |x| bf16::from_f32(x);
}

fn inputs<T: Rounding>(rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| T::input(rank, index)).collect()
}

fn folded<T: Rounding>(op: ReduceOp, ranks: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| T::fold(op, &(0..ranks).map(|rank| T::input(rank, index)).collect::<Vec<_>>())).collect()
}

fn bits<T: Rounding>(values: &[T]) -> Vec<u64> {
    values.iter().map(|value| value.bits()).collect()
}

#[track_caller]
fn assert_bits<T: Rounding>(what: &str, got: &[T], expected: &[T]) {
    let wrong = got.iter().zip(expected).position(|(got, expected)| got.bits() != expected.bits());
    assert_eq!(got.len(), expected.len(), "{what}");
    if let Some(at) = wrong {
        panic!("{what}, seed {SEED:#x}: got {:?} at {at}, expected {:?}", got[at], expected[at]);
    }
}

/// Checks every reducing collective with one op and type against the plain reduction.
fn folds_in_rank_order<T: Rounding>(comm: &Communicator, op: ReduceOp, count: usize, wiring: Wiring) {
    let (n, me) = (comm.world_size(), comm.rank());
    let what = |call: &str| format!("{call}({op}, {}, {count}) on rank {me} of {n}, {wiring:?}", T::ELEMENT_TYPE);
    let expected = folded::<T>(op, n, count);

    let mut x = inputs::<T>(me, count);
    comm.all_reduce(&mut x, op).unwrap();
    assert_bits(&what("all_reduce"), &x, &expected);
    let started = comm.start_all_reduce(inputs::<T>(me, count), op).unwrap().wait().unwrap();
    assert_bits(&what("start_all_reduce"), &started, &expected);

    let mut x = inputs::<T>(me, count);
    comm.reduce(&mut x, count % n, op).unwrap();
    assert_bits(&what("reduce"), &x, &if me == count % n { expected } else { inputs(me, count) });

    let block = count.div_ceil(n);
    let wide = folded::<T>(op, n, block * n);
    let mut x = vec![T::input(0, 0); block];
    comm.reduce_scatter_into(&inputs::<T>(me, block * n), &mut x, op).unwrap();
    assert_bits(&what("reduce_scatter_into"), &x, &wide[me * block..(me + 1) * block]);

    let counts: Vec<usize> = (0..n).map(|rank| (rank + 1) % 3 * block).collect();
    let start: usize = counts[..me].iter().sum();
    let total = counts.iter().sum();
    let mut x = vec![T::input(0, 0); counts[me]];
    comm.reduce_scatter_v_into(&inputs::<T>(me, total), &mut x, &counts, op).unwrap();
    assert_bits(&what("reduce_scatter_v_into"), &x, &folded::<T>(op, n, total)[start..start + counts[me]]);
}

fn everything_in_rank_order(wiring: Wiring) {
    for ranks in [1, 2, 3, 5, 8] {
        threads_with(
            ranks,
            |rank| wiring.builder(rank).configure(|config| config.reproducible = true),
            |comm| {
                assert!(comm.config().reproducible);
                for count in COUNTS {
                    folds_in_rank_order::<f32>(comm, ReduceOp::Sum, count, wiring);
                    folds_in_rank_order::<bf16>(comm, ReduceOp::Sum, count, wiring);
                    if count < 10_000 {
                        folds_in_rank_order::<f32>(comm, ReduceOp::Prod, count, wiring);
                        folds_in_rank_order::<f32>(comm, ReduceOp::Avg, count, wiring);
                        folds_in_rank_order::<bf16>(comm, ReduceOp::Avg, count, wiring);
                        folds_in_rank_order::<f16>(comm, ReduceOp::Sum, count, wiring);
                        folds_in_rank_order::<f64>(comm, ReduceOp::Sum, count, wiring);
                    }
                }
            },
        );
    }
}

#[test]
fn in_rank_order_in_shared_memory() {
    everything_in_rank_order(Wiring::Shm);
}

#[test]
fn in_rank_order_over_tcp() {
    everything_in_rank_order(Wiring::Tcp);
}

#[test]
fn in_rank_order_between_pairs() {
    everything_in_rank_order(Wiring::Pairs);
}

#[test]
fn in_rank_order_between_unequal_hosts() {
    everything_in_rank_order(Wiring::Dealt);
}

#[test]
fn in_rank_order_whatever_algorithm_is_asked_for() {
    for algorithm in [Algorithm::Ring, Algorithm::Doubling, Algorithm::Direct] {
        let algorithms = AlgorithmRanges::new().with(algorithm, ..).unwrap();
        for wiring in [Wiring::Tcp, Wiring::Dealt] {
            let builder = |rank| {
                wiring.builder(rank).configure(|config| {
                    config.algorithms = algorithms.clone();
                    config.reproducible = true;
                })
            };
            threads_with(5, builder, |comm| folds_in_rank_order::<f32>(comm, ReduceOp::Sum, 5001, wiring));
        }
    }
}

/// Checks that the order of the inputs matters. Otherwise the tests above would prove nothing.
#[test]
fn the_order_shows() {
    let forth = folded::<f32>(ReduceOp::Sum, 5, 2000);
    let back: Vec<f32> = (0..2000).map(|index| (0..5).rev().map(|rank| f32::input(rank, index)).reduce(|a, b| a + b).unwrap()).collect();
    let differ = forth.iter().zip(&back).filter(|(a, b)| a.bits() != b.bits()).count();
    assert!(differ > 500, "only {differ} of 2000 sums depend on their order");
}

#[test]
fn without_the_promise_every_rank_and_every_run_still_has_the_same_bits() {
    let run = |wiring: Wiring, ranks: usize| {
        let results = threads(wiring, ranks, |comm| {
            let mut seen = Vec::new();
            for count in COUNTS {
                let mut x = inputs::<f32>(comm.rank(), count);
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                seen.extend(bits(&x));
                let mut x = inputs::<bf16>(comm.rank(), count);
                comm.all_reduce(&mut x, ReduceOp::Avg).unwrap();
                seen.extend(bits(&x));
                // The same call again, in the same run.
                let mut y = inputs::<bf16>(comm.rank(), count);
                comm.all_reduce(&mut y, ReduceOp::Avg).unwrap();
                assert_eq!(bits(&x), bits(&y));
            }
            seen
        });
        for (rank, result) in results.iter().enumerate() {
            assert!(*result == results[0], "rank {rank} of {ranks} has other bits than rank 0, {wiring:?}");
        }
        results.into_iter().next().unwrap()
    };
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5, 8] {
            assert!(run(wiring, ranks) == run(wiring, ranks), "two runs differ: {ranks} ranks, {wiring:?}");
        }
    }
}

/// Returns a sum that is declared not to commute. Its last bits show the order of reduction.
fn rounding_sum() -> CustomOp<f32> {
    CustomOp::ordered("rounding sum", |into: &mut [f32], from: &[f32]| into.iter_mut().zip(from).for_each(|(a, b)| *a += *b))
}

#[test]
fn an_ordered_op_of_ones_own_is_folded_from_the_first_rank_to_the_last() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5, 8] {
            let builder = |rank| wiring.builder(rank).configure(|config| config.reproducible = true);
            threads_with(ranks, builder, |comm| {
                let op = rounding_sum();
                for count in COUNTS {
                    let what = |call: &str| format!("{call} of {count} on rank {} of {ranks}, {wiring:?}", comm.rank());
                    let expected = folded::<f32>(ReduceOp::Sum, ranks, count);
                    let mut x = inputs::<f32>(comm.rank(), count);
                    comm.all_reduce(&mut x, &op).unwrap();
                    assert_bits(&what("all_reduce"), &x, &expected);
                    let mut root = (comm.rank() == ranks - 1).then(|| vec![0.0; count]);
                    comm.reduce_into(&inputs::<f32>(comm.rank(), count), root.as_mut(), ranks - 1, &op).unwrap();
                    if let Some(root) = root {
                        assert_bits(&what("reduce_into"), &root, &expected);
                    }
                    let block = count.div_ceil(ranks);
                    let mut x = vec![0.0; block];
                    comm.reduce_scatter_into(&inputs::<f32>(comm.rank(), block * ranks), &mut x, &op).unwrap();
                    let expected = folded::<f32>(ReduceOp::Sum, ranks, block * ranks);
                    assert_bits(&what("reduce_scatter_into"), &x, &expected[comm.rank() * block..][..block]);
                }
            });
        }
    }
}

/// Returns the sums of all ways to set parentheses, with the operands in order.
fn parenthesised(operands: &[f32]) -> Vec<f32> {
    if let [only] = operands {
        return vec![*only];
    }
    let mut sums: Vec<f32> = (1..operands.len())
        .flat_map(|middle| {
            let (left, right) = (parenthesised(&operands[..middle]), parenthesised(&operands[middle..]));
            left.into_iter().flat_map(move |a| right.clone().into_iter().map(move |b| a + b))
        })
        .collect();
    sums.sort_by(f32::total_cmp);
    sums.dedup_by_key(|sum| sum.to_bits());
    sums
}

#[test]
fn an_ordered_op_keeps_the_order_of_ranks_in_whatever_grouping() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5, 8] {
            let results = threads(wiring, ranks, |comm| {
                COUNTS.map(|count| {
                    let mut x = inputs::<f32>(comm.rank(), count);
                    comm.all_reduce(&mut x, rounding_sum()).unwrap();
                    x
                })
            });
            for (rank, result) in results.iter().enumerate() {
                let same = result.iter().zip(&results[0]).all(|(x, y)| bits(x) == bits(y));
                assert!(same, "rank {rank} of {ranks} has other bits than rank 0, {wiring:?}");
            }
            for result in &results[0] {
                // A few elements in each part of the buffer, since there are hundreds of ways.
                for index in (0..result.len()).step_by(result.len().div_ceil(20)) {
                    let ways = parenthesised(&(0..ranks).map(|rank| f32::input(rank, index)).collect::<Vec<_>>());
                    let is_one = ways.iter().any(|way| way.to_bits() == result[index].to_bits());
                    assert!(is_one, "{} at {index} of {} with {ranks} ranks, {wiring:?}: {ways:?}", result[index], result.len());
                }
            }
        }
    }
}

#[test]
fn settings_that_differ_are_a_conflict() {
    let store = collectives::store::MemoryStore::new();
    let join = |rank: usize| {
        let store = std::sync::Arc::new(store.clone());
        Wiring::Shm.builder(rank).configure(|config| config.reproducible = rank == 0).with_store(store, rank, 2)
    };
    let errors = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0)), scope.spawn(|| join(1))];
        ranks.map(|rank| rank.join().unwrap().expect_err("the settings differ").to_string())
    });
    for error in errors {
        assert!(error.contains("reproducible true") && error.contains("reproducible false"), "{error}");
    }
}
