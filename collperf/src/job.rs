//! Where ranks come from: a launcher that has started this process as one of them, or this process, whose children they are.

use std::time::Duration;

use collectives::{Communicator, Secret};

use crate::arguments::{IS_ONE_RANK, Links};
use crate::failure::{CHECK, COLLECTIVE, Failure};
use crate::launch::{self, Job, Output, Store};
use crate::links::words;
use crate::machine::Load;

/// Variables by which launchers tell a process its rank: torchrun and collrun, Open MPI, PMIx, PMI, Slurm, Kubernetes.
const RANK_VARIABLES: [&str; 6] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];
/// How long ranks may take to stop after one has failed.
const GRACE: Duration = Duration::from_secs(5);
/// The ranks of a task that names none.
const DEFAULT_RANKS: usize = 2;

/// What tasks have in common that need ranks, and are no measurement of a collective.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Flags {
    /// Ranks to start on this host [default: 2]. Under a launcher its processes are the ranks
    #[arg(short = 'g', long = "ngpus", alias = "ranks-per-host", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,
    /// Give up on a rank that is so many seconds late
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    timeout: u64,
    /// How ranks reach each other
    #[arg(long, value_enum, default_value_t = Links::Auto)]
    transport: Links,
    /// This process is one of the ranks, which collperf has started
    #[arg(long = &IS_ONE_RANK[2..], hide = true)]
    is_one_rank: bool,
}

impl Flags {
    /// Whether there are ranks: one of a launcher's, or those that are asked for.
    pub(crate) fn are_ranks(&self) -> bool {
        self.is_one_rank || self.ranks.is_some() || launcher().is_some()
    }

    /// How late a rank may be.
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

/// The same for a task that makes the communicator itself.
pub(crate) fn run_as(flags: &Flags, task: impl FnOnce(collectives::Builder) -> Result<u8, Failure>) -> Result<u8, Failure> {
    let launcher = launcher();
    match (flags.is_one_rank, launcher, flags.ranks) {
        (false, None, ranks) => processes(ranks.map_or(DEFAULT_RANKS, usize::from)),
        (false, Some(launcher), Some(ranks)) => {
            Err(Failure::usage(format!("-g {ranks}: {launcher} makes this process one of a job's, whose processes are the ranks")))
        }
        _ => task(builder(flags)),
    }
}

fn builder(flags: &Flags) -> collectives::Builder {
    Communicator::builder().configure(|config| {
        config.transport = flags.transport.transport();
        config.timeout = flags.timeout();
    })
}

/// A line for each host of which others use the cores that ranks want. Every rank calls it, and sleeps a moment while that is measured.
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

/// The variable by which a launcher has told this process its rank.
pub(crate) fn launcher() -> Option<&'static str> {
    RANK_VARIABLES.into_iter().find(|name| variable(name).is_some())
}

/// A variable of the environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The number of a process that [`processes`] has started, among those.
pub(crate) fn child_number() -> usize {
    variable("LOCAL_RANK").and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Starts so many ranks as processes that run this program with the same command line, and waits for them.
pub(crate) fn processes(ranks: usize) -> Result<u8, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::io("finding this program, to start ranks", &error))?;
    let arguments = std::iter::once(IS_ONE_RANK.into()).chain(words().into_iter().skip(1)).collect();
    let known = Job { verdict: Some(CHECK), call_failed: Some(COLLECTIVE), ..Job::new(program.into(), arguments, ranks) };
    let job = Job { output: Output::FirstRank, grace: GRACE, ..known };
    let secret = Secret::from_env()?;
    let store = Store::local(secret.as_ref())?;
    launch::run("collperf", &job, &store, secret.as_ref()).map(|end| end.code).map_err(|refused| Failure::internal(refused.message))
}
