//! One rank as a process: its variables, folder, processors, process group, and death signal.

#![expect(unsafe_code, reason = "pre_exec: the death signal and the processors must be asked for between fork and exec")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::bind::set_of;
use super::output::Ends;
use super::{Job, Refused, Store, guardian, limits};

/// The variables that set how many threads OpenMP and rayon start in a rank.
const THREADS: [&str; 2] = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"];
/// The variable that lists the visible devices.
const DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The variable that names the file to which a rank writes why it fails.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// The variable that names the file to which a rank writes its join address.
const JOIN_FILE: &str = "COLLECTIVES_JOIN_FILE";
const JOIN: &str = "COLLECTIVES_JOIN";

/// One process of a rank of this host, and its files.
pub(super) struct Place {
    pub(super) local_rank: usize,
    /// The number of processes of this rank before this one.
    pub(super) attempt: u32,
    pub(super) error_file: Option<PathBuf>,
    /// The file to which the process writes its join address, if others may have to join.
    pub(super) join_file: Option<PathBuf>,
    /// The addresses at which the process joins the running job, if it replaces another one.
    pub(super) joins: Vec<SocketAddr>,
}

/// Starts the rank in its own process group, so that signals reach all processes that it starts. Registers the group
/// with the guardian, if there is one. Also returns the files to which the rank's output is copied.
pub(super) fn spawn(
    job: &Job,
    store: &Store,
    place: &Place,
    ends: Ends,
    guardian: Option<Arc<OwnedFd>>,
) -> io::Result<(Child, [Option<File>; 2])> {
    let mut command = Command::new(&job.program);
    // The files of a launcher above this one are not for its ranks.
    command.env_remove(ERROR_FILE).env_remove(JOIN_FILE);
    if std::env::var_os(JOIN_FILE).is_some() {
        // This launcher runs in a rank that replaced another one. The job that this rank joined is not for its ranks.
        command.env_remove(JOIN);
    }
    command.args(&job.arguments).envs(job.variables.iter().cloned()).envs(variables(job, store, place));
    if job.local_world_size > 1 {
        // Otherwise a library in each rank would start a thread for every processor of the host.
        let threads = threads(job, place.local_rank).to_string();
        let unset = THREADS.into_iter().filter(|name| std::env::var_os(name).is_none());
        command.envs(unset.map(|name| (name, &threads)));
    }
    command
        .stdin(if job.controlled { Stdio::null() } else { stdin(place.local_rank) })
        .stdout(ends.stdout)
        .stderr(ends.stderr)
        .process_group(0);
    if let Some(folder) = &job.folder {
        command.current_dir(folder);
    }
    let parent = getpid();
    let processors = job.binding.of_rank(place.local_rank).map(set_of);
    let must_be_bound = job.binding.is_asked;
    let shares_a_terminal = io::stdout().is_terminal() || io::stderr().is_terminal();
    let before_exec = move || {
        die_with(parent)?;
        bind(processors.as_ref(), must_be_bound)?;
        if shares_a_terminal {
            print_in_background();
        }
        // The rank leads its process group, so both have the same number.
        guardian.iter().for_each(|line| guardian::tell(line, getpid().as_raw_nonzero().get()));
        Ok(())
    };
    // SAFETY:
    // - between fork and exec only async-signal-safe calls are allowed: `die_with` makes two bare system calls, `bind`,
    //   `print_in_background` and `tell` one, and `getpid` is one;
    // - they allocate nothing and take no lock: errors are made of numbers;
    // - it captures a `Pid`, a set of processors without a pointer, and a counted descriptor by value, and only borrows
    //   them: the child ends by exec or _exit, so it drops neither.
    unsafe { command.pre_exec(before_exec) };
    Ok((command.spawn()?, ends.copies))
}

/// Returns the variables of the rank with this number on this host. They are torchrun's, so programs for torchrun run
/// under this launcher and ours run under torchrun.
fn variables(job: &Job, store: &Store, place: &Place) -> Vec<(&'static str, String)> {
    let Place { local_rank, attempt, error_file, join_file, joins } = place;
    let rank = (job.node * job.local_world_size + local_rank).to_string();
    let world_size = (job.nodes * job.local_world_size).to_string();
    // This id is the same on every host of the job, and differs from that of another job on the same host.
    let run_id = job.run_id.clone().unwrap_or_else(|| format!("collrun-{}-{}", store.address, store.port));
    let mut variables = vec![
        ("RANK", rank.clone()),
        ("WORLD_SIZE", world_size.clone()),
        ("LOCAL_RANK", if job.virtual_local_rank { "0".to_owned() } else { local_rank.to_string() }),
        ("LOCAL_WORLD_SIZE", job.local_world_size.to_string()),
        ("GROUP_RANK", job.node.to_string()),
        ("GROUP_WORLD_SIZE", job.nodes.to_string()),
        ("ROLE_NAME", job.role.clone()),
        ("ROLE_RANK", rank),
        ("ROLE_WORLD_SIZE", world_size),
        ("MASTER_ADDR", store.address.clone()),
        ("MASTER_PORT", store.port.to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        ("TORCHELASTIC_RESTART_COUNT", attempt.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", job.most_restarts.max(job.replacements).to_string()),
        ("TORCHELASTIC_RUN_ID", run_id),
    ];
    let files = [(ERROR_FILE, error_file), (JOIN_FILE, join_file)];
    variables.extend(files.into_iter().filter_map(|(name, path)| Some((name, path.as_ref()?.to_string_lossy().into_owned()))));
    if !joins.is_empty() {
        variables.push((JOIN, listed(joins)));
    }
    if job.virtual_local_rank {
        variables.push((DEVICES, device(std::env::var(DEVICES).ok().as_deref(), *local_rank)));
    }
    variables.extend(store.secret.as_ref().map(|secret| ("COLLECTIVES_SECRET", String::from_utf8_lossy(secret.expose()).into_owned())));
    variables
}

/// Lists addresses as `COLLECTIVES_JOIN` takes them.
pub(super) fn listed(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
}

/// Returns the rank's device among those that are visible here.
fn device(visible: Option<&str>, local_rank: usize) -> String {
    let named = visible.and_then(|devices| devices.split(',').nth(local_rank));
    named.map_or_else(|| local_rank.to_string(), |device| device.trim().to_owned())
}

/// Returns the text before each line of a rank.
pub(super) fn prefix(job: &Job, local_rank: usize) -> String {
    let rank = (job.node * job.local_world_size + local_rank).to_string();
    let filled = job.prefix.replace("${role_name}", &job.role).replace("${local_rank}", &local_rank.to_string());
    filled.replace("${rank}", &rank).replace("${hostname}", &host_name())
}

/// Returns this host's name.
pub(super) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Asks the kernel to kill this process when the thread that forked it ends.
fn die_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parent that died before the request was made would never be noticed.
    if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
}

/// Lets this process print to its terminal, although its process group is not in the foreground. After `stty tostop`, a
/// terminal stops such processes if they do not ignore this signal.
fn print_in_background() {
    // SAFETY: the signal is ignored, so no handler runs.
    unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
}

/// Binds this process to these processors. If the system refuses, that is an error only if the command line asked for
/// the binding.
fn bind(processors: Option<&CpuSet>, must_be_bound: bool) -> io::Result<()> {
    match processors.map(|processors| sched_setaffinity(None, processors)) {
        Some(Err(error)) if must_be_bound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns how many threads keep a rank's processors busy: its share of this process's processors, and no more than it
/// is bound to.
fn threads(job: &Job, local_rank: usize) -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let bound = job.binding.of_rank(local_rank).map_or(usize::MAX, <[usize]>::len);
    (available / job.local_world_size.max(1)).clamp(1, bound.max(1))
}

/// Returns a rank's standard input. Rank 0 of this host may read what is piped in, but not a terminal: a background
/// process group that reads a terminal is stopped.
fn stdin(local_rank: usize) -> Stdio {
    if local_rank == 0 && !io::stdin().is_terminal() { Stdio::inherit() } else { Stdio::null() }
}

/// Returns why a program could not be started, with the exit code that shells use.
pub(super) fn refused(program: &OsStr, rank: usize, error: &io::Error) -> Refused {
    let program = program.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound if Path::new(&*program).is_file() => {
            Refused { message: format!("{program:?}: the interpreter that its first line names, or its loader, is not found"), code: 127 }
        }
        io::ErrorKind::NotFound => Refused { message: format!("{program:?}: program not found"), code: 127 },
        io::ErrorKind::PermissionDenied => Refused { message: format!("{program:?}: not allowed to run it: {error}"), code: 126 },
        _ => Refused { message: format!("starting rank {rank}, {program:?}: {}", limits::explained(error)), code: 126 },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::bind::{Bind, Binding};

    fn of(job: &Job, store: &Store, local_rank: usize) -> HashMap<&'static str, String> {
        variables(job, store, &Place { local_rank, attempt: 2, error_file: None, join_file: None, joins: vec![] }).into_iter().collect()
    }

    fn job(local_world_size: usize, nodes: usize, node: usize) -> Job {
        Job { nodes, node, most_restarts: 5, ..Job::new("true".into(), vec![], local_world_size) }
    }

    #[test]
    fn ranks_count_on_from_host_to_host() {
        let store = Store::elsewhere("head", 29500);
        let mut ranks = Vec::new();
        for node in 0..3 {
            for local_rank in 0..4 {
                let found = of(&job(4, 3, node), &store, local_rank);
                assert_eq!(found["WORLD_SIZE"], "12");
                assert_eq!(found["LOCAL_WORLD_SIZE"], "4");
                assert_eq!(found["LOCAL_RANK"], local_rank.to_string());
                assert_eq!(found["GROUP_RANK"], node.to_string());
                assert_eq!((found["MASTER_ADDR"].as_str(), found["MASTER_PORT"].as_str()), ("head", "29500"));
                assert_eq!((found["TORCHELASTIC_RESTART_COUNT"].as_str(), found["TORCHELASTIC_MAX_RESTARTS"].as_str()), ("2", "5"));
                assert_eq!(found["ROLE_RANK"], found["RANK"]);
                ranks.push(found["RANK"].parse::<usize>().unwrap());
            }
        }
        assert_eq!(ranks, (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn all_hosts_name_the_run_alike() {
        let id = |node, port| of(&job(1, 2, node), &Store::elsewhere("head", port), 0)["TORCHELASTIC_RUN_ID"].clone();
        assert!(id(0, 1) == id(1, 1) && id(0, 1) != id(0, 2));
        let named = Job { run_id: Some("mine".to_owned()), ..job(1, 2, 0) };
        assert_eq!(of(&named, &Store::elsewhere("head", 1), 0)["TORCHELASTIC_RUN_ID"], "mine");
    }

    #[test]
    fn a_replacement_is_told_where_to_join() {
        let store = Store::elsewhere("head", 1);
        let joins = vec!["127.0.0.1:80".parse().unwrap(), "[::1]:81".parse().unwrap()];
        let job = Job { replacements: 4, most_restarts: 0, ..job(1, 1, 0) };
        let place = Place { local_rank: 0, attempt: 1, error_file: None, join_file: Some("/tmp/a".into()), joins };
        let found: HashMap<_, _> = variables(&job, &store, &place).into_iter().collect();
        assert_eq!((&*found["COLLECTIVES_JOIN"], &*found[JOIN_FILE]), ("127.0.0.1:80,[::1]:81", "/tmp/a"));
        assert_eq!(found["TORCHELASTIC_MAX_RESTARTS"], "4");
        assert!(!of(&job, &store, 0).contains_key("COLLECTIVES_JOIN"), "the first process starts the job");
    }

    #[test]
    fn a_rank_may_see_its_own_device_alone() {
        let job = Job { virtual_local_rank: true, ..job(2, 1, 0) };
        assert_eq!(of(&job, &Store::elsewhere("head", 1), 1)["LOCAL_RANK"], "0");
        assert_eq!((device(None, 3), device(Some("4, 6"), 1), device(Some("4"), 1)), ("3".into(), "6".into(), "1".into()));
    }

    #[test]
    fn a_rank_has_threads_for_its_share_of_the_processors() {
        let available = std::thread::available_parallelism().unwrap().get();
        assert_eq!(threads(&job(1, 1, 0), 0), available);
        assert_eq!(threads(&job(available + 1, 1, 0), 0), 1);
        let binding = Binding { to: Bind::Core, processors: vec![vec![0]], why_none: None, is_asked: true };
        assert_eq!(threads(&Job { binding, ..job(1, 1, 0) }, 0), 1);
    }

    #[test]
    fn prefixes_name_what_they_are_asked_to() {
        let named = |template: &str| prefix(&Job { prefix: template.to_owned(), ..job(2, 3, 1) }, 1);
        assert_eq!(named("[${rank}] "), "[3] ");
        assert_eq!(named("${role_name}${local_rank}@${hostname}: "), format!("default1@{}: ", host_name()));
    }
}
