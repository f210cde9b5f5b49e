//! The training loop of one rank that keeps only its shards of the parameters.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Optimizer as _, SGD};
use collectives::Communicator;
use collectives_candle::{FullySharded, Unit};
use collectives_train::FullyShardedOptions;
use training_common::{Options, Outcome, Report, Spirals};

use crate::model::initial_weight;

/// Trains on this rank's share of every batch. Each layer is a unit: its parameters are whole only while it computes.
///
/// # Errors
///
/// The errors of candle and of any collective.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    let share = options.share(comm)?;
    let layers = options.layers();
    let unit = |(index, sizes): (usize, &(usize, usize))| layer(index, *sizes, index + 1 == layers.len());
    let units = layers.iter().enumerate().map(unit).collect();
    let model = FullySharded::new(comm, units, DType::F32, FullyShardedOptions::default())?;
    set_initial(&model, &layers)?;
    let mut optimizer = SGD::new(model.variables()?, options.learning_rate)?;
    let mut report = Report::new(comm, options);
    for number in 0..options.steps {
        let samples = Spirals::of(number, share.clone(), options.batch);
        let points = Tensor::from_slice(&samples.points, (samples.len(), 2), &Device::Cpu)?;
        let classes = Tensor::from_slice(&samples.classes, samples.len(), &Device::Cpu)?;
        let scores = (0..layers.len()).try_fold(points, |input, unit| model.forward(unit, &input))?;
        let loss = candle_nn::loss::cross_entropy(&scores, &classes)?;
        loss.backward()?; // reduces the gradients to shards
        model.step(&mut optimizer)?; // updates this rank's shards
        report.step(loss.to_scalar()?)?;
    }
    Ok(report.finish(parameters(&model, layers.len())?))
}

/// Describes a layer as a unit.
fn layer(index: usize, (inputs, outputs): (usize, usize), is_last: bool) -> Unit {
    Unit::new(index.to_string(), move |builder| {
        let (weight, bias) = (builder.get((inputs, outputs), "weight")?, builder.get(outputs, "bias")?);
        Ok(move |input: &Tensor| {
            let output = input.matmul(&weight)?.broadcast_add(&bias)?;
            if is_last { Ok(output) } else { output.tanh() }
        })
    })
}

/// Gives every layer the weights with which [`Network`](crate::Network) starts on rank 0. The whole weights of one
/// layer at a time are in memory.
fn set_initial(model: &FullySharded, layers: &[(usize, usize)]) -> Result<()> {
    for (unit, &sizes) in layers.iter().enumerate() {
        let weight = initial_weight(1 + unit as u64, sizes, &Device::Cpu)?;
        let bias = Tensor::zeros(sizes.1, DType::F32, &Device::Cpu)?;
        model.set_tensors(unit, &HashMap::from([(format!("{unit}.weight"), weight), (format!("{unit}.bias"), bias)]))?;
    }
    Ok(())
}

/// Returns all parameters, concatenated: weight, bias, weight, bias … Collective.
fn parameters(model: &FullySharded, units: usize) -> Result<Vec<f32>> {
    let mut parameters = Vec::new();
    for unit in 0..units {
        let tensors = model.tensors(unit)?;
        for name in ["weight", "bias"] {
            let Some(tensor) = tensors.get(&format!("{unit}.{name}")) else { candle_core::bail!("layer {unit} has no {name}") };
            parameters.extend(tensor.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    Ok(parameters)
}
