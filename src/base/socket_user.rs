//! The user at the other end of a Unix socket.

#![expect(unsafe_code, reason = "reads SO_PEERCRED through libc: the safe form fails if the peer's process has no number here")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns the user at the other end of a connection, as this namespace numbers users.
pub(crate) fn peer_user(connection: BorrowedFd<'_>) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open (borrowed), the option is a `ucred`, which consists of integers, and `peer` and
    // `length` outlive the call.
    let result =
        unsafe { libc::getsockopt(connection.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut length) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(peer.uid) }
}
