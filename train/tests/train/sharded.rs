//! An optimiser sharded over ranks has the same bits as one that is complete on every rank.

use collectives::{Communicator, Config, Result};
use collectives_train::{DataParallel, Options, Parameter, ShardedOptimizer};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads, threads_with};

const STEPS: u64 = 6;

/// Adam (Kingma, Ba 2015), in place.
fn adam(step: u64, x: &mut f32, slope: f32, (mean, square): (&mut f32, &mut f32)) {
    *mean = 0.9 * *mean + 0.1 * slope;
    *square = 0.999 * *square + 0.001 * slope * slope;
    let (mean, square) = (*mean / (1.0 - 0.9_f32.powi(step as i32 + 1)), *square / (1.0 - 0.999_f32.powi(step as i32 + 1)));
    *x -= 0.01 * mean / (square.sqrt() + 1e-8);
}

fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 6] = [&[31, 17], &[], &[0], &[2, 3], &[4099], &[1]];
    shapes.iter().enumerate().map(|(index, shape)| Parameter::new::<f32>(format!("p{index}"), shape)).collect()
}

fn lens() -> Vec<usize> {
    parameters().iter().map(|parameter| parameter.shape.iter().product()).collect()
}

/// Returns numbers between -1 and 1 for this seed.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..len).map(|_| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn gradient(seed: u64, rank: usize, step: u64, index: usize, len: usize) -> Vec<f32> {
    numbers(seed ^ (rank as u64) << 40 ^ step << 20 ^ index as u64, len)
}

fn bits(values: &[Vec<f32>]) -> Vec<Vec<u32>> {
    values.iter().map(|values| values.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Trains with the whole state on every rank.
fn whole(comm: &Communicator, options: Options, seed: u64, clip: Option<f64>) -> Result<Vec<Vec<u32>>> {
    let mut values: Vec<_> = lens().iter().enumerate().map(|(index, len)| numbers(index as u64, *len)).collect();
    let mut state: Vec<_> = lens().iter().map(|len| (vec![0.0; *len], vec![0.0; *len])).collect();
    let mut model = DataParallel::new(comm, parameters(), options)?;
    for step in 0..STEPS {
        for (index, len) in lens().into_iter().enumerate() {
            model.ready(index, &gradient(seed, comm.rank(), step, index, len))?;
        }
        let mut averaged = model.finish()?;
        if let Some(limit) = clip {
            averaged.clip_norm(limit)?;
        }
        for (index, (values, (mean, square))) in values.iter_mut().zip(&mut state).enumerate() {
            let slopes = averaged.gradient::<f32>(index)?;
            for (at, x) in values.iter_mut().enumerate() {
                adam(step, x, slopes[at], (&mut mean[at], &mut square[at]));
            }
        }
    }
    Ok(bits(&values))
}

/// Trains with a share of the state on each rank.
fn dealt_out(comm: &Communicator, options: Options, seed: u64, clip: Option<f64>) -> Result<Vec<Vec<u32>>> {
    let mut values: Vec<_> = lens().iter().enumerate().map(|(index, len)| numbers((index + 100 * comm.rank()) as u64, *len)).collect();
    let mut model = ShardedOptimizer::new(comm, parameters(), options)?;
    values.iter_mut().enumerate().try_for_each(|(index, values)| model.broadcast(index, values, 0))?;
    let mut state: Vec<_> = model.shard_lens().map(|len| (vec![0.0; len], vec![0.0; len])).collect();
    for step in 0..STEPS {
        for (index, len) in lens().into_iter().enumerate().rev() {
            model.ready(index, &gradient(seed, comm.rank(), step, index, len))?;
        }
        let mut shards = model.reduce()?;
        if let Some(limit) = clip {
            shards.clip_norm(limit)?;
        }
        let updated = shards.update(|shard| {
            let (mean, square) = &mut state[shard.bucket];
            let (parameters, slopes) = shard.values::<f32>()?;
            for (at, x) in parameters.iter_mut().enumerate() {
                adam(step, x, slopes[at], (&mut mean[at], &mut square[at]));
            }
            Ok(())
        })?;
        values.iter_mut().enumerate().try_for_each(|(index, values)| updated.copy_to(index, values))?;
    }
    Ok(bits(&values))
}

fn compare(comm: &Communicator, options: &Options, seed: u64) {
    let (plain, shared) = (whole(comm, options.clone(), seed, None).unwrap(), dealt_out(comm, options.clone(), seed, None).unwrap());
    assert!(plain == shared, "{options:?}, {} ranks, seed {seed}", comm.world_size());
}

#[test]
fn a_sharded_optimiser_gives_the_bits_of_a_whole_one() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for (first_bucket_bytes, bucket_bytes) in [(0, 0), (64, 3000), (1 << 20, 25 << 20)] {
        let options = Options { first_bucket_bytes, bucket_bytes, ..Options::default() };
        for world_size in [1, 2, 3, 4] {
            let seed = random.next();
            let reproducible = || {
                let mut config = Config::default();
                config.reproducible = true;
                config
            };
            for wiring in [Wiring::Shm, Wiring::Tcp] {
                threads_with(world_size, |rank| wiring.builder_with(rank, reproducible()), |comm| compare(comm, &options, seed));
            }
            threads(Wiring::Shm, world_size, |comm| compare(comm, &options, seed));
            if world_size <= 2 {
                threads(Wiring::Tcp, world_size, |comm| compare(comm, &options, seed));
            }
        }
    }
}

#[test]
fn a_sharded_optimiser_gives_the_same_bits_between_processes() {
    processes("sharded::a_sharded_optimiser_gives_the_same_bits_between_processes", Wiring::Shm, 2, |comm| {
        compare(comm, &Options::default(), 5);
        Ok(())
    });
}

#[test]
fn the_norm_of_shards_is_that_of_the_whole() {
    threads(Wiring::Shm, 3, |comm| {
        let options = Options { bucket_bytes: 3000, ..Options::default() };
        let (plain, shared) = (whole(comm, options.clone(), 9, Some(0.5)).unwrap(), dealt_out(comm, options, 9, Some(0.5)).unwrap());
        for (plain, shared) in plain.iter().flatten().zip(shared.iter().flatten()) {
            // Squares are summed in a different order.
            let (plain, shared) = (f32::from_bits(*plain), f32::from_bits(*shared));
            assert!((plain - shared).abs() <= 1e-5, "{plain} and {shared}");
        }
    });
}

#[test]
fn parameters_without_values_are_named() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = ShardedOptimizer::new(comm, parameters(), Options::default()).unwrap();
    model.load(0, &[0.0_f32; 31 * 17]).unwrap();
    let error = model.reduce().unwrap_err().to_string();
    assert!(error.contains("parameter 1 \"p1\" (f32[]) has no values yet"), "{error}");
    let error = model.load(3, &[0.0_f32; 5]).unwrap_err().to_string();
    assert!(error.contains("parameter 3 \"p3\" (f32[2, 3]): 5 elements were passed"), "{error}");
}

#[test]
fn an_optimiser_that_fails_ends_the_steps() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = ShardedOptimizer::new(comm, vec![Parameter::new::<f64>("a", &[2])], Options::default()).unwrap();
    model.load(0, &[1.0_f64; 2]).unwrap();
    model.ready(0, &[1.0_f64; 2]).unwrap();
    let error = model.reduce().unwrap().update(|shard| shard.values::<f32>().map(drop)).unwrap_err().to_string();
    assert!(error.contains("bucket 0 holds elements of f64"), "{error}");
    assert!(model.ready(0, &[1.0_f64; 2]).unwrap_err().is_poisoned());
}

#[test]
fn an_optimiser_that_panics_ends_the_steps() {
    let comm = &Communicator::local(1).unwrap()[0];
    let mut model = ShardedOptimizer::new(comm, vec![Parameter::new::<f64>("a", &[2])], Options::default()).unwrap();
    model.load(0, &[1.0_f64; 2]).unwrap();
    model.ready(0, &[1.0_f64; 2]).unwrap();
    let shards = model.reduce().unwrap();
    let update = std::panic::AssertUnwindSafe(|| shards.update(|_| panic!("a panic of the test's")).map(drop));
    assert!(std::panic::catch_unwind(update).is_err());
    assert!(model.ready(0, &[1.0_f64; 2]).unwrap_err().is_poisoned());
}
