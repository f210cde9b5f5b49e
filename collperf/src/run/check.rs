//! Checks the results of calls, bit by bit.

use std::time::{Duration, Instant};

use collectives::{Communicator, Result};
use rustix::time::{ClockId, clock_gettime};

use super::backend::{Backend, Memory};
use super::call::Call;
use super::words::share;
use crate::inputs::{Recipe, Sample};
use crate::layout::{Layout, Origin, Run};
use crate::report::say;

/// The most wrong elements that a rank describes; further ones are only counted.
const MOST_COMPLAINTS: usize = 5;

/// The checks of a run, each with its own inputs.
pub(super) struct Checks<'a> {
    /// All ranks, including those of other groups.
    world: &'a Communicator,
    made: u64,
    complaints: usize,
}

impl<'a> Checks<'a> {
    pub(super) fn new(world: &'a Communicator) -> Self {
        Self { world, made: 0, complaints: 0 }
    }

    /// Makes calls with two buffers and counts wrong elements over all ranks.
    pub(super) fn out_of_place<P: Backend, T: Sample>(
        &mut self,
        backend: &P,
        call: &Call<'_>,
        layout: &Layout,
        recipe: Recipe,
        root: usize,
        [source, target]: [&mut P::Memory<'_, T>; 2],
    ) -> Result<u64> {
        let (recipe, rank) = (self.next(recipe), call.comm.rank());
        let input = Run { start: 0, length: layout.source_length(rank), origin: Origin::Of { rank, start: 0 } };
        source.write(input, &values(&recipe, &input))?;
        let expected = poison(&recipe, layout.expected(rank), target)?;
        call.comm.barrier()?;
        call.out_of_place(root, source, target)?;
        backend.finish()?;
        self.compare(call, &expected, target)
    }

    /// Makes calls with one buffer and counts wrong elements over all ranks.
    pub(super) fn in_place<P: Backend, T: Sample>(
        &mut self,
        backend: &P,
        call: &Call<'_>,
        layout: &Layout,
        recipe: Recipe,
        root: usize,
        buffer: &mut P::Memory<'_, T>,
    ) -> Result<u64> {
        let (recipe, rank) = (self.next(recipe), call.comm.rank());
        let expected = poison(&recipe, layout.expected_in_place(rank), buffer)?;
        for run in layout.initial_in_place(rank) {
            buffer.write(run, &values(&recipe, &run))?;
        }
        call.comm.barrier()?;
        call.in_place(root, buffer)?;
        backend.finish()?;
        self.compare(call, &expected, buffer)
    }

    /// Returns inputs that no earlier check had.
    fn next(&mut self, recipe: Recipe) -> Recipe {
        self.made += 1;
        Recipe { seed: self.made, ..recipe }
    }

    fn compare<T: Sample>(&mut self, call: &Call<'_>, expected: &[(Run, Vec<T>)], found: &impl Memory<T>) -> Result<u64> {
        let rank = call.comm.rank();
        let mut wrong = 0_u64;
        let mut complain = |index, found, right: T| {
            wrong += 1;
            self.complaints += 1;
            if self.complaints <= MOST_COMPLAINTS {
                say(&format!("rank {rank}: {} of {}: element {index} is {found}, not {right:?}", call.collective, T::ELEMENT_TYPE));
            }
        };
        for (run, values) in expected {
            found.compare(*run, values, &mut complain)?;
        }
        Ok(share(self.world, &[wrong])?.into_iter().sum())
    }

    /// Enters a barrier at a different time on each rank, and counts the ranks that left before the last of their host
    /// had entered.
    pub(super) fn barrier(&mut self, comm: &Communicator) -> Result<u64> {
        self.made += 1;
        let late = (comm.rank() as u64 + self.made) % comm.world_size() as u64;
        let until = Instant::now() + Duration::from_micros(50 * late.min(20));
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let entered = host_time();
        comm.barrier()?;
        let times = share(comm, &[entered, host_time()])?;
        let peers = comm.peers();
        let left_early = |rank: &usize| {
            let here =
                (0..times.len() / 2).filter(|other| peers.get(*other).map(|peer| &peer.host) == peers.get(*rank).map(|peer| &peer.host));
            here.map(|other| times[2 * other]).max() > Some(times[2 * rank + 1])
        };
        let wrong = (0..times.len() / 2).filter(left_early).count() as u64;
        // Every rank of a group finds the same, so only the first reports it.
        let mine = if comm.rank() == 0 { wrong } else { 0 };
        Ok(share(self.world, &[mine])?.into_iter().sum())
    }
}

/// Returns nanoseconds on the clock that all processes of a host share.
fn host_time() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Returns the elements of a run, until they repeat.
fn values<T: Sample>(recipe: &Recipe, run: &Run) -> Vec<T> {
    let offsets = 0..run.length.min(recipe.period);
    match run.origin {
        Origin::Of { rank, start } => offsets.map(|offset| T::input(recipe, rank, start + offset)).collect(),
        Origin::Folded { start } => offsets.map(|offset| T::folded(recipe, start + offset)).collect(),
    }
}

/// Fills the elements that a call must write with wrong values, and returns the expected ones.
fn poison<T: Sample>(recipe: &Recipe, runs: Vec<Run>, memory: &mut impl Memory<T>) -> Result<Vec<(Run, Vec<T>)>> {
    let mut expected = Vec::with_capacity(runs.len());
    for run in runs {
        let values: Vec<T> = values(recipe, &run);
        let poison: Vec<T> = values.iter().map(|value| value.poisoned()).collect();
        memory.write(run, &poison)?;
        expected.push((run, values));
    }
    Ok(expected)
}
