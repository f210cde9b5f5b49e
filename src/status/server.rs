//! The socket and its thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::sleep;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::answer;
use crate::authentication;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::own_thread::OwnThread;
use crate::base::socket_user::peer_user;
use crate::base::tuning::status::{AFTER_REFUSAL, BACKLOG, PATIENCE, WITHOUT_RESOURCES};

/// What the names of all sockets begin with. `collperf ps` looks for it.
const NAME: &str = "collectives-status-";

/// The user that stands for all users that a user namespace does not map, if the system does not say otherwise.
const UNMAPPED: u32 = 65_534;

/// Opens the socket, and starts the thread.
pub(super) fn start() -> io::Result<()> {
    let listener = listen()?;
    OwnThread::spawn("status".to_owned(), move || serve(&listener)).map(drop)
}

/// Listens under a name that no other process can foresee, so that none can take it first.
fn listen() -> io::Result<OwnedFd> {
    let random: String = authentication::random()?[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("{NAME}{}-{random}", std::process::id());
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Answers as long as the process lives.
fn serve(listener: &OwnedFd) {
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            // A process that was stopped finds the questions of programs that no longer wait.
            Ok(connection) if has_hung_up(connection.as_fd()) => {}
            Ok(connection) if peer_user(connection.as_fd()).is_ok_and(|user| Answered::now().includes(user)) => {
                // A program that has stopped reading gets a part of the answer, which it notices.
                let _ = send(connection.as_fd(), answer::to_text().as_bytes(), &Deadline::after(PATIENCE));
            }
            Ok(_) => sleep(AFTER_REFUSAL),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => sleep(WITHOUT_RESOURCES),
            Err(error) => return event::debug!(%error, "this process no longer answers collperf ps"),
        }
    }
}

/// The users that get an answer.
#[derive(Debug, Clone, Copy)]
struct Answered {
    own: u32,
    /// The user that stands for all unmapped users. If that is this process's own user, the kernel does
    /// not say who asks.
    unmapped: u32,
}

impl Answered {
    /// Returns the users for the process's own user at this moment, which a program may change.
    fn now() -> Self {
        let unmapped = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok().and_then(|text| text.trim().parse().ok());
        Self { own: rustix::process::geteuid().as_raw(), unmapped: unmapped.unwrap_or(UNMAPPED) }
    }

    fn includes(self, user: u32) -> bool {
        user == 0 || user == self.own && user != self.unmapped
    }
}

/// Sends all bytes to a program that reads them before the deadline.
fn send(connection: BorrowedFd<'_>, mut bytes: &[u8], deadline: &Deadline) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(connection, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => await_room(connection, deadline)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether the program at the other end has closed the connection.
fn has_hung_up(connection: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(connection, PollFlags::empty())];
    poll(&mut watched, Some(&Timespec::default())).is_ok() && watched[0].revents().contains(PollFlags::HUP)
}

fn await_room(connection: BorrowedFd<'_>, deadline: &Deadline) -> io::Result<()> {
    let left = deadline.remaining();
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut [PollFd::from_borrowed_fd(connection, PollFlags::OUT)], Some(&left)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_the_own_user_and_root_are_answered() {
        let own = Answered { own: 1000, unmapped: UNMAPPED };
        assert!(own.includes(1000) && own.includes(0) && !own.includes(1001) && !own.includes(UNMAPPED));
        let unmapped = Answered { own: UNMAPPED, unmapped: UNMAPPED };
        assert!(!unmapped.includes(UNMAPPED) && unmapped.includes(0), "it may be any user");
    }

    #[test]
    fn a_program_that_does_not_read_is_left_at_the_deadline() {
        let (mut reads, sends) = UnixStream::pair().unwrap();
        sends.set_nonblocking(true).unwrap();
        let bytes = vec![7; 8 << 20];
        let error = send(sends.as_fd(), &bytes, &Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(sends);
        let mut part = Vec::new();
        reads.read_to_end(&mut part).unwrap();
        assert!(part.len() < bytes.len() && part.iter().all(|byte| *byte == 7), "{} B", part.len());
        let (reads, sends) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(sends.as_fd()));
        drop(reads);
        assert!(has_hung_up(sends.as_fd()));
        assert!(send(sends.as_fd(), &bytes, &Deadline::after(Duration::from_secs(60))).is_err(), "the program is gone");
    }
}
