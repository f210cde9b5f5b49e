//! The training loop of one rank.

use candle_core::{Device, Result, Tensor, Var};
use collectives::train::{Averaged, DataParallel, Flat};
use collectives::{Buffer, Communicator, ReduceOp};
use training_common::{Averaging, Options, Outcome, Report, Spirals};

use crate::collective::{Call, Read, failed, into_elements, on_memory_of};
use crate::model::Network;

/// Trains on this rank's share of every batch.
///
/// # Errors
///
/// Those of candle and of collectives.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    let share = options.share(comm)?;
    let device = device_of(comm)?;
    // Every rank begins with other weights, and takes rank 0's.
    let network = Network::new(&options.layers(), 1 + 1000 * comm.rank() as u64, &device)?;
    network.parameters().try_for_each(|parameter| parameter.inplace_op1(&Call::Broadcast(comm, 0)))?;
    let mut step = match options.averaging {
        Averaging::Buckets => Step::buckets(comm, options, &device)?,
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

/// The device that this rank's tensors live on: that of the communicator, if it has one.
fn device_of(comm: &Communicator) -> Result<Device> {
    #[cfg(feature = "cuda")]
    if let Some(device) = comm.device() {
        // A stream of its own: cudarc orders what happens on it with what happens on the communicator's.
        return Device::new_cuda_with_stream(device.ordinal());
    }
    #[cfg(not(feature = "cuda"))]
    let _ = comm;
    Ok(Device::Cpu)
}

/// How the gradients of a step become the ranks' mean.
enum Step {
    /// In buckets that start while the backward pass goes on.
    Buckets(Box<DataParallel>),
    /// One call for each parameter, when the backward pass has ended.
    EachParameter(Communicator),
}

/// Hands a gradient over: in host memory it is moved, on a device copied into its bucket.
fn hand_over(model: &mut DataParallel, number: usize, gradient: Tensor) -> Result<()> {
    if gradient.device().is_cpu() {
        return model.give(number, into_elements(gradient)?).map_err(failed);
    }
    on_memory_of(&gradient, Ready(model, number))
}

/// The mean gradient of a parameter, which `means` has no longer then.
fn mean_of(means: &mut Averaged<'_>, number: usize, parameter: &Var) -> Result<Tensor> {
    if parameter.device().is_cpu() {
        let mean = means.take::<f32>(number).and_then(Flat::into_vec).map_err(failed)?;
        return Tensor::from_vec(mean, parameter.shape(), parameter.device());
    }
    let mean = parameter.zeros_like()?;
    mean.inplace_op1(&Call::Mean(means, number))?;
    Ok(mean)
}

/// Copies a gradient into its bucket.
struct Ready<'a>(&'a mut DataParallel, usize);

impl Read for Ready<'_> {
    fn read<B: Buffer<Element = f32> + ?Sized>(self, gradient: &B) -> collectives::Result<()> {
        self.0.ready(self.1, gradient)
    }
}

impl Step {
    /// The buckets, where the gradients are: on a GPU they are copied and used on the stream on which candle works.
    fn buckets(comm: &Communicator, options: &Options, device: &Device) -> anyhow::Result<Self> {
        let parameters = options.parameters(|inputs, outputs| [inputs, outputs]);
        let model = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => DataParallel::on_device(comm, &device.cuda_stream(), parameters, options.buckets())?,
            _ => DataParallel::new(comm, parameters, options.buckets())?,
        };
        Ok(Self::Buckets(Box::new(model)))
    }

    /// One step of gradient descent; this rank's loss.
    fn run(&mut self, network: &Network, points: &Tensor, classes: &Tensor, rate: f64) -> anyhow::Result<f32> {
        match self {
            Self::Buckets(model) => {
                let loss = network.step(points, classes, |number, gradient| hand_over(model, number, gradient))?;
                let mut means = model.finish()?;
                for (number, parameter) in network.parameters().enumerate() {
                    descend(parameter, &mean_of(&mut means, number, parameter)?, rate)?;
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
                    gradient.inplace_op1(&Call::AllReduce(comm, ReduceOp::Avg))?;
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
