//! The network with each layer split over ranks: every other layer by its outputs, and the following one by its inputs,
//! so that no rank has all values between them. The forward pass sums over the ranks of a slice after the latter, the
//! backward pass before the former.

use std::ops::Range;

use collectives::{Communicator, ReduceOp, Result};
use collectives_train::{Float, Mesh, Parameter};

use super::{LAYERS, Layer, Part, Place, Training, WIDTHS, backward, descend, forward, loss_slope, narrow, samples, start, widen, zeros};
use crate::common::oracle::Predict;

/// The dimension along which layers are split, and the one over which gradients are averaged, if any.
pub(super) const SPLIT: &str = "tp";
pub(super) const AVERAGED: &str = "dp";

fn by_outputs(layer: usize) -> bool {
    layer.is_multiple_of(2)
}

/// Returns one rank's part of `len` neurons; parts may differ in size.
fn neurons(len: usize, index: usize, parts: usize) -> Range<usize> {
    len * index / parts..len * (index + 1) / parts
}

/// Returns one rank's part of each layer. Biases of layers that are split by inputs are on every rank.
pub(super) fn part(layers: &[Layer], index: usize, parts: usize) -> Vec<Layer> {
    let cut = |(number, [weight, bias]): (usize, &Layer)| {
        let (inputs, outputs) = (WIDTHS[number], WIDTHS[number + 1]);
        if by_outputs(number) {
            let own = neurons(outputs, index, parts);
            return [weight[own.start * inputs..own.end * inputs].to_vec(), bias[own].to_vec()];
        }
        let own = neurons(inputs, index, parts);
        [weight.chunks(inputs).flat_map(|row| row[own.clone()].to_vec()).collect(), bias.clone()]
    };
    layers.iter().enumerate().map(cut).collect()
}

/// Sums the rows of the ranks of a slice, as `T`s.
fn sum<T: Float + Predict, P: Place>(place: &P, slice: &Communicator, rows: &mut [Vec<f64>]) -> Result<()> {
    let mut all = place.put(&narrow::<T>(&rows.concat()));
    slice.all_reduce(&mut all, ReduceOp::Sum)?;
    rows.iter_mut().flatten().zip(place.get(&all)).for_each(|(x, sum)| *x = sum.to_f64());
    Ok(())
}

/// Returns the inputs of each layer and the outputs of the last, by layer and sample.
fn forward_pass<T: Float + Predict, P: Place>(
    place: &P,
    slice: &Communicator,
    layers: &[Layer],
    inputs: Vec<Vec<f64>>,
) -> Result<Vec<Vec<Vec<f64>>>> {
    let mut states = vec![inputs];
    for (number, layer) in layers.iter().enumerate() {
        if by_outputs(number) {
            states.push(states[number].iter().map(|input| forward(layer, input, false)).collect());
            continue;
        }
        let without_bias = [layer[0].clone(), vec![0.0; layer[1].len()]];
        let mut outputs: Vec<_> = states[number].iter().map(|input| forward(&without_bias, input, true)).collect();
        sum::<T, P>(place, slice, &mut outputs)?;
        let is_last = number + 1 == LAYERS;
        let bend = |x: f64, bias: f64| if is_last { x + bias } else { (x + bias).tanh() };
        outputs.iter_mut().for_each(|output| output.iter_mut().zip(&layer[1]).for_each(|(x, bias)| *x = bend(*x, *bias)));
        states.push(outputs);
    }
    Ok(states)
}

/// Returns the gradients of this rank's parts.
fn backward_pass<T: Float + Predict, P: Place>(
    place: &P,
    slice: &Communicator,
    layers: &[Layer],
    states: &[Vec<Vec<f64>>],
    mut slopes: Vec<Vec<f64>>,
) -> Result<Vec<Layer>> {
    let mut sums = zeros(layers);
    for number in (0..LAYERS).rev() {
        for (index, slope) in slopes.iter_mut().enumerate() {
            let (input, output) = (&states[number][index], &states[number + 1][index]);
            *slope = backward(&layers[number], input, output, slope, number + 1 == LAYERS, &mut sums[number]);
        }
        if by_outputs(number) && number > 0 {
            sum::<T, P>(place, slice, &mut slopes)?;
        }
    }
    Ok(sums)
}

/// Scales gradients so that the norm over all ranks is at most the limit; parameters that all ranks of a slice have
/// count once.
fn clip(slice: &Communicator, gradients: &mut [Layer], limit: f64) -> Result<()> {
    let counts = |number: usize, parameter: usize| by_outputs(number) || parameter == 0 || slice.rank() == 0;
    let each = gradients
        .iter()
        .enumerate()
        .flat_map(|(number, layer)| layer.iter().enumerate().map(move |(index, values)| (number, index, values)));
    let counted = each.filter(|(number, index, _)| counts(*number, *index));
    let mut squares = counted.flat_map(|(.., values)| values).map(|slope| slope * slope).sum::<f64>();
    slice.all_reduce(&mut squares, ReduceOp::Sum)?;
    let factor = (limit / squares.sqrt()).min(1.0);
    gradients.iter_mut().flatten().flatten().for_each(|slope| *slope *= factor);
    Ok(())
}

/// Averages gradients over the copies of this rank's parts.
fn average<T: Float + Predict, P: Place>(place: &P, copies: &Communicator, gradients: Vec<Layer>) -> Result<Vec<Layer>> {
    let listed: Vec<Vec<T>> = gradients.iter().flatten().map(|values| narrow(values)).collect();
    let parameters = listed.iter().enumerate().map(|(index, values)| Parameter::new::<T>(format!("part {index}"), &[values.len()]));
    let mut model = place.data_parallel(copies, parameters.collect())?;
    let mut buffers: Vec<_> = listed.iter().map(|values| place.put(values)).collect();
    model.average(&mut buffers)?;
    let means: Vec<Vec<f64>> = buffers.iter().map(|buffer| widen(&place.get(buffer))).collect();
    Ok(means.chunks(2).map(|pair| [pair[0].clone(), pair[1].clone()]).collect())
}

/// Trains on a mesh, and returns this rank's parts.
pub(super) fn train<T: Float + Predict, P: Place>(place: &P, mesh: &Mesh, training: Training) -> Result<Vec<Layer>> {
    let slice = mesh.dimension(SPLIT)?;
    let copies = mesh.dimensions().any(|(name, _)| name == AVERAGED).then(|| mesh.dimension(AVERAGED)).transpose()?;
    let mut layers = part(&start(training.seed), slice.rank(), slice.world_size());
    for step in 0..training.steps {
        let mut gradients = zeros(&layers);
        for pass in 0..training.passes {
            let own = samples(training, step, pass, copies.map_or(Part::ALL, Part::of));
            let states = forward_pass::<T, P>(place, slice, &layers, own.iter().map(|(input, _)| input.clone()).collect())?;
            let count = own.len() * training.passes;
            let slopes = states[LAYERS].iter().zip(&own).map(|(output, (_, target))| loss_slope(output, *target, count)).collect();
            let found = backward_pass::<T, P>(place, slice, &layers, &states, slopes)?;
            gradients.iter_mut().flatten().flatten().zip(found.iter().flatten().flatten()).for_each(|(sum, slope)| *sum += slope);
        }
        if let Some(copies) = copies {
            gradients = average::<T, P>(place, copies, gradients)?;
        }
        training.limit.map_or(Ok(()), |limit| clip(slice, &mut gradients, limit))?;
        for (values, slopes) in layers.iter_mut().flatten().zip(gradients.iter().flatten()) {
            let mut narrowed = narrow::<T>(values);
            descend(&mut narrowed, &narrow(slopes));
            *values = widen(&narrowed);
        }
    }
    Ok(layers)
}
