//! Finds the rank that the others wait for.

mod blame;
mod waits;
mod work;

use std::time::{Duration, Instant};

use clap::Parser;
use collectives::Communicator;

use crate::failure::{CHECK, Failure};
use crate::job;
use crate::report::answer;
use blame::Blame;
use waits::{Round, Waited, Waits};
pub(crate) use work::Work;

/// Names the rank that others wait for.
///
/// Every rank repeatedly does the same piece of work, on its processor and in memory, and then enters a barrier. In
/// each round, the cost of the last rank is the time by which it is later than the second-last. The clocks of hosts
/// need not agree: each rank times only its own work. To find a rank whose links are slow, use collperf pairs.
///
/// A rank is named if it costs the others at least --threshold percent of the time. That must hold in most stretches of
/// the run, and more often than by chance. Time in which a rank waited for a core that another program used counts
/// against the host, not the rank.
///
/// The exit code is 7 if --threshold is given and a rank or host is named.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf stragglers", bin_name = "collperf stragglers", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: job::Flags,
    /// How long a piece of work takes on rank 0, approximately
    #[arg(long, value_name = "US", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(10..=10_000_000))]
    work_us: u32,
    /// How long the whole run takes, approximately
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = seconds)]
    seconds: f64,
    /// Name a rank if the others wait for it for this percentage of the time [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=99))]
    threshold: Option<u8>,
}

/// The least number of rounds, and the largest.
const LEAST_ROUNDS: usize = 10;
const MOST_ROUNDS: f64 = 100_000.0;
/// The default of `--threshold`, in percent.
const DEFAULT_THRESHOLD: u8 = 10;

/// Runs rounds of work; rank 0 reports which rank the others waited for.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    job::run(&arguments.job, |comm| {
        if comm.world_size() < 2 {
            return Err(Failure::usage("stragglers: there is only one rank; start more, with -g or a launcher"));
        }
        let notes = job::busy_hosts(comm)?;
        let all = rounds(comm, arguments)?;
        if comm.rank() != 0 {
            return Ok(0);
        }
        let threshold = f64::from(arguments.threshold.unwrap_or(DEFAULT_THRESHOLD)) / 100.0;
        let names = comm.peers().iter().map(|peer| format!("{}, pid {}", peer.host, peer.pid)).collect();
        let own: Vec<Vec<f64>> = all.iter().map(|rank| rank.iter().map(Round::own).collect()).collect();
        let blame = Blame::new(names, &own, threshold);
        let hosts: Vec<String> = comm.peers().iter().map(|peer| peer.host.clone()).collect();
        let waits = Waits::new(&hosts, &all, threshold);
        answer(&format!("{notes}{blame}{waits}"))?;
        let is_named = blame.straggler().is_some() || waits.straggler().is_some();
        Ok(if arguments.threshold.is_some() && is_named { CHECK } else { 0 })
    })
}

/// Returns the rounds of every rank, one rank after the other.
fn rounds(comm: &Communicator, arguments: &Arguments) -> Result<Vec<Vec<Round>>, Failure> {
    let mut work = Work::new();
    let waited = Waited::new();
    // All ranks do as much work as takes rank 0 the requested time.
    let mut units = [work.units_in(Duration::from_micros(arguments.work_us.into()))];
    comm.broadcast(&mut units[..], 0)?;
    let round = |work: &mut Work| -> Result<Round, Failure> {
        comm.barrier()?;
        let before = waited.so_far();
        let began = Instant::now();
        work.perform(units[0]);
        let took = began.elapsed().as_secs_f64() * 1e6;
        Ok(Round { took, waited: (waited.so_far() - before).clamp(0.0, took) })
    };
    let began = Instant::now();
    (0..LEAST_ROUNDS).try_for_each(|_| round(&mut work).map(drop))?;
    let per_round = began.elapsed().as_secs_f64() / LEAST_ROUNDS as f64;
    let mut count = [(arguments.seconds / per_round.max(1e-6)).clamp(LEAST_ROUNDS as f64, MOST_ROUNDS) as u64];
    comm.broadcast(&mut count[..], 0)?;
    let mine = (0..count[0]).map(|_| round(&mut work)).collect::<Result<Vec<Round>, Failure>>()?;
    let mine: Vec<f64> = mine.iter().flat_map(|round| [round.took, round.waited]).collect();
    let mut all = vec![0.0; mine.len() * comm.world_size()];
    comm.all_gather_into(&mine[..], &mut all[..])?;
    let round = |pair: &[f64]| Round { took: pair[0], waited: pair[1] };
    Ok(all.chunks_exact(mine.len()).map(|rank| rank.chunks_exact(2).map(round).collect()).collect())
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|seconds| (0.01..=86_400.0).contains(seconds))
        .ok_or_else(|| "expected a number of seconds from 0.01 to 86400".to_owned())
}
