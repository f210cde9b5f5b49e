//! Training whose ranks come and go: processes may be killed, and new processes may join, at any time.
//!
//! In each step, all ranks average their gradients, then admit the processes that wait. If a rank is lost, the same call
//! leaves it out. After each change, all ranks continue from the newest state that a rank has. The ranks that have it
//! send it to those that lack it. So the result is that of a run without changes, except for the order in which
//! gradients are added: no parameter differs by more than 1e-9.
//!
//! `cargo launch --keep-going --nproc-per-node 3 -- target/debug/examples/elastic_training STOP-FILE` trains until the
//! file exists. `COLLECTIVES_JOIN=HOST:PORT target/debug/examples/elastic_training STOP-FILE` joins, at an address that
//! a rank has printed.

use std::path::{Path, PathBuf};

use collectives::{Communicator, Error, ReduceOp, Result};
use collectives_train::checkpoint::Piece;
use collectives_train::{DataParallel, Options, Parameter, Sampler, StateTransfer, StopFlag, UnevenEnd};

pub(crate) const SAMPLES: usize = 240;
const FEATURES: usize = 8;
const RATE: f64 = 0.05;
const MOMENTUM: f64 = 0.5;

/// The state of the training, which every rank has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) step: u64,
    pub(crate) parameters: Vec<f64>,
    momentum: Vec<f64>,
}

impl State {
    pub(crate) fn new() -> Self {
        Self { step: 0, parameters: vec![0.0; FEATURES], momentum: vec![0.0; FEATURES] }
    }

    /// Takes one step along the gradient of all samples.
    pub(crate) fn advance(&mut self, gradient: &[f64]) {
        for ((parameter, momentum), slope) in self.parameters.iter_mut().zip(&mut self.momentum).zip(gradient) {
            *momentum = MOMENTUM * *momentum + slope;
            *parameter -= RATE * *momentum;
        }
        self.step += 1;
    }
}

/// Returns the part of the gradient that these samples contribute.
pub(crate) fn gradient(parameters: &[f64], samples: impl Iterator<Item = usize>) -> Vec<f64> {
    let mut gradient = vec![0.0; FEATURES];
    for sample in samples {
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
    let newest = steps.into_iter().max().unwrap_or(mine);
    // This rank's state must not be half replaced if the transfer fails.
    let mut copy = State { step: newest.unsigned_abs(), ..state.clone() };
    let mut transfer = StateTransfer::new(comm)?;
    for (name, own, wanted) in [("parameters", &state.parameters, &mut copy.parameters), ("momentum", &state.momentum, &mut copy.momentum)]
    {
        match mine == newest {
            true => transfer.offer(name, &[FEATURES], Piece::Whole, own),
            false => transfer.want(name, &[FEATURES], Piece::Whole, wanted),
        };
    }
    transfer.run()?;
    *state = copy;
    Ok(())
}

/// Trains until the ranks change, and returns the new communicator. Returns `None` once the file exists.
fn train(comm: &Communicator, state: &mut State, stop: &Path) -> Result<Option<Communicator>> {
    let options = Options { op: ReduceOp::Sum, ..Options::default() };
    let mut model = DataParallel::new(comm, vec![Parameter::new::<f64>("parameters", &[FEATURES])], options)?;
    let sampler = Sampler::new(comm, SAMPLES).in_order().with_end(UnevenEnd::Keep);
    let stopping = StopFlag::new();
    loop {
        let mut gradients = [gradient(&state.parameters, sampler.epoch(0))];
        model.average(&mut gradients)?;
        state.advance(&gradients[0]);
        if state.step.is_multiple_of(50) {
            println!("step {}: {} ranks", state.step, comm.world_size());
        }
        if comm.is_main() && stop.exists() {
            stopping.raise();
        }
        // All ranks stop at the same step.
        if stopping.agreed(comm)? {
            return Ok(None);
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
