//! How long calls take: as nccl-tests times them, and each by itself.

use std::time::{Duration, Instant};

use collectives::{Communicator, Result};

use super::share;
use crate::settings::{Blocking, Settings};
use crate::statistics::slowest;

/// Microseconds per call on average, one figure for all ranks.
pub(super) fn mean(comm: &Communicator, settings: &Settings, mut once: impl FnMut() -> Result<()>) -> Result<f64> {
    once()?;
    comm.barrier()?;
    let mut excluded = Duration::ZERO;
    let began = Instant::now();
    for _ in 0..settings.iterations {
        once()?;
        match settings.blocking {
            Blocking::No => {}
            Blocking::Barrier => comm.barrier()?,
            Blocking::UntimedBarrier => {
                let done = Instant::now();
                comm.barrier()?;
                excluded += done.elapsed();
            }
        }
    }
    let time = microseconds(began.elapsed().saturating_sub(excluded)) / settings.iterations as f64;
    Ok(settings.average.of(&share(comm, &[time])?))
}

/// Microseconds of every single call, the slowest rank's.
pub(super) fn single(comm: &Communicator, settings: &Settings, mut once: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(settings.iterations);
    comm.barrier()?;
    for _ in 0..settings.iterations {
        let began = Instant::now();
        once()?;
        if settings.blocking == Blocking::Barrier {
            comm.barrier()?;
        }
        times.push(microseconds(began.elapsed()));
        if settings.blocking == Blocking::UntimedBarrier {
            comm.barrier()?;
        }
    }
    Ok(slowest(&share(comm, &times)?, settings.iterations))
}

/// The least time of a sample: calls are repeated until they fill it.
const SAMPLE_US: f64 = 200.0;
const MOST_SAMPLES: usize = 2000;
const LEAST_SAMPLES: usize = 10;

/// What sampling a cell gave.
pub(super) struct Cell {
    /// Microseconds per call of each sample, the slowest rank's.
    pub(super) samples: Vec<f64>,
    /// Timed calls.
    pub(super) calls: u64,
}

/// Samples for as long as asked: batches of calls back to back, each after a barrier that is not timed, each counted as the
/// slowest rank's time per call.
pub(super) fn sample(comm: &Communicator, time: Duration, bytes: usize, mut once: impl FnMut() -> Result<()>) -> Result<Cell> {
    for _ in 0..if bytes >= 16 << 20 { 1 } else { 20 } {
        once()?;
    }
    comm.barrier()?;
    let trial = if bytes >= 1 << 20 { 2 } else { 20 };
    let began = Instant::now();
    for _ in 0..trial {
        once()?;
    }
    let mine = microseconds(began.elapsed()) / f64::from(trial);
    // All ranks must choose the same number of calls, so they choose by the slowest.
    let per_call = share(comm, &[mine])?.into_iter().fold(0.02, f64::max);
    let batch = if per_call >= SAMPLE_US { 1 } else { (SAMPLE_US / per_call) as usize + 1 };
    let wanted = (microseconds(time) / (per_call * batch as f64)) as usize + 1;
    let samples = samples(comm, time, batch, wanted.clamp(LEAST_SAMPLES, MOST_SAMPLES), once)?;
    let calls = (samples.len() * batch) as u64;
    Ok(Cell { samples: slowest(&share(comm, &samples)?, samples.len()), calls })
}

fn samples(comm: &Communicator, time: Duration, batch: usize, wanted: usize, mut once: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(wanted);
    let started = Instant::now();
    while samples.len() < wanted {
        comm.barrier()?;
        let began = Instant::now();
        for _ in 0..batch {
            once()?;
        }
        samples.push(microseconds(began.elapsed()) / batch as f64);
        // A cell that runs far over its time ends early, on all ranks together.
        if samples.len() >= LEAST_SAMPLES && samples.len() % 8 == 2 {
            let mut stop = [u8::from(started.elapsed() > 4 * time)];
            comm.broadcast(&mut stop, 0)?;
            if stop == [1] {
                break;
            }
        }
    }
    Ok(samples)
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
