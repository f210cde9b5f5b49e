//! Whether a call brings what it should, bit by bit.

use std::time::{Duration, Instant};

use collectives::{Communicator, Result};
use rustix::time::{ClockId, clock_gettime};

use super::call::Call;
use super::share;
use crate::inputs::{Recipe, Sample};
use crate::layout::{Layout, Origin, Run};
use crate::report::say;

/// Wrong elements that a rank describes; after these it only counts.
const MOST_COMPLAINTS: usize = 5;

/// The checks of a run, each with inputs of its own.
#[derive(Default)]
pub(super) struct Checks {
    made: u64,
    complaints: usize,
}

impl Checks {
    /// Calls with two buffers and counts wrong elements over all ranks.
    pub(super) fn out_of_place<T: Sample>(
        &mut self,
        call: &Call<'_>,
        layout: &Layout,
        recipe: Recipe,
        root: usize,
        [source, target]: [&mut [T]; 2],
    ) -> Result<u64> {
        let (recipe, rank) = (self.next(recipe), call.comm.rank());
        let expected = layout.expected(rank);
        fill(&recipe, &[Run { start: 0, length: layout.source_length(rank), origin: Origin::Of { rank, start: 0 } }], source);
        poison(&recipe, &expected, target);
        call.out_of_place(root, source, target)?;
        self.compare(call, &recipe, &expected, target)
    }

    /// Calls with one buffer and counts wrong elements over all ranks.
    pub(super) fn in_place<T: Sample>(
        &mut self,
        call: &Call<'_>,
        layout: &Layout,
        recipe: Recipe,
        root: usize,
        buffer: &mut [T],
    ) -> Result<u64> {
        let (recipe, rank) = (self.next(recipe), call.comm.rank());
        let expected = layout.expected_in_place(rank);
        poison(&recipe, &expected, buffer);
        fill(&recipe, &layout.initial_in_place(rank), buffer);
        call.in_place(root, buffer)?;
        self.compare(call, &recipe, &expected, buffer)
    }

    /// Inputs that no earlier check had.
    fn next(&mut self, recipe: Recipe) -> Recipe {
        self.made += 1;
        Recipe { seed: self.made, ..recipe }
    }

    fn compare<T: Sample>(&mut self, call: &Call<'_>, recipe: &Recipe, expected: &[Run], found: &[T]) -> Result<u64> {
        let rank = call.comm.rank();
        let mut wrong = 0_u64;
        for run in expected {
            for (offset, found) in found[run.start..run.start + run.length].iter().enumerate() {
                let right: T = value(recipe, run.origin, offset);
                if found.bits() != right.bits() {
                    wrong += 1;
                    self.complaints += 1;
                    if self.complaints <= MOST_COMPLAINTS {
                        let index = run.start + offset;
                        say(&format!(
                            "rank {rank}: {} of {}: element {index} is {found:?}, not {right:?}",
                            call.collective,
                            T::ELEMENT_TYPE
                        ));
                    }
                }
            }
        }
        Ok(share(call.comm, &[wrong])?.into_iter().sum())
    }

    /// Enters a barrier at a time of each rank's own, and counts the ranks that left before the last of their host had entered.
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
        Ok((0..times.len() / 2).filter(left_early).count() as u64)
    }
}

/// Nanoseconds on the clock that all processes of a host share.
fn host_time() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The element this far into a run.
fn value<T: Sample>(recipe: &Recipe, origin: Origin, offset: usize) -> T {
    match origin {
        Origin::Of { rank, start } => T::input(recipe, rank, start + offset),
        Origin::Folded { start } => T::folded(recipe, start + offset),
    }
}

/// Writes what the runs say.
fn fill<T: Sample>(recipe: &Recipe, runs: &[Run], buffer: &mut [T]) {
    for run in runs {
        for (offset, element) in buffer[run.start..run.start + run.length].iter_mut().enumerate() {
            *element = value(recipe, run.origin, offset);
        }
    }
}

/// Writes what is wrong everywhere, so that what a call leaves untouched shows.
fn poison<T: Sample>(recipe: &Recipe, runs: &[Run], buffer: &mut [T]) {
    for run in runs {
        for (offset, element) in buffer[run.start..run.start + run.length].iter_mut().enumerate() {
            *element = value::<T>(recipe, run.origin, offset).poisoned();
        }
    }
}
