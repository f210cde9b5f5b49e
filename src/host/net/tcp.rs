//! A link to one peer over TCP.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use socket2::{SockRef, TcpKeepalive};

use super::tcp_info::Watch;
use crate::host::link::ByteLink;
use crate::tuning::net::{KEEP_ALIVE_AFTER, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_RETRIES, SILENCE_INTERVAL};

/// A connection to a peer that has been greeted. It never blocks.
///
/// The next call notices that a peer's process died. Of a cut network the kernel tells after 11 s where nothing is under way. Where something
/// is, [`ByteLink::try_write`] and [`ByteLink::try_read`] notice it 12 s to 14 s after it was first sent in vain. So whoever waits for a link
/// must call one of them about once a second, though nothing is ready.
#[derive(Debug)]
pub(crate) struct TcpLink {
    stream: TcpStream,
    watch: Watch,
    /// When the watch was last asked.
    checked: Instant,
}

impl TcpLink {
    /// Takes over a connection that was prepared with [`prepare`] and does not block.
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, watch: Watch::default(), checked: Instant::now() }
    }

    /// What a call returns that found nothing to do: `WouldBlock`, or that the peer's host has stopped answering.
    ///
    /// `TCP_USER_TIMEOUT` would let the kernel do this, but Linux then also ends the connection to a peer that is alive and
    /// merely does not read for that long, which a rank that computes between two calls is free to do.
    fn blocked(&mut self) -> io::Error {
        if self.checked.elapsed() < SILENCE_INTERVAL {
            return ErrorKind::WouldBlock.into();
        }
        self.checked = Instant::now();
        match self.watch.is_silent(self.stream.as_fd()) {
            Ok(true) => io::Error::new(ErrorKind::TimedOut, "the peer's host has stopped answering"),
            Ok(false) => ErrorKind::WouldBlock.into(),
            Err(error) => error,
        }
    }
}

impl AsFd for TcpLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl ByteLink for TcpLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        // The system takes a limited number of parts, which might all be empty ones.
        let Some(first) = parts.iter().position(|part| !part.is_empty()) else { return Ok(0) };
        loop {
            match self.stream.write_vectored(&parts[first..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => return Ok(written),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(self.blocked()),
                Err(error) => return Err(error),
            }
        }
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            match self.stream.read(into) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(self.blocked()),
                Err(error) => return Err(error),
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }
}

/// Sets the options of every link: no waiting for full segments, and probes of an idle peer.
///
/// Buffer sizes are left alone: the kernel grows them as needed, and a small send buffer stalls loopback for 40 ms at a time.
pub(super) fn prepare(socket: SockRef<'_>) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    let keep_alive = TcpKeepalive::new().with_time(KEEP_ALIVE_AFTER).with_interval(KEEP_ALIVE_INTERVAL).with_retries(KEEP_ALIVE_RETRIES);
    socket.set_tcp_keepalive(&keep_alive)
}

/// Chooses the congestion control for a peer on this very host, before the connection is made.
///
/// Inside a host no network is shared, and bbr, which some systems choose, paces itself to half the speed of the older ones. Users without
/// privileges may only be allowed reno. Where neither can be chosen, the default stays.
pub(super) fn prefer_unpaced(socket: SockRef<'_>) {
    let is_cubic = |name: Vec<u8>| name.split(|&byte| byte == 0).next() == Some(b"cubic");
    if socket.tcp_congestion().is_ok_and(is_cubic) {
        return;
    }
    if let Err(error) = socket.set_tcp_congestion(b"cubic").or_else(|_| socket.set_tcp_congestion(b"reno")) {
        crate::event::debug!("neither cubic nor reno can be chosen: {error}");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Two ends of a connection.
    fn pair() -> (TcpLink, TcpLink) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let left = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (right, _) = listener.accept().unwrap();
        for stream in [&left, &right] {
            stream.set_nonblocking(true).unwrap();
            prepare(SockRef::from(stream)).unwrap();
        }
        (TcpLink::new(left), TcpLink::new(right))
    }

    /// Reads until `into` is full.
    fn read_all(link: &mut TcpLink, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            match link.try_read(&mut into[done..]) {
                Ok(read) => done += read,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
    }

    #[test]
    fn parts_arrive_in_order() {
        let (mut left, mut right) = pair();
        let parts = [IoSlice::new(b""), IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")];
        assert_eq!(left.try_write(&parts).unwrap(), 5);
        let mut got = [0; 5];
        read_all(&mut right, &mut got);
        assert_eq!(&got, b"abcde");
    }

    #[test]
    fn more_parts_than_the_system_takes() {
        let (mut left, mut right) = pair();
        let mut parts = vec![IoSlice::new(b""); 5000];
        assert_eq!(left.try_write(&parts).unwrap(), 0);
        parts.push(IoSlice::new(b"x"));
        assert_eq!(left.try_write(&parts).unwrap(), 1);
        let mut got = [0];
        read_all(&mut right, &mut got);
        assert_eq!(&got, b"x");
    }

    #[test]
    fn a_full_link_would_block_and_moves_on() {
        let (mut left, mut right) = pair();
        let pattern: Vec<u8> = (0..65_521_usize).map(|index| (index % 251) as u8).collect();
        let mut sent = 0;
        let error = loop {
            let rest = &pattern[sent % pattern.len()..];
            // Long enough ago that a link that cannot move also looks at the state of the connection.
            left.checked = Instant::now().checked_sub(SILENCE_INTERVAL).unwrap();
            match left.try_write(&[IoSlice::new(rest)]) {
                Ok(written) => sent += written,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert!(left.checked.elapsed() < SILENCE_INTERVAL);

        let mut got = vec![0; sent];
        read_all(&mut right, &mut got);
        assert!(got.iter().enumerate().all(|(index, &byte)| byte == pattern[index % pattern.len()]));
        assert_eq!(right.try_read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(right.try_read(&mut []).unwrap(), 0);
    }

    #[test]
    fn a_closed_end_is_an_end_and_then_an_error() {
        let (mut left, right) = pair();
        drop(right);
        let error = loop {
            match left.try_read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => break other.unwrap_err(),
            }
        };
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        // The first write provokes a reset, a later one meets it; the process lives on.
        let error = loop {
            match left.try_write(&[IoSlice::new(b"x")]) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
    }

    #[test]
    fn the_options_are_set() {
        let (left, _right) = pair();
        let socket = SockRef::from(&left.stream);
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEP_ALIVE_AFTER);
        assert_eq!(socket.tcp_user_timeout().unwrap(), None);
        prefer_unpaced(SockRef::from(&left.stream));
        let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").unwrap_or_default();
        let chosen = socket.tcp_congestion().unwrap();
        if allowed.contains("cubic") || allowed.contains("reno") {
            assert!(chosen.starts_with(b"cubic") || chosen.starts_with(b"reno"), "{}", chosen.escape_ascii());
        } else {
            println!("skipped: only {allowed} may be chosen here");
        }
    }
}
