//! Means of metrics compared with those of one process that has all samples, whatever the ranks' numbers of samples.

use collectives::{Communicator, ReduceOp};
use collectives_train::Metrics;

use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};

/// A batch: its number of samples, and the sums of two metrics over these samples.
type Batch = (usize, [i64; 2]);

/// Returns the batches of each rank. Some ranks may have none. Batches have 2ⁿ samples, so their means are exact.
fn batches(random: &mut Random, world_size: usize) -> Vec<Vec<Batch>> {
    let mut sum = |len: usize| random.below(len * 1000) as i64 - 100;
    let mut batch = |size: usize| (1 << size, [sum(1 << size), sum(1 << size)]);
    let numbers: Vec<(usize, usize)> = (0..world_size).map(|rank| (rank * 7 % 5, rank)).collect();
    numbers.into_iter().map(|(count, rank)| (0..count).map(|number| batch((number + rank) % 5)).collect()).collect()
}

fn add(metrics: &mut Metrics<2>, batches: &[Batch]) {
    for (samples, sums) in batches {
        metrics.add(sums.map(|sum| sum as f64 / *samples as f64), *samples);
    }
}

/// Computes the means over all samples from whole numbers.
fn expected(all: &[Vec<Batch>]) -> Option<[f64; 2]> {
    let samples: usize = all.iter().flatten().map(|(samples, _)| samples).sum();
    let sum = |metric: usize| all.iter().flatten().map(|(_, sums)| sums[metric]).sum::<i64>();
    (samples > 0).then(|| [0, 1].map(|metric| sum(metric) as f64 / samples as f64))
}

fn bits(means: Option<[f64; 2]>) -> Option<[u64; 2]> {
    means.map(|means| means.map(f64::to_bits))
}

#[test]
fn every_sample_of_every_rank_has_the_same_weight() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            let mut all = batches(&mut random, world_size);
            all.rotate_left(random.below(world_size));
            let (wanted, world) = (expected(&all), format!("{world_size} ranks, {wiring:?}, seed {seed}"));
            threads(wiring, world_size, |comm| {
                let mut metrics = Metrics::new(["loss", "accuracy"]);
                for round in 0..2 {
                    add(&mut metrics, &all[comm.rank()]);
                    assert_eq!(bits(metrics.finish(comm).unwrap()), bits(wanted), "round {round}, {world}");
                }
                assert_eq!(metrics.finish(comm).unwrap(), None, "{world}");
            });
        }
    }
}

#[test]
fn means_between_processes_are_those_of_one() {
    processes("metrics::means_between_processes_are_those_of_one", Wiring::Pairs, 3, |comm| {
        let all = batches(&mut Random(20_270_117), 3);
        let mut metrics = Metrics::new(["loss", "accuracy"]);
        add(&mut metrics, &all[comm.rank()]);
        assert_eq!(bits(metrics.finish(comm)?), bits(expected(&all)));
        Ok(())
    });
}

#[test]
fn means_have_the_same_bits_on_every_rank() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        let seeds: Vec<u64> = (0..4).map(|_| random.next()).collect();
        let means = threads(wiring, 4, |comm| {
            let (mut own, mut metrics) = (Random(seeds[comm.rank()]), Metrics::new(["loss"]));
            (0..100).for_each(|_| metrics.add([own.unit()], 1 + own.below(9)));
            metrics.finish(comm).unwrap().unwrap()[0].to_bits()
        });
        assert_eq!(means, [means[0]; 4], "{wiring:?}, seed {seed}");
    }
}

#[test]
fn empty_batches_count_for_nothing_and_nan_is_not_hidden() {
    threads(Wiring::Tcp, 3, |comm| {
        let mut metrics = Metrics::new(["loss", "accuracy"]);
        metrics.add([f64::NAN, f64::INFINITY], 0);
        assert_eq!(metrics.finish(comm).unwrap(), None);
        if comm.rank() == 1 {
            metrics.add([2.0, 3.0], 5);
        }
        metrics.add([f64::NAN; 2], 0);
        assert_eq!(metrics.finish(comm).unwrap(), Some([2.0, 3.0]));
        metrics.add([if comm.rank() == 2 { f32::NAN } else { 1.0 }, 1.0], 1);
        let [loss, accuracy] = metrics.finish(comm).unwrap().unwrap();
        assert!(loss.is_nan() && accuracy == 1.0);
        // No metric at all.
        let mut none = Metrics::<0>::new::<&str>([]);
        assert_eq!(none.finish(comm).unwrap(), None);
        none.add([0.0_f64; 0], comm.rank());
        assert_eq!(none.finish(comm).unwrap(), Some([]));
    });
}

#[test]
fn numbers_of_samples_that_no_job_has_do_not_wrap_around() {
    threads(Wiring::Shm, 2, |comm| {
        let mut metrics = Metrics::new(["loss"]);
        (0..3).for_each(|_| metrics.add([0.0], usize::MAX));
        assert_eq!(metrics.finish(comm).unwrap(), Some([0.0]));
    });
}

/// Checks that both errors name what differs, that all ranks get the same text, and that the communicator works on.
fn refused<const N: usize>(comm: &Communicator, metrics: &mut Metrics<N>, words: &[&str]) {
    let error = metrics.finish(comm).unwrap_err();
    assert!(error.is_mismatch(), "{error}");
    assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    let mut sum = 1_u32;
    comm.all_reduce(&mut sum, ReduceOp::Sum).expect("the communicator lives on");
    assert_eq!(sum as usize, comm.world_size());
}

#[test]
fn names_that_differ_are_named_and_nothing_is_mixed_or_lost() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 3, |comm| {
            let last = comm.rank() == 2;
            let mut swapped = Metrics::new(if last { ["accuracy", "loss"] } else { ["loss", "accuracy"] });
            swapped.add([1.0, 2.0], 1);
            let words =
                ["rank 0 called Metrics::finish with metric 0 \"loss\"", "rank 2 called Metrics::finish with metric 0 \"accuracy\""];
            refused(comm, &mut swapped, &words);
            // Samples are kept: the sums of one rank alone are still there.
            let alone = comm.split(Some(comm.rank() as u32), 0).unwrap().unwrap();
            assert_eq!(swapped.finish(&alone).unwrap(), Some([1.0, 2.0]));
            match last {
                true => refused(comm, &mut Metrics::new(["loss", "accuracy"]), &["including metric 1 \"accuracy\""]),
                false => refused(comm, &mut Metrics::new(["loss"]), &["rank 2 called Metrics::finish with 2 metrics"]),
            }
        });
    }
}
