//! The same training on the host and on this rank's GPU; both must arrive at the same model. Gradients come in two
//! parts, are averaged (as they are or as 16-bit floats), and are clipped. A second training uses an optimiser that is
//! sharded over the ranks.
//!
//! A linear model (64 inputs, 8 outputs) learns a random map from samples that each rank generates. Gradients are
//! computed on the CPU, so that both runs start from the same numbers.
//!
//! `cargo launch --nproc-per-node 2 -- target/debug/examples/train_device`

#[path = "../../src/base/random.rs"]
mod random;

use std::error::Error;
use std::sync::Arc;

use collectives::{Communicator, DeviceChoice, ReduceOp, f16};
use collectives_train::{Compress, DataParallel, Options, Parameter, ShardedOptimizer};
use cudarc::driver::{CudaStream, DriverError};
use random::Random;

const INPUTS: usize = 64;
const OUTPUTS: usize = 8;
const SAMPLES: usize = 32;
const STEPS: usize = 200;
const RATE: f32 = 0.02;
/// The allowed difference of the two models: NCCL may add in another order than the host.
const BOUND: f32 = 1e-4;
/// The same as [`BOUND`], for gradients that are summed as 16-bit floats.
const COARSE_BOUND: f32 = 1e-2;
/// The largest norm of a step's gradients, less than that of the first steps.
const LIMIT: f64 = 15.0;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Returns numbers from −1 to 1.
fn many(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.unit()).collect()
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
        Self { weight: many(&mut random, INPUTS * OUTPUTS), bias: many(&mut random, OUTPUTS) }
    }

    fn output(&self, sample: &[f32], output: usize) -> f32 {
        let row = &self.weight[output * INPUTS..][..INPUTS];
        self.bias[output] + row.iter().zip(sample).map(|(weight, x)| weight * x).sum::<f32>()
    }

    /// Returns the mean squared error against `truth` over some samples, and its gradient.
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

    /// Halves each number: the sum of two halves is exactly the original.
    fn half(&self) -> Self {
        let half = |numbers: &[f32]| numbers.iter().map(|x| x / 2.0).collect();
        Self { weight: half(&self.weight), bias: half(&self.bias) }
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

fn parameters() -> Vec<Parameter> {
    vec![Parameter::new::<f32>("weight", &[OUTPUTS, INPUTS]), Parameter::new::<f32>("bias", &[OUTPUTS])]
}

/// Trains with the gradients on the device of `stream`, or on the host. Returns this rank's first and last loss, and
/// the model.
fn train(comm: &Communicator, stream: Option<&Arc<CudaStream>>, compressed: bool) -> Outcome<(f32, f32, Model)> {
    let (truth, mut model) = (Model::random(1), Model::random(2 + comm.rank() as u64));
    let mut random = Random(1000 + comm.rank() as u64);
    let mut parallel = match stream {
        Some(stream) => DataParallel::on_device(comm, stream, parameters(), Options::default())?,
        None => DataParallel::new(comm, parameters(), Options::default())?,
    };
    if compressed {
        parallel.set_hooks::<f32>(|layout| {
            Ok(Box::new(match stream {
                Some(stream) => Compress::<f32, f16>::on_device(comm, stream, layout, ReduceOp::Avg)?,
                None => Compress::<f32, f16>::new(comm, layout, ReduceOp::Avg)?,
            }))
        })?;
    }
    parallel.broadcast(0, &mut model.weight, 0)?;
    parallel.broadcast(1, &mut model.bias, 0)?;
    let mut losses = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let (loss, slope) = model.loss_and_gradient(&truth, &many(&mut random, INPUTS * SAMPLES));
        losses.push(loss);
        let part = slope.half();
        match stream {
            Some(stream) => {
                let (bias, weight) = (stream.clone_htod(&part.bias)?, stream.clone_htod(&part.weight)?);
                parallel.accumulate(1, &bias)?;
                parallel.ready(1, &bias)?;
                parallel.accumulate(0, &weight)?;
                parallel.ready(0, &weight)?;
                let mut mean = parallel.finish()?;
                mean.clip_norm(LIMIT)?;
                let weight = stream.clone_dtoh(&mean.device_gradient::<f32>(0)?)?;
                let bias = stream.clone_dtoh(&mean.device_gradient::<f32>(1)?)?;
                stream.synchronize()?;
                model.descend(&weight, &bias);
            }
            None => {
                parallel.accumulate(1, &part.bias)?;
                parallel.ready(1, &part.bias)?;
                parallel.accumulate(0, &part.weight)?;
                parallel.ready(0, &part.weight)?;
                let mut mean = parallel.finish()?;
                mean.clip_norm(LIMIT)?;
                model.descend(mean.gradient::<f32>(0)?, mean.gradient::<f32>(1)?);
            }
        }
    }
    Ok((losses[0], losses[STEPS - 1], model))
}

/// Runs some steps of a sharded optimiser, with different gradients on each rank. Returns the resulting parameters.
fn train_sharded(comm: &Communicator, stream: Option<&Arc<CudaStream>>) -> Outcome<Model> {
    let (mut model, mut random) = (Model::random(3), Random(2000 + comm.rank() as u64));
    let mut sharded = match stream {
        Some(stream) => ShardedOptimizer::on_device(comm, stream, parameters(), Options::default())?,
        None => ShardedOptimizer::new(comm, parameters(), Options::default())?,
    };
    let descend = |values: &mut [f32], slopes: &[f32]| values.iter_mut().zip(slopes).for_each(|(x, slope)| *x -= RATE * slope);
    match stream {
        Some(stream) => {
            sharded.load(0, &stream.clone_htod(&model.weight)?)?;
            sharded.load(1, &stream.clone_htod(&model.bias)?)?;
        }
        None => {
            sharded.load(0, &model.weight)?;
            sharded.load(1, &model.bias)?;
        }
    }
    for _ in 0..STEPS / 10 {
        let slope = Model { weight: many(&mut random, INPUTS * OUTPUTS), bias: many(&mut random, OUTPUTS) };
        let Some(stream) = stream else {
            sharded.ready(1, &slope.bias)?;
            sharded.ready(0, &slope.weight)?;
            let mut shards = sharded.reduce()?;
            shards.clip_norm(LIMIT)?;
            let updated = shards.update(|shard| shard.values::<f32>().map(|(values, slopes)| descend(values, slopes)))?;
            updated.copy_to(0, &mut model.weight)?;
            updated.copy_to(1, &mut model.bias)?;
            continue;
        };
        sharded.ready(1, &stream.clone_htod(&slope.bias)?)?;
        sharded.ready(0, &stream.clone_htod(&slope.weight)?)?;
        let mut shards = sharded.reduce()?;
        shards.clip_norm(LIMIT)?;
        let updated = shards.update(|shard| {
            // In place of an optimiser's kernel, this goes through the host.
            let (mut values, slopes) = shard.device_values::<f32>()?;
            let failed = |error: DriverError| collectives::Error::InvalidArgument { call: "update", reason: error.to_string() };
            let slopes = stream.clone_dtoh(&slopes).map_err(failed)?;
            let mut changed = stream.clone_dtoh(&values).map_err(failed)?;
            stream.synchronize().map_err(failed)?;
            descend(&mut changed, &slopes);
            stream.memcpy_htod(&changed, &mut values).map_err(failed)
        })?;
        model.weight = stream.clone_dtoh(&updated.device_parameter::<f32>(0)?)?;
        model.bias = stream.clone_dtoh(&updated.device_parameter::<f32>(1)?)?;
        stream.synchronize()?;
    }
    Ok(model)
}

fn main() -> Outcome<()> {
    let comm = Communicator::builder().device(DeviceChoice::Local).from_env()?;
    let (first, last, on_host) = train(&comm, None, false)?;
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
    let stream = device.context().new_stream()?;
    let (first, last, on_device) = train(&comm, Some(&stream), false)?;
    println!("rank {}, {}: loss {first:.4} → {last:.4}", comm.rank(), device.name());
    let compressed = train(&comm, Some(&stream), true)?.2.difference(&train(&comm, None, true)?.2);
    let sharded = train_sharded(&comm, Some(&stream))?.difference(&train_sharded(&comm, None)?);
    for (what, difference, bound) in
        [("plain", on_device.difference(&on_host), BOUND), ("compressed", compressed, COARSE_BOUND), ("sharded", sharded, BOUND)]
    {
        println!("rank {}, {what}: parameters differ by {difference:e} at most", comm.rank());
        assert!(difference <= bound, "{what}: the models differ by {difference}, more than {bound}");
    }
    Ok(comm.close()?)
}
