//! One rank as a process: its variables, its process group, and its death with ours.

#![expect(unsafe_code, reason = "pre_exec: the death signal must be asked for between fork and exec")]

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

use super::{Job, Refused};

/// Starts the rank in a process group of its own, so that signals reach all that it starts.
pub(super) fn spawn(job: &Job, local_rank: usize, variables: &[(&'static str, String)]) -> io::Result<Child> {
    let (stdout, stderr) = job.output.streams(local_rank);
    let mut command = Command::new(&job.program);
    command.args(&job.arguments).envs(variables.iter().map(|(name, value)| (name, value)));
    command.stdin(stdin(local_rank)).stdout(stdout).stderr(stderr).process_group(0);
    let parent = getpid();
    // SAFETY:
    // - between fork and exec only async-signal-safe calls are allowed: `die_with` makes two bare system calls;
    // - it allocates nothing and takes no lock: its errors are made of numbers;
    // - it captures one `Pid`, which is `Copy`, so nothing is dropped in the child.
    unsafe { command.pre_exec(move || die_with(parent)) };
    command.spawn()
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
