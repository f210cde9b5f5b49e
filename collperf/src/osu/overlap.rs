//! `osu_iallreduce`: how much of a started all-reduce is hidden behind computation.

use std::time::{Duration, Instant};

use clap::Parser;
use collectives::{Communicator, ReduceOp};

use super::Common;
use super::amounts::{Amount, OF_COLLECTIVES};
use super::columns::{Cell, Columns};
use super::computation::Computation;
use super::payload::buffer;
use super::session::{Figures, Session, are, nanoseconds};
use crate::failure::Failure;
use crate::job;
use crate::tails::Histogram;

/// Measures the overlap of a started all-reduce with computation, as OSU's osu_iallreduce does.
///
/// First, each all-reduce is started and waited for: this takes the time "Pure Comm.". Then each all-reduce is started,
/// the rank computes for that same time, and then waits: this takes the time "Overall". The overlap is 100 % if the
/// all-reduce makes the computation no longer, and 0 % if both take as long as one after the other:
/// overlap = 100 - 100 * (overall - compute) / pure communication, but not below 0. All times are means of all ranks.
///
/// Elements are f32, the op is sum. By default, sizes go from 4 B to 1 MiB. Up to 8 KiB there are 100 untimed and 1000
/// timed iterations, and above 8 KiB 10 and 100, as in OSU's benchmarks. A call in host memory runs on a thread of its
/// own, so it needs a core beside that of the rank: see --bind.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf osu_iallreduce", bin_name = "collperf osu_iallreduce", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Ask this many times during the computation whether the call has ended
    #[arg(short = 't', long = "num-test-calls", value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    tests: u32,
    /// Add columns with the time to start the call, to ask and to wait, and with the smallest and largest time of a rank
    #[arg(short = 'f', long)]
    full: bool,
}

const NAME: &str = "osu_iallreduce";
/// The smallest and the largest size by default.
const SIZES: (usize, usize) = (4, 1 << 20);
const ELEMENT: usize = size_of::<f32>();
const USUAL: [&str; 4] = ["Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)"];
const FULL: [&str; 9] = [
    "Overall(us)",
    "Compute(us)",
    "Coll. Init(us)",
    "Test(us)",
    "Wait(us)",
    "Pure Comm.(us)",
    "Min Comm.(us)",
    "Max Comm.(us)",
    "Overlap(%)",
];

/// Measures every size; rank 0 prints the table.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let common = &arguments.common;
    common.job.ranks_to_start().map_or(Ok(()), check_ranks)?;
    job::run(&common.job, |comm| {
        check_ranks(comm.world_size())?;
        let mut session = Session::begin(comm, common, NAME, OF_COLLECTIVES)?;
        let names: &[&str] = if arguments.full { &FULL } else { &USUAL };
        let columns = Columns::new(names).with(&common.percentiles, "Lat(us)", common.is_checked);
        session.header("f32", &columns)?;
        let mut overlap = Overlap { comm, arguments, computation: Computation::new(), buffers: None, wrong: 0 };
        let mut sizes: Vec<usize> = session.sizes(SIZES.0, SIZES.1)?.into_iter().map(whole).collect();
        sizes.dedup();
        for bytes in sizes {
            if let Some(code) = overlap.size(&session, &columns, bytes)? {
                return Ok(code);
            }
        }
        Ok(0)
    })
}

/// Returns the size of a whole number of elements: 0, or at least one.
fn whole(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes / ELEMENT).max(1) * ELEMENT }
}

fn check_ranks(ranks: usize) -> Result<(), Failure> {
    let refusal = || Failure::usage(format!("{NAME}: at least 2 ranks are needed, but there {}; give -g 2", are(ranks)));
    if ranks < 2 { Err(refusal()) } else { Ok(()) }
}

/// Microseconds of one iteration, on average.
#[derive(Debug, Clone, Copy, Default)]
struct Parts {
    overall: f64,
    compute: f64,
    start: f64,
    test: f64,
    wait: f64,
    pure: f64,
}

impl Parts {
    fn words(self) -> [f64; 6] {
        [self.overall, self.compute, self.start, self.test, self.wait, self.pure]
    }

    fn from_words(words: [f64; 6]) -> Self {
        let [overall, compute, start, test, wait, pure] = words;
        Self { overall, compute, start, test, wait, pure }
    }

    /// Returns the part of the call that is hidden, in percent.
    fn overlap(&self) -> f64 {
        if self.pure > 0.0 { (100.0 - (self.overall - self.compute) / self.pure * 100.0).max(0.0) } else { 0.0 }
    }
}

/// The source and the destination of a call.
type Buffers = (Vec<f32>, Vec<f32>);

/// A rank's buffers and computation.
struct Overlap<'a> {
    comm: &'a Communicator,
    arguments: &'a Arguments,
    computation: Computation,
    /// The source and the destination, unless a call has them.
    buffers: Option<Buffers>,
    wrong: u64,
}

impl Overlap<'_> {
    /// Measures a size and prints its line; returns an exit code if data was wrong.
    fn size(&mut self, session: &Session<'_>, columns: &Columns, bytes: usize) -> Result<Option<u8>, Failure> {
        let count = bytes / ELEMENT;
        self.buffers = Some((buffer(count)?, buffer(count)?));
        let amount = session.amount(bytes);
        let is_checked = session.common.is_checked;
        let pure = self.pure(amount, is_checked)?;
        let mut times = Histogram::default();
        let mine = Parts { pure, ..self.overlapped(amount, is_checked, pure, &mut times)? };
        let mut all = vec![[0.0; 6]; self.comm.world_size()];
        self.comm.all_gather_into(&[mine.words()][..], &mut all[..])?;
        let (wrong, code) = session.wrong(count * ELEMENT, self.wrong)?;
        let cells = cells(&all, self.arguments.full);
        let tail = |percent: f64| times.percentile_us(percent);
        session.line(columns, Figures { bytes, cells, times: &times, parts: 1.0, tail: &tail, wrong })?;
        Ok(code)
    }

    /// Returns the microseconds of a call that is started and waited for.
    fn pure(&mut self, amount: Amount, is_checked: bool) -> Result<f64, Failure> {
        self.iteration(true, Duration::ZERO)?;
        let mut total = Duration::ZERO;
        for number in 0..u64::from(amount.warmup) + u64::from(amount.iterations) {
            let parts = self.iteration(is_checked, Duration::ZERO)?;
            if number >= u64::from(amount.warmup) {
                total += parts.overall;
            }
        }
        Ok(total.as_secs_f64() * 1e6 / f64::from(amount.iterations))
    }

    /// Returns the means of calls that overlap with computation.
    fn overlapped(&mut self, amount: Amount, is_checked: bool, pure_us: f64, times: &mut Histogram) -> Result<Parts, Failure> {
        let compute = Duration::from_secs_f64(pure_us / 1e6);
        let mut total = Iteration::default();
        for number in 0..u64::from(amount.warmup) + u64::from(amount.iterations) {
            let parts = self.iteration(is_checked, compute)?;
            if number >= u64::from(amount.warmup) {
                times.add(nanoseconds(parts.overall));
                total.add(&parts);
            }
        }
        let mean = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(amount.iterations);
        let Iteration { overall, compute, start, test, wait } = total;
        Ok(Parts { overall: mean(overall), compute: mean(compute), start: mean(start), test: mean(test), wait: mean(wait), pure: 0.0 })
    }

    /// Makes one call, followed by a barrier as in OSU's benchmark, and checks its result if wanted.
    fn iteration(&mut self, is_checked: bool, compute: Duration) -> Result<Iteration, Failure> {
        let (mut source, mut target) = self.buffers.take().unwrap_or_default();
        if is_checked {
            source.iter_mut().enumerate().for_each(|(place, value)| *value = input(self.comm.rank(), place));
            target.fill(-1.0);
            self.comm.barrier()?;
        }
        let (parts, (source, target)) = self.call((source, target), compute)?;
        self.comm.barrier()?;
        if is_checked {
            let ranks = self.comm.world_size();
            let sum = |place: usize| (0..ranks).map(|rank| input(rank, place)).sum::<f32>();
            self.wrong += target.iter().enumerate().filter(|(place, value)| **value != sum(*place)).count() as u64;
        }
        self.buffers = Some((source, target));
        Ok(parts)
    }

    /// Starts a call, computes, and waits.
    fn call(&mut self, (source, target): Buffers, compute: Duration) -> Result<(Iteration, Buffers), Failure> {
        let began = Instant::now();
        let work = self.comm.start_all_reduce_into(source, target, ReduceOp::Sum)?;
        let started = began.elapsed();
        let mut test = Duration::ZERO;
        if !compute.is_zero() {
            let tests = self.arguments.tests;
            for _ in 0..tests.max(1) {
                self.computation.perform(compute / tests.max(1));
                if tests > 0 {
                    let asked = Instant::now();
                    let _ = work.is_done();
                    test += asked.elapsed();
                }
            }
        }
        let computed = began.elapsed();
        let buffers = work.wait()?;
        let overall = began.elapsed();
        let parts = Iteration { overall, compute: computed - started - test, start: started, test, wait: overall - computed };
        Ok((parts, buffers))
    }
}

/// The times of one iteration.
#[derive(Debug, Clone, Copy, Default)]
struct Iteration {
    overall: Duration,
    compute: Duration,
    start: Duration,
    test: Duration,
    wait: Duration,
}

impl Iteration {
    fn add(&mut self, other: &Self) {
        self.overall += other.overall;
        self.compute += other.compute;
        self.start += other.start;
        self.test += other.test;
        self.wait += other.wait;
    }
}

/// Returns a rank's input: small whole numbers, whose sum is exact.
fn input(rank: usize, place: usize) -> f32 {
    ((rank * 7 + place) % 31) as f32
}

/// Returns the figures of a line: means over all ranks.
fn cells(all: &[[f64; 6]], is_full: bool) -> Vec<Cell> {
    let ranks = all.len().max(1) as f64;
    let mean = Parts::from_words(std::array::from_fn(|word| all.iter().map(|rank| rank[word]).sum::<f64>() / ranks));
    let pure = all.iter().map(|words| Parts::from_words(*words).pure);
    let (least, most) = (pure.clone().fold(f64::INFINITY, f64::min), pure.fold(0.0, f64::max));
    let figures = if is_full {
        vec![mean.overall, mean.compute, mean.start, mean.test, mean.wait, mean.pure, least, most, mean.overlap()]
    } else {
        vec![mean.overall, mean.compute, mean.pure, mean.overlap()]
    };
    figures.into_iter().map(Cell::Number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_what_the_call_does_not_add() {
        let parts = |overall| Parts { overall, compute: 10.0, pure: 10.0, ..Parts::default() };
        let found = [10.0, 15.0, 20.0, 25.0].map(|overall| parts(overall).overlap());
        assert_eq!(found, [100.0, 50.0, 0.0, 0.0]);
        assert_eq!(Parts::default().overlap(), 0.0);
    }

    #[test]
    fn a_line_has_the_means_of_all_ranks() {
        let all = [[10.0, 6.0, 1.0, 0.0, 3.0, 8.0], [20.0, 8.0, 1.0, 0.0, 5.0, 12.0]];
        let numbers = |is_full| {
            let cells = cells(&all, is_full);
            cells.into_iter().map(|cell| if let Cell::Number(number) = cell { number } else { f64::NAN }).collect::<Vec<_>>()
        };
        assert_eq!(numbers(false), [15.0, 7.0, 10.0, 20.0]);
        assert_eq!(numbers(true), [15.0, 7.0, 1.0, 0.0, 4.0, 10.0, 8.0, 12.0, 20.0]);
        assert_eq!((USUAL.len(), FULL.len()), (numbers(false).len(), numbers(true).len()));
    }
}
