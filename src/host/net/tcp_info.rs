//! Whether the kernel still receives answers from the other end of a connection, and whether it has sent everything.
#![expect(unsafe_code, reason = "no safe wrapper reads TCP_INFO")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// The start of the kernel's `struct tcp_info`, up to and including `tcpi_notsent_bytes` (since Linux 4.6). The
/// structure only ever grows at its end. It is an array of `u32`, so that the memory is aligned like the kernel's.
type Info = [u32; 37];

/// The index of `tcpi_last_ack_recv`.
const LAST_ACKNOWLEDGEMENT: usize = 14;

/// The index of `tcpi_notsent_bytes`.
const UNSENT_BYTES: usize = 36;

/// The relevant part of `struct tcp_info`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Quiet {
    /// How often the oldest data in flight has been retransmitted without an answer.
    retransmits: u8,
    /// How many zero-window probes are unanswered.
    probes: u8,
    /// The time since the last acknowledgement.
    since_acknowledgement: Duration,
}

/// Detects a peer that has stopped answering although something was sent to it. (For an idle connection, the kernel's
/// own probes do this.)
#[derive(Debug)]
pub(super) struct Watch {
    /// How long the peer may leave data unanswered; `None`: forever.
    limit: Option<Duration>,
    /// Since when data is known to be unanswered.
    since: Option<Instant>,
}

impl Watch {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, since: None }
    }

    /// Returns how long the peer has been silent, if that is too long. Call it repeatedly while the connection cannot
    /// move: an answer that arrives withdraws the report.
    pub(super) fn silence(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<Duration>> {
        Ok(self.observe(read(socket)?, Instant::now()))
    }

    /// Does the work of [`Watch::silence`] for an observation made at `now`.
    ///
    /// The time since the last acknowledgement alone is not enough: probes sent to a peer that is alive and does not
    /// read are up to two minutes apart. So the time runs from the first unanswered observation, and starts again with
    /// each answer.
    fn observe(&mut self, seen: Quiet, now: Instant) -> Option<Duration> {
        if seen.retransmits == 0 && seen.probes == 0 {
            self.since = None;
            return None;
        }
        let waited = now.saturating_duration_since(*self.since.get_or_insert(now));
        if seen.since_acknowledgement < waited {
            self.since = Some(now);
            return None;
        }
        self.limit.filter(|limit| waited >= *limit).map(|_| waited)
    }
}

/// Whether the kernel has yet to send bytes that were written. `false` if it does not report that.
pub(super) fn has_unsent(socket: BorrowedFd<'_>) -> bool {
    query(socket).is_ok_and(|info| info[UNSENT_BYTES] > 0)
}

/// Returns what the kernel has seen of the other end.
fn read(socket: BorrowedFd<'_>) -> io::Result<Quiet> {
    let info = query(socket)?;
    let [_state, _congestion_state, retransmits, probes] = info[0].to_ne_bytes();
    let since_acknowledgement = Duration::from_millis(info[LAST_ACKNOWLEDGEMENT].into());
    Ok(Quiet { retransmits, probes, since_acknowledgement })
}

/// Queries the kernel. Fields that it does not have are 0.
fn query(socket: BorrowedFd<'_>) -> io::Result<Info> {
    let mut info: Info = [0; _];
    let mut len = size_of::<Info>() as libc::socklen_t;
    // SAFETY:
    // - `socket` is open for as long as it is borrowed.
    // - `info` and `len` live across the call, and `len` is the size of `info` in bytes.
    // - The kernel is trusted to write at most `len` bytes; any bit pattern is a valid `u32`.
    let status = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len) };
    if status == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    fn quiet(retransmits: u8, probes: u8, since_acknowledgement: u64) -> Quiet {
        Quiet { retransmits, probes, since_acknowledgement: Duration::from_secs(since_acknowledgement) }
    }

    /// Returns, for each observation, whether a watch with a limit of 12 s reports silence.
    fn watch(seen: impl IntoIterator<Item = (u64, Quiet)>) -> Vec<bool> {
        watch_for(Some(Duration::from_secs(12)), seen)
    }

    fn watch_for(limit: Option<Duration>, seen: impl IntoIterator<Item = (u64, Quiet)>) -> Vec<bool> {
        let (mut watch, start) = (Watch::new(limit), Instant::now());
        seen.into_iter().map(|(second, quiet)| watch.observe(quiet, start + Duration::from_secs(second)).is_some()).collect()
    }

    #[test]
    fn silence_takes_time_and_something_unanswered() {
        assert_eq!(watch((0..1000).map(|second| (second, quiet(0, 0, second)))), [false; 1000], "idle");
        for cut in [quiet(1, 0, 0), quiet(0, 1, 0)] {
            let said = watch((0..14).map(|second| (second, Quiet { since_acknowledgement: Duration::from_secs(second), ..cut })));
            assert_eq!(said.iter().position(|&silent| silent), Some(12), "{cut:?}");
        }
        let cut = (0..1000).map(|second| (second, quiet(1, 0, second)));
        assert!(!watch_for(None, cut).contains(&true), "silence is borne for ever");
    }

    #[test]
    fn an_answer_takes_back_what_was_said() {
        // Dead for 20 s, and then answering again.
        let dead = (0..30).map(|second| if second < 20 { (second, quiet(5, 0, second)) } else { (second, quiet(0, 0, second - 20)) });
        let said = watch(dead);
        assert!(said[12..20].iter().all(|silent| *silent) && !said[20..].contains(&true), "{said:?}");
        // The same if more was lost in the meantime: the answer is what counts.
        let still_lossy = (0..30).map(|second| (second, quiet(5, 0, if second < 20 { second } else { second - 20 })));
        assert!(!watch(still_lossy)[20..].contains(&true));
    }

    #[test]
    fn a_peer_that_does_not_read_is_not_silent() {
        // Probes two minutes apart, each observed before its answer arrived, and checked once a second.
        let second_by_second = (0..600).map(|second| (second, quiet(0, u8::from(second % 120 == 0), second % 120)));
        assert!(!watch(second_by_second).contains(&true));
        // Checked so rarely that only unanswered probes are ever observed.
        assert!(!watch((0..20).map(|probe| (probe * 120, quiet(0, 1, 119)))).contains(&true));
        // After such a wait, a cut is detected 12 s after the first unanswered probe.
        let cut = (0..40).map(|second| (second, quiet(0, u8::from(second >= 20), 100 + second)));
        assert_eq!(watch(cut).iter().position(|&silent| silent), Some(32));
    }

    #[test]
    fn a_bad_line_is_not_silent() {
        let lossy = (0..100).map(|second| (second, quiet(3, 0, second % 11)));
        assert!(!watch(lossy).contains(&true));
    }

    #[test]
    fn the_kernel_fills_it_in() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _peer = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let full = loop {
            match stream.write(&[0; 65536]) {
                Ok(written) => assert!(written > 0),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        let quiet = read(stream.as_fd()).unwrap();
        assert!(quiet.since_acknowledgement < Duration::from_secs(2), "{quiet:?}");
        assert!(Watch::new(None).silence(stream.as_fd()).unwrap().is_none());
    }

    #[test]
    fn what_is_no_connection_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        assert!(Watch::new(None).silence(file.as_fd()).is_err());
    }
}
