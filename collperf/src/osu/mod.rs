//! Measures messages between pairs of ranks, and the overlap of collectives with computation, as OSU's benchmarks do.

mod amounts;
mod columns;
mod computation;
pub(crate) mod latency;
pub(crate) mod overlap;
mod payload;
mod session;
pub(crate) mod windows;

use std::time::Duration;

use clap::Args;

use crate::job;
use amounts::Range;

/// The flags of all these benchmarks.
#[derive(Debug, Clone, Args)]
pub(crate) struct Common {
    #[command(flatten)]
    pub(crate) job: job::Flags,
    /// Sizes of messages: MAX, MIN: or MIN:MAX, in bytes; K, M and G are powers of 1024. Each size is twice the one
    /// before
    #[arg(short = 'm', long = "message-size", value_name = "MIN:MAX", value_parser = Range::parse)]
    range: Option<Range>,
    /// Timed iterations of each size
    #[arg(short = 'i', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    iterations: Option<u32>,
    /// Untimed iterations of each size, before the timed ones
    #[arg(short = 'x', long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100_000_000))]
    warmup: Option<u32>,
    /// Check the data of every iteration, and add a column with the result. Without -c, one iteration of each size is
    /// checked before the timed ones. Wrong data ends the run with exit code 7
    #[arg(short = 'c', long = "validation")]
    is_checked: bool,
    /// Add a column for each of these percentiles [default if no list is given: 50,99,99.9]. For bandwidths, P99 is
    /// the bandwidth that 99 % of the windows reach (OSU: the bandwidth that 99 % do not exceed)
    #[arg(short = 'z', long = "tail-lat", value_name = "LIST", num_args = 0..=1, require_equals = false, value_delimiter = ',',
        default_missing_value = "50,99,99.9", value_parser = percentile)]
    percentiles: Vec<f64>,
    /// Below each line, print percentiles and a histogram of the iterations. A second column has the pauses of the
    /// machine that are to be expected in the same time: before the first size, every rank reads the clock for 200 ms
    /// and counts the gaps
    #[arg(long)]
    histogram: bool,
    /// The cores that each rank is bound to, as for collperf COLLECTIVE [default: core if there are enough cores]
    #[arg(long, value_name = "none|core|cache|numa")]
    bind: Option<crate::launch::Bind>,
}

/// How long each size is measured (perftest's -D).
#[derive(Debug, Clone, Args)]
pub(crate) struct Lasting {
    /// Repeat the iterations of each size until this time has passed: a load that lasts
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = duration)]
    duration: Option<Duration>,
}

fn percentile(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or_else(|| "expected percentiles from 0 to 100, such as 50,99,99.9".to_owned())
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected a number of seconds from 0.001 to 1000000".to_owned())
}
