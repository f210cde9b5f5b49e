//! The same bits: on every rank, on every run, and, where asked for, over every transport and number of hosts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::oracle::hash;
use common::ranks::{Wiring, threads_with};

use collectives::{ReduceOp, bf16};

/// Numbers of all magnitudes: their sum depends on the order of adding.
fn wild(seed: u64, rank: usize, index: usize) -> f32 {
    let h = hash(seed, rank, index);
    let mantissa = (h >> 40) as f32 / (1 << 23) as f32 - 1.0;
    mantissa * 2.0_f32.powi((h & 31) as i32 - 16)
}

fn floats(seed: u64, rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|index| wild(seed, rank, index)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// All-reduce, reduce and reduce-scatter on every rank; every rank's results joined.
fn results(wiring: Wiring, ranks: usize, count: usize, reproducible: bool) -> Vec<(Vec<u32>, Vec<u32>, Vec<u16>)> {
    threads_with(
        ranks,
        |rank| wiring.builder(rank).reproducible(reproducible),
        |comm| {
            let mut all = floats(1, comm.rank(), count);
            comm.all_reduce(&mut all, ReduceOp::Sum).unwrap();
            let wide = floats(2, comm.rank(), count * ranks);
            let mut part = vec![0.0_f32; count];
            comm.reduce_scatter_into(&wide, &mut part, ReduceOp::Avg).unwrap();
            let mut half: Vec<bf16> = floats(3, comm.rank(), count).into_iter().map(bf16::from_f32).collect();
            comm.all_reduce(&mut half, ReduceOp::Sum).unwrap();
            (bits(&all), bits(&part), half.iter().map(|value| value.to_bits()).collect())
        },
    )
}

#[test]
fn reproducible_folds_are_in_rank_order_over_every_wiring() {
    for ranks in [2, 3, 5, 8] {
        for count in [1, 77, 30_000] {
            let fold = |seed: u64, index: usize| (1..ranks).fold(wild(seed, 0, index), |sum, rank| sum + wild(seed, rank, index));
            let all: Vec<u32> = (0..count).map(|index| fold(1, index).to_bits()).collect();
            let half: Vec<u16> = (0..count)
                .map(|index| {
                    let input = |rank| bf16::from_f32(wild(3, rank, index)).to_f32();
                    bf16::from_f32((1..ranks).fold(input(0), |sum, rank| sum + input(rank))).to_bits()
                })
                .collect();
            for wiring in Wiring::ALL {
                for (rank, got) in results(wiring, ranks, count, true).into_iter().enumerate() {
                    let part: Vec<u32> = (0..count).map(|index| (fold(2, rank * count + index) / ranks as f32).to_bits()).collect();
                    assert!(got.0 == all, "all_reduce, {wiring:?}, rank {rank} of {ranks}, {count}");
                    assert!(got.1 == part, "reduce_scatter, {wiring:?}, rank {rank} of {ranks}, {count}");
                    assert!(got.2 == half, "all_reduce of bf16, {wiring:?}, rank {rank} of {ranks}, {count}");
                }
            }
        }
    }
}

#[test]
fn every_rank_and_every_run_has_the_same_bits_anyway() {
    for wiring in Wiring::ALL {
        for count in [5, 200_000] {
            let first = results(wiring, 5, count, false);
            let second = results(wiring, 5, count, false);
            assert!(first == second, "{wiring:?}, {count}: two runs differ");
            assert!(first.iter().all(|rank| rank.0 == first[0].0 && rank.2 == first[0].2), "{wiring:?}, {count}: ranks differ");
        }
    }
}

#[test]
fn settings_that_differ_are_a_conflict() {
    let store = collectives::MemoryStore::new();
    let join = |rank: usize| {
        let store = std::sync::Arc::new(store.clone());
        Wiring::Shm.builder(rank).reproducible(rank == 0).with_store(store, rank, 2)
    };
    let errors = std::thread::scope(|scope| {
        let ranks = [scope.spawn(|| join(0)), scope.spawn(|| join(1))];
        ranks.map(|rank| rank.join().unwrap().expect_err("the settings differ").to_string())
    });
    for error in errors {
        assert!(error.contains("reproducible true") && error.contains("reproducible false"), "{error}");
    }
}
