//! Data-parallel training by hand: each rank has a part of the data and computes its gradients, and all ranks average
//! them.
//!
//! A small network (1 → 16 → 1, tanh) learns a sine. Rank 0's parameters are broadcast at the start, so all ranks begin
//! with the same values. The averaged gradients have the same bits everywhere, so the parameters remain the same; the
//! program checks that.
//!
//! `cargo launch --nproc-per-node 4 -- target/debug/examples/gradient_averaging`

use collectives::{Communicator, ReduceOp, Result};

const HIDDEN: usize = 16;
/// The number of parameters: weights and biases of the hidden layer, weights of the output, and its bias.
const PARAMETERS: usize = 3 * HIDDEN + 1;
const SAMPLES: usize = 256;
const STEPS: usize = 600;
const RATE: f32 = 0.1;

/// Returns the prediction for `x` and the hidden layer's values.
fn predict(parameters: &[f32], x: f32) -> (f32, [f32; HIDDEN]) {
    let mut hidden = [0.0; HIDDEN];
    let mut y = parameters[3 * HIDDEN];
    for (unit, value) in hidden.iter_mut().enumerate() {
        *value = (parameters[unit] * x + parameters[HIDDEN + unit]).tanh();
        y += parameters[2 * HIDDEN + unit] * *value;
    }
    (y, hidden)
}

/// Returns the mean squared error over `data` and its gradient.
fn loss_and_gradient(parameters: &[f32], data: &[(f32, f32)]) -> (f32, Vec<f32>) {
    let (mut loss, mut gradient) = (0.0, vec![0.0; PARAMETERS]);
    for (x, target) in data {
        let (y, hidden) = predict(parameters, *x);
        let error = (y - target) / data.len() as f32;
        loss += (y - target) * error;
        for unit in 0..HIDDEN {
            let back = 2.0 * error * parameters[2 * HIDDEN + unit] * (1.0 - hidden[unit] * hidden[unit]);
            gradient[unit] += back * x;
            gradient[HIDDEN + unit] += back;
            gradient[2 * HIDDEN + unit] += 2.0 * error * hidden[unit];
        }
        gradient[3 * HIDDEN] += 2.0 * error;
    }
    (loss, gradient)
}

/// Returns this rank's part of the data: every `world_size`-th sample.
fn shard(comm: &Communicator) -> Vec<(f32, f32)> {
    let sample = |index: usize| {
        let x = index as f32 / SAMPLES as f32 * 6.0 - 3.0;
        (x, x.sin())
    };
    (comm.rank()..SAMPLES).step_by(comm.world_size()).map(sample).collect()
}

/// Returns initial parameters, which differ on every rank. Only rank 0's are used.
fn initial(rank: usize) -> Vec<f32> {
    (0..PARAMETERS).map(|index| ((1 + rank + 7 * index) as f32).sin()).collect()
}

fn train(comm: &Communicator) -> Result<(f32, f32, Vec<f32>)> {
    let data = shard(comm);
    let mut parameters = initial(comm.rank());
    comm.broadcast(&mut parameters, 0)?;
    let (mut first, mut last) = (f32::NAN, f32::NAN);
    for step in 0..=STEPS {
        let (mut loss, mut gradient) = loss_and_gradient(&parameters, &data);
        comm.all_reduce(&mut gradient, ReduceOp::Avg)?;
        comm.all_reduce(&mut loss, ReduceOp::Avg)?;
        for (parameter, slope) in parameters.iter_mut().zip(&gradient) {
            *parameter -= RATE * slope;
        }
        if step == 0 {
            first = loss;
        }
        last = loss;
        if comm.rank() == 0 && step % 100 == 0 {
            println!("step {step:4}: loss {loss:.5}");
        }
    }
    Ok((first, last, parameters))
}

fn main() -> Result<()> {
    // collrun and torchrun then report why a rank failed.
    collectives::record_failure(run)
}

fn run() -> Result<()> {
    let comm = Communicator::from_env()?;
    let (first, last, parameters) = train(&comm)?;

    let mut all = vec![0.0; PARAMETERS * comm.world_size()];
    comm.all_gather_into(&parameters, &mut all)?;
    let alike = all.chunks_exact(PARAMETERS).all(|theirs| theirs.iter().zip(&parameters).all(|(a, b)| a.to_bits() == b.to_bits()));
    if comm.rank() == 0 {
        println!("loss {first:.5} → {last:.5}; parameters alike on all {} ranks, bit for bit: {alike}", comm.world_size());
    }
    assert!(alike, "the ranks' parameters differ");
    assert!(last < first / 10.0, "nothing was learnt: loss {first} → {last}");
    comm.close()
}
