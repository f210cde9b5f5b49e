//! A small network, in `f64` on one process, and trained in every way in which ranks can share the work. This is done
//! on the host, and on devices if `place.rs` is given another [`Place`].

mod mode;
mod place;
mod replicated;
mod sharded;
mod tensor_parallel;

use collectives::Communicator;
use collectives_train::Float;

use crate::common::random::Random;

pub(crate) use mode::{Mode, bound};
pub(crate) use place::{Host, Place};
#[allow(unused_imports, reason = "each test program uses a part of it")]
pub(crate) use sharded::{load, pass, train, units, used};

/// Neurons of each layer; the middle layers are of one size.
const WIDTHS: [usize; 5] = [3, 6, 6, 6, 2];
pub(crate) const LAYERS: usize = WIDTHS.len() - 1;

/// Samples of a pass; every world of up to four ranks has equally many on each rank.
const SAMPLES: usize = 12;

const RATE: f64 = 0.2;

/// Weights, row by row, and biases of a layer.
pub(crate) type Layer = [Vec<f64>; 2];

/// The input of the network and the target output.
pub(crate) type Sample = (Vec<f64>, [f64; 2]);

/// The settings of a training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Training {
    pub(crate) seed: u64,
    pub(crate) steps: usize,
    /// The number of passes accumulated in a step.
    pub(crate) passes: usize,
    pub(crate) limit: Option<f64>,
}

/// One rank's part of the samples of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    index: usize,
    parts: usize,
}

impl Part {
    const ALL: Self = Self { index: 0, parts: 1 };

    /// Returns the part of this rank among all of the communicator.
    pub(crate) fn of(comm: &Communicator) -> Self {
        Self { index: comm.rank(), parts: comm.world_size() }
    }
}

fn number(random: &mut Random) -> f64 {
    random.below(1 << 20) as f64 / f64::from(1 << 19) - 1.0
}

/// Returns the initial network, with numbers that every type can represent.
pub(crate) fn start(seed: u64) -> Vec<Layer> {
    let mut random = Random(seed);
    let mut many = |len: usize| (0..len).map(|_| (number(&mut random) * 64.0).round() / 128.0).collect();
    WIDTHS.windows(2).map(|pair| [many(pair[0] * pair[1]), many(pair[1])]).collect()
}

/// Returns the sample with this number.
pub(crate) fn sample(seed: u64, index: usize) -> Sample {
    let mut random = Random(seed ^ (index + 1) as u64);
    let input: Vec<f64> = (0..WIDTHS[0]).map(|_| number(&mut random)).collect();
    let target = [(input[0] * 2.0).sin(), input[1] * input[2]];
    (input, target)
}

/// Returns a part of the samples of a pass.
pub(crate) fn samples(training: Training, step: usize, pass: usize, part: Part) -> Vec<Sample> {
    let numbers = (part.index..SAMPLES).step_by(part.parts);
    numbers.map(|number| sample(training.seed, (step * 10 + pass) * 1000 + number)).collect()
}

/// Returns the output of a layer; all layers but the last apply tanh.
fn forward([weight, bias]: &Layer, input: &[f64], is_last: bool) -> Vec<f64> {
    let rows = weight.chunks(input.len()).zip(bias);
    let sums = rows.map(|(row, bias)| row.iter().zip(input).map(|(w, x)| w * x).sum::<f64>() + bias);
    sums.map(|sum| if is_last { sum } else { sum.tanh() }).collect()
}

/// Adds the gradients of a layer to `sums`, and returns the gradient of its input.
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

/// Returns the gradient of the mean squared error of this many samples.
fn loss_slope(output: &[f64], target: [f64; 2], samples: usize) -> Vec<f64> {
    output.iter().zip(target).map(|(output, target)| 2.0 * (output - target) / samples as f64).collect()
}

/// Returns as many zeros as each parameter has elements.
fn zeros(layers: &[Layer]) -> Vec<Layer> {
    layers.iter().map(|layer| layer.each_ref().map(|values| vec![0.0; values.len()])).collect()
}

/// Returns the gradients of all layers: the contribution of these samples to the gradient of a loss over `count`
/// samples.
pub(crate) fn gradients(layers: &[Layer], samples: &[Sample], count: usize) -> Vec<Layer> {
    let mut sums = zeros(layers);
    for (input, target) in samples {
        let mut states = vec![input.clone()];
        for (number, layer) in layers.iter().enumerate() {
            states.push(forward(layer, &states[number], number + 1 == LAYERS));
        }
        let mut slope = loss_slope(&states[LAYERS], *target, count);
        for number in (0..LAYERS).rev() {
            let is_last = number + 1 == LAYERS;
            slope = backward(&layers[number], &states[number], &states[number + 1], &slope, is_last, &mut sums[number]);
        }
    }
    sums
}

/// Trains on one process, with all samples.
pub(crate) fn train_alone(training: Training) -> Vec<Layer> {
    train_alone_but(training, &[])
}

/// Does the same, but skips some steps.
pub(crate) fn train_alone_but(training: Training, left_out: &[usize]) -> Vec<Layer> {
    let mut layers = start(training.seed);
    for step in (0..training.steps).filter(|step| !left_out.contains(step)) {
        let all: Vec<Sample> = (0..training.passes).flat_map(|pass| samples(training, step, pass, Part::ALL)).collect();
        let sums = gradients(&layers, &all, all.len());
        let norm = sums.iter().flatten().flatten().map(|slope| slope * slope).sum::<f64>().sqrt();
        let factor = training.limit.filter(|limit| norm > *limit).map_or(1.0, |limit| limit / norm);
        let all = layers.iter_mut().flatten().flatten().zip(sums.iter().flatten().flatten());
        all.for_each(|(x, slope)| *x -= RATE * factor * slope);
    }
    layers
}

/// Runs an optimiser without state.
pub(crate) fn descend<T: Float>(parameters: &mut [T], gradients: &[T]) {
    parameters.iter_mut().zip(gradients).for_each(|(x, slope)| *x = T::from_f64(x.to_f64() - RATE * slope.to_f64()));
}

/// Converts numbers to `T`s.
pub(crate) fn narrow<T: Float>(values: &[f64]) -> Vec<T> {
    values.iter().map(|x| T::from_f64(*x)).collect()
}

pub(crate) fn widen<T: Float>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// Returns the largest difference of two networks in any parameter.
pub(crate) fn distance(first: &[Layer], second: &[Layer]) -> f64 {
    let pairs = first.iter().flatten().flatten().zip(second.iter().flatten().flatten());
    // If a difference is NaN, so is the result.
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |most, apart| if most.is_nan() || apart <= most { most } else { apart })
}
