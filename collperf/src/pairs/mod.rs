//! Measures hosts in pairs, and names those that are out of line.

mod exchange;
mod matrix;
mod rounds;

use std::time::Duration;

use clap::{Parser, ValueEnum};
use collectives::Communicator;

use crate::failure::{CHECK, Failure};
use crate::job;
use crate::report::answer;
use crate::sizes;
use exchange::Exchange;
use matrix::Matrix;

/// Measures every pair of hosts, and names pairs and hosts that are out of line with the rest.
///
/// One rank of each host takes part. At any time, each host is in one pair, so half as many pairs as hosts are measured
/// at once. Each pair makes round trips for latency, then sends a stream of messages in each direction for bandwidth.
/// Messages are in host memory, and use the host backend's links between hosts.
///
/// A host is out of line if most of its pairs, in one direction, are slower than the pairs of the others. A pair is out
/// of line if it is slower although its hosts are not. If anything looks out of line, all pairs are measured again,
/// with shorter streams. A host or pair is named only if that confirms it beyond chance. The exit code is 7 if
/// --threshold is given and any host or pair is named.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf pairs", bin_name = "collperf pairs", max_term_width = 110, args_override_self = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: job::Flags,
    /// Measure pairs of hosts or pairs of ranks
    #[arg(long, value_enum, default_value_t = Of::Hosts)]
    of: Of,
    /// Size of each message of a stream, in bytes
    #[arg(short = 'b', long = "bytes", value_name = "SIZE", default_value = "1M", value_parser = sizes::parse)]
    bytes: usize,
    /// How long each stream runs, approximately
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    stream_ms: u32,
    /// How many percent slower than the rest a host or pair must be to be out of line [default: 50]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=99))]
    threshold: Option<u8>,
}

/// The members of pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Of {
    /// Hosts, each represented by its first rank
    Hosts,
    /// All ranks
    Ranks,
}

/// The largest message, in bytes; each rank holds two.
const MOST_BYTES: usize = 1 << 30;
/// The default of `--threshold`, in percent.
const DEFAULT_THRESHOLD: u8 = 50;
/// How often all pairs are measured again if something looks out of line, and how many times shorter the streams are
/// then. Two or three members have few figures to compare, and so need more repetitions.
const AGAIN: usize = 8;
const AGAIN_OF_FEW: usize = 12;
const FEW: usize = 3;
const SHORTER: u32 = 4;

/// Measures all pairs; rank 0 prints the results.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    if !(1..=MOST_BYTES).contains(&arguments.bytes) {
        return Err(Failure::usage(format!("-b {}: expected a size from 1 byte to 1G", arguments.bytes)));
    }
    job::run(&arguments.job, |comm| {
        let members = members(comm, arguments.of)?;
        let notes = job::busy_hosts(comm)?;
        let names: Vec<_> = members.iter().map(|rank| (comm.peers()[*rank].host.clone(), *rank)).collect();
        let threshold = f64::from(arguments.threshold.unwrap_or(DEFAULT_THRESHOLD)) / 100.0;
        let stream = Duration::from_millis(arguments.stream_ms.into());
        let mut measured = vec![measure(comm, &members, arguments.bytes, stream)?];
        // All ranks follow rank 0's result.
        let mut again = [u8::from(Matrix::new(names.clone(), &measured, threshold).is_suspicious())];
        comm.broadcast(&mut again, 0)?;
        let times = if members.len() <= FEW { AGAIN_OF_FEW } else { AGAIN };
        for _ in 0..times * usize::from(again[0]) {
            measured.push(measure(comm, &members, arguments.bytes, stream / SHORTER)?);
        }
        if comm.rank() != 0 {
            return Ok(0);
        }
        let matrix = Matrix::new(names, &measured, threshold);
        answer(&format!("{notes}{matrix}"))?;
        Ok(if arguments.threshold.is_some() && !matrix.findings().is_empty() { CHECK } else { 0 })
    })
}

/// Returns the ranks that take part.
fn members(comm: &Communicator, of: Of) -> Result<Vec<usize>, Failure> {
    let mut local = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&(comm.local_rank() as u64), &mut local[..])?;
    let members: Vec<usize> = (0..local.len()).filter(|rank| of == Of::Ranks || local[*rank] == 0).collect();
    match (members.len(), of) {
        (1, Of::Hosts) => Err(Failure::usage(format!(
            "pairs: all {} ranks are on one host, so there are no pairs of hosts; use --of ranks",
            comm.world_size()
        ))),
        (1, Of::Ranks) => Err(Failure::usage("pairs: there is only one rank; start more, with -g or a launcher")),
        _ => Ok(members),
    }
}

/// Runs all rounds. Returns a row for each member: its bandwidth to every member in 10^6 bytes per second, its latency
/// in microseconds, and zeros for itself.
fn measure(comm: &Communicator, members: &[usize], bytes: usize, stream: Duration) -> Result<Vec<[f64; 2]>, Failure> {
    let count = members.len();
    let me = members.iter().position(|rank| *rank == comm.rank());
    let mut mine = vec![[0.0_f64; 2]; count];
    let mut exchange = Exchange::new(comm, bytes, stream)?;
    for round in rounds::all(count) {
        comm.barrier()?;
        let Some((first, second)) = me.and_then(|me| round.into_iter().find(|pair| pair.0 == me || pair.1 == me)) else { continue };
        let other = if Some(first) == me { second } else { first };
        mine[other] = exchange.measure(members[other], Some(first) == me)?;
    }
    let mut all = vec![[0.0; 2]; count * comm.world_size()];
    comm.all_gather_into(&mine[..], &mut all[..])?;
    Ok(members.iter().flat_map(|rank| all[rank * count..(rank + 1) * count].to_vec()).collect())
}
