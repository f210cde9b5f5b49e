//! Training with 16-bit gradients and scaled losses. If a single rank overflows, all ranks skip that step, and reach
//! the parameters of one process that skips it.

use collectives::{Communicator, ReduceOp, Result, bf16, f16};
use collectives_train::{
    DataParallel, Float, FullySharded, FullyShardedOptions, LossScaler, LossScalerOptions, Options, Parameter, ShardedOptimizer, Unit,
};

use crate::common::oracle::Predict;
use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};
use crate::network::{self, Host, LAYERS, Layer, Part, Training, descend, distance, gradients, narrow, samples, start, widen};

/// Options with a growth interval short enough for the few steps of a test.
const OPTIONS: LossScalerOptions = LossScalerOptions { initial_scale: 1024.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 4 };

/// A gradient of one rank that overflows in a step: an element of a layer's weights.
#[derive(Debug, Clone, Copy)]
struct Overflow {
    step: usize,
    rank: usize,
    layer: usize,
}

/// The results of a rank: its parameters, the skipped steps, and the scale after each step.
#[derive(Debug, PartialEq)]
struct End {
    layers: Vec<Layer>,
    left_out: Vec<usize>,
    scales: Vec<f32>,
}

/// Returns the gradients of a scaled loss over this rank's samples, including the overflow.
fn scaled(comm: &Communicator, layers: &[Layer], training: Training, step: usize, scale: f32, overflow: Overflow) -> Vec<Layer> {
    let own = samples(training, step, 0, Part::of(comm));
    let mut found = gradients(layers, &own, own.len());
    found.iter_mut().flatten().flatten().for_each(|slope| *slope *= f64::from(scale));
    if (overflow.step, overflow.rank) == (step, comm.rank()) {
        found[overflow.layer][0][1] = f64::MAX;
    }
    found
}

/// Returns the number of ranks that have seen an overflow: their scaler has changed.
fn witnesses(comm: &Communicator, before: &LossScaler, scaler: &LossScaler) -> Result<u32> {
    let mut count = u32::from(before != scaler);
    comm.all_reduce(&mut count, ReduceOp::Sum).map(|()| count)
}

/// Trains with shards of `f32` and gradients of `G`s: only the rank whose shard contains the overflow sees it.
fn sharded<G: Float + Predict>(comm: &Communicator, training: Training, overflow: Overflow) -> Result<End> {
    let options = FullyShardedOptions { gather_type: Some(G::ELEMENT_TYPE), ..FullyShardedOptions::default() };
    let mut model = FullySharded::new(comm, network::units::<f32>(), options)?;
    network::load::<f32>(&mut model, comm, training.seed)?;
    let (mut scaler, mut left_out, mut scales) = (LossScaler::new(OPTIONS)?, Vec::new(), Vec::new());
    for step in 0..training.steps {
        let layers = (0..LAYERS).map(|unit| network::used::<G, _>(&Host, &mut model, unit)).collect::<Result<Vec<_>>>()?;
        let found = scaled(comm, &layers, training, step, scaler.scale(), overflow);
        for (unit, layer) in found.iter().enumerate().rev() {
            model.reduce_gradients(unit, &layer.each_ref().map(|values| narrow::<G>(values)))?;
        }
        let (mut reduced, before) = (model.reduce()?, scaler.clone());
        reduced.unscale(&mut scaler)?;
        assert_eq!(witnesses(comm, &before, &scaler)?, u32::from(step == overflow.step), "step {step}, {overflow:?}");
        match scaler.update(comm)? {
            true => reduced.update(|shard| shard.values::<f32>().map(|(parameters, slopes)| descend(parameters, slopes)))?,
            false => left_out.push(step),
        }
        scales.push(scaler.scale());
    }
    let layers = (0..LAYERS).map(|unit| network::used::<G, _>(&Host, &mut model, unit)).collect::<Result<Vec<_>>>()?;
    Ok(End { layers, left_out, scales })
}

/// Trains with parameters of `f32` on every rank and gradients of `G`s. These are averaged, so every rank sees the
/// overflow.
fn replicated<G: Float + Predict>(comm: &Communicator, training: Training, overflow: Overflow) -> Result<End> {
    let mut layers = start(training.seed);
    let listed = layers.iter().flatten().map(|values| Parameter::new::<G>("parameter", &[values.len()])).collect();
    let mut model = DataParallel::new(comm, listed, Options::default())?;
    let (mut scaler, mut left_out, mut scales) = (LossScaler::new(OPTIONS)?, Vec::new(), Vec::new());
    for step in 0..training.steps {
        let found = scaled(comm, &layers, training, step, scaler.scale(), overflow);
        found.iter().flatten().enumerate().try_for_each(|(index, slopes)| model.ready(index, &narrow::<G>(slopes)))?;
        let averaged = model.finish()?;
        let slopes: Result<Vec<Vec<f64>>> = (0..2 * LAYERS).map(|index| averaged.gradient::<G>(index).map(widen)).collect();
        let mut slopes: Vec<Vec<f32>> = slopes?.iter().map(|slopes| narrow(slopes)).collect();
        slopes.iter_mut().for_each(|slopes| scaler.unscale(slopes));
        match scaler.update(comm)? {
            true => layers.iter_mut().flatten().zip(&slopes).for_each(|(values, slopes)| {
                let mut narrowed = narrow::<f32>(values);
                descend(&mut narrowed, slopes);
                *values = widen(&narrowed);
            }),
            false => left_out.push(step),
        }
        scales.push(scaler.scale());
    }
    Ok(End { layers, left_out, scales })
}

/// Returns the expected scale after each step.
fn expected_scales(steps: usize, overflow: usize) -> Vec<f32> {
    let grown = |good: usize| 2_f32.powi(good as i32 / OPTIONS.growth_interval as i32);
    let behind = |step: usize| match step < overflow {
        true => 1024.0 * grown(step + 1),
        false => 1024.0 * grown(overflow) * 0.5 * grown(step - overflow),
    };
    (0..steps).map(behind).collect()
}

/// Returns the allowed difference from the parameters of one process in `f64`. Gradients below 1, and parameters up to
/// 2 gathered as `G`s, are rounded by half a unit of the last place. A step multiplies the error of a gradient by 0.2,
/// so a dozen steps have an error of 3 units.
fn bound<G: Float>() -> f64 {
    4.0 * if G::ELEMENT_TYPE == collectives::DType::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 }
}

fn compare<G: Float + Predict>(comm: &Communicator, training: Training, overflow: Overflow) -> [End; 2] {
    let alone = network::train_alone_but(training, &[overflow.step]);
    let moved = distance(&alone, &network::train_alone(training));
    let ends = [sharded::<G>(comm, training, overflow).unwrap(), replicated::<G>(comm, training, overflow).unwrap()];
    for End { layers, left_out, scales } in &ends {
        let (apart, what) =
            (distance(layers, &alone), format!("{} of {} ranks, {training:?}, {overflow:?}", G::ELEMENT_TYPE, comm.world_size()));
        assert_eq!(*left_out, [overflow.step], "{what}");
        assert_eq!(*scales, expected_scales(training.steps, overflow.step), "{what}");
        assert!(apart <= bound::<G>(), "{apart} apart, at most {}; the step itself moves {moved}; {what}", bound::<G>());
    }
    ends
}

fn drawn(random: &mut Random, world_size: usize) -> (Training, Overflow) {
    let training = Training { seed: random.next(), steps: 12, passes: 1, limit: None };
    (training, Overflow { step: random.below(12), rank: random.below(world_size), layer: random.below(LAYERS) })
}

#[test]
fn a_step_in_which_one_rank_overflows_is_left_out_on_all() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for world_size in [1, 2, 3, 4] {
            let (training, overflow) = drawn(&mut random, world_size);
            let ends =
                threads(wiring, world_size, |comm| (compare::<f16>(comm, training, overflow), compare::<bf16>(comm, training, overflow)));
            assert!(ends.iter().all(|end| *end == ends[0]), "ranks differ, seed {seed}");
        }
    }
}

#[test]
fn a_step_in_which_one_rank_overflows_is_left_out_between_processes() {
    let name = "loss_scaler::a_step_in_which_one_rank_overflows_is_left_out_between_processes";
    processes(name, Wiring::Tcp, 3, |comm| {
        let (training, overflow) = drawn(&mut Random(20_270_115), comm.world_size());
        compare::<f16>(comm, training, overflow);
        Ok(())
    });
}

/// Returns whole multiples of an eighth of the scale, whose means are exact; in the second step one is infinite.
fn numbers(rank: usize, step: usize, scale: f32) -> Vec<f32> {
    let mut numbers: Vec<f32> = (0..11).map(|at| ((at * 3 + rank * 5 + step) % 17) as f32 * 0.125 * scale).collect();
    if (rank, step) == (0, 1) {
        numbers[10] = f32::NEG_INFINITY;
    }
    numbers
}

#[test]
fn what_holds_gradients_divides_them_as_the_scaler_does() {
    for world_size in [1, 2, 4] {
        threads(Wiring::Shm, world_size, |comm| {
            let parameter = || vec![Parameter::new::<f32>("weight", &[11])];
            let mut whole = DataParallel::new(comm, parameter(), Options::default()).unwrap();
            let mut shared = ShardedOptimizer::new(comm, parameter(), Options::default()).unwrap();
            let unit = Unit::new("layer", parameter());
            let mut units = FullySharded::new(comm, vec![unit], FullyShardedOptions::default()).unwrap();
            shared.load(0, &[0.0_f32; 11]).unwrap();
            for step in 0..2 {
                let mut scalers = [0; 4].map(|_| LossScaler::new(LossScalerOptions { initial_scale: 24.0, ..OPTIONS }).unwrap());
                let mine = numbers(comm.rank(), step, 24.0);
                whole.ready(0, &mine).unwrap();
                shared.ready(0, &mine).unwrap();
                units.reduce_gradients(0, std::slice::from_ref(&mine)).unwrap();
                let mut averaged = whole.finish().unwrap();
                let mut expected = averaged.gradient::<f32>(0).unwrap().to_vec();
                scalers[0].unscale(&mut expected);
                averaged.unscale(&mut scalers[1]).unwrap();
                assert_eq!(averaged.gradient::<f32>(0).unwrap(), expected);
                let (mut shards, mut reduced) = (shared.reduce().unwrap(), units.reduce().unwrap());
                shards.unscale(&mut scalers[2]).unwrap();
                reduced.unscale(&mut scalers[3]).unwrap();
                let check = |shard: &mut collectives_train::Shard<'_>| {
                    let (range, gradients) = (shard.range.clone(), shard.values::<f32>()?.1);
                    let inside = range.end.min(11).saturating_sub(range.start);
                    assert_eq!(gradients[..inside], expected[range.start..range.start + inside]);
                    Ok(())
                };
                shards.update(check).map(|_| ()).unwrap();
                reduced.update(check).unwrap();
                let taken = scalers.map(|mut scaler| scaler.update(comm).unwrap());
                assert_eq!(taken, [step == 0; 4], "step {step}");
            }
        });
    }
}

#[test]
fn what_comes_twice_or_too_late_is_refused_and_changes_nothing() {
    threads(Wiring::Shm, 2, |comm| {
        let parameter = || vec![Parameter::new::<f32>("weight", &[4])];
        let mut whole = DataParallel::new(comm, parameter(), Options::default()).unwrap();
        let mut shared = ShardedOptimizer::new(comm, parameter(), Options::default()).unwrap();
        let unit = Unit::new("layer", parameter());
        let mut units = FullySharded::new(comm, vec![unit], FullyShardedOptions::default()).unwrap();
        // Here both ranks have their own copies.
        let alone = comm.split(Some(comm.rank() as u32), 0).unwrap().unwrap();
        let mut copy = FullySharded::new(&alone, vec![Unit::new("layer", parameter())], FullyShardedOptions::default()).unwrap();
        shared.load(0, &[0.0_f32; 4]).unwrap();
        let refused = |result: Result<()>, words: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, collectives::Error::InvalidArgument { .. }) && error.to_string().contains(words), "{error}");
        };
        for _step in 0..2 {
            let mut scaler = LossScaler::new(LossScalerOptions { initial_scale: 8.0, ..OPTIONS }).unwrap();
            let mine = [16.0_f32; 4];
            whole.ready(0, &mine).unwrap();
            shared.ready(0, &mine).unwrap();
            units.reduce_gradients(0, &[mine]).unwrap();
            copy.reduce_gradients(0, &[mine]).unwrap();
            let mut averaged = whole.finish().unwrap();
            averaged.unscale(&mut scaler).unwrap();
            refused(averaged.unscale(&mut scaler), "already unscaled");
            assert_eq!(averaged.clip_norm(3.0).unwrap(), 4.0);
            refused(averaged.unscale(&mut scaler), "already clipped");
            assert_eq!(averaged.clip_norm(1.5).unwrap(), 3.0, "clipped again");
            let mut shards = shared.reduce().unwrap();
            shards.unscale(&mut scaler).unwrap();
            refused(shards.unscale(&mut scaler), "already unscaled");
            assert_eq!(shards.clip_norm(9.0).unwrap(), 4.0);
            refused(shards.unscale(&mut scaler), "already clipped");
            let mut reduced = units.reduce().unwrap();
            assert_eq!(reduced.clip_norm(99.0).unwrap(), 32.0);
            refused(reduced.unscale(&mut scaler), "already clipped");
            refused(reduced.reduce_over(comm), "already clipped");
            reduced.update(|shard| shard.values::<f32>().map(|(_, slopes)| assert_eq!(slopes, [16.0; 2]))).unwrap();
            let mut reduced = copy.reduce().unwrap();
            reduced.reduce_over(comm).unwrap();
            refused(reduced.reduce_over(comm), "already reduced over replicas");
            reduced.unscale(&mut scaler).unwrap();
            refused(reduced.reduce_over(comm), "already unscaled");
            refused(reduced.unscale(&mut scaler), "already unscaled");
            reduced.update(|shard| shard.values::<f32>().map(|(_, slopes)| assert_eq!(slopes, [2.0; 4]))).unwrap();
        }
    });
}
