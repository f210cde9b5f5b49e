//! Ends all processes that ranks have started if this launcher is killed. The kernel then kills the ranks (`child`),
//! but not what they have started, such as the program behind a shell.
//!
//! A guardian is a second process of this program that waits for the launcher's end. Each rank sends it the number of
//! its process group before it executes its program. When the launcher's end of the socket is closed, the guardian
//! kills those groups. It has its own process group, so signals to the launcher's group, such as Ctrl-C, do not reach
//! it.
//!
//! The numbers cannot have been reused. A rank keeps its number until the launcher reaps it, and before that the
//! launcher makes the guardian forget it. If the launcher dies, the system reaps the ranks. It would have to go through
//! all numbers to reuse one before the guardian has killed the group.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::net::{SendFlags, send};
use rustix::process::{Pid, Signal, kill_process_group};

/// The argument that makes this program a guardian.
const ARGUMENT: &str = "--guard-ranks";
/// Its name in a list of processes, so that killing launchers by name does not kill it.
const NAME: &str = "rank-guardian";
/// The message, in place of a group, that makes the guardian forget all groups before it.
const FORGET: i32 = 0;

/// The launcher's handle of a guardian.
pub(super) struct Guardian {
    process: Child,
    line: Arc<OwnedFd>,
}

impl Guardian {
    pub(super) fn start() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        // This program's file, even if its path names another file by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).arg(ARGUMENT).current_dir("/").process_group(0);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { process: command.spawn()?, line: Arc::new(ours.into()) })
    }

    /// Returns the socket to which ranks write their process groups.
    pub(super) fn line(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.line)
    }

    /// Makes the guardian forget all ranks, before they are reaped.
    pub(super) fn forget(&self) {
        tell(&self.line, FORGET);
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a process group to a guardian. One system call without allocation, so a forked child may call it.
pub(super) fn tell(line: &OwnedFd, group: i32) {
    // An error means that the guardian is gone; the job runs without it.
    let _ = send(line, &group.to_ne_bytes(), SendFlags::NOSIGNAL);
}

/// Runs as the guardian if this process was started as the guardian, and returns `true` after the launcher has ended.
/// In any other process, returns `false` immediately. A program must call this function before it does anything else.
pub fn guard() -> bool {
    let is_guardian = std::env::args_os().nth(1).is_some_and(|word| word == ARGUMENT);
    if is_guardian {
        let _ = rustix::thread::set_name(c"rank-guardian");
        for group in groups(io::stdin().lock()).into_iter().filter_map(Pid::from_raw) {
            // An error means that no process is left in the group.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    is_guardian
}

/// Reads groups until the end of input, and returns those that are not to be forgotten.
fn groups(mut line: impl Read) -> Vec<i32> {
    let (mut groups, mut group) = (Vec::new(), [0; 4]);
    while line.read_exact(&mut group).is_ok() {
        match i32::from_ne_bytes(group) {
            FORGET => groups.clear(),
            group if group > 1 => groups.push(group),
            _ => {}
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_kept_until_they_are_to_be_forgotten() {
        let told = |groups: &[i32]| groups.iter().flat_map(|group| group.to_ne_bytes()).collect::<Vec<u8>>();
        assert_eq!(groups(&*told(&[5, 7])), [5, 7]);
        assert_eq!(groups(&*told(&[5, 7, FORGET, 9])), [9]);
        assert_eq!(groups(&*told(&[5, FORGET])), [0; 0]);
        // Neither a number that means many processes, nor half a number.
        assert_eq!(groups(&[told(&[-1, 1, 6]), vec![1, 0]].concat()[..]), [6]);
    }
}
