//! Every way of training reaches the parameters of one process, on 1, 2, 3 and 4 ranks.

use collectives::{Communicator, Result};
use collectives_train::Float;

use crate::common::oracle::Predict;
use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};
use crate::network::{Host, Layer, Mode, Training, bound, distance, start, train_alone};

/// Returns a training with one pass per step, and one with two passes and clipped gradients.
fn trainings(seed: u64) -> [Training; 2] {
    let training = Training { seed, steps: 12, passes: 1, limit: None };
    [training, Training { passes: 2, limit: Some(0.1), ..training }]
}

/// Trains in every mode. Returns the largest difference from one process, in units of the mode's bound.
fn all<T: Float + Predict>(comm: &Communicator, training: Training, alone: &[Layer]) -> Result<f64> {
    let mut furthest = 0.0_f64;
    for mode in Mode::of_world(comm.world_size()) {
        let apart = mode.apart::<T, _>(&Host, comm, training, alone)?;
        let (ranks, limit) = (comm.world_size(), bound::<T>());
        assert!(apart <= limit, "{mode:?}, {} on {ranks} ranks: {apart:e} apart, at most {limit:e}; {training:?}", T::ELEMENT_TYPE);
        furthest = furthest.max(apart / limit);
    }
    Ok(furthest)
}

/// Trains with both types, and returns the largest difference of each.
fn both(comm: &Communicator, training: Training) -> [f64; 2] {
    let alone = train_alone(training);
    let moved = distance(&alone, &start(training.seed));
    assert!(moved > 0.02, "the network has learnt nothing: {moved}, {training:?}");
    [all::<f32>(comm, training, &alone).unwrap(), all::<f64>(comm, training, &alone).unwrap()]
}

#[test]
fn every_mode_comes_to_the_parameters_of_one_process() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for world_size in [1, 2, 3, 4] {
            for training in trainings(random.next()) {
                let furthest = threads(wiring, world_size, |comm| both(comm, training));
                println!("{wiring:?}, {world_size} ranks, of the bounds for f32 and f64: {:?}", furthest[0]);
            }
        }
    }
}

#[test]
fn every_mode_comes_to_the_parameters_of_one_process_between_processes() {
    let name = "modes::every_mode_comes_to_the_parameters_of_one_process_between_processes";
    processes(name, Wiring::Pairs, 4, |comm| {
        let furthest = both(comm, Training { seed: 20_270_114, steps: 5, passes: 2, limit: Some(0.3) });
        println!("of the bounds for f32 and f64: {furthest:?}");
        Ok(())
    });
}
