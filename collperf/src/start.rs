//! Starts the ranks, as threads or as children of this process, or runs those of a process that a launcher has started.

use std::thread;

use collectives::Communicator;
#[cfg(feature = "cuda")]
use collectives::{
    Config, DeviceChoice,
    nccl::{CheckDeviceCalls, CtaPolicy, NcclConfig},
};

use sha2::{Digest, Sha256};

use crate::arguments::{Arguments, Backend, RankKind};
use crate::environment::Environment;
use crate::failure::Failure;
use crate::gpus;
use crate::job;
use crate::launch::{Binding, Width};
use crate::process;
use crate::report::tell_written;
use crate::run::run;
use crate::settings::Settings;
use crate::trace;

/// The number of ranks if none is given and there is no GPU.
const DEFAULT_RANKS: usize = 2;
/// Executes the command line and returns the exit code.
pub(crate) fn start(arguments: &Arguments) -> Result<u8, Failure> {
    let environment = Environment::read(&job::variable)?;
    let mut settings = Settings::new(arguments, &environment)?;
    if arguments.is_one_rank {
        let comm = builder(&settings, job::child_number()).from_env()?;
        let number = comm.rank();
        return finish(comm, number, &settings);
    }
    settings.launcher = job::launcher();
    if let Some(launcher) = settings.launcher {
        return launched(&settings, launcher);
    }
    let ranks = ranks_here(&settings)?;
    // Checked and reported once, instead of by every rank.
    settings.check_ranks(ranks)?;
    check_devices(&settings, ranks)?;
    Binding::here(settings.bind, Width::One, ranks).map_err(Failure::usage)?;
    let are_threads = settings.threads.is_some() || settings.rank_kind == Some(RankKind::Thread);
    if are_threads { threads(&settings, ranks) } else { job::processes(ranks) }
}

/// Runs the ranks of a process that a launcher has started as one of several.
fn launched(settings: &Settings, launcher: &str) -> Result<u8, Failure> {
    let ranks = settings.ranks_of_process();
    check_devices(settings, ranks)?;
    match (ranks, settings.rank_kind) {
        (2.., Some(RankKind::Process)) => {
            let reason = format!("{launcher} is set, so a launcher has started this process, and its ranks can only be threads");
            Err(Failure::usage(format!("-g {ranks} --ranks process: {reason}")))
        }
        (1, _) => {
            let comm = builder(settings, 0).from_env()?;
            let number = comm.rank();
            finish(comm, number, settings)
        }
        _ => {
            let process = process::Process::join(host_builder(settings))?;
            check_alike(process.comm(), settings)?;
            let comms = process.ranks(ranks, |rank| builder(settings, rank))?;
            let code = run_threads(comms, settings, |_| process.comm().rank());
            process.leave(code)
        }
    }
}

/// Runs a rank to its end.
fn finish(comm: Communicator, number: usize, settings: &Settings) -> Result<u8, Failure> {
    check_alike(&comm, settings)?;
    let code = run(&comm, number, settings)?;
    if let Some(path) = &settings.trace {
        let file = trace::collect(&comm, path)?;
        file.map_or(Ok(()), |file| tell_written(settings, &file.told()))?;
    }
    comm.close()?;
    Ok(code)
}

/// Returns how many ranks to start: as many as requested, else one for each GPU.
fn ranks_here(settings: &Settings) -> Result<usize, Failure> {
    let asked = settings.ranks.map(|ranks| ranks * settings.threads.unwrap_or(1));
    if settings.backend == Backend::Host {
        return Ok(asked.unwrap_or(DEFAULT_RANKS));
    }
    let counted = gpus::count();
    match (&counted, settings.backend, &settings.device.refusal) {
        (Err(reason), Backend::Device, _) => Err(Failure::unsupported(format!("--backend device: {reason}"))),
        (Err(reason), _, Some(refusal)) => Err(Failure::unsupported(format!("{refusal}, and there is no device: {reason}"))),
        _ => Ok(asked.or(counted.ok()).unwrap_or(DEFAULT_RANKS)),
    }
}

/// If the first device is given, checks that the devices of a process's ranks exist. Otherwise they are checked when
/// the ranks start.
fn check_devices(settings: &Settings, ranks: usize) -> Result<(), Failure> {
    let Some(first) = settings.first_device else { return Ok(()) };
    match gpus::count() {
        Ok(count) if first + ranks > count => {
            let last = first + ranks - 1;
            Err(Failure::usage(format!(
                "NCCL_TESTS_DEVICE={first}: {ranks} ranks of a process need devices {first} to {last}, but there are only {count} devices"
            )))
        }
        _ => Ok(()),
    }
}

/// Returns a builder with the configuration of all ranks. `number` is the rank's number in its process, or among the
/// processes that were started with it.
fn builder(settings: &Settings, number: usize) -> collectives::Builder {
    let builder = host_builder(settings);
    #[cfg(feature = "cuda")]
    let builder = with_device(builder.configure(unchecked), settings, number);
    #[cfg(not(feature = "cuda"))]
    let _ = number;
    builder
}

/// Returns a builder with the configuration of all ranks, but without a device.
fn host_builder(settings: &Settings) -> collectives::Builder {
    Communicator::builder().configure(|config| {
        config.transport = settings.transport.transport();
        config.trace = settings.trace.is_some();
        config.timeout = settings.timeout.unwrap_or(config.timeout);
    })
}

/// Disables the comparison of device calls, because calls are to be measured without it. Their results are checked.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "ranks that do alike")]
fn unchecked(config: &mut Config) {
    // SAFETY: all ranks run this program, with the same settings (compared in `finish`, before the first call on a
    // device), and walk one list of calls, which the settings and the number of ranks decide: kind, op, type, root and
    // lengths are the same on all. There are no messages.
    config.check_device_calls = unsafe { CheckDeviceCalls::unchecked_after(0) };
}

/// Refuses ranks whose arguments differ from rank 0's: they would make different calls.
fn check_alike(comm: &Communicator, settings: &Settings) -> Result<(), Failure> {
    // A wrapper may give each process its own devices.
    let settings = Settings { first_device: None, launcher: None, ..settings.clone() };
    let mine: [u8; 32] = Sha256::digest(format!("{settings:?}")).into();
    let mut all = vec![[0; 32]; comm.world_size()];
    comm.all_gather_into(&[mine], &mut all[..])?;
    match all.iter().position(|theirs| *theirs != all[0]) {
        None => Ok(()),
        Some(other) => Err(Failure::usage(format!("rank {other} has different arguments from rank 0: give all ranks the same arguments"))),
    }
}

/// Configures the device backend that the command line names.
#[cfg(feature = "cuda")]
fn with_device(builder: collectives::Builder, settings: &Settings, number: usize) -> collectives::Builder {
    let choice = settings.first_device.map_or(DeviceChoice::Local, |first| DeviceChoice::Ordinal(first + number));
    let policy = match settings.device.cta_policy {
        None => return choose_device(builder, settings.backend, choice),
        Some(0) => CtaPolicy::Default,
        Some(1) => CtaPolicy::Efficiency,
        Some(_) => CtaPolicy::Zero,
    };
    choose_device(builder, settings.backend, choice).configure(|config| config.nccl = NcclConfig::default().cta_policy(policy))
}

#[cfg(feature = "cuda")]
fn choose_device(builder: collectives::Builder, backend: Backend, choice: DeviceChoice) -> collectives::Builder {
    match backend {
        Backend::Host => builder,
        Backend::Auto => builder.device(choice),
        Backend::Device => builder.require_device(choice),
    }
}

/// Runs every rank as a thread.
fn threads(settings: &Settings, ranks: usize) -> Result<u8, Failure> {
    let comms = match settings.first_device {
        None => builder(settings, 0).local(ranks)?,
        Some(_) => process::together(ranks, |rank| builder(settings, rank))?,
    };
    run_threads(comms, settings, Communicator::rank)
}

/// Runs each rank on a thread; `number` determines its group.
fn run_threads(comms: Vec<Communicator>, settings: &Settings, number: impl Fn(&Communicator) -> usize + Sync) -> Result<u8, Failure> {
    let number = &number;
    let ended: Vec<Result<u8, Failure>> = thread::scope(|scope| {
        let rank = |comm: Communicator| {
            let named = thread::Builder::new().name("rank".to_owned());
            let ended = named.spawn_scoped(scope, move || {
                let number = number(&comm);
                finish(comm, number, settings)
            });
            ended.map_err(|error| Failure::io("starting a thread for a rank", &error))
        };
        let ranks: Vec<_> = comms.into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank?.join().unwrap_or_else(|_| Err(Failure::internal("a rank panicked")))).collect()
    });
    // A rank that only lost a peer knows less than the one that failed first.
    let (codes, mut failures): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_ok);
    failures.sort_by_key(|failure| failure.as_ref().is_err_and(|failure| failure.lost_a_peer));
    match failures.into_iter().next() {
        Some(failure) => failure,
        None => Ok(codes.into_iter().flatten().max().unwrap_or(0)),
    }
}
