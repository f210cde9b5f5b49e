//! The command line: nccl-tests' flags if they apply here, refusals if they do not, and our own.

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
/// time per call, bandwidth of the algorithm and of the bus, and the number of wrong elements, with two buffers and
/// with one.
///
/// Exit codes: 0; 1 files and processes; 3 a collective failed; 4 time ran out; 5 not supported; 6 usage; 7 wrong
/// elements, or less bandwidth than NCCL_TESTS_MIN_BW asks for.
///
/// `collperf --explain-hang FOLDER` measures nothing: it reads the flight records that ranks have written there, and
/// reports which rank hung where. `collperf trace FOLDER` merges the traces that ranks have written, and `collperf
/// report A.json B.json` compares two results (`collperf report CELLS.csv` those of several libraries). `collperf
/// doctor` reports what this machine has and lacks, and whether ranks reach each other; `collperf pairs` measures every
/// pair of hosts and names those that are out of line; `collperf stragglers` names the rank that others wait for;
/// `collperf install-links FOLDER` makes links with nccl-tests' names. Each has its own --help.
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
    /// What to measure: all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all,
    /// all_gather_v, reduce_scatter_v, gather_v, scatter_v, all_to_all_v, sendrecv, barrier, hypercube, or all, which
    /// is every one but the last. Other spellings are accepted: allreduce, AllReduce, osu_allreduce, all_reduce_perf
    #[arg(value_name = "COLLECTIVE")]
    pub(crate) collective: String,

    /// Smallest size in bytes; K, M and G are powers of 1024 [default: 8]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = sizes::parse)]
    pub(crate) min_bytes: Option<usize>,
    /// Largest size in bytes [default: 128M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = sizes::parse)]
    pub(crate) max_bytes: Option<usize>,
    /// From size to size, add this many bytes [default: multiply, see -f]
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", value_parser = sizes::parse)]
    pub(crate) step_bytes: Option<usize>,
    /// From size to size, multiply by this [default: 2, unless -i is given]
    #[arg(short = 'f', long = "stepfactor", value_name = "N")]
    pub(crate) step_factor: Option<usize>,
    /// These sizes instead of a sweep
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = sizes::parse)]
    pub(crate) sizes: Vec<usize>,

    /// Timed calls per row
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) iterations: u32,
    /// Calls of every size before anything is timed
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N", default_value_t = 1)]
    pub(crate) warmup: u32,
    /// Repeat the sweep this often; 0: until interrupted
    #[arg(short = 'N', long = "run_cycles", alias = "run-cycles", value_name = "N", default_value_t = 1)]
    pub(crate) cycles: u32,
    /// Checked calls per row; 0: none
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    pub(crate) check: u32,
    /// sum, prod, min, max, avg, band, bor, bxor, mulsum, or all
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum")]
    pub(crate) op: String,
    /// f32, f64, f16, bf16, f8e4m3, f8e5m2, i8, i16, i32, i64, u8, u16, u32, u64, bool (or nccl-tests' names), or all
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "f32")]
    pub(crate) datatype: String,
    /// The root rank, if the collective has one; -1 or all: each in turn
    #[arg(short = 'r', long, value_name = "RANK", default_value = "0")]
    pub(crate) root: String,
    /// When to wait: 0: never between calls; 1: for each call, and in a barrier after it, both timed; 2: for each call
    /// (on the host backend as 0, since every call there waits); 3: as 1, but the barrier is not timed. With -G, a call
    /// is a launch of the graph
    #[arg(short = 'z', long, value_name = "0-3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) blocking: u8,
    /// Give up a call after this many seconds
    #[arg(short = 'T', long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) timeout: Option<u64>,
    /// How to make the time of a row from those of the ranks: 0: rank 0's; 1: mean; 2: least; 3: largest
    #[arg(short = 'a', long, value_name = "0-3", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) average: u8,
    /// Let buffers begin this many elements after an aligned address
    #[arg(short = 'u', long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16))]
    pub(crate) unalign: u16,
    /// 1: also time each call by itself (on devices with events), and print least, largest, 99th percentile and
    /// variation
    #[arg(short = 'I', long = "per_iter_timing", alias = "per-iter-timing", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) per_iteration: u8,
    /// Leave this many of the first individually timed calls out of their figures
    #[arg(short = 'K', long = "per_iter_skip", alias = "per-iter-skip", value_name = "N", default_value_t = 0)]
    pub(crate) skip: u32,
    /// 1: print the time of day (UTC) in each row
    #[arg(short = 'S', long = "report_timestamps", alias = "report-timestamps", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) timestamps: u8,

    /// Ranks to start on this host, one GPU each [default: the number of GPUs, else 2]; with -t, ranks for each of its
    /// threads. In a process that a launcher started: ranks of this process [default: 1], which makes processes x -t x
    /// -g in all
    #[arg(short = 'g', long = "ngpus", alias = "ranks-per-host", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) ranks_here: Option<u16>,
    /// Ranks are threads: this many times -g [with this, -g is 1 unless given]
    #[arg(short = 't', long = "nthreads", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) threads: Option<u16>,
    /// What ranks are on this host [default: process; thread with -t or if a launcher has started this process]
    #[arg(long, value_enum)]
    pub(crate) ranks: Option<RankKind>,
    /// Calls that are made together in each of the -n iterations: on devices in one NCCL group, on the host backend one
    /// after the other. The time of a row is that of one call
    #[arg(short = 'm', long = "agg_iters", alias = "agg-iters", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) aggregated: u32,
    /// 0 or 1, without effect: ranks always start in parallel
    #[arg(short = 'p', long = "parallel_init", alias = "parallel-init", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) parallel_init: u8,
    /// Use nccl-tests' defaults: -b 32M -e 32M -i 1M -g 1. Its names for the tests, such as all_reduce_perf, do so too:
    /// see collperf install-links
    #[arg(long)]
    pub(crate) nccl_tests_defaults: bool,
    /// This process is a rank that collperf has started for -t and -g
    #[arg(long = &IS_ONE_RANK[2..], hide = true)]
    pub(crate) is_one_rank: bool,
    /// Where buffers are: auto uses devices if every rank gets one, else host memory
    #[arg(long, alias = "plane", value_enum, default_value_t = Backend::Auto)]
    pub(crate) backend: Backend,
    /// How ranks of the host backend reach each other
    #[arg(long, value_enum, default_value_t = Links::Auto)]
    pub(crate) transport: Links,
    /// Bind each rank. core: one core with all its hardware threads, near those of the other ranks; cache, numa: all
    /// cores of one last-level cache or NUMA node; none [default: core if there are as many cores as ranks; none if
    /// there are fewer, on devices, and under another launcher]
    #[arg(long, value_name = "none|core|cache|numa")]
    pub(crate) bind: Option<Bind>,
    /// Like --bind core, but ranks share cores if there are too few
    #[arg(long, conflicts_with = "bind")]
    pub(crate) pin: bool,
    /// The collectives that `all` stands for
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) colls: Vec<String>,
    /// Sample each cell for this long, in batches of at least 200 us of calls back to back, each after a barrier; print
    /// CSV with least and median of the slowest rank's time per call
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub(crate) cell_ms: Option<Duration>,

    /// Before each collective, measure calls of six sizes, for about a tenth of a second; then add to each row how it
    /// is done, how long it should take, and that over the time it took. Host backend only
    #[arg(long)]
    pub(crate) explain: bool,

    #[command(flatten)]
    pub(crate) device: DeviceFlags,

    /// Write the results here as JSON. All files of results replace older ones as a whole at the end, even if the run
    /// ends early
    #[arg(short = 'J', long = "output_file", alias = "output-file", value_name = "FILE.json")]
    pub(crate) json: Option<PathBuf>,
    /// Write the results here as CSV, line by line; -: to standard output, instead of the table
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write the results here for Prometheus (the node exporter's textfile collector)
    #[arg(long, value_name = "FILE.prom")]
    pub(crate) prometheus: Option<PathBuf>,
    /// Print Markdown tables instead of nccl-tests' table
    #[arg(long)]
    pub(crate) markdown: bool,
    /// Write a page of one file: verdict, pictures, results, ranks and environment
    #[arg(long, value_name = "FILE.html")]
    pub(crate) html: Option<PathBuf>,
    /// Draw time and bus bandwidth over size; with several cycles (-N) the medians, in a band from least to largest
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
    /// Devices: capture the timed calls in a CUDA graph and launch it this often; 0: no graph
    #[arg(short = 'G', long = "cudagraph", value_name = "N", default_value_t = 0)]
    pub(crate) graph: u32,
    /// Devices: 1: report the processor's time to issue a call instead of the call's time
    #[arg(short = 'C', long = "report_cputime", alias = "report-cputime", value_name = "0/1", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) issue_time: u8,
    /// Devices: 1: register buffers with NCCL; 2: as windows for symmetric memory. Host: 1, 2: use buffers from the
    /// library, in memory that the ranks of a host share
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
    /// Returns why the host backend refuses the first of these flags that needs a device.
    pub(crate) fn refusal(&self) -> Option<String> {
        let flags = [
            ("-G", self.graph, "the host backend has no CUDA graphs"),
            ("-C", self.issue_time.into(), "calls of the host backend are done when they return, so the time to issue them is the time"),
            ("-y", self.null_stream.into(), "the host backend has no streams"),
            ("-M", self.memory.into(), "the host backend uses no GPU memory"),
        ];
        let switched_on = flags.into_iter().find(|(_, value, _)| *value != 0);
        let policy = self.cta_policy.map(|policy| ("-x", policy.into(), "the host backend has no thread blocks"));
        switched_on.or(policy).map(|(flag, value, reason)| format!("{flag} {value}: {reason}"))
    }
}

/// nccl-tests' flags that do not apply here: accepted so that they can be refused with a reason.
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
            ("-D", &self.device_implementation, "0", "collperf calls the library, which has no kernels of NCCL's device interface"),
            ("-V", &self.cta_count, "", "collperf has no kernels of NCCL's device interface whose blocks could be counted"),
        ];
        flags.into_iter().find_map(|(flag, value, off, reason)| {
            let value = value.as_deref().filter(|value| *value != off)?;
            Some(format!("{flag} {value}: {reason}"))
        })
    }
}

/// What a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RankKind {
    /// A process
    Process,
    /// A thread of this process
    Thread,
}

/// Where buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// On the device if there is one
    Auto,
    /// In host memory
    Host,
    /// In device memory
    Device,
}

/// How ranks of the host backend reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Links {
    /// Shared memory inside a host, TCP between hosts
    Auto,
    /// Shared memory
    Shm,
    /// TCP, also inside a host
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

/// Reads a time in milliseconds, fractions allowed.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let milliseconds: f64 = text.parse().map_err(|_| "not a number of milliseconds".to_owned())?;
    match Duration::try_from_secs_f64(milliseconds / 1e3) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("must be more than zero".to_owned()),
    }
}
