//! Whether the kernel still hears from the other end of a connection.
#![expect(unsafe_code, reason = "no safe wrapper reads TCP_INFO")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// How long a peer may leave what was sent to it unacknowledged, in milliseconds.
const SILENCE_MILLIS: u32 = 12_000;
/// The start of the kernel's `struct tcp_info`, up to and including `tcpi_last_ack_recv`; it only ever grows at its end.
const INFO_BYTES: usize = 60;

/// What matters here of `struct tcp_info`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Quiet {
    /// How often the oldest data in flight has been sent again without an answer.
    retransmits: u8,
    /// How many probes of a closed window went unanswered.
    probes: u8,
    /// How long ago the last acknowledgement came.
    since_acknowledgement_millis: u32,
}

impl Quiet {
    /// Data or probes are unanswered, and nothing was heard for too long.
    ///
    /// A peer that reads slowly still answers probes, which come up to two minutes apart: one or two without answer may just be
    /// under way, three are not.
    fn is_too_long(self) -> bool {
        (self.retransmits >= 1 || self.probes >= 3) && self.since_acknowledgement_millis >= SILENCE_MILLIS
    }
}

/// Whether the peer has stopped answering at all although something was sent to it. (An idle connection is kept alive by the
/// kernel's own probes.)
pub(super) fn is_silent(socket: BorrowedFd<'_>) -> io::Result<bool> {
    read(socket).map(Quiet::is_too_long)
}

/// Asks the kernel.
fn read(socket: BorrowedFd<'_>) -> io::Result<Quiet> {
    // Words, so that the memory is aligned as the kernel's structure is.
    let mut info = [0_u32; INFO_BYTES / 4];
    let mut len = INFO_BYTES as libc::socklen_t;
    // SAFETY:
    // - `socket` is open for as long as it is borrowed.
    // - `info` and `len` live across the call, and `len` is the size of `info` in bytes.
    // - Trusted of the kernel: it writes at most `len` bytes; any bit pattern is a valid `u32`.
    let status = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    let [_state, _congestion_state, retransmits, probes] = info[0].to_ne_bytes();
    Ok(Quiet { retransmits, probes, since_acknowledgement_millis: info[INFO_BYTES / 4 - 1] })
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn silence_takes_time_and_something_unanswered() {
        let quiet = |retransmits, probes, since_acknowledgement_millis| Quiet { retransmits, probes, since_acknowledgement_millis };
        assert!(!quiet(0, 0, u32::MAX).is_too_long(), "idle");
        assert!(!quiet(9, 9, 11_999).is_too_long());
        assert!(!quiet(0, 2, 120_000).is_too_long(), "a probe is under way");
        assert!(quiet(1, 0, 12_000).is_too_long());
        assert!(quiet(0, 3, 12_000).is_too_long());
    }

    #[test]
    fn the_kernel_fills_it_in() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _peer = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let full = loop {
            match stream.write(&[0; 65536]) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        let quiet = read(stream.as_fd()).unwrap();
        assert!(quiet.since_acknowledgement_millis < 2_000, "{quiet:?}");
        assert!(!is_silent(stream.as_fd()).unwrap());
    }

    #[test]
    fn what_is_no_connection_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        assert!(is_silent(file.as_fd()).is_err());
    }
}
