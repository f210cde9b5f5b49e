//! A small network, in `f64` on one process, and the same with its layers as units that are dealt out over ranks.

use collectives::train::{Float, FullySharded, Parameter, Unit};
use collectives::{Communicator, Result};

use crate::common::random::Random;

/// Neurons of each layer: three layers, the middle ones of which are of one size.
const WIDTHS: [usize; 5] = [3, 6, 6, 6, 2];
pub(crate) const LAYERS: usize = WIDTHS.len() - 1;

/// Samples of a pass; every world of up to four ranks has as many on each rank.
const SAMPLES: usize = 12;

const RATE: f64 = 0.2;

/// Weights, row by row, and biases of a layer.
type Layer = [Vec<f64>; 2];

/// How a network is trained.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training {
    pub(crate) seed: u64,
    pub(crate) steps: usize,
    /// How many passes are accumulated in a step.
    pub(crate) passes: usize,
    pub(crate) limit: Option<f64>,
}

fn number(random: &mut Random) -> f64 {
    random.below(1 << 20) as f64 / f64::from(1 << 19) - 1.0
}

/// Where training starts: numbers that every type has.
pub(crate) fn start(seed: u64) -> Vec<Layer> {
    let mut random = Random(seed);
    let mut many = |len: usize| (0..len).map(|_| (number(&mut random) * 64.0).round() / 128.0).collect();
    WIDTHS.windows(2).map(|pair| [many(pair[0] * pair[1]), many(pair[1])]).collect()
}

pub(crate) fn units<T: Float>() -> Vec<Unit> {
    let unit = |(index, pair): (usize, &[usize])| {
        let parameters = vec![Parameter::new::<T>("weight", &[pair[1], pair[0]]), Parameter::new::<T>("bias", &[pair[1]])];
        Unit::new(format!("layer {index}"), parameters)
    };
    WIDTHS.windows(2).enumerate().map(unit).collect()
}

/// A sample and what the network should say.
fn sample(training: Training, step: usize, pass: usize, index: usize) -> (Vec<f64>, [f64; 2]) {
    let mut random = Random(training.seed ^ ((step * 10 + pass) * 1000 + index + 1) as u64);
    let input: Vec<f64> = (0..WIDTHS[0]).map(|_| number(&mut random)).collect();
    let target = [(input[0] * 2.0).sin(), input[1] * input[2]];
    (input, target)
}

/// What a layer makes of its input; all but the last are bent.
fn forward([weight, bias]: &Layer, input: &[f64], is_last: bool) -> Vec<f64> {
    let rows = weight.chunks(input.len()).zip(bias);
    let sums = rows.map(|(row, bias)| row.iter().zip(input).map(|(w, x)| w * x).sum::<f64>() + bias);
    sums.map(|sum| if is_last { sum } else { sum.tanh() }).collect()
}

/// The gradients of a layer, added to `sums`, and that of its input.
fn backward([weight, _]: &Layer, input: &[f64], output: &[f64], slope: &[f64], is_last: bool, sums: &mut Layer) -> Vec<f64> {
    let mut of_input = vec![0.0; input.len()];
    for (row, (slope, output)) in slope.iter().zip(output).enumerate() {
        let slope = if is_last { *slope } else { slope * (1.0 - output * output) };
        sums[1][row] += slope;
        for (column, x) in input.iter().enumerate() {
            sums[0][row * input.len() + column] += slope * x;
            of_input[column] += slope * weight[row * input.len() + column];
        }
    }
    of_input
}

/// The slope of the mean squared error of so many samples.
fn loss_slope(output: &[f64], target: [f64; 2], samples: usize) -> Vec<f64> {
    output.iter().zip(target).map(|(output, target)| 2.0 * (output - target) / samples as f64).collect()
}

/// Trains on one process, with all samples.
pub(crate) fn train_alone(training: Training) -> Vec<Layer> {
    let mut layers = start(training.seed);
    for step in 0..training.steps {
        let mut sums: Vec<Layer> = layers.iter().map(|layer| layer.each_ref().map(|values| vec![0.0; values.len()])).collect();
        for (pass, index) in (0..training.passes).flat_map(|pass| (0..SAMPLES).map(move |index| (pass, index))) {
            let (input, target) = sample(training, step, pass, index);
            let mut states = vec![input];
            for (number, layer) in layers.iter().enumerate() {
                states.push(forward(layer, &states[number], number + 1 == LAYERS));
            }
            let mut slope = loss_slope(&states[LAYERS], target, SAMPLES * training.passes);
            for number in (0..LAYERS).rev() {
                let is_last = number + 1 == LAYERS;
                slope = backward(&layers[number], &states[number], &states[number + 1], &slope, is_last, &mut sums[number]);
            }
        }
        let norm = sums.iter().flatten().flatten().map(|slope| slope * slope).sum::<f64>().sqrt();
        let factor = training.limit.filter(|limit| norm > *limit).map_or(1.0, |limit| limit / norm);
        let all = layers.iter_mut().flatten().flatten().zip(sums.iter().flatten().flatten());
        all.for_each(|(x, slope)| *x -= RATE * factor * slope);
    }
    layers
}

/// Gives a model its start, by broadcast or from what every rank has.
pub(crate) fn load<M: Float>(model: &mut FullySharded, comm: &Communicator, seed: u64) -> Result<()> {
    for (unit, layer) in start(seed).iter().enumerate() {
        for (parameter, values) in layer.iter().enumerate() {
            let mut values: Vec<M> = values.iter().map(|x| M::from_f64(*x)).collect();
            let root = unit % comm.world_size();
            if parameter == 1 {
                model.load(unit, parameter, &values)?;
                continue;
            }
            if comm.rank() != root {
                values.fill(M::from_f64(7.0));
            }
            model.broadcast(unit, parameter, &mut values, root)?;
        }
    }
    Ok(())
}

/// A gathered layer.
fn layer<G: Float>(model: &FullySharded, unit: usize) -> Result<Layer> {
    let values = |parameter| Ok(model.parameter::<G>(unit, parameter)?.iter().map(|x| x.to_f64()).collect());
    Ok([values(0)?, values(1)?])
}

/// Forward and backward with this rank's samples of a pass, in which units are gathered as `G`s.
fn pass<G: Float>(model: &mut FullySharded, training: Training, step: usize, pass: usize) -> Result<()> {
    let (rank, world_size) = (model.communicator().rank(), model.communicator().world_size());
    let own: Vec<_> = (rank..SAMPLES).step_by(world_size).map(|index| sample(training, step, pass, index)).collect();
    let mut states: Vec<Vec<Vec<f64>>> = own.iter().map(|(input, _)| vec![input.clone()]).collect();
    for unit in 0..LAYERS {
        model.gather(unit)?;
        let layer = layer::<G>(model, unit)?;
        model.release(unit)?;
        states.iter_mut().for_each(|states| states.push(forward(&layer, &states[unit], unit + 1 == LAYERS)));
    }
    let samples = own.len() * training.passes;
    let mut slopes: Vec<_> = states.iter().zip(&own).map(|(states, (_, target))| loss_slope(&states[LAYERS], *target, samples)).collect();
    for unit in (0..LAYERS).rev() {
        model.gather(unit)?;
        let layer = layer::<G>(model, unit)?;
        model.release(unit)?;
        let mut sums = layer.each_ref().map(|values| vec![0.0; values.len()]);
        for (states, slope) in states.iter().zip(&mut slopes) {
            *slope = backward(&layer, &states[unit], &states[unit + 1], slope, unit + 1 == LAYERS, &mut sums);
        }
        model.reduce_gradients(unit, &sums.map(|sums| sums.iter().map(|x| G::from_f64(*x)).collect::<Vec<G>>()))?;
    }
    Ok(())
}

/// Trains with parameters of `M`s, gathered as `G`s. Calls `look` with the model where most is held.
pub(crate) fn train<M: Float, G: Float>(
    model: &mut FullySharded,
    training: Training,
    mut look: impl FnMut(&FullySharded),
) -> Result<Vec<Layer>> {
    for step in 0..training.steps {
        for number in 0..training.passes {
            pass::<G>(model, training, step, number)?;
            look(model);
            if number + 1 < training.passes {
                model.end_backward()?;
            }
        }
        let mut reduced = model.reduce()?;
        if let Some(limit) = training.limit {
            let norm = reduced.clip_norm(limit)?;
            let clipped = reduced.norm()?;
            assert!((clipped - norm.min(limit)).abs() <= 1e-6 * limit, "a norm of {norm}, clipped to {clipped}");
        }
        reduced.update(|shard| {
            let (parameters, gradients) = shard.values::<M>()?;
            parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x = M::from_f64(x.to_f64() - RATE * slope.to_f64()));
            Ok(())
        })?;
        look(model);
    }
    (0..LAYERS).map(|unit| model.gather(unit).and_then(|()| layer::<G>(model, unit))).collect()
}

/// How far two networks are apart in any parameter.
pub(crate) fn distance(first: &[Layer], second: &[Layer]) -> f64 {
    let pairs = first.iter().flatten().flatten().zip(second.iter().flatten().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
