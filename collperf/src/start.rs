//! Where the ranks come from: a launcher that has started this process as one, this process's threads, or its children.

use std::thread;
use std::time::Duration;

use collectives::{Communicator, Secret};
#[cfg(feature = "cuda")]
use collectives::{
    Config, DeviceChoice,
    nccl::{CheckDeviceCalls, CtaPolicy, NcclConfig},
};

use sha2::{Digest, Sha256};

use crate::arguments::{Arguments, Plane, RankKind};
use crate::failure::{CHECK, Failure};
use crate::gpus;
use crate::launch::{self, Job, Output, Store};
use crate::report::say;
use crate::run::run;
use crate::settings::Settings;
use crate::trace;

/// Variables by which launchers tell a process its rank: torchrun and collrun, Open MPI, PMIx, PMI, Slurm, Kubernetes.
const RANK_VARIABLES: [&str; 6] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];
/// The ranks to start where nothing is said and there is no GPU.
const DEFAULT_RANKS: usize = 2;
/// How long ranks may take to stop after one has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Does what the command line asks for and returns the exit code.
pub(crate) fn start(arguments: &Arguments) -> Result<u8, Failure> {
    let least_busbw = std::env::var("NCCL_TESTS_MIN_BW").ok();
    let settings = Settings::new(arguments, least_busbw.as_deref())?;
    let launched = RANK_VARIABLES.into_iter().find(|name| std::env::var_os(name).is_some());
    match (launched, settings.rank_kind) {
        (Some(variable), RankKind::Thread) => {
            Err(Failure::usage(format!("--ranks thread: this process is a rank already, since {variable} is set")))
        }
        (Some(variable), RankKind::Process) => {
            let comm = builder(&settings).from_env()?;
            let asked = arguments.ranks_here.map(usize::from).filter(|asked| *asked != comm.world_size());
            if let (Some(asked), 0) = (asked, comm.rank()) {
                let size = comm.world_size();
                say(&format!("-g {asked} has no effect: {variable} makes this process one of {size} ranks"));
            }
            finish(comm, &settings)
        }
        (None, kind) => {
            let ranks = ranks_here(&settings)?;
            // Said once, rather than by every rank.
            settings.check_root(ranks)?;
            if kind == RankKind::Thread { threads(&settings, ranks) } else { processes(ranks) }
        }
    }
}

/// Runs a rank to its end.
fn finish(comm: Communicator, settings: &Settings) -> Result<u8, Failure> {
    check_alike(&comm, settings)?;
    let code = run(&comm, settings)?;
    if let Some(path) = &settings.trace {
        trace::collect(&comm, path)?;
    }
    comm.close()?;
    Ok(code)
}

/// How many ranks to start: as many as asked for, else one for each GPU.
fn ranks_here(settings: &Settings) -> Result<usize, Failure> {
    if settings.plane == Plane::Host {
        return Ok(settings.ranks.unwrap_or(DEFAULT_RANKS));
    }
    let counted = gpus::count();
    match (&counted, settings.plane, &settings.device.refusal) {
        (Err(reason), Plane::Device, _) => Err(Failure::unsupported(format!("--plane device: {reason}"))),
        (Err(reason), _, Some(refusal)) => Err(Failure::unsupported(format!("{refusal}, and there is no device: {reason}"))),
        _ => Ok(settings.ranks.or(counted.ok()).unwrap_or(DEFAULT_RANKS)),
    }
}

/// What all ranks set.
fn builder(settings: &Settings) -> collectives::Builder {
    let builder = Communicator::builder();
    #[cfg(feature = "cuda")]
    let builder = with_device(builder.configure(unchecked), settings);
    builder.configure(|config| {
        config.transport = settings.transport.transport();
        config.trace = settings.trace.is_some();
        config.timeout = settings.timeout.unwrap_or(config.timeout);
    })
}

/// Device calls as they are when nobody compares them: that is what is measured, and their results are checked.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "ranks that do alike")]
fn unchecked(config: &mut Config) {
    // SAFETY: all ranks run this program, with the same settings (compared in `finish`, before the first call on a device), and walk one
    // list of calls, which the settings and the number of ranks decide: kind, op, type, root and lengths are the same on all. There are
    // no messages.
    config.check_device_calls = unsafe { CheckDeviceCalls::unchecked_after(0) };
}

/// Refuses ranks that were given other arguments than rank 0: they would make other calls.
fn check_alike(comm: &Communicator, settings: &Settings) -> Result<(), Failure> {
    let mine: [u8; 32] = Sha256::digest(format!("{settings:?}")).into();
    let mut all = vec![[0; 32]; comm.world_size()];
    comm.all_gather_into(&[mine], &mut all[..])?;
    match all.iter().position(|theirs| *theirs != all[0]) {
        None => Ok(()),
        Some(other) => Err(Failure::usage(format!("rank {other} was given other arguments than rank 0: give all ranks the same"))),
    }
}

/// Asks for the device plane that the command line names.
#[cfg(feature = "cuda")]
fn with_device(builder: collectives::Builder, settings: &Settings) -> collectives::Builder {
    let policy = match settings.device.cta_policy {
        None => return choose_device(builder, settings.plane),
        Some(0) => CtaPolicy::Default,
        Some(1) => CtaPolicy::Efficiency,
        Some(_) => CtaPolicy::Zero,
    };
    choose_device(builder, settings.plane).configure(|config| config.nccl = NcclConfig::default().cta_policy(policy))
}

#[cfg(feature = "cuda")]
fn choose_device(builder: collectives::Builder, plane: Plane) -> collectives::Builder {
    match plane {
        Plane::Host => builder,
        Plane::Auto => builder.device(DeviceChoice::Local),
        Plane::Device => builder.require_device(DeviceChoice::Local),
    }
}

/// Every rank is a thread.
fn threads(settings: &Settings, ranks: usize) -> Result<u8, Failure> {
    let comms = builder(settings).local(ranks)?;
    let ended: Vec<Result<u8, Failure>> = thread::scope(|scope| {
        let rank = |comm: Communicator| scope.spawn(move || finish(comm, settings));
        let ranks: Vec<_> = comms.into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(Failure::internal("a rank panicked")))).collect()
    });
    // Those that only lost a peer know less than the one that failed first.
    let (codes, mut failures): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_ok);
    failures.sort_by_key(|failure| failure.as_ref().is_err_and(|failure| failure.lost_a_peer));
    match failures.into_iter().next() {
        Some(failure) => failure,
        None => Ok(codes.into_iter().flatten().max().unwrap_or(0)),
    }
}

/// Every rank is a process that runs this program with the same command line.
fn processes(ranks: usize) -> Result<u8, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::io("finding this program, to start ranks", &error))?;
    let job = Job {
        program: program.into(),
        arguments: std::env::args_os().skip(1).collect(),
        local_world_size: ranks,
        nodes: 1,
        node: 0,
        output: Output::FirstRank,
        grace: GRACE,
        verdict: Some(CHECK),
        keep_going: false,
    };
    let store = Store::local(Secret::from_env()?.as_ref())?;
    launch::run("collperf", &job, &store).map_err(|refused| Failure::internal(refused.message))
}
