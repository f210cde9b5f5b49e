//! Means over ranks, for every wiring, world and bucket size, and any order of the gradients.

use collectives::{Communicator, ReduceOp, Result};
use collectives_train::{DataParallel, FullySharded, FullyShardedOptions, Mesh, Missing, Options, Parameter, ShardedOptimizer, Unit};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};
use crate::model::{assert_means, hand_in, parameters};

/// Runs steps with gradients in a random order, different on every rank.
fn random_steps(comm: &Communicator, options: Options, seed: u64) -> Result<()> {
    let parameters = parameters();
    let mut model = DataParallel::new(comm, parameters.clone(), options)?;
    let mut random = Random(seed ^ (comm.rank() as u64 + 1) << 56);
    for step in 0..4 {
        let mut order: Vec<usize> = (0..parameters.len()).collect();
        (1..order.len()).for_each(|end| order.swap(end, random.below(end + 1)));
        for index in order {
            hand_in(&mut model, seed + step, comm.rank(), index, &parameters[index])?;
        }
        assert_means(&model.finish()?, seed + step, comm.world_size(), &parameters);
    }
    Ok(())
}

#[test]
fn means_are_exact_in_every_wiring_world_and_bucket_size() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            for (first_bucket_bytes, bucket_bytes) in [(0, 0), (1 << 20, 25 << 20), (100, 7000)] {
                let (seed, missing) = (random.next(), if random.below(2) == 0 { Missing::Zeros } else { Missing::Refused });
                let options = Options { first_bucket_bytes, bucket_bytes, missing, ..Options::default() };
                threads(wiring, world_size, |comm| random_steps(comm, options.clone(), seed).unwrap());
            }
        }
    }
}

#[test]
fn means_are_exact_between_processes() {
    for_processes("averages::means_are_exact_between_processes", Wiring::Shm, 3);
}

#[test]
fn means_are_exact_between_processes_over_tcp() {
    for_processes("averages::means_are_exact_between_processes_over_tcp", Wiring::Tcp, 2);
}

fn for_processes(name: &str, wiring: Wiring, world_size: usize) {
    let options = Options { first_bucket_bytes: 500, bucket_bytes: 5000, ..Options::default() };
    processes(name, wiring, world_size, |comm| random_steps(comm, options.clone(), 20_261_122));
}

#[test]
fn all_gradients_at_once_are_averaged_where_they_lie() {
    let results = threads(Wiring::Shm, 3, |comm| {
        let parameters = vec![Parameter::new::<f32>("a", &[2]), Parameter::new::<f32>("b", &[1000])];
        let mut model = DataParallel::new(comm, parameters, Options::default()).unwrap();
        let mut gradients = [vec![comm.rank() as f32; 2], vec![1.0; 1000]];
        model.average(&mut gradients).unwrap();
        let error = model.average(&mut gradients[..1]).unwrap_err().to_string();
        assert!(error.contains("1 gradients were passed for 2 parameters"), "{error}");
        gradients
    });
    assert!(results.iter().all(|gradients| *gradients == [vec![1.0; 2], vec![1.0; 1000]]));
}

#[test]
fn parts_are_accumulated_before_anything_is_sent() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("a", &[3])], Options::default()).unwrap();
        for step in 0..3 {
            let part = [comm.rank() as f32, 1.0, step as f32];
            model.accumulate(0, &part).unwrap();
            model.accumulate(0, &part).unwrap();
            model.ready(0, &part).unwrap();
            assert_eq!(model.finish().unwrap().gradient::<f32>(0).unwrap(), [1.5, 3.0, 3.0 * step as f32]);
        }
    });
}

#[test]
fn other_ways_to_add_up_have_their_own_weights() {
    threads(Wiring::Shm, 2, |comm| {
        let share = [0.25, 0.75][comm.rank()];
        for (op, expected) in [(ReduceOp::Sum, 12.0), (ReduceOp::PreMulSum(share), 7.0), (ReduceOp::Avg, 6.0)] {
            let options = Options { op, ..Options::default() };
            let mut model = DataParallel::new(comm, vec![Parameter::new::<f64>("a", &[1])], options).unwrap();
            model.ready(0, &[4.0 + 4.0 * comm.rank() as f64]).unwrap();
            assert_eq!(model.finish().unwrap().gradient::<f64>(0).unwrap(), [expected], "{op}");
        }
        let options = Options { op: ReduceOp::Max, ..Options::default() };
        assert!(DataParallel::new(comm, parameters(), options).unwrap_err().is_unsupported());
    });
}

#[test]
fn clipping_bounds_the_norm_of_all_gradients_together() {
    threads(Wiring::Shm, 2, |comm| {
        let parameters = vec![Parameter::new::<f32>("a", &[1]), Parameter::new::<f64>("b", &[1])];
        let mut model = DataParallel::new(comm, parameters, Options::default()).unwrap();
        for (values, limit, expected, norm) in [
            ((3.0, 4.0), 1.0, (0.6_f32, 0.8_f64), 5.0),
            ((3.0, 4.0), 5.0, (3.0, 4.0), 5.0),
            ((f32::INFINITY, 4.0), 5.0, (f32::INFINITY, 4.0), f64::INFINITY),
        ] {
            model.ready(0, &[values.0]).unwrap();
            model.ready(1, &[values.1]).unwrap();
            let mut averaged = model.finish().unwrap();
            assert_eq!(averaged.clip_norm(limit).unwrap(), norm);
            assert_eq!(averaged.gradient::<f32>(0).unwrap(), [expected.0]);
            assert!((averaged.gradient::<f64>(1).unwrap()[0] - expected.1).abs() < 1e-15);
            for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY] {
                assert!(averaged.clip_norm(nonsense).is_err());
            }
        }
    });
}

#[test]
fn parts_of_a_model_are_clipped_by_the_norm_of_the_whole() {
    for wiring in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs] {
        threads(wiring, 4, |comm| {
            let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)]).unwrap();
            let (dp, tp) = (mesh.dimension("dp").unwrap(), mesh.dimension("tp").unwrap());
            let parameter = || vec![Parameter::new::<f32>("columns", &[5])];
            let mut whole = DataParallel::new(dp, parameter(), Options::default()).unwrap();
            let mut shared = ShardedOptimizer::new(dp, parameter(), Options::default()).unwrap();
            let mut units = FullySharded::new(dp, vec![Unit::new("layer", parameter())], FullyShardedOptions::default()).unwrap();
            shared.load(0, &[0.0_f32; 5]).unwrap();
            // The gradients of the whole model on one process. Each tp rank has five of them, and the mean over dp is
            // the number itself.
            let all: Vec<f32> = (1..=10).map(|x| x as f32).collect();
            let (mine, norm) = (&all[5 * tp.rank()..][..5], all.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt());
            for (limit, factor) in [(2.0, 2.0 / norm), (1e9, 1.0)] {
                let expected: Vec<f32> = mine.iter().map(|x| (f64::from(*x) * factor) as f32).collect();
                whole.ready(0, mine).unwrap();
                shared.ready(0, mine).unwrap();
                units.reduce_gradients(0, &[mine.to_vec()]).unwrap();
                let (mut averaged, mut shards, mut reduced) = (whole.finish().unwrap(), shared.reduce().unwrap(), units.reduce().unwrap());
                for part in [averaged.norm().unwrap(), shards.norm().unwrap(), reduced.norm().unwrap()] {
                    let mut squares = part.powi(2);
                    tp.all_reduce(&mut squares, ReduceOp::Sum).unwrap();
                    assert!((squares.sqrt() - norm).abs() < 1e-12 * norm, "{} instead of {norm}", squares.sqrt());
                }
                averaged.clip_to(norm, limit).unwrap();
                shards.clip_to(norm, limit).unwrap();
                reduced.clip_to(norm, limit).unwrap();
                assert_eq!(averaged.gradient::<f32>(0).unwrap(), expected);
                let check = |shard: &mut collectives_train::Shard<'_>| {
                    let (range, slopes) = (shard.range.clone(), shard.values::<f32>()?.1);
                    let inside = range.end.min(5) - range.start;
                    assert_eq!(slopes[..inside], expected[range.start..][..inside]);
                    Ok(())
                };
                shards.update(check).map(drop).unwrap();
                reduced.update(check).unwrap();
            }
        });
    }
}

#[test]
fn what_is_no_norm_and_no_limit_is_refused_and_gradients_without_a_finite_norm_stay() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = DataParallel::new(comm, vec![Parameter::new::<f32>("a", &[2])], Options::default()).unwrap();
    let mut units = FullySharded::new(comm, Vec::new(), FullyShardedOptions::default()).unwrap();
    let mut shared = ShardedOptimizer::new(comm, Vec::new(), Options::default()).unwrap();
    model.ready(0, &[3.0_f32, 4.0]).unwrap();
    let (mut averaged, mut reduced, mut shards) = (model.finish().unwrap(), units.reduce().unwrap(), shared.reduce().unwrap());
    for (norm, limit, words) in [
        (-1.0, 1.0, "the norm is -1"),
        (f64::NEG_INFINITY, 1.0, "the norm is -inf"),
        (1.0, 0.0, "the limit is 0"),
        (1.0, f64::NAN, "the limit is NaN"),
    ] {
        for error in [averaged.clip_to(norm, limit), reduced.clip_to(norm, limit), shards.clip_to(norm, limit)].map(Result::unwrap_err) {
            assert!(error.to_string().contains("clip_to") && error.to_string().contains(words), "{error}");
        }
    }
    for norm in [f64::NAN, f64::INFINITY, 0.0] {
        averaged.clip_to(norm, 1.0).unwrap();
        assert_eq!(averaged.gradient::<f32>(0).unwrap(), [3.0, 4.0]);
    }
    averaged.clip_to(2.0, 1.0).unwrap();
    assert_eq!(averaged.gradient::<f32>(0).unwrap(), [1.5, 2.0]);
    averaged.take::<f32>(0).map(drop).unwrap();
    assert!(averaged.clip_to(2.0, 1.0).unwrap_err().to_string().contains("its gradient was taken"));
}
