//! How the region's descriptor gets from the leader to the other ranks of the host: over an abstract unix socket, whose name no
//! file system holds, and only to processes of the same user.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::deadline::Deadline;

/// The leader's listening socket.
pub(super) struct Door {
    listener: OwnedFd,
    name: String,
}

impl Door {
    /// Listens under a random name.
    pub(super) fn open() -> io::Result<Self> {
        let random = || RandomState::new().build_hasher().finish();
        let name = format!("collectives-{:016x}{:016x}", random(), random());
        let listener = socket(SocketFlags::CLOEXEC)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        rustix::net::listen(&listener, 1024)?;
        Ok(Self { listener, name })
    }

    /// The name under which others find it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Hands `file` to whoever comes, until [`Door::close`]. Strangers, and those who hang up, are dropped.
    pub(super) fn serve(&self, file: BorrowedFd<'_>) {
        loop {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(visitor) if is_own_user(&visitor) => {
                    if let Err(error) = hand_over(&visitor, file) {
                        tracing::debug!(%error, "a visitor left before it had the shared region");
                    }
                }
                Ok(_) => tracing::warn!("a process of another user asked for the shared region and was refused"),
                Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
                Err(Errno::INVAL) => return,
                Err(error) => {
                    // Out of descriptors or memory: those who wait see their deadline unless it passes.
                    tracing::warn!(%error, "could not accept a visitor");
                    if wait_for(self.listener.as_fd(), PollFlags::empty(), Duration::from_millis(10)) {
                        return;
                    }
                }
            }
        }
    }

    /// Ends [`Door::serve`] in whichever thread it runs.
    pub(super) fn close(&self) {
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
    }
}

fn socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Whether the process at the other end runs as this one's user.
fn is_own_user(connection: impl AsFd) -> bool {
    sockopt::socket_peercred(connection).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Sends the descriptor with one byte, which a fresh socket always has room for.
fn hand_over(visitor: &OwnedFd, file: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    control.push(SendAncillaryMessage::ScmRights(&files));
    rustix::net::sendmsg(visitor, &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits for an event, an error or the limit; says whether something came.
fn wait_for(socket: BorrowedFd<'_>, events: PollFlags, limit: Duration) -> bool {
    // A day at a time, so that no limit is too long for the kernel.
    let limit = limit.min(Duration::from_secs(86_400));
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    matches!(poll(&mut [PollFd::from_borrowed_fd(socket, events)], Some(&limit)), Ok(1..))
}

/// Gets the region's descriptor from the leader that listens under `name`.
pub(super) fn fetch(name: &str, deadline: &Deadline) -> io::Result<OwnedFd> {
    let connection = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let late = || io::Error::new(io::ErrorKind::TimedOut, "the deadline passed");
    loop {
        match rustix::net::connect(&connection, &address) {
            Ok(()) => break,
            // The leader's queue is full: it is being emptied.
            Err(Errno::AGAIN | Errno::INTR) if !deadline.has_passed() => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::AGAIN | Errno::INTR) => return Err(late()),
            Err(error) => return Err(error.into()),
        }
    }
    if !is_own_user(&connection) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the socket belongs to another user"));
    }
    loop {
        match receive(&connection) {
            Err(Errno::AGAIN | Errno::INTR) if deadline.has_passed() => return Err(late()),
            Err(Errno::AGAIN | Errno::INTR) => {
                wait_for(connection.as_fd(), PollFlags::IN, deadline.remaining());
            }
            Ok(Some(file)) => return Ok(file),
            Ok(None) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the leader hung up without handing over the region")),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The descriptor that came with the next byte, if one did.
fn receive(connection: &OwnedFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    Ok(files.next().and_then(|mut files| files.next()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    /// Runs `visit` while a door hands out a file.
    fn with_door<T>(visit: impl FnOnce(&str) -> T) -> T {
        let door = Door::open().unwrap();
        let file = memfd_create("door-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 77).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| door.serve(file.as_fd()));
            let result = visit(door.name());
            door.close();
            result
        })
    }

    #[test]
    fn every_visitor_gets_the_file() {
        let sizes = with_door(|name| {
            let deadline = Deadline::after(Duration::from_secs(10));
            let size = || rustix::fs::fstat(fetch(name, &deadline).unwrap()).unwrap().st_size;
            std::thread::scope(|scope| {
                (0..20).map(|_| scope.spawn(size)).collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            })
        });
        assert_eq!(sizes, [77; 20]);
    }

    #[test]
    fn a_visitor_that_hangs_up_disturbs_nobody() {
        with_door(|name| {
            let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
            for _ in 0..50 {
                rustix::net::connect(socket(SocketFlags::CLOEXEC).unwrap(), &address).unwrap();
            }
            assert!(fetch(name, &Deadline::after(Duration::from_secs(10))).is_ok());
        });
    }

    #[test]
    fn a_door_that_is_gone_or_silent_is_an_error() {
        let deadline = Deadline::after(Duration::from_millis(20));
        let gone = Door::open().unwrap().name().to_owned();
        assert_eq!(fetch(&gone, &deadline).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let silent = Door::open().unwrap();
        assert_eq!(fetch(silent.name(), &deadline).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(fetch(&"x".repeat(200), &deadline).is_err());
        assert_ne!(silent.name(), Door::open().unwrap().name());
    }
}
