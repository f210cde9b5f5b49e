//! Training whose ranks come and go: processes may be killed, and new processes may join, at any time.
//!
//! In each step, all ranks add their gradients, then admit the processes that wait. If a rank is lost, the same call
//! leaves it out. After each change, all ranks continue from the newest state that a rank has. So the result is that of
//! a run without changes, except for the order in which gradients are added.
//!
//! `cargo launch --keep-going --nproc-per-node 3 -- target/debug/examples/elastic_training STOP-FILE` trains until the
//! file exists. `COLLECTIVES_JOIN=HOST:PORT target/debug/examples/elastic_training STOP-FILE` joins, at an address that
//! a rank has printed.

use std::path::{Path, PathBuf};

use collectives::{Communicator, Error, ReduceOp, Result};

const SAMPLES: usize = 240;
const FEATURES: usize = 8;
const RATE: f64 = 0.05;

/// The state of the training, which every rank has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) step: u64,
    pub(crate) parameters: Vec<f64>,
}

impl State {
    pub(crate) fn new() -> Self {
        Self { step: 0, parameters: vec![0.0; FEATURES] }
    }

    /// Takes one step along the gradient of all samples.
    pub(crate) fn advance(&mut self, gradient: &[f64]) {
        self.parameters.iter_mut().zip(gradient).for_each(|(parameter, slope)| *parameter -= RATE * slope);
        self.step += 1;
    }
}

/// Returns the part of the gradient that this rank's samples contribute: every `world_size`-th sample.
pub(crate) fn gradient(parameters: &[f64], rank: usize, world_size: usize) -> Vec<f64> {
    let mut gradient = vec![0.0; FEATURES];
    for sample in (rank..SAMPLES).step_by(world_size) {
        let features: Vec<f64> = (0..FEATURES).map(|feature| ((1 + sample * (feature + 3)) as f64).sin()).collect();
        let target: f64 = features.iter().enumerate().map(|(feature, x)| x * feature as f64).sum();
        let prediction: f64 = features.iter().zip(parameters).map(|(x, parameter)| x * parameter).sum();
        for (slope, x) in gradient.iter_mut().zip(&features) {
            *slope += 2.0 * (prediction - target) * x / SAMPLES as f64;
        }
    }
    gradient
}

/// Gives every rank the newest state. Ranks may be one step apart, because a call can fail on some ranks only.
fn synchronise(comm: &Communicator, state: &mut State, has_state: bool) -> Result<()> {
    let mine = if has_state { state.step as i64 } else { -1 };
    let mut steps = vec![0; comm.world_size()];
    comm.all_gather_into(&mine, &mut steps)?;
    let newest = (0..steps.len()).max_by_key(|rank| steps[*rank]).unwrap_or_default();
    // This rank's state must not be half replaced if the call fails.
    let mut parameters = state.parameters.clone();
    comm.broadcast(&mut parameters, newest)?;
    *state = State { step: steps[newest].unsigned_abs(), parameters };
    Ok(())
}

/// Trains until the ranks change, and returns the new communicator. Returns `None` once the file exists.
fn train(comm: &Communicator, state: &mut State, stop: &Path) -> Result<Option<Communicator>> {
    loop {
        let mut sums = gradient(&state.parameters, comm.rank(), comm.world_size());
        // All ranks stop at the same step.
        sums.push(f64::from(u8::from(comm.is_main() && stop.exists())));
        comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        if sums.pop() != Some(0.0) {
            return Ok(None);
        }
        state.advance(&sums);
        if state.step.is_multiple_of(50) {
            println!("step {}: {} ranks", state.step, comm.world_size());
        }
        let membership = comm.admit()?;
        if !membership.newcomers.is_empty() || membership.communicator.world_size() != comm.world_size() {
            return Ok(Some(membership.communicator));
        }
    }
}

fn main() -> Result<()> {
    // collrun and torchrun then report why a rank failed.
    collectives::record_failure(run)
}

fn run() -> Result<()> {
    let stop = PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "stop".into()));
    let mut has_state = std::env::var_os("COLLECTIVES_JOIN").is_none();
    let mut state = State::new();
    let mut comm = Communicator::from_env()?;
    println!("join at {}", comm.join_address()?);
    loop {
        let outcome = synchronise(&comm, &mut state, has_state).and_then(|()| {
            has_state = true;
            println!("step {}: {} ranks", state.step, comm.world_size());
            train(&comm, &mut state, &stop)
        });
        comm = match outcome {
            Ok(Some(changed)) => changed,
            Ok(None) => break,
            Err(error) if error.is_peer_lost() || matches!(error, Error::Aborted { .. }) => comm.admit()?.communicator,
            Err(error) => return Err(error),
        };
    }
    println!("result {} {:?}", state.step, state.parameters);
    comm.close()
}
