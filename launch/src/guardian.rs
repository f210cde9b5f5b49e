//! The end of all that ranks have started, when this launcher is killed and can end nothing itself: the kernel kills the ranks then (`child`), and
//! nobody what a rank has started, such as the program behind a shell.
//!
//! A guardian is this program once more, as a process that waits for the launcher's end. Each rank tells it the number of its process group before
//! it becomes its program. When the launcher's end of the socket is closed, the guardian kills those groups. It is in a process group of
//! its own: what ends the launcher's, or a key of the terminal, does not reach it.
//!
//! Numbers are no other's: until the launcher reaps a rank, the rank keeps its number, and before that the guardian is told to forget it. After
//! the launcher's death the system reaps them, and the kernel would have to go through all numbers to give one away before the guardian has it.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::net::{SendFlags, send};
use rustix::process::{Pid, Signal, kill_process_group};

/// By which this program knows that it is one.
const ARGUMENT: &str = "--guard-ranks";
/// Its name in a list of processes: whoever kills launchers by their name does not mean it.
const NAME: &str = "rank-guardian";
/// In the place of a group: those before it are forgotten.
const FORGET: i32 = 0;

/// The launcher's end of one.
pub(super) struct Guardian {
    process: Child,
    line: Arc<OwnedFd>,
}

impl Guardian {
    pub(super) fn start() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        // The file of this program, also where another one has its name by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).arg(ARGUMENT).current_dir("/").process_group(0);
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { process: command.spawn()?, line: Arc::new(ours.into()) })
    }

    /// The line by which ranks are told of.
    pub(super) fn line(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.line)
    }

    /// Has it forget the ranks that were told of, before their numbers are let go.
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

/// Tells a guardian of a process group. It is one system call, and allocates nothing: a forked child may call it.
pub(super) fn tell(line: &OwnedFd, group: i32) {
    // A guardian that is gone guards nothing.
    let _ = send(line, &group.to_ne_bytes(), SendFlags::NOSIGNAL);
}

/// Does what a guardian does, where this process was started as one; whether it was. To be asked before anything else.
pub fn guard() -> bool {
    let is_guardian = std::env::args_os().nth(1).is_some_and(|word| word == ARGUMENT);
    if is_guardian {
        let _ = rustix::thread::set_name(c"rank-guardian");
        for group in groups(io::stdin().lock()).into_iter().filter_map(Pid::from_raw) {
            // One in which nobody is left needs nothing.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    is_guardian
}

/// The groups that are told of until the end, without those that are to be forgotten.
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
        // Neither a number that means many, nor half a word.
        assert_eq!(groups(&[told(&[-1, 1, 6]), vec![1, 0]].concat()[..]), [6]);
    }
}
