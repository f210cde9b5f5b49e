//! The same training twice: with gradients averaged in host memory, and in memory of this rank's GPU. Both must come to the same model.
//!
//! A linear model (64 inputs, 8 outputs) learns a random map from samples that each rank makes for itself. Gradients are computed on the
//! processor, so that both runs start from the same numbers.
//!
//! `cargo launch --nproc-per-node 2 -- target/debug/examples/train_device`

use std::error::Error;
use std::sync::Arc;

use collectives::train::{DataParallel, Options, Parameter};
use collectives::{Communicator, DeviceChoice};
use cudarc::driver::CudaStream;

const INPUTS: usize = 64;
const OUTPUTS: usize = 8;
const SAMPLES: usize = 32;
const STEPS: usize = 200;
const RATE: f32 = 0.02;
/// What the two models may differ by, where NCCL adds in another order than the host does.
const BOUND: f32 = 1e-4;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Numbers from −1 to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn many(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// Weights and biases.
#[derive(Clone)]
struct Model {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Model {
    fn random(seed: u64) -> Self {
        let mut random = Random(seed);
        Self { weight: random.many(INPUTS * OUTPUTS), bias: random.many(OUTPUTS) }
    }

    fn output(&self, sample: &[f32], output: usize) -> f32 {
        let row = &self.weight[output * INPUTS..][..INPUTS];
        self.bias[output] + row.iter().zip(sample).map(|(weight, x)| weight * x).sum::<f32>()
    }

    /// The mean squared error over some samples of what `truth` says, and its gradient.
    fn loss_and_gradient(&self, truth: &Self, samples: &[f32]) -> (f32, Self) {
        let (mut loss, mut slope) = (0.0, Self { weight: vec![0.0; INPUTS * OUTPUTS], bias: vec![0.0; OUTPUTS] });
        for sample in samples.chunks_exact(INPUTS) {
            for output in 0..OUTPUTS {
                let error = self.output(sample, output) - truth.output(sample, output);
                loss += error * error / SAMPLES as f32;
                slope.bias[output] += 2.0 * error / SAMPLES as f32;
                let row = &mut slope.weight[output * INPUTS..][..INPUTS];
                row.iter_mut().zip(sample).for_each(|(slope, x)| *slope += 2.0 * error * x / SAMPLES as f32);
            }
        }
        (loss, slope)
    }

    fn descend(&mut self, weight: &[f32], bias: &[f32]) {
        self.weight.iter_mut().zip(weight).for_each(|(x, slope)| *x -= RATE * slope);
        self.bias.iter_mut().zip(bias).for_each(|(x, slope)| *x -= RATE * slope);
    }

    fn difference(&self, other: &Self) -> f32 {
        let pairs = self.weight.iter().chain(&self.bias).zip(other.weight.iter().chain(&other.bias));
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}

/// Trains with the gradients where `stream` says, or on the host. Gives the first and the last loss of this rank, and the model.
fn train(comm: &Communicator, stream: Option<&Arc<CudaStream>>) -> Outcome<(f32, f32, Model)> {
    let (truth, mut model) = (Model::random(1), Model::random(2 + comm.rank() as u64));
    let mut random = Random(1000 + comm.rank() as u64);
    let parameters = vec![Parameter::new::<f32>("weight", &[OUTPUTS, INPUTS]), Parameter::new::<f32>("bias", &[OUTPUTS])];
    let mut parallel = match stream {
        Some(stream) => DataParallel::on_device(comm, stream, parameters, Options::default())?,
        None => DataParallel::new(comm, parameters, Options::default())?,
    };
    parallel.broadcast(0, &mut model.weight, 0)?;
    parallel.broadcast(1, &mut model.bias, 0)?;
    let mut losses = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let (loss, slope) = model.loss_and_gradient(&truth, &random.many(INPUTS * SAMPLES));
        losses.push(loss);
        match stream {
            Some(stream) => {
                parallel.ready(1, &stream.clone_htod(&slope.bias)?)?;
                parallel.ready(0, &stream.clone_htod(&slope.weight)?)?;
                let mean = parallel.finish()?;
                let weight = stream.clone_dtoh(&mean.device_gradient::<f32>(0)?)?;
                let bias = stream.clone_dtoh(&mean.device_gradient::<f32>(1)?)?;
                stream.synchronize()?;
                model.descend(&weight, &bias);
            }
            None => {
                parallel.ready(1, &slope.bias)?;
                parallel.ready(0, &slope.weight)?;
                let mean = parallel.finish()?;
                model.descend(mean.gradient::<f32>(0)?, mean.gradient::<f32>(1)?);
            }
        }
    }
    Ok((losses[0], losses[STEPS - 1], model))
}

fn main() -> Outcome<()> {
    let comm = Communicator::builder().device(DeviceChoice::Local).from_env()?;
    let (first, last, on_host) = train(&comm, None)?;
    println!("rank {} of {}, host: loss {first:.4} → {last:.4}", comm.rank(), comm.world_size());
    assert!(last < first / 10.0, "nothing was learnt: loss {first} → {last}");
    let Some(device) = comm.device() else {
        let why = comm.why_no_device().unwrap_or_default();
        if std::env::var("COLLECTIVES_TEST_GPU").as_deref() == Ok("real") {
            return Err(format!("no device, and COLLECTIVES_TEST_GPU=real asks for one: {why}").into());
        }
        println!("no device: {why}");
        return Ok(comm.close()?);
    };
    let (first, last, on_device) = train(&comm, Some(&device.context().new_stream()?))?;
    let difference = on_device.difference(&on_host);
    println!("rank {}, {}: loss {first:.4} → {last:.4}; parameters differ by {difference:e} at most", comm.rank(), device.name());
    assert!(difference <= BOUND, "the models differ by {difference}, more than {BOUND}");
    Ok(comm.close()?)
}
