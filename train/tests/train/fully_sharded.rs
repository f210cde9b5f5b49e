//! Parameters sharded over ranks: trained as by one process, with as much memory as documented, and mistakes named.

use std::time::Instant;

use collectives::{Collective, Communicator, DType, ReduceOp, Result, bf16, f16, flight::State};
use collectives_train::{Float, FullySharded, FullyShardedOptions, Parameter, ShardingStrategy, Unit};

use crate::common::oracle::Predict;
use crate::common::random::Random;
use crate::common::ranks::{Meeting, Wiring, patience, processes, threads};
use crate::model::{gradient, len, mean, parameters};
use crate::network::{self, LAYERS, Training, distance, train, train_alone};

const STRATEGIES: [ShardingStrategy; 2] = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp];

/// Returns the parameters of `model.rs`, one type in each unit.
fn units_by_type() -> Vec<Unit> {
    let of = |dtype| parameters().into_iter().filter(|parameter| parameter.dtype == dtype).collect();
    [DType::F32, DType::F16, DType::F64, DType::Bf16].map(|dtype| Unit::new(dtype.name(), of(dtype))).to_vec()
}

/// Runs some steps with whole numbers, whose mean is the same in every order; the means are subtracted from the
/// parameters.
fn exact_steps(comm: &Communicator, options: FullyShardedOptions, seed: u64) -> Result<()> {
    fn typed<T: Float>(model: &mut FullySharded, unit: usize, seed: u64, ranks: usize, lens: &[usize]) -> Result<()> {
        let rank = model.communicator().rank();
        let mut expected: Vec<Vec<T>> = lens.iter().enumerate().map(|(index, len)| gradient(seed, 99, index, *len)).collect();
        expected.iter().enumerate().try_for_each(|(index, values)| model.load(unit, index, values))?;
        for step in 1..4 {
            let gradients: Vec<Vec<T>> = lens.iter().enumerate().map(|(index, len)| gradient(seed + step, rank, index, *len)).collect();
            model.gather(unit)?;
            model.reduce_gradients(unit, &gradients)?;
            model.release(unit)?;
            model.reduce()?.update(|shard| {
                if shard.bucket == unit {
                    let (parameters, gradients) = shard.values::<T>()?;
                    parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x = T::from_f64(x.to_f64() - slope.to_f64()));
                }
                Ok(())
            })?;
            model.gather(unit)?;
            for (index, values) in expected.iter_mut().enumerate() {
                let mean = mean::<T>(seed + step, ranks, index, values.len());
                values.iter_mut().zip(mean).for_each(|(x, slope)| *x = T::from_f64(x.to_f64() - slope.to_f64()));
                assert!(model.parameter::<T>(unit, index)? == *values, "unit {unit}, parameter {index}, seed {seed}");
                let mut copied = vec![T::default(); values.len()];
                model.copy_to(unit, index, &mut copied)?;
                assert!(copied == *values);
            }
            model.release(unit)?;
        }
        Ok(())
    }
    let units = units_by_type();
    let mut model = FullySharded::new(comm, units.clone(), options)?;
    // All of them first, because no unit is gathered before.
    for (unit, listed) in units.iter().enumerate() {
        for (index, parameter) in listed.parameters.iter().enumerate() {
            fn zeros<T: Float>(model: &mut FullySharded, unit: usize, index: usize, len: usize) -> Result<()> {
                model.load(unit, index, &vec![T::default(); len])
            }
            crate::model::with_type!(parameter, zeros::<_>(&mut model, unit, index, len(parameter)))?;
        }
    }
    for (unit, listed) in units.iter().enumerate() {
        let lens: Vec<usize> = listed.parameters.iter().map(len).collect();
        crate::model::with_type!(listed.parameters[0], typed::<_>(&mut model, unit, seed, comm.world_size(), &lens))?;
    }
    Ok(())
}

#[test]
fn shares_are_updated_exactly_in_every_wiring_world_and_type() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            for strategy in STRATEGIES {
                let (seed, prefetch) = (random.next(), random.below(3));
                let options = FullyShardedOptions { strategy, prefetch, ..FullyShardedOptions::default() };
                threads(wiring, world_size, |comm| exact_steps(comm, options.clone(), seed).unwrap());
            }
        }
    }
}

#[test]
fn shares_are_updated_exactly_between_processes() {
    let name = "fully_sharded::shares_are_updated_exactly_between_processes";
    processes(name, Wiring::Shm, 3, |comm| exact_steps(comm, FullyShardedOptions::default(), 20_261_123));
}

/// Trains on ranks and on one process, and returns the difference at the end.
fn apart<M: Float + Predict, G: Float + Predict>(world_size: usize, options: &FullyShardedOptions, training: Training) -> f64 {
    let alone = train_alone(training);
    let moved = distance(&alone, &network::start(training.seed));
    assert!(moved > 0.02, "the network has learnt nothing: {moved}, seed {}", training.seed);
    let distances = threads(Wiring::Shm, world_size, |comm| {
        let mut model = FullySharded::new(comm, network::units::<M>(), options.clone()).unwrap();
        network::load::<M>(&mut model, comm, training.seed).unwrap();
        distance(&train::<M, G>(&mut model, training, |_| ()).unwrap(), &alone)
    });
    assert!(distances.iter().all(|distance| *distance == distances[0]), "ranks differ: {distances:?}, seed {}", training.seed);
    distances[0]
}

/// Returns trainings with one pass per step and with more, with clipping and without.
fn trainings(seed: u64) -> [Training; 3] {
    let training = Training { seed, steps: 12, passes: 1, limit: None };
    [training, Training { passes: 3, ..training }, Training { limit: Some(0.1), passes: 2, ..training }]
}

#[test]
fn a_network_comes_to_the_parameters_of_one_process() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let mut worst = 0.0_f64;
    for world_size in [1, 2, 3, 4] {
        for strategy in STRATEGIES {
            for training in trainings(random.next()) {
                let options = FullyShardedOptions { strategy, prefetch: random.below(3), ..FullyShardedOptions::default() };
                worst = worst.max(apart::<f32, f32>(world_size, &options, training));
                assert!(apart::<f64, f64>(world_size, &options, training) < 1e-12, "{options:?}, {training:?}");
            }
        }
    }
    println!("apart by {worst:e}");
    // 12 steps round parameters and gradients of about 1 to 24 bits, each with an error of 6e-8.
    assert!(worst < 1e-6, "apart by {worst:e}, seed {seed}");
}

#[test]
fn a_network_of_bf16_over_shares_of_f32_stays_near_that_of_one_process() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let mut worst = [0.0_f64; 2];
    for world_size in [1, 2, 3, 4] {
        for strategy in STRATEGIES {
            for training in trainings(random.next()) {
                for (kind, reduce_type) in [None, Some(DType::F32)].into_iter().enumerate() {
                    let options =
                        FullyShardedOptions { strategy, gather_type: Some(DType::Bf16), reduce_type, ..FullyShardedOptions::default() };
                    worst[kind] = worst[kind].max(apart::<f32, bf16>(world_size, &options, training));
                }
            }
        }
    }
    println!("apart by {worst:?}");
    // Values are rounded to 8 bits: numbers up to 2 have an error of up to 0.004. Each of 12 steps of 0.2 adds the
    // error of a gradient below 0.5, a few times 0.004 of it.
    assert!(worst.iter().all(|worst| *worst < 0.015), "apart by {worst:?}, seed {seed}");
}

#[test]
fn shares_of_f32_keep_what_bf16_would_lose() {
    threads(Wiring::Shm, 2, |comm| {
        let options = FullyShardedOptions { gather_type: Some(DType::Bf16), ..FullyShardedOptions::default() };
        let unit = Unit::new("layer", vec![Parameter::new::<f32>("weight", &[3])]);
        let mut model = FullySharded::new(comm, vec![unit], options).unwrap();
        model.load(0, 0, &[1.0_f32; 3]).unwrap();
        for _ in 0..16 {
            model.gather(0).unwrap();
            assert_eq!(model.parameter::<bf16>(0, 0).unwrap(), [bf16::ONE; 3], "1/1024 is nothing beside 1");
            model.release(0).unwrap();
            // Two passes per step: the second is converted and added.
            for part in 0..2 {
                model.reduce_gradients(0, &[[bf16::from_f32(1.0 / 8192.0); 3]]).unwrap();
                if part == 0 {
                    model.end_backward().unwrap();
                }
            }
            let add = |shard: &mut collectives_train::Shard<'_>| {
                let (parameters, gradients) = shard.values::<f32>()?;
                parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x += slope / 4.0);
                Ok(())
            };
            model.reduce().unwrap().update(add).unwrap();
        }
        let own = model.shard_range(0).unwrap();
        let expected = [1.0 + 16.0 / 16384.0; 3];
        assert_eq!(model.shard::<f32>(0).unwrap()[..own.end.min(3) - own.start], expected[own.start..own.end.min(3)]);
    });
}

#[test]
fn gradients_that_are_narrowed_are_weighted_before_they_are_added_up() {
    threads(Wiring::Shm, 4, |comm| {
        let options = FullyShardedOptions { reduce_type: Some(DType::F16), ..FullyShardedOptions::default() };
        let unit = Unit::new("layer", vec![Parameter::new::<f32>("weight", &[4])]);
        let mut model = FullySharded::new(comm, vec![unit], options).unwrap();
        model.load(0, 0, &[0.0_f32; 4]).unwrap();
        model.reduce_gradients(0, &[[40_000.0_f32; 4]]).unwrap();
        assert_eq!(model.reduce().unwrap().norm().unwrap(), 80_000.0);
        assert!(f32::from(f16::from_f32(4.0 * 40_000.0)).is_infinite());
    });
}

#[test]
fn other_ways_to_add_up_have_their_own_weights() {
    for world_size in [1, 2] {
        threads(Wiring::Tcp, world_size, |comm| {
            let share = if world_size == 1 { 0.5 } else { [0.25, 0.75][comm.rank()] };
            let expected = [[2.0, 4.0, 4.0], [7.0, 12.0, 6.0]][world_size - 1];
            for (op, expected) in [ReduceOp::PreMulSum(share), ReduceOp::Sum, ReduceOp::Avg].into_iter().zip(expected) {
                for reduce_type in [None, Some(DType::F32)] {
                    let options = FullyShardedOptions { op, reduce_type, ..FullyShardedOptions::default() };
                    let unit = Unit::new("layer", vec![Parameter::new::<f64>("weight", &[4])]);
                    let mut model = FullySharded::new(comm, vec![unit], options).unwrap();
                    model.reduce_gradients(0, &[[4.0 + 4.0 * comm.rank() as f64; 4]]).unwrap();
                    assert_eq!(model.reduce().unwrap().norm().unwrap(), 2.0 * expected, "{op}, {reduce_type:?}");
                }
            }
        });
    }
}

#[test]
fn a_model_that_is_dropped_in_the_middle_leaves_its_communicator_usable() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        threads(wiring, 3, |comm| {
            let unit = |name| Unit::new(name, vec![Parameter::new::<f32>("weight", &[50_000])]);
            for _ in 0..3 {
                let mut model = FullySharded::new(comm, vec![unit("a"), unit("b")], FullyShardedOptions::default()).unwrap();
                [0, 1].into_iter().for_each(|unit| model.load(unit, 0, &vec![1.0_f32; 50_000]).unwrap());
                model.reduce_gradients(1, &[vec![1.0_f32; 50_000]]).unwrap();
                model.prefetch(1).unwrap();
                drop(model);
                let mut one = [1.0_f32];
                comm.all_reduce(&mut one, ReduceOp::Sum).unwrap();
                assert_eq!(one, [3.0]);
            }
        });
    }
}

#[test]
fn what_fills_a_unit_up_counts_nowhere() {
    threads(Wiring::Shm, 4, |comm| {
        let unit = |len| Unit::new("layer", vec![Parameter::new::<f32>("weight", &[len])]);
        // Both are padded to twelve elements, and use one buffer.
        let options = FullyShardedOptions { prefetch: 0, ..FullyShardedOptions::default() };
        let mut model = FullySharded::new(comm, vec![unit(9), unit(12)], options).unwrap();
        for _ in 0..2 {
            model.reduce_gradients(1, &[[1.0_f32; 12]]).unwrap();
            model.reduce_gradients(0, &[&[1.0_f32; 9]]).unwrap();
            assert_eq!(model.reduce().unwrap().norm().unwrap(), 21_f64.sqrt());
        }
    });
}

#[test]
fn units_without_gradients_have_zeros_and_a_step_can_be_skipped() {
    threads(Wiring::Shm, 2, |comm| {
        let unit = |name| Unit::new(name, vec![Parameter::new::<f32>("weight", &[5])]);
        let mut model =
            FullySharded::new(comm, vec![unit("a"), unit("b"), Unit::new("none", vec![])], FullyShardedOptions::default()).unwrap();
        [0, 1].into_iter().for_each(|unit| model.load(unit, 0, &[1.0_f32; 5]).unwrap());
        model.reduce_gradients(1, &[[f32::INFINITY; 5]]).unwrap();
        let norm = model.reduce().unwrap().clip_norm(1.0).unwrap();
        assert!(norm.is_infinite(), "the step is skipped");
        model.reduce_gradients(2, &[] as &[Vec<f32>]).unwrap();
        model.reduce_gradients(0, &[[3.0_f32; 5]]).unwrap();
        let mut seen = Vec::new();
        let reduced = model.reduce().unwrap().update(|shard| {
            let (bucket, range) = (shard.bucket, shard.range.clone());
            let gradients = shard.values::<f32>()?.1;
            let inside = gradients.len() - range.end.saturating_sub(5).min(gradients.len());
            seen.push((bucket, gradients[..inside].to_vec()));
            Ok(())
        });
        reduced.unwrap();
        let lens = if comm.rank() == 0 { 3 } else { 2 };
        assert_eq!(seen, [(0, vec![3.0; lens]), (1, vec![0.0; lens]), (2, vec![])]);
    });
}

#[test]
fn the_next_unit_is_gathered_in_the_background_before_it_is_asked_for() {
    threads(Wiring::Shm, 2, |comm| {
        let mut model = FullySharded::new(comm, network::units::<f32>(), FullyShardedOptions::default()).unwrap();
        network::load::<f32>(&mut model, comm, 1).unwrap();
        let gathered = || {
            let records = comm.flight_recorder().records();
            records.iter().filter(|record| record.kind == Collective::AllGather && record.state == State::Finished).count()
        };
        let before = gathered();
        let began = Instant::now();
        let expect = |model: &mut FullySharded, unit: usize, count: usize| {
            model.gather(unit).unwrap();
            while gathered() < before + count {
                assert!(began.elapsed() < patience(20), "{} of {count} were gathered", gathered() - before);
                std::thread::yield_now();
            }
            model.release(unit).unwrap();
        };
        // Forward: each call also gathers the unit after the requested one; the last call starts the gathering for the
        // backward pass.
        (0..LAYERS).for_each(|unit| expect(&mut model, unit, unit + 2));
        // The last unit was released, and is gathered again.
        let backward = (0..LAYERS).rev().zip([LAYERS + 2, LAYERS + 3, LAYERS + 4, LAYERS + 4]);
        backward.for_each(|(unit, count)| expect(&mut model, unit, count));
        assert_eq!(gathered(), before + LAYERS + 4, "no unit was gathered twice in a pass, but for the last");
        comm.barrier().unwrap();
    });
}

#[test]
fn gathers_and_reductions_go_on_while_other_ranks_are_elsewhere() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let meeting = Meeting::new(2);
        threads(wiring, 2, |comm| {
            let mut model = FullySharded::new(comm, network::units::<f32>(), FullyShardedOptions::default()).unwrap();
            network::load::<f32>(&mut model, comm, 1).unwrap();
            // Rank 1 makes no call before rank 0 has returned from these.
            if comm.rank() == 1 {
                meeting.meet();
            }
            model.prefetch(2).unwrap();
            for unit in [3, 2] {
                let lens = network::units::<f32>()[unit].parameters.iter().map(len).collect::<Vec<_>>();
                model.reduce_gradients(unit, &lens.iter().map(|len| vec![1.0_f32; *len]).collect::<Vec<_>>()).unwrap();
            }
            if comm.rank() == 0 {
                meeting.meet();
            }
            assert!(model.reduce().unwrap().norm().unwrap() > 1.0);
        });
    }
}

/// Computes the formula of the documentation for the units of the network.
fn formula(options: &FullyShardedOptions, world_size: usize, passes: usize) -> usize {
    let lens: Vec<usize> =
        network::units::<f32>().iter().map(|unit| unit.parameters.iter().map(len).sum::<usize>().next_multiple_of(world_size)).collect();
    let (all, largest) = (lens.iter().sum::<usize>(), *lens.iter().max().unwrap());
    let bytes = |dtype: Option<DType>, otherwise: usize| dtype.map_or(otherwise, DType::size_bytes);
    let (kept, gathered) = (size_of::<f32>(), bytes(options.gather_type, 4));
    let reduced = bytes(options.reduce_type, gathered);
    let buffers = options.prefetch + 1;
    let whole = match options.strategy {
        ShardingStrategy::FullShard => buffers * largest * gathered,
        ShardingStrategy::ShardGradOp => all * gathered,
    };
    let converted = if reduced != kept && passes > 1 { kept * largest / world_size } else { 0 };
    2 * kept * all / world_size + whole + buffers * largest * reduced + converted
}

#[test]
fn memory_stays_within_its_formula_and_comes_up_to_it() {
    for world_size in [1, 2, 4] {
        for (strategy, prefetch) in [(ShardingStrategy::FullShard, 0), (ShardingStrategy::FullShard, 1), (ShardingStrategy::ShardGradOp, 1)]
        {
            for (gather_type, passes) in [(None, 1), (None, 2), (Some(DType::Bf16), 1), (Some(DType::Bf16), 2)] {
                let options = FullyShardedOptions { strategy, prefetch, gather_type, ..FullyShardedOptions::default() };
                let training = Training { seed: 3, steps: 3, passes, limit: None };
                threads(Wiring::Shm, world_size, |comm| {
                    let mut model = FullySharded::new(comm, network::units::<f32>(), options.clone()).unwrap();
                    assert_eq!(model.memory_bytes(), model.shard_lens().sum::<usize>() * 8);
                    network::load::<f32>(&mut model, comm, 3).unwrap();
                    let mut most = 0;
                    let look = |model: &FullySharded| most = most.max(model.memory_bytes());
                    match gather_type {
                        None => train::<f32, f32>(&mut model, training, look),
                        Some(_) => train::<f32, bf16>(&mut model, training, look),
                    }
                    .unwrap();
                    let limit = formula(&options, world_size, passes);
                    // The first layer's gradients are last, and the first and last layers are smaller than the largest.
                    assert!(most <= limit && most * 10 >= limit * 7, "{most} of {limit} bytes, {options:?}, {world_size} ranks");
                });
            }
        }
    }
}

#[test]
fn units_of_one_size_come_to_the_formula_exactly() {
    const LEN: usize = 1200;
    for (prefetch, world_size) in [(0, 2), (1, 3), (2, 4)] {
        threads(Wiring::Shm, world_size, |comm| {
            let units = (0..6).map(|index| Unit::new(format!("layer {index}"), vec![Parameter::new::<f32>("weight", &[LEN])])).collect();
            let options = FullyShardedOptions { prefetch, gather_type: Some(DType::Bf16), ..FullyShardedOptions::default() };
            let mut model = FullySharded::new(comm, units, options).unwrap();
            (0..6).for_each(|unit| model.load(unit, 0, &[1.0_f32; LEN]).unwrap());
            let mut most = 0;
            for pass in 0..3 {
                for (unit, is_backward) in (0..6).map(|unit| (unit, false)).chain((0..6).rev().map(|unit| (unit, true))) {
                    model.gather(unit).unwrap();
                    most = most.max(model.memory_bytes());
                    model.release(unit).unwrap();
                    if is_backward {
                        model.reduce_gradients(unit, &[[bf16::ONE; LEN]]).unwrap();
                        most = most.max(model.memory_bytes());
                    }
                }
                if pass < 2 {
                    model.end_backward().unwrap();
                }
            }
            let shares = 2 * 4 * 6 * LEN / world_size;
            assert_eq!(most, shares + 2 * (1 + prefetch) * 2 * LEN + 4 * LEN / world_size);
            assert_eq!(model.reduce().unwrap().norm().unwrap(), 3.0 * (6.0 * LEN as f64).sqrt(), "three passes of ones");
        });
    }
}

#[test]
fn shares_are_read_and_loaded_by_their_range() {
    for world_size in [1, 2, 3, 4] {
        threads(Wiring::Shm, world_size, |comm| {
            let units = vec![Unit::new("layer", vec![Parameter::new::<f32>("a", &[2, 3]), Parameter::new::<f32>("b", &[5])])];
            let values: Vec<f32> = (1..12).map(|x| x as f32).collect();
            let mut model = FullySharded::new(comm, units.clone(), FullyShardedOptions::default()).unwrap();
            model.load(0, 0, &values[..6]).unwrap();
            model.load(0, 1, &values[6..]).unwrap();
            let layout = model.layouts().next().unwrap().clone();
            assert_eq!((layout.slots[0].range.clone(), layout.slots[1].range.clone()), (0..6, 6..11));
            let padded: Vec<f32> = values.iter().copied().chain([0.0; 4]).take(layout.len).collect();
            let own = model.shard_range(0).unwrap();
            assert_eq!(own.len() * world_size, layout.len);
            let shard = model.shard::<f32>(0).unwrap().to_vec();
            assert_eq!(shard, padded[own.clone()]);
            let mut other = FullySharded::new(comm, units.clone(), FullyShardedOptions::default()).unwrap();
            let error = other.gather(0).unwrap_err().to_string();
            assert!(error.contains("unit 0 \"layer\", parameter 0 \"a\" (f32[2, 3]) has no values yet"), "{error}");
            other.load_shard(0, &shard).unwrap();
            other.gather(0).unwrap();
            assert_eq!(other.parameter::<f32>(0, 1).unwrap(), &values[6..]);
            assert!(other.load_shard(0, &shard).unwrap_err().to_string().contains("release it first"));
            other.release(0).unwrap();
            for (error, words) in [
                (other.load_shard(0, &vec![0.0_f32; own.len() + 1]).unwrap_err(), "elements were passed"),
                (other.load_shard(0, &vec![0.0_f64; own.len()]).unwrap_err(), "elements of f64 were passed"),
                (other.shard::<f64>(0).map(drop).unwrap_err(), "f64"),
                (other.shard_range(1).map(drop).unwrap_err(), "there is no unit 1: the model has 1"),
            ] {
                assert!(error.to_string().contains(words), "{error}");
            }
        });
    }
}
