//! The training loop of one rank.

use burn::tensor::Device;
use collectives::{Communicator, ReduceOp};
use collectives_train::DataParallel;
use training_common::{Averaging, Options, Outcome, Report, Spirals};

use crate::model::Network;

/// Trains on this rank's share of every batch. Every rank keeps all parameters.
///
/// # Errors
///
/// The errors of any collective.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    let share = options.share(comm)?;
    let layers = options.layers();
    // Every rank creates different weights, and then takes rank 0's.
    let mut network = Network::new(&layers, 1 + 1000 * comm.rank() as u64, &Device::default());
    for number in 0..2 * layers.len() {
        network.change(number, |values| Ok(comm.broadcast(values, 0)?))?;
    }
    let mut step = match options.averaging {
        Averaging::Buckets => {
            let parameters = options.parameters(|inputs, outputs| [inputs, outputs]);
            Step::Buckets(Box::new(DataParallel::new(comm, parameters, options.buckets())?))
        }
        Averaging::EachParameter => Step::EachParameter(comm.clone()),
    };
    let mut report = Report::new(comm, options);
    for number in 0..options.steps {
        let samples = Spirals::of(number, share.clone(), options.batch);
        report.step(step.run(&mut network, samples, options.learning_rate as f32)?)?;
    }
    Ok(report.finish(network.parameters()?.concat()))
}

/// The way the gradients of a step become the ranks' mean.
enum Step {
    /// In buckets that start while the backward pass continues.
    Buckets(Box<DataParallel>),
    /// With one call for each parameter, after the backward pass.
    EachParameter(Communicator),
}

impl Step {
    /// Runs one step of gradient descent and returns this rank's loss.
    fn run(&mut self, network: &mut Network, samples: Spirals, rate: f32) -> anyhow::Result<f32> {
        match self {
            Self::Buckets(model) => {
                let mut count = 0;
                let loss = network.step(samples.points, samples.classes, |number, gradient| {
                    count += 1;
                    Ok(model.give(number, gradient)?)
                })?;
                let means = model.finish()?;
                for number in 0..count {
                    let mean = means.gradient::<f32>(number)?;
                    network.change(number, |values| Ok(descend(values, mean, rate)))?;
                }
                Ok(loss)
            }
            Self::EachParameter(comm) => {
                let mut gradients = Vec::new();
                let loss = network.step(samples.points, samples.classes, |number, gradient| {
                    gradients.push((number, gradient));
                    Ok(())
                })?;
                for (number, mut gradient) in gradients {
                    comm.all_reduce(&mut gradient, ReduceOp::Avg)?;
                    network.change(number, |values| Ok(descend(values, &gradient, rate)))?;
                }
                Ok(loss)
            }
        }
    }
}

fn descend(values: &mut [f32], mean: &[f32], rate: f32) {
    values.iter_mut().zip(mean).for_each(|(value, slope)| *value -= rate * slope);
}
