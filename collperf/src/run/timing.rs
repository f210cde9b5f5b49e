//! The times of calls: of all calls of a row together, as nccl-tests measures them, and of each call separately.

use std::time::{Duration, Instant};

use collectives::{Communicator, Result};

use super::backend::Backend;
use super::words::share;
use crate::settings::{Blocking, Settings};
use crate::statistics::slowest;

/// Microseconds per call on average, one figure for all ranks.
pub(super) struct Mean {
    /// The time from the first call to the end of the last.
    pub(super) time: f64,
    /// The time until the last was queued.
    pub(super) issue: f64,
}

/// Times consecutive iterations, or launches of a graph of them. `once` makes all calls of one iteration.
pub(super) fn mean<P: Backend>(
    backend: &P,
    comm: &Communicator,
    settings: &Settings,
    mut once: impl FnMut() -> Result<()>,
) -> Result<Mean> {
    once()?;
    backend.finish()?;
    let launches = settings.device.graph;
    let graph = match launches {
        0 => None,
        _ => Some(backend.capture(&mut || (0..settings.iterations).try_for_each(|_| once()))?),
    };
    let mut round = || graph.as_ref().map_or_else(&mut once, |graph| backend.launch(graph));
    let (rounds, iterations) = if launches == 0 { (settings.iterations, 1) } else { (launches, settings.iterations) };
    let calls = iterations * settings.aggregated;
    comm.barrier()?;
    let mut excluded = Duration::ZERO;
    let began = Instant::now();
    for _ in 0..rounds {
        round()?;
        excluded += between_calls(backend, comm, settings.blocking)?;
    }
    let issued = began.elapsed();
    backend.finish()?;
    let ended = began.elapsed();
    let per_call = |time: Duration| microseconds(time.saturating_sub(excluded)) / (rounds * calls) as f64;
    let all = share(comm, &[per_call(ended), per_call(issued)])?;
    let of = |which: usize| settings.average.of(&all.iter().copied().skip(which).step_by(2).collect::<Vec<_>>());
    Ok(Mean { time: of(0), issue: of(1) })
}

/// Does what `-z` requests after each call; returns how much of that time does not count.
fn between_calls<P: Backend>(backend: &P, comm: &Communicator, blocking: Blocking) -> Result<Duration> {
    if blocking == Blocking::No {
        return Ok(Duration::ZERO);
    }
    backend.finish()?;
    let done = Instant::now();
    match blocking {
        Blocking::No | Blocking::Wait => Ok(Duration::ZERO),
        Blocking::Barrier => comm.barrier().map(|()| Duration::ZERO),
        Blocking::UntimedBarrier => comm.barrier().map(|()| done.elapsed()),
    }
}

/// Returns the microseconds per call of every single iteration, on the slowest rank.
pub(super) fn single<P: Backend>(
    backend: &P,
    comm: &Communicator,
    settings: &Settings,
    mut once: impl FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let mut marks = Vec::with_capacity(settings.iterations);
    comm.barrier()?;
    for _ in 0..settings.iterations {
        let began = backend.mark()?;
        once()?;
        if settings.blocking == Blocking::Barrier {
            between_calls(backend, comm, Blocking::Barrier)?;
        }
        marks.push((began, backend.mark()?));
        if settings.blocking != Blocking::Barrier {
            between_calls(backend, comm, settings.blocking)?;
        }
    }
    backend.finish()?;
    let times =
        marks.iter().map(|(began, ended)| Ok(backend.between(began, ended)? / settings.aggregated as f64)).collect::<Result<Vec<f64>>>()?;
    Ok(slowest(&share(comm, &times)?, settings.iterations))
}

/// The least time of a sample in microseconds: calls are repeated until they fill it.
const SAMPLE_US: f64 = 200.0;
const MOST_SAMPLES: usize = 2000;
const LEAST_SAMPLES: usize = 10;

/// The result of sampling a cell.
pub(super) struct Cell {
    /// Microseconds per call of each sample, on the slowest rank.
    pub(super) samples: Vec<f64>,
    /// The number of timed calls.
    pub(super) calls: u64,
}

/// Takes samples for as long as requested: batches of calls back to back, each after a barrier that is not timed, each
/// counted as the slowest rank's time per call.
pub(super) fn sample<P: Backend>(
    backend: &P,
    comm: &Communicator,
    time: Duration,
    bytes: usize,
    mut once: impl FnMut() -> Result<()>,
) -> Result<Cell> {
    // Makes this many calls and returns their time.
    let mut batch = |calls: usize| -> Result<Duration> {
        let began = Instant::now();
        (0..calls).try_for_each(|_| once())?;
        backend.finish()?;
        Ok(began.elapsed())
    };
    batch(if bytes >= 16 << 20 { 1 } else { 20 })?;
    comm.barrier()?;
    let trial: usize = if bytes >= 1 << 20 { 2 } else { 20 };
    let mine = microseconds(batch(trial)?) / trial as f64;
    // All ranks must choose the same number of calls, so the slowest rank determines it.
    let per_call = share(comm, &[mine])?.into_iter().fold(0.02, f64::max);
    let calls = if per_call >= SAMPLE_US { 1 } else { (SAMPLE_US / per_call) as usize + 1 };
    let wanted = (microseconds(time) / (per_call * calls as f64)) as usize + 1;
    let samples = samples(comm, time, wanted.clamp(LEAST_SAMPLES, MOST_SAMPLES), || Ok(microseconds(batch(calls)?) / calls as f64))?;
    let calls = (samples.len() * calls) as u64;
    Ok(Cell { samples: slowest(&share(comm, &samples)?, samples.len()), calls })
}

fn samples(comm: &Communicator, time: Duration, wanted: usize, mut sample: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    let mut samples = Vec::with_capacity(wanted);
    let started = Instant::now();
    while samples.len() < wanted {
        comm.barrier()?;
        samples.push(sample()?);
        // A cell that far exceeds its time ends early, on all ranks together.
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
