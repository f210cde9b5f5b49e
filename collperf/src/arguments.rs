//! The command line: nccl-tests' flags and our own. Flags of nccl-tests that do not apply here are refused.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use collectives::Transport;

use crate::launch::Bind;
use crate::sizes;

/// The first argument of a process that collperf has started as a rank.
pub(crate) const IS_ONE_RANK: &str = "--is-one-rank";

/// Measures a collective, as nccl-tests does, and checks its results.
///
/// Starts its own ranks, or is one of them under torchrun, collrun, Slurm or mpirun. Prints the table of nccl-tests:
/// time per call, algorithm bandwidth, bus bandwidth and the number of wrong elements, out of place and in place.
///
/// Exit codes: 0 success; 1 a file or process error; 3 a collective failed; 4 a call timed out; 5 not supported; 6
/// wrong command line or environment variable; 7 a check failed: wrong elements, a bandwidth below nine tenths of
/// NCCL_TESTS_MIN_BW, a --threshold of report, pairs or stragglers exceeded, or a BAD finding of doctor; 128 + N:
/// signal N ended the run, such as 130 after Ctrl-C, or 141 if no process reads the output any more, as with head.
///
/// `collperf --explain-hang FOLDER` measures nothing: it reads the flight records that ranks have written there, and
/// reports which rank hung in which call. `collperf ps` asks the ranks of running jobs where they are. `collperf trace
/// FOLDER` merges the traces that ranks have written, and `collperf report A.json B.json` compares two results
/// (`collperf report CELLS.csv` those of several libraries).
/// `collperf doctor` reports what this machine has and lacks, and whether ranks can reach each other; `collperf pairs`
/// measures every pair of hosts and names the slow ones; `collperf osu_latency`, `osu_bw`, `osu_bibw`, `osu_mbw_mr` and
/// `osu_iallreduce` measure what OSU's benchmarks of these names measure; `collperf stragglers` names the rank that others wait for;
/// `collperf replay RECORD` makes the calls of a recorded job again;
/// `collperf install-links FOLDER` makes links with the names of nccl-tests' programs. Each of these has its own
/// --help.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "collperf",
    version,
    disable_version_flag = true,
    disable_help_flag = true,
    max_term_width = 110,
    allow_negative_numbers = true,
    args_override_self = true
)]
pub(crate) struct Arguments {
    /// The collective: all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all,
    /// all_gather_v, reduce_scatter_v, gather_v, scatter_v, all_to_all_v, sendrecv, barrier, hypercube, or all
    /// (every one except hypercube). Other spellings are accepted: allreduce, AllReduce, osu_allreduce, all_reduce_perf
    #[arg(value_name = "COLLECTIVE")]
    pub(crate) collective: String,

    /// Smallest size in bytes; K, M and G are powers of 1024 [default: 8]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = sizes::parse)]
    pub(crate) min_bytes: Option<usize>,
    /// Largest size in bytes [default: 128M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = sizes::parse)]
    pub(crate) max_bytes: Option<usize>,
    /// Add this many bytes from one size to the next [default: multiply, see -f]
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", value_parser = sizes::parse)]
    pub(crate) step_bytes: Option<usize>,
    /// Multiply by this from one size to the next [default: 2, unless -i is given]
    #[arg(short = 'f', long = "stepfactor", value_name = "N")]
    pub(crate) step_factor: Option<usize>,
    /// Measure these sizes instead of a sweep
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = sizes::parse)]
    pub(crate) sizes: Vec<usize>,

    /// Timed calls per row
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) iterations: u32,
    /// Untimed calls of every size, before the first timed call
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N", default_value_t = 1)]
    pub(crate) warmup: u32,
    /// Repeat the sweep this many times; 0: until interrupted
    #[arg(short = 'N', long = "run_cycles", alias = "run-cycles", value_name = "N", default_value_t = 1)]
    pub(crate) cycles: u32,
    /// Calls per row whose results are checked; 0: none
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    pub(crate) check: u32,
    /// The op: sum, prod, min, max, avg, band, bor, bxor, mulsum, or all
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum")]
    pub(crate) op: String,
    /// The element type: f32, f64, f16, bf16, f8e4m3, f8e5m2, i8, i16, i32, i64, u8, u16, u32, u64, bool (or
    /// nccl-tests' names), or all
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "f32")]
    pub(crate) datatype: String,
    /// The root rank, if the collective has one; -1 or all: each rank in turn
    #[arg(short = 'r', long, value_name = "RANK", default_value = "0")]
    pub(crate) root: String,
    /// When to wait between calls: 0: never; 1: after each call, with a barrier, both timed; 2: after each call,
    /// without a barrier; 3: like 1, but the barrier is not timed. With -m, after each group; with -G, after each
    /// launch of the graph. On the host backend every call waits, so 2 is the same as 0
    #[arg(short = 'z', long, value_name = "0-3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) blocking: u8,
    /// Timeout of each call, in seconds
    #[arg(short = 'T', long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) timeout: Option<u64>,
    /// Which time a row shows: 0: rank 0's; 1: the mean of all ranks; 2: the smallest; 3: the largest
    #[arg(short = 'a', long, value_name = "0-3", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) average: u8,
    /// Start buffers this many elements after an aligned address
    #[arg(short = 'u', long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16))]
    pub(crate) unalign: u16,
    /// 1: also time each call separately (on devices with events), and print the minimum, maximum, 99th percentile and
    /// coefficient of variation
    #[arg(short = 'I', long = "per_iter_timing", alias = "per-iter-timing", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) per_iteration: u8,
    /// Leave this many of the first calls out of the statistics of separately timed calls (-I 1, -J, --csv)
    #[arg(short = 'K', long = "per_iter_skip", alias = "per-iter-skip", value_name = "N", default_value_t = 0)]
    pub(crate) skip: u32,
    /// Below each row, print percentiles (50, 99, 99.9) and a histogram of separately timed calls, with the pauses of
    /// the machine that are to be expected in the same time. To count the pauses, every rank first reads the clock for
    /// 200 ms and notes the gaps
    #[arg(long)]
    pub(crate) histogram: bool,
    /// 1: print the time of day (UTC) in each row
    #[arg(short = 'S', long = "report_timestamps", alias = "report-timestamps", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) timestamps: u8,

    /// Ranks to start on this host, with one GPU each [default: the number of GPUs, or 2 if there are none]. Under a
    /// launcher: ranks of each process [default: 1]. The total number of ranks is processes x -t x -g
    #[arg(short = 'g', long = "ngpus", alias = "ranks-per-host", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) ranks_here: Option<u16>,
    /// Start N times -g ranks as threads. The default of -g is then 1
    #[arg(short = 't', long = "nthreads", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) threads: Option<u16>,
    /// Start ranks as processes or threads [default: process; thread with -t, or if a launcher has started this
    /// process]
    #[arg(long, value_enum)]
    pub(crate) ranks: Option<RankKind>,
    /// Calls in each of the -n iterations: on devices in one NCCL group, on the host backend one after the other. A row
    /// shows the time of one call
    #[arg(short = 'm', long = "agg_iters", alias = "agg-iters", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) aggregated: u32,
    /// No effect: ranks always start in parallel
    #[arg(short = 'p', long = "parallel_init", alias = "parallel-init", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) parallel_init: u8,
    /// Use nccl-tests' defaults: -b 32M -e 32M -i 1M -g 1. They also apply if collperf is called by the name of one of
    /// its tests, such as all_reduce_perf: see collperf install-links
    #[arg(long)]
    pub(crate) nccl_tests_defaults: bool,
    /// This process is a rank that collperf has started for -t and -g
    #[arg(long = &IS_ONE_RANK[2..], hide = true)]
    pub(crate) is_one_rank: bool,
    /// The kind of memory for buffers. auto: device memory if every rank gets a device, else host memory
    #[arg(long, alias = "plane", value_enum, default_value_t = Backend::Auto)]
    pub(crate) backend: Backend,
    /// How ranks of the host backend reach each other
    #[arg(long, value_enum, default_value_t = Links::Auto)]
    pub(crate) transport: Links,
    /// The cores that each rank is bound to. core: one core with all its hardware threads, near those of the other
    /// ranks; cache, numa: all cores of one last-level cache or NUMA node; none: not bound [default: core if there are
    /// as many cores as ranks; none if there are fewer, on devices, and under another launcher]
    #[arg(long, value_name = "none|core|cache|numa")]
    pub(crate) bind: Option<Bind>,
    /// Like --bind core, but ranks share cores if there are too few
    #[arg(long, conflicts_with = "bind")]
    pub(crate) pin: bool,
    /// The collectives that `all` measures
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) colls: Vec<String>,
    /// Measure each cell (a call of one size) for this many milliseconds, in batches of calls that take at least 200
    /// us. A barrier precedes each batch. Prints CSV: minimum and median of the slowest rank's time per call
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub(crate) cell_ms: Option<Duration>,

    /// Host backend only: add to each row the algorithm, a predicted time, and the ratio of predicted to measured time.
    /// Predictions are based on calls of six sizes, which are measured for about a tenth of a second before each
    /// collective
    #[arg(long)]
    pub(crate) explain: bool,

    #[command(flatten)]
    pub(crate) device: DeviceFlags,

    /// Write the results to this file as JSON. An existing file is replaced only when the run ends, even if it ends
    /// early; the same holds for --prometheus, --html and --plot
    #[arg(short = 'J', long = "output_file", alias = "output-file", value_name = "FILE.json")]
    pub(crate) json: Option<PathBuf>,
    /// Write the results to this file as CSV, line by line; -: to standard output, instead of the table
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write the results to this file for Prometheus (the node exporter's textfile collector)
    #[arg(long, value_name = "FILE.prom")]
    pub(crate) prometheus: Option<PathBuf>,
    /// Print Markdown tables instead of nccl-tests' table
    #[arg(long)]
    pub(crate) markdown: bool,
    /// Write an HTML page in one file: verdict, pictures, results, ranks and environment
    #[arg(long, value_name = "FILE.html")]
    pub(crate) html: Option<PathBuf>,
    /// Draw time and bus bandwidth over size in this SVG file; with several cycles (-N), medians and a band from
    /// minimum to maximum
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Write the times of every call of every rank as a trace for Perfetto or chrome://tracing. Recording makes calls
    /// about 0.2 us longer
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print help; --help prints more
    #[arg(short = 'h', long, action = clap::ArgAction::Help)]
    help: Option<bool>,

    /// Print version
    // Without a short form: nccl-tests has another meaning for -V.
    #[arg(long, action = clap::ArgAction::Version)]
    version: Option<bool>,

    #[command(flatten)]
    pub(crate) elsewhere: Elsewhere,
}

/// Flags that apply to devices only.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct DeviceFlags {
    /// Devices: capture the timed calls in a CUDA graph and launch it this many times; 0: no graph
    #[arg(short = 'G', long = "cudagraph", value_name = "N", default_value_t = 0)]
    pub(crate) graph: u32,
    /// Devices: 1: report the time to issue a call, instead of the time of the call
    #[arg(short = 'C', long = "report_cputime", alias = "report-cputime", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) issue_time: u8,
    /// Devices: 1: register buffers with NCCL; 2: register them as windows for symmetric memory. Host backend: 1, 2:
    /// take buffers from `alloc`, in memory that the ranks of a host share
    #[arg(short = 'R', long = "local_register", alias = "local-register", value_name = "0-2", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub(crate) register: u8,
    /// Devices: 1: queue calls on the null stream
    #[arg(short = 'y', long = "stream_null", alias = "stream-null", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) null_stream: u8,
    /// Devices: NCCL's policy for thread blocks: 0: default; 1: efficiency; 2: zero
    #[arg(short = 'x', long = "cta_policy", alias = "cta-policy", value_name = "0-2", value_parser = clap::value_parser!(u8).range(0..=2))]
    pub(crate) cta_policy: Option<u8>,
    /// Devices: 1: print the device memory in use
    #[arg(short = 'M', long, value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) memory: u8,
}

impl DeviceFlags {
    /// Returns why the host backend refuses the first of these flags that is given.
    pub(crate) fn refusal(&self) -> Option<String> {
        let flags = [
            ("-G", self.graph, "the host backend has no CUDA graphs"),
            (
                "-C",
                self.issue_time.into(),
                "a call of the host backend has completed when it returns, so there is no separate issue time to measure",
            ),
            ("-y", self.null_stream.into(), "the host backend has no streams"),
            ("-M", self.memory.into(), "the host backend uses no GPU memory"),
        ];
        let switched_on = flags.into_iter().find(|(_, value, _)| *value != 0);
        let policy = self.cta_policy.map(|policy| ("-x", policy.into(), "the host backend has no thread blocks"));
        switched_on.or(policy).map(|(flag, value, reason)| format!("{flag} {value}: {reason}"))
    }
}

/// nccl-tests' flags that do not apply here. They are parsed so that they can be refused with a reason.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Elsewhere {
    #[arg(short = 'D', long = "device_implementation", alias = "device-implementation", hide = true)]
    device_implementation: Option<String>,
    #[arg(short = 'V', long = "device_cta_count", alias = "device-cta-count", hide = true)]
    cta_count: Option<String>,
}

impl Elsewhere {
    /// Returns why the first of these flags is refused.
    pub(crate) fn refusal(&self) -> Option<String> {
        let flags = [
            ("-D", &self.device_implementation, "0", "collperf has no kernels that use NCCL's device interface; use -D 0"),
            ("-V", &self.cta_count, "", "collperf has no kernels that use NCCL's device interface; leave out the flag"),
        ];
        flags.into_iter().find_map(|(flag, value, off, reason)| {
            let value = value.as_deref().filter(|value| *value != off)?;
            Some(format!("{flag} {value}: {reason}"))
        })
    }
}

/// The kind of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RankKind {
    /// A process
    Process,
    /// A thread of this process
    Thread,
}

/// The kind of memory for buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// Buffers in device memory if there is a device, else in host memory
    Auto,
    /// Buffers in host memory
    Host,
    /// Buffers in device memory
    Device,
}

/// How ranks of the host backend reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Links {
    /// Shared memory within a host, TCP between hosts
    Auto,
    /// Shared memory
    Shm,
    /// TCP, even within a host
    Tcp,
}

impl Links {
    /// Returns the library's transport.
    pub(crate) fn transport(self) -> Transport {
        match self {
            Links::Auto => Transport::Auto,
            Links::Shm => Transport::Shm,
            Links::Tcp => Transport::Tcp,
        }
    }

    /// Returns the name in CSV, JSON and plots.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Links::Auto => "auto",
            Links::Shm => "shm",
            Links::Tcp => "tcp",
        }
    }

    /// Returns the name for calls on buffers from the library.
    pub(crate) fn name_of_allocated(self) -> &'static str {
        match self {
            Links::Auto => "auto-alloc",
            Links::Shm => "shm-alloc",
            Links::Tcp => "tcp-alloc",
        }
    }
}

/// The longest time for a cell: a day.
const MOST_CELL: Duration = Duration::from_secs(24 * 3600);

/// Reads a time in milliseconds, fractions allowed.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let milliseconds: f64 = text.parse().map_err(|_| "expected a number of milliseconds".to_owned())?;
    match Duration::try_from_secs_f64(milliseconds / 1e3) {
        Ok(time) if !time.is_zero() && time <= MOST_CELL => Ok(time),
        _ => Err(format!("expected more than 0 and at most {} milliseconds", MOST_CELL.as_millis())),
    }
}
