//! Finds the ranks of this host, and asks all of them at once. The library's module `status` answers.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde_json::Value;

use super::document::{Process, STATUS_FORMAT, STATUS_VERSION};
use super::process::{self, State};

/// What the names of the sockets begin with.
const NAME: &str = "collectives-status-";
/// The bit of a socket that listens, among the flags in the kernel's list.
const LISTENS: u32 = 1 << 16;
/// The most bytes of an answer. A rank sends about 5 MiB at most.
const MOST: usize = 32 << 20;
/// The bytes that one read returns at most.
const PART: usize = 64 << 10;

/// A process that was asked, and what it has sent so far.
struct Question {
    connection: OwnedFd,
    process: Process,
    text: Vec<u8>,
    has_ended: bool,
}

/// Asks all ranks of this host that belong to this user, or, for root, those of all users. No rank is waited for longer
/// than `limit`, and a stopped one is not waited for.
pub(super) fn ask_all(host: &str, limit: Duration) -> io::Result<Vec<Process>> {
    let names = names(&fs::read_to_string("/proc/net/unix")?);
    let (mut questions, mut silent) = (Vec::new(), Vec::new());
    for question in names.iter().filter_map(|name| Question::begin(name, host)) {
        if question.process.error.is_some() { silent.push(question.process) } else { questions.push(question) }
    }
    let began = Instant::now();
    while let Some(left) = limit.checked_sub(began.elapsed()).filter(|_| questions.iter().any(|question| !question.has_ended)) {
        read_some(&mut questions, left)?;
    }
    let mut processes: Vec<Process> = questions.into_iter().map(|question| question.end(limit)).chain(silent).collect();
    processes.retain(|process| process.state != State::Gone || process.status.is_some());
    processes.sort_by_key(|process| process.pid);
    Ok(processes)
}

/// Returns the names of the listening sockets in the kernel's list, without the `@` that stands for an abstract name.
fn names(list: &str) -> Vec<String> {
    let name = |line: &str| {
        let mut fields = line.split_whitespace().skip(3);
        let flags = u32::from_str_radix(fields.next()?, 16).ok()?;
        let name = fields.nth(3)?.strip_prefix('@')?;
        (flags & LISTENS != 0 && name.starts_with(NAME)).then(|| name.to_owned())
    };
    list.lines().filter_map(name).collect()
}

impl Question {
    /// Connects to a rank; `None` if the rank is gone, or belongs to another user.
    fn begin(name: &str, host: &str) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connection = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        let connected = rustix::net::connect(&connection, &SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?);
        let (pid, user, mut error) = match (connected, sockopt::socket_peercred(&connection)) {
            (Err(Errno::CONNREFUSED), _) => return None,
            // The process has not accepted many earlier questions. Nothing but its name says who it is.
            (Err(_), _) => (name[NAME.len()..].split('-').next()?.parse().ok()?, None, Some("no answer to earlier questions".to_owned())),
            (Ok(()), Ok(peer)) => (peer.pid.as_raw_nonzero().get().unsigned_abs(), Some(peer.uid.as_raw()), None),
            (Ok(()), Err(_)) => return None,
        };
        let own = rustix::process::geteuid().as_raw();
        // Another user could have made a socket with such a name.
        if user.is_some_and(|user| user != own && own != 0) {
            return None;
        }
        let (program, state) = process::look(pid);
        if state == State::Gone {
            // A child that was forked from it still holds the socket.
            return None;
        }
        error = state.silence().map(str::to_owned).or(error);
        let process = Process { host_name: host.to_owned(), pid, user, program, state, status: None, error };
        Some(Self { connection, process, text: Vec::new(), has_ended: false })
    }

    /// Reads what has arrived.
    fn read(&mut self) {
        let mut part = vec![0; PART];
        loop {
            match rustix::net::recv(&self.connection, &mut part[..], RecvFlags::empty()) {
                Ok((0, _)) => self.has_ended = true,
                Ok((count, _)) if self.text.len() + count <= MOST => {
                    self.text.extend_from_slice(&part[..count]);
                    continue;
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                Ok(_) | Err(_) => self.has_ended = true,
            }
            return;
        }
    }

    /// Returns the process with its answer, or why there is none.
    fn end(self, limit: Duration) -> Process {
        // It may have been stopped, or have ended, since it was asked.
        let state = process::look(self.process.pid).1;
        let answer = if self.has_ended { parse(&self.text) } else { Err(format!("no answer within {:.1} s", limit.as_secs_f64())) };
        match answer {
            Ok(status) => Process { status: Some(status), ..self.process },
            Err(error) => Process { error: Some(state.silence().map_or(error, str::to_owned)), state, ..self.process },
        }
    }
}

/// Waits until a rank has sent something, and reads it.
fn read_some(questions: &mut [Question], left: Duration) -> io::Result<()> {
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let mut open: Vec<&mut Question> = questions.iter_mut().filter(|question| !question.has_ended).collect();
    let mut watched: Vec<PollFd<'_>> =
        open.iter().map(|question| PollFd::from_borrowed_fd(question.connection.as_fd(), PollFlags::IN)).collect();
    match poll(&mut watched, Some(&left)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ready: Vec<bool> = watched.iter().map(|watched| !watched.revents().is_empty()).collect();
    drop(watched);
    open.iter_mut().zip(is_ready).filter(|(_, is_ready)| *is_ready).for_each(|(question, _)| question.read());
    Ok(())
}

/// Reads an answer.
fn parse(text: &[u8]) -> Result<Value, String> {
    let status: Value = serde_json::from_slice(text).map_err(|error| format!("an answer that is not complete ({error})"))?;
    match status["version"].as_u64() {
        _ if status["format"] != STATUS_FORMAT => Err("an answer of another format".to_owned()),
        Some(version) if version <= STATUS_VERSION => Ok(status),
        _ => Err(format!("an answer of version {}; this collperf reads versions up to {STATUS_VERSION}", status["version"])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_of_ranks_are_found() {
        let list = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01 20 @collectives-status-7-00ff\n\
                    0000000000000000: 00000003 00000000 00000000 0001 03 21 @collectives-status-7-00ff\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01 22 /run/collectives-status-8\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01 23 @collectives-00ff\n\
                    0000000000000000: 00000003 00000000 00000000 0001 03 24\n";
        assert_eq!(names(list), ["collectives-status-7-00ff"]);
    }

    #[test]
    fn answers_that_are_none_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "not complete"),
            ("{\"format\":\"collectives status\",", "not complete"),
            ("7", "another format"),
            ("{\"format\":\"other\",\"version\":1}", "another format"),
            ("{\"format\":\"collectives status\",\"version\":9}", "of version 9"),
            ("{\"format\":\"collectives status\"}", "of version null"),
        ] {
            let said = parse(text.as_bytes()).unwrap_err();
            assert!(said.contains(reason), "{text}: {said}");
        }
        assert!(parse(b"{\"format\":\"collectives status\",\"version\":1,\"records\":[]}\n").is_ok());
    }
}
