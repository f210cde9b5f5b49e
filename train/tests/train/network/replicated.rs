//! The network with all parameters on every rank: gradients averaged (DDP), and also with the optimiser sharded
//! (ZeRO-1).

use collectives::{Communicator, Result};
use collectives_train::{DataParallel, Float, Parameter, ShardedOptimizer};

use super::{LAYERS, Layer, Part, Place, Training, WIDTHS, descend, gradients, narrow, samples, start, widen};
use crate::common::oracle::Predict;

fn parameters<T: Float>() -> Vec<Parameter> {
    let of_layer = |(index, pair): (usize, &[usize])| {
        let weight = Parameter::new::<T>(format!("layer {index} weight"), &[pair[1], pair[0]]);
        [weight, Parameter::new::<T>(format!("layer {index} bias"), &[pair[1]])]
    };
    WIDTHS.windows(2).enumerate().flat_map(of_layer).collect()
}

fn listed<T: Float>(layers: &[Layer]) -> Vec<Vec<T>> {
    layers.iter().flatten().map(|values| narrow(values)).collect()
}

fn layers<T: Float>(values: &[Vec<T>]) -> Vec<Layer> {
    values.chunks(2).map(|pair| [widen(&pair[0]), widen(&pair[1])]).collect()
}

/// Returns rank 0's initial values; other ranks get different ones, which a broadcast must replace.
fn begun<T: Float>(comm: &Communicator, seed: u64) -> Vec<Vec<T>> {
    let mut values = listed::<T>(&start(seed));
    if comm.rank() > 0 {
        values.iter_mut().flatten().for_each(|x| *x = T::from_f64(7.0));
    }
    values
}

/// Returns the gradients of this rank's samples of a pass, by parameter, the last first.
fn backward_pass<T: Float>(comm: &Communicator, values: &[Vec<T>], training: Training, step: usize, pass: usize) -> Vec<(usize, Vec<T>)> {
    let own = samples(training, step, pass, Part::of(comm));
    let found = gradients(&layers(values), &own, own.len() * training.passes);
    listed(&found).into_iter().enumerate().rev().collect()
}

/// Trains with averaged gradients and the same optimiser on every rank.
pub(super) fn data_parallel<T: Float + Predict, P: Place>(place: &P, comm: &Communicator, training: Training) -> Result<Vec<Layer>> {
    let mut values = begun::<T>(comm, training.seed);
    let mut model: DataParallel = place.data_parallel(comm, parameters::<T>())?;
    for (index, values) in values.iter_mut().enumerate() {
        let mut told = place.put(values);
        model.broadcast(index, &mut told, 0)?;
        *values = place.get(&told);
    }
    for step in 0..training.steps {
        for pass in 0..training.passes {
            for (index, gradient) in backward_pass(comm, &values, training, step, pass) {
                let gradient = place.put(&gradient);
                if pass + 1 < training.passes { model.accumulate(index, &gradient) } else { model.ready(index, &gradient) }?;
            }
        }
        let mut averaged = model.finish()?;
        training.limit.map_or(Ok(0.0), |limit| averaged.clip_norm(limit))?;
        for (index, values) in values.iter_mut().enumerate() {
            let mut slopes = place.put(values);
            averaged.copy_to(index, &mut slopes)?;
            descend(values, &place.get(&slopes));
        }
    }
    assert_eq!(values.len(), 2 * LAYERS);
    Ok(layers(&values))
}

/// Trains with each rank updating its share of the parameters.
pub(super) fn sharded_optimizer<T: Float + Predict, P: Place>(place: &P, comm: &Communicator, training: Training) -> Result<Vec<Layer>> {
    let mut values = begun::<T>(comm, training.seed);
    let mut model: ShardedOptimizer = place.sharded_optimizer(comm, parameters::<T>())?;
    for (index, values) in values.iter_mut().enumerate() {
        let mut told = place.put(values);
        model.broadcast(index, &mut told, 0)?;
        *values = place.get(&told);
    }
    for step in 0..training.steps {
        for pass in 0..training.passes {
            for (index, gradient) in backward_pass(comm, &values, training, step, pass) {
                let gradient = place.put(&gradient);
                if pass + 1 < training.passes { model.accumulate(index, &gradient) } else { model.ready(index, &gradient) }?;
            }
        }
        let mut shards = model.reduce()?;
        training.limit.map_or(Ok(0.0), |limit| shards.clip_norm(limit))?;
        let updated = shards.update(|shard| place.change::<T>(shard, descend))?;
        for (index, values) in values.iter_mut().enumerate() {
            let mut all = place.put(values);
            updated.copy_to(index, &mut all)?;
            *values = place.get(&all);
        }
    }
    Ok(layers(&values))
}
