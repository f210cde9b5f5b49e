//! Runs a task on ranks. Either a launcher has started this process as one of them, or this process starts them.

use std::time::Duration;

use collectives::{Communicator, Secret};

use crate::arguments::{IS_ONE_RANK, Links};
use crate::failure::{CHECK, COLLECTIVE, Failure};
use crate::launch::{self, Job, Output, Store};
use crate::links::words;
use crate::machine::Load;

/// The launchers' variables for a process's rank: torchrun and collrun, Open MPI, PMIx, PMI, Slurm, Kubernetes.
const RANK_VARIABLES: [&str; 6] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];
/// How long ranks may take to stop after one has failed.
const GRACE: Duration = Duration::from_secs(5);
/// The number of ranks of a task if none is given.
const DEFAULT_RANKS: usize = 2;
/// The most ranks that this program starts on a host.
const MOST_RANKS: usize = 4096;

/// Flags of all tasks that need ranks but do not measure a collective.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Flags {
    /// Ranks to start on this host [default: 2]. Not allowed under a launcher, whose processes are the ranks
    #[arg(short = 'g', long = "ngpus", alias = "ranks-per-host", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,
    /// Fail if a rank is this many seconds late
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    timeout: u64,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value_t = Links::Auto)]
    transport: Links,
    /// This process is one of the ranks that collperf has started
    #[arg(long = &IS_ONE_RANK[2..], hide = true)]
    is_one_rank: bool,
}

impl Flags {
    /// Returns how many ranks this process will start; `None` if it is a rank itself.
    pub(crate) fn ranks_to_start(&self) -> Option<usize> {
        let starts = !self.is_one_rank && launcher().is_none();
        starts.then(|| self.ranks.map_or(DEFAULT_RANKS, usize::from))
    }

    /// Returns the name of the transport, as in CSV and JSON.
    pub(crate) fn transport(&self) -> &'static str {
        self.transport.name()
    }

    /// Returns the variable of a launcher that has started the ranks; `None` if this program has.
    pub(crate) fn launcher_of_ranks(&self) -> Option<&'static str> {
        if self.is_one_rank { None } else { launcher() }
    }

    /// Whether there are ranks: those of a launcher, or those that `-g` requests.
    pub(crate) fn are_ranks(&self) -> bool {
        self.is_one_rank || self.ranks.is_some() || launcher().is_some()
    }

    /// Returns how late a rank may be.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// Runs a task on every rank; returns the exit code.
pub(crate) fn run(flags: &Flags, task: impl FnOnce(&Communicator) -> Result<u8, Failure>) -> Result<u8, Failure> {
    run_as(flags, |builder| {
        let comm = builder.from_env()?;
        let code = task(&comm)?;
        comm.close()?;
        Ok(code)
    })
}

/// Runs a task that makes the communicator itself on every rank; returns the exit code.
pub(crate) fn run_as(flags: &Flags, task: impl FnOnce(collectives::Builder) -> Result<u8, Failure>) -> Result<u8, Failure> {
    if let Some(ranks) = flags.ranks_to_start() {
        return processes(ranks);
    }
    match (flags.is_one_rank, launcher(), flags.ranks) {
        (false, Some(launcher), Some(ranks)) => {
            Err(Failure::usage(format!("-g {ranks}: {launcher} is set, so this process is one rank of a launcher's job; leave out -g")))
        }
        _ => task(builder(flags)),
    }
}

/// Runs a task on every rank of a recorded job; `recorded` returns their number. Called only in the process that starts
/// the ranks.
pub(crate) fn run_recorded(
    flags: &Flags,
    recorded: impl FnOnce() -> Result<usize, Failure>,
    task: impl FnOnce(collectives::Builder) -> Result<u8, Failure>,
) -> Result<u8, Failure> {
    if flags.is_one_rank || launcher().is_some() {
        return run_as(flags, task);
    }
    let recorded = recorded()?;
    match flags.ranks.map(usize::from) {
        Some(asked) if asked != recorded => Err(Failure::usage(format!("-g {asked}: {}", other_number(recorded, asked)))),
        None if recorded > MOST_RANKS => Err(Failure::usage(format!(
            "the record has {recorded} ranks: start as many with a launcher, such as collrun, on several hosts"
        ))),
        _ => processes(recorded),
    }
}

/// Says that a job cannot replay a record.
pub(crate) fn other_number(recorded: usize, here: usize) -> String {
    format!("the record has {recorded} ranks, but this job has {here}: start {recorded} ranks")
}

fn builder(flags: &Flags) -> collectives::Builder {
    Communicator::builder().configure(|config| {
        config.transport = flags.transport.transport();
        config.timeout = flags.timeout();
    })
}

/// Returns a line for each host on which other processes use the cores that ranks need. Every rank calls it, and sleeps
/// briefly during the measurement.
pub(crate) fn busy_hosts(comm: &Communicator) -> Result<String, Failure> {
    let mine = Load::here().map_or([0.0, 0.0], |load| [load.busy, load.cores as f64]);
    let mut all = vec![0.0; 2 * comm.world_size()];
    comm.all_gather_into(&mine[..], &mut all[..])?;
    let peers = comm.peers();
    let line = |(rank, said): (usize, &[f64])| {
        let host = &peers[rank].host;
        let is_first = peers[..rank].iter().all(|other| other.host != *host);
        let ranks = peers.iter().filter(|other| other.host == *host).count();
        let note = Load { busy: said[0], cores: said[1] as usize }.note(ranks).filter(|_| is_first && said[1] > 0.0)?;
        Some(format!("# note: on {host} {note}\n"))
    };
    Ok(all.chunks_exact(2).enumerate().filter_map(line).collect())
}

/// Returns the variable in which a launcher gives this process its rank.
pub(crate) fn launcher() -> Option<&'static str> {
    RANK_VARIABLES.into_iter().find(|name| variable(name).is_some())
}

/// Returns an environment variable.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Returns the number of a process among those that [`processes`] has started.
pub(crate) fn child_number() -> usize {
    variable("LOCAL_RANK").and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Starts `ranks` ranks as processes that run this program with the same command line, and waits for them.
pub(crate) fn processes(ranks: usize) -> Result<u8, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::io("finding the path of this program, to start ranks", &error))?;
    let arguments = std::iter::once(IS_ONE_RANK.into()).chain(words().into_iter().skip(1)).collect();
    let known = Job { verdict: Some(CHECK), call_failed: Some(COLLECTIVE), ..Job::new(program.into(), arguments, ranks) };
    let job = Job { output: Output::FirstRank, grace: GRACE, ..known };
    let secret = Secret::from_env()?;
    let store = Store::local(secret.as_ref())?;
    launch::run("collperf", &job, &store, secret.as_ref()).map(|end| end.code).map_err(|refused| Failure::internal(refused.message))
}
