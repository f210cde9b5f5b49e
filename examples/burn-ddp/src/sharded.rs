//! The training loop of one rank that keeps only its shards of the parameters.

use anyhow::Context as _;
use burn::module::Param;
use burn::nn::Linear;
use burn::optim::SgdConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use collectives::Communicator;
use collectives_burn::FullySharded;
use collectives_train::FullyShardedOptions;
use training_common::{Options, Outcome, Report, Spirals};

use crate::model::{elements, initial_weight, mean_loss};

/// Trains on this rank's share of every batch. Each layer is a unit: its parameters are whole only while it computes.
///
/// # Errors
///
/// The errors of any collective.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    let share = options.share(comm)?;
    let device = Device::default().autodiff();
    // Every rank creates different weights, and then takes its shards of rank 0's.
    let layers = network(&options.layers(), 1 + 1000 * comm.rank() as u64, &device);
    let units: Vec<String> = (0..layers.len()).map(|unit| unit.to_string()).collect();
    let units: Vec<&str> = units.iter().map(String::as_str).collect();
    let (mut model, layers) = FullySharded::new(comm, layers, &units, FullyShardedOptions::default())?;
    let mut optimizer = SgdConfig::new().init();
    let mut report = Report::new(comm, options);
    for number in 0..options.steps {
        let loss = pass(&mut model, &layers, Spirals::of(number, share.clone(), options.batch), &device)?;
        model.step(options.learning_rate, &mut optimizer)?; // updates this rank's shards
        report.step(loss)?;
    }
    let mut parameters = Vec::new();
    for (unit, layer) in layers.iter().enumerate() {
        let Linear { weight, bias } = model.gather(unit, layer)?;
        parameters.extend(elements(weight.val())?);
        parameters.extend(elements(bias.context("a layer has no bias")?.val())?);
    }
    Ok(report.finish(parameters))
}

/// Creates the layers with random weights, which depend on the seed.
fn network(sizes: &[(usize, usize)], seed: u64, device: &Device) -> Vec<Linear> {
    let layer = |(index, &(inputs, outputs)): (usize, &(usize, usize))| {
        let weight = TensorData::new(initial_weight(seed + index as u64, inputs, outputs), [inputs, outputs]);
        let bias = Param::from_tensor(Tensor::zeros([outputs], device));
        Linear { weight: Param::from_tensor(Tensor::from_data(weight, device)), bias: Some(bias) }
    };
    sizes.iter().enumerate().map(layer).collect()
}

/// Runs a forward and a backward pass, which reduces the gradients to shards. Returns this rank's loss.
fn pass(model: &mut FullySharded, layers: &[Linear], samples: Spirals, device: &Device) -> anyhow::Result<f32> {
    let count = samples.len();
    let classes = Tensor::<2, Int>::from_data(TensorData::new(samples.classes, [count, 1]), device);
    let mut input = Tensor::<2>::from_data(TensorData::new(samples.points, [count, 2]), device);
    let compute = |unit: usize| {
        let is_last = unit + 1 == layers.len();
        move |layer: &Linear, input| if is_last { layer.forward(input) } else { layer.forward(input).tanh() }
    };
    let mut inputs = Vec::new();
    for (unit, layer) in layers.iter().enumerate() {
        let output = model.forward(unit, layer, input.clone(), compute(unit))?;
        inputs.push(std::mem::replace(&mut input, output));
    }
    let scores = input;
    let loss = mean_loss(scores.clone(), classes);
    let mut slope = scores.grad(&loss.backward()).context("the loss does not depend on the scores")?;
    for (unit, (layer, input)) in layers.iter().zip(inputs).enumerate().rev() {
        slope = model.backward(unit, layer, input, slope, compute(unit))?;
    }
    elements(loss).map(|loss| loss[0])
}
