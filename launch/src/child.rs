//! One rank as a process: its variables, its process group, and its death with ours.

#![expect(unsafe_code, reason = "pre_exec: the death signal must be asked for between fork and exec")]

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

use super::{Job, Refused, Store};

/// Starts the rank in a process group of its own, so that signals reach all that it starts.
pub(super) fn spawn(job: &Job, store: &Store, local_rank: usize) -> io::Result<Child> {
    let (stdout, stderr) = job.output.streams(local_rank);
    let mut command = Command::new(&job.program);
    command.args(&job.arguments).envs(variables(job, store, local_rank));
    command.stdin(stdin(local_rank)).stdout(stdout).stderr(stderr).process_group(0);
    let parent = getpid();
    // SAFETY:
    // - between fork and exec only async-signal-safe calls are allowed: `die_with` makes two bare system calls;
    // - it allocates nothing and takes no lock: its errors are made of numbers;
    // - it captures one `Pid`, which is `Copy`, so nothing is dropped in the child.
    unsafe { command.pre_exec(move || die_with(parent)) };
    command.spawn()
}

/// What the rank with this number on this host finds in its environment: torchrun's variables, so that its programs run under us and ours
/// under it.
fn variables(job: &Job, store: &Store, local_rank: usize) -> Vec<(&'static str, String)> {
    let rank = (job.node * job.local_world_size + local_rank).to_string();
    let world_size = (job.nodes * job.local_world_size).to_string();
    let mut variables = vec![
        ("RANK", rank.clone()),
        ("WORLD_SIZE", world_size.clone()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", job.local_world_size.to_string()),
        ("GROUP_RANK", job.node.to_string()),
        ("GROUP_WORLD_SIZE", job.nodes.to_string()),
        ("ROLE_NAME", "default".to_owned()),
        ("ROLE_RANK", rank),
        ("ROLE_WORLD_SIZE", world_size),
        ("MASTER_ADDR", store.address.clone()),
        ("MASTER_PORT", store.port.to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
        ("TORCHELASTIC_MAX_RESTARTS", "0".to_owned()),
        // The same on every host of the job, and different from another job's on the same host.
        ("TORCHELASTIC_RUN_ID", format!("collrun-{}-{}", store.address, store.port)),
    ];
    variables.extend(store.secret.as_ref().map(|secret| ("COLLECTIVES_SECRET", String::from_utf8_lossy(secret.expose()).into_owned())));
    variables
}

/// Asks the kernel to kill this process when the thread that forked it ends.
fn die_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parent that died before the request was made would never be noticed.
    if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
}

/// Rank 0 of this host may read what is piped in. A terminal it may not: a group in the background that reads one is
/// stopped.
fn stdin(local_rank: usize) -> Stdio {
    if local_rank == 0 && !io::stdin().is_terminal() { Stdio::inherit() } else { Stdio::null() }
}

/// Why a program could not be started, in words and as shells number it.
pub(super) fn refused(program: &OsStr, rank: usize, error: &io::Error) -> Refused {
    let program = program.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound => Refused { message: format!("{program:?}: program not found"), code: 127 },
        io::ErrorKind::PermissionDenied => Refused { message: format!("{program:?}: not allowed to run it: {error}"), code: 126 },
        _ => Refused { message: format!("starting rank {rank}, {program:?}: {error}"), code: 126 },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::super::Output;
    use super::*;

    fn job(local_world_size: usize, nodes: usize, node: usize) -> Job {
        let grace = Duration::from_secs(5);
        Job {
            program: "true".into(),
            arguments: vec![],
            local_world_size,
            nodes,
            node,
            output: Output::Prefixed,
            grace,
            verdict: None,
            keep_going: false,
        }
    }

    #[test]
    fn ranks_count_on_from_host_to_host() {
        let store = Store::elsewhere("head", 29500);
        let mut ranks = Vec::new();
        for node in 0..3 {
            for local_rank in 0..4 {
                let found: HashMap<_, _> = variables(&job(4, 3, node), &store, local_rank).into_iter().collect();
                assert_eq!(found["WORLD_SIZE"], "12");
                assert_eq!(found["LOCAL_WORLD_SIZE"], "4");
                assert_eq!(found["LOCAL_RANK"], local_rank.to_string());
                assert_eq!(found["GROUP_RANK"], node.to_string());
                assert_eq!((found["MASTER_ADDR"].as_str(), found["MASTER_PORT"].as_str()), ("head", "29500"));
                assert_eq!(found["ROLE_RANK"], found["RANK"]);
                ranks.push(found["RANK"].parse::<usize>().unwrap());
            }
        }
        assert_eq!(ranks, (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn all_hosts_name_the_run_alike() {
        let id = |node| variables(&job(1, 2, node), &Store::elsewhere("head", 1), 0).pop();
        assert_eq!(id(0), id(1));
        assert_ne!(id(0), variables(&job(1, 2, 0), &Store::elsewhere("head", 2), 0).pop());
    }
}
