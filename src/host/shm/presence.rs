//! How ranks of one host know that another one still lives.
//!
//! Each rank holds a lock on one byte of the region's file, under an open file description of its own. The kernel drops it with
//! the last descriptor, however the process ends, and anyone can test it without waiting.

#![expect(unsafe_code, reason = "fcntl's open-file-description locks have no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;

use super::control::Member;

/// How often a waiter asks the kernel whether a rank still lives.
pub(super) const PULSE: Duration = Duration::from_millis(5);

/// One rank's lock.
pub(super) struct Presence {
    file: OwnedFd,
    locked: bool,
}

impl Presence {
    /// Takes the lock of `rank`. `received` is shared with other ranks, so the file is opened anew through /proc; without
    /// /proc there is no lock, and peers look for the process instead.
    pub(super) fn claim(received: OwnedFd, rank: usize) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", received.as_raw_fd());
        let Ok(file) = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else {
            return Ok(Self { file: received, locked: false });
        };
        lock(file.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, rank)?;
        Ok(Self { file, locked: true })
    }

    /// That of a thread under Miri, where ranks live as long as the process, and files have no locks.
    #[cfg(miri)]
    pub(super) fn unknown() -> io::Result<Self> {
        Ok(Self { file: std::fs::File::open("/dev/null")?.into(), locked: false })
    }

    /// Whether peers can test a lock of this rank.
    pub(super) fn is_locked(&self) -> bool {
        self.locked
    }

    /// Gives the lock back while the file stays open.
    pub(super) fn release(&self, rank: usize) {
        if self.locked {
            let _ = lock(self.file.as_fd(), libc::F_OFD_SETLK, libc::F_UNLCK, rank);
        }
    }

    /// Whether another rank lives, as far as can be told: one that cannot be tested counts as alive.
    pub(super) fn lives(&self, rank: usize, member: &Member) -> bool {
        if member.is_locked() {
            return lock(self.file.as_fd(), libc::F_OFD_GETLK, libc::F_WRLCK, rank).map_or(true, |held| held != libc::F_UNLCK);
        }
        let pid = i32::try_from(member.pid()).ok().and_then(Pid::from_raw).filter(|_| !cfg!(miri));
        pid.is_none_or(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
    }
}

/// One lock command on the byte of `rank`; gives back the type of lock that the kernel answers.
fn lock(file: BorrowedFd<'_>, command: libc::c_int, kind: libc::c_int, rank: usize) -> io::Result<libc::c_int> {
    // SAFETY: all-zero bytes are a valid `flock`: it is made of integers.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = rank as libc::off_t;
    request.l_len = 1;
    // SAFETY: the descriptor is open (borrowed), the command takes a `flock`, and `request` outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut request) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(request.l_type.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    /// A member record as its rank would enter it.
    fn member(presence: &Presence, pid: u32) -> Box<Member> {
        // SAFETY: a record is made of atomic integers, for which zero is a value.
        let member: Box<Member> = unsafe { Box::new(std::mem::zeroed()) };
        member.enter(pid, presence.is_locked(), 1, None);
        member
    }

    #[test]
    fn a_lock_ends_with_its_file() {
        let file = memfd_create("presence-test", MemfdFlags::CLOEXEC).unwrap();
        let mine = Presence::claim(file.try_clone().unwrap(), 0).unwrap();
        let other = Presence::claim(file.try_clone().unwrap(), 1).unwrap();
        assert!(other.is_locked(), "/proc is needed here");
        let record = member(&other, 1);
        assert!(mine.lives(1, &record));
        drop(other);
        assert!(!mine.lives(1, &record));

        let again = Presence::claim(file, 1).unwrap();
        assert!(mine.lives(1, &record));
        again.release(1);
        assert!(!mine.lives(1, &record));
    }

    #[test]
    fn a_byte_is_locked_once() {
        let file = memfd_create("presence-test", MemfdFlags::CLOEXEC).unwrap();
        let _first = Presence::claim(file.try_clone().unwrap(), 3).unwrap();
        assert!(Presence::claim(file, 3).is_err());
    }

    #[test]
    fn without_locks_the_process_is_looked_for() {
        let file = memfd_create("presence-test", MemfdFlags::CLOEXEC).unwrap();
        let unlocked = Presence { file, locked: false };
        assert!(unlocked.lives(1, &member(&unlocked, std::process::id())));
        let mut child = std::process::Command::new("/proc/self/exe").arg("--list").stdout(std::process::Stdio::null()).spawn().unwrap();
        let record = member(&unlocked, child.id());
        child.wait().unwrap();
        assert!(!unlocked.lives(1, &record));
    }
}
