//! The training loop of one rank.

use candle_core::{Result, Tensor, Var};
use collectives::{Communicator, ReduceOp};
use collectives_candle::{DataParallel, all_reduce_in_place, broadcast_in_place, device_of};
use training_common::{Averaging, Options, Outcome, Report, Spirals};

use crate::model::Network;

/// Trains on this rank's share of every batch. Every rank keeps all parameters.
///
/// # Errors
///
/// The errors of candle and of any collective.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    let share = options.share(comm)?;
    let device = device_of(comm)?;
    // Every rank creates different weights, and then takes rank 0's.
    let network = Network::new(&options.layers(), 1 + 1000 * comm.rank() as u64, &device)?;
    network.parameters().try_for_each(|parameter| broadcast_in_place(comm, parameter, 0))?;
    let mut step = match options.averaging {
        Averaging::Buckets => {
            let variables = network.parameters().cloned().collect();
            Step::Buckets(Box::new(DataParallel::with_options(comm, variables, options.buckets())?))
        }
        Averaging::EachParameter => Step::EachParameter(comm.clone()),
    };
    let mut report = Report::new(comm, options);
    for number in 0..options.steps {
        let samples = Spirals::of(number, share.clone(), options.batch);
        let points = Tensor::from_slice(&samples.points, (samples.len(), 2), &device)?;
        let classes = Tensor::from_slice(&samples.classes, samples.len(), &device)?;
        report.step(step.run(&network, &points, &classes, options.learning_rate)?)?;
    }
    let parameters: Result<Vec<Vec<f32>>> = network.parameters().map(|parameter| parameter.flatten_all()?.to_vec1()).collect();
    Ok(report.finish(parameters?.concat()))
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
    fn run(&mut self, network: &Network, points: &Tensor, classes: &Tensor, rate: f64) -> anyhow::Result<f32> {
        match self {
            Self::Buckets(model) => {
                let loss = network.step(points, classes, |number, gradient| model.ready(number, &gradient))?;
                for (parameter, mean) in network.parameters().zip(model.finish()?) {
                    descend(parameter, &mean, rate)?;
                }
                Ok(loss)
            }
            Self::EachParameter(comm) => {
                let mut gradients = Vec::new();
                let loss = network.step(points, classes, |number, gradient| {
                    gradients.push((number, gradient));
                    Ok(())
                })?;
                gradients.sort_by_key(|(number, _)| *number);
                for (parameter, (_, gradient)) in network.parameters().zip(gradients) {
                    all_reduce_in_place(comm, &gradient, ReduceOp::Avg)?;
                    descend(parameter, &gradient, rate)?;
                }
                Ok(loss)
            }
        }
    }
}

fn descend(parameter: &Var, mean: &Tensor, rate: f64) -> Result<()> {
    parameter.set(&parameter.sub(&(mean * rate)?)?)
}
