//! Which rank the others wait for.

mod blame;
mod work;

use std::time::{Duration, Instant};

use clap::Parser;
use collectives::Communicator;

use crate::failure::{CHECK, Failure};
use crate::job;
use crate::report::answer;
use blame::Blame;
use work::Work;

/// Names the rank that others wait for.
///
/// Every rank does the same piece of work on its processor and in memory, and then a barrier, again and again. What each round takes
/// longer than its second-last rank is the last one's doing. Clocks of hosts need not agree: each rank times its own work alone. A rank
/// whose links are slow is found by collperf pairs.
///
/// Exit code 7 where --threshold is given and a rank is named.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf stragglers", bin_name = "collperf stragglers", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: job::Flags,
    /// How long a piece of work is about to take, on rank 0
    #[arg(long, value_name = "US", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(10..=10_000_000))]
    work_us: u32,
    /// For about how long all of it runs
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = seconds)]
    seconds: f64,
    /// The percentage of all time that others have to wait for a rank, for it to be named [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=99))]
    threshold: Option<u8>,
}

/// Rounds that are run at least, and at most.
const LEAST_ROUNDS: usize = 10;
const MOST_ROUNDS: f64 = 100_000.0;
/// What a rank has to cost where nothing is said.
const DEFAULT_THRESHOLD: u8 = 10;

/// Runs rounds of work; rank 0 says who was waited for.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    job::run(&arguments.job, |comm| {
        if comm.world_size() < 2 {
            return Err(Failure::usage("stragglers: one rank waits for nobody; start more, with -g or a launcher"));
        }
        let times = rounds(comm, arguments)?;
        if comm.rank() != 0 {
            return Ok(0);
        }
        let threshold = arguments.threshold.unwrap_or(DEFAULT_THRESHOLD);
        let names = comm.peers().iter().map(|peer| format!("{}, pid {}", peer.host, peer.pid)).collect();
        let blame = Blame::new(names, &times, f64::from(threshold) / 100.0);
        answer(&blame.to_string())?;
        Ok(if arguments.threshold.is_some() && blame.straggler().is_some() { CHECK } else { 0 })
    })
}

/// The microseconds of every rank's work in each round, one rank after the other.
fn rounds(comm: &Communicator, arguments: &Arguments) -> Result<Vec<Vec<f64>>, Failure> {
    let mut work = Work::new();
    // All do as much as rank 0 takes so long for.
    let mut units = [work.units_in(Duration::from_micros(arguments.work_us.into()))];
    comm.broadcast(&mut units[..], 0)?;
    let round = |work: &mut Work| -> Result<f64, Failure> {
        comm.barrier()?;
        let began = Instant::now();
        work.perform(units[0]);
        Ok(began.elapsed().as_secs_f64() * 1e6)
    };
    let began = Instant::now();
    (0..LEAST_ROUNDS).try_for_each(|_| round(&mut work).map(drop))?;
    let per_round = began.elapsed().as_secs_f64() / LEAST_ROUNDS as f64;
    let mut count = [(arguments.seconds / per_round.max(1e-6)).clamp(LEAST_ROUNDS as f64, MOST_ROUNDS) as u64];
    comm.broadcast(&mut count[..], 0)?;
    let mine = (0..count[0]).map(|_| round(&mut work)).collect::<Result<Vec<f64>, Failure>>()?;
    let mut all = vec![0.0; mine.len() * comm.world_size()];
    comm.all_gather_into(&mine[..], &mut all[..])?;
    Ok(all.chunks_exact(mine.len()).map(<[f64]>::to_vec).collect())
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (0.01..=86_400.0).contains(seconds))
        .ok_or_else(|| "not a number of seconds from 0.01 to 86400".to_owned())
}
