//! A link to one peer over TCP.

use std::io::{self, ErrorKind, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use socket2::{SockRef, TcpKeepalive};

use super::tcp_info::{self, Watch};
use crate::base::tuning::net::{IDLE_SHARE, KEEP_ALIVE_PROBES, SILENCE_INTERVAL};
use crate::host::link::{ByteLink, Silence};

/// The largest number of parts that Linux accepts in one call (`UIO_MAXIOV`).
const MOST_PARTS: usize = 1024;

/// A connection to a peer after the handshake. It never blocks.
///
/// If the peer's process died, the next call reports it. If a network is cut while nothing is in transit, the kernel
/// reports it after the silence timeout. If data is in transit, [`ByteLink::try_write`] and [`ByteLink::try_read`]
/// report the cut, at most 2 s after this timeout has passed since the first unanswered transmission. They withdraw the
/// report if an answer arrives after all. So a caller that waits for a link must call one of these two functions about
/// once a second, even if nothing is ready.
#[derive(Debug)]
pub(crate) struct TcpLink {
    stream: TcpStream,
    watch: Watch,
    /// When the watch was last queried.
    checked: Instant,
    /// Whether the watch reported then that the peer is silent. While it does, every call queries it.
    is_silent: bool,
    /// Set after the kernel has given up on the peer. The kernel reports this only once, and later reports that the
    /// stream has ended.
    given_up: Option<Silence>,
    silence_timeout: Duration,
}

impl TcpLink {
    /// Takes over a nonblocking connection that was prepared with [`prepare`]. A `silence_timeout` of zero means
    /// forever.
    pub(super) fn new(stream: TcpStream, silence_timeout: Duration) -> Self {
        let watch = Watch::new(Some(silence_timeout).filter(|limit| !limit.is_zero()));
        Self { stream, watch, checked: Instant::now(), is_silent: false, given_up: None, silence_timeout }
    }

    /// Returns the error of a call that found nothing to do: `WouldBlock`, or [`Silence`] if the peer's host has
    /// stopped answering.
    ///
    /// With `TCP_USER_TIMEOUT`, the kernel would detect the silence. But then Linux would also end the connection to a
    /// peer that is alive and merely does not read for that long, and a rank need not read while it computes between
    /// two calls. Also, the report could not be withdrawn.
    fn blocked(&mut self) -> io::Error {
        if !self.is_silent && self.checked.elapsed() < SILENCE_INTERVAL {
            return ErrorKind::WouldBlock.into();
        }
        self.checked = Instant::now();
        match self.watch.silence(self.stream.as_fd()) {
            Ok(silence) => {
                self.is_silent = silence.is_some();
                silence.map_or(ErrorKind::WouldBlock.into(), |time| Silence(time).into())
            }
            Err(error) => error,
        }
    }

    /// Returns the error that ended the connection, as links report it. If the kernel gave up on the peer's host or has
    /// no route to it, that is silence, not an end.
    #[cold]
    fn ended(&mut self, error: io::Error) -> io::Error {
        let no_answer = [libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETUNREACH, libc::EHOSTDOWN, libc::ENETDOWN];
        if error.raw_os_error().is_some_and(|code| no_answer.contains(&code)) {
            self.given_up = Some(Silence(self.silence_timeout));
        }
        self.given_up.map_or(error, Silence::into)
    }
}

impl AsFd for TcpLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl ByteLink for TcpLink {
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        // The first parts might all be empty.
        let Some(first) = parts.iter().position(|part| !part.is_empty()) else { return Ok(0) };
        let parts = &parts[first..parts.len().min(first + MOST_PARTS)];
        loop {
            match send(&self.stream, parts) {
                Ok(0) => return Err(self.ended(ErrorKind::WriteZero.into())),
                Ok(written) => return Ok(written),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(self.blocked()),
                Err(error) => return Err(self.ended(error.into())),
            }
        }
    }

    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            match self.stream.read(into) {
                Ok(0) => return Err(self.ended(ErrorKind::UnexpectedEof.into())),
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(self.blocked()),
                Err(error) => return Err(self.ended(error)),
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }

    fn has_unsent(&self) -> bool {
        tcp_info::has_unsent(self.stream.as_fd())
    }
}

/// Writes parts of which the first is not empty.
fn send(stream: &TcpStream, parts: &[IoSlice<'_>]) -> rustix::io::Result<usize> {
    // Not `write_vectored`, which raises SIGPIPE once the peer is gone. That kills a program with a C `main`.
    match sendmsg(stream, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
        // A sandbox may refuse this call, because it can also pass on file descriptors.
        Err(Errno::PERM | Errno::NOSYS | Errno::ACCESS) => rustix::net::send(stream, &parts[0], SendFlags::NOSIGNAL),
        sent => sent,
    }
}

/// Sets the options of every link: it does not wait for full segments, and it probes an idle peer unless the silence
/// timeout is zero.
///
/// Buffer sizes are left alone: the kernel grows them as needed, and a small send buffer stalls loopback for 40 ms at a time.
pub(super) fn prepare(socket: SockRef<'_>, silence_timeout: Duration) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if silence_timeout.is_zero() {
        return Ok(());
    }
    let [idle, interval, probes] = keep_alive(silence_timeout);
    let of = Duration::from_secs;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(of(idle)).with_interval(of(interval)).with_retries(probes as u32))
}

/// Returns the settings of the kernel's probes: idle seconds before the first, seconds between two, and their number.
/// The kernel gives up after the silence timeout. Each of the three values is in the range that the kernel accepts.
fn keep_alive(silence_timeout: Duration) -> [u64; 3] {
    let seconds = silence_timeout.as_secs() + u64::from(silence_timeout.subsec_nanos() > 0);
    let seconds = seconds.clamp(2, 1 << 16);
    let idle = (seconds / IDLE_SHARE).max(1);
    let interval = (seconds - idle).div_ceil(KEEP_ALIVE_PROBES);
    [idle, interval, (seconds - idle).div_ceil(interval)]
}

/// Chooses the congestion control for a peer on the same host, before the connection is made.
///
/// Within a host no network is shared, and bbr, the default of some systems, paces itself to half the speed of the
/// older ones. Unprivileged users may be limited to reno, which every kernel has. If neither can be chosen, the default
/// stays.
pub(super) fn prefer_unpaced(socket: SockRef<'_>) {
    let is_cubic = |name: Vec<u8>| name.split(|&byte| byte == 0).next() == Some(b"cubic");
    if socket.tcp_congestion().is_ok_and(is_cubic) {
        return;
    }
    if let Err(error) = socket.set_tcp_congestion(b"cubic").or_else(|_| socket.set_tcp_congestion(b"reno")) {
        crate::base::event::debug!("neither cubic nor reno can be chosen: {error}");
    }
}

/// Gives a connection the congestion control that the system chose originally, without which it may be slower or
/// faster.
pub(super) fn choose(socket: SockRef<'_>, congestion_control: &[u8]) {
    if let Err(error) = socket.set_tcp_congestion(congestion_control) {
        crate::base::event::debug!("the system's congestion control cannot be chosen: {error}");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use std::mem::MaybeUninit;
    use std::net::TcpListener;

    use super::*;
    use crate::base::tuning::net::SILENCE_TIMEOUT;

    /// Returns the two ends of a connection.
    fn pair() -> (TcpLink, TcpLink) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let left = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (right, _) = listener.accept().unwrap();
        for stream in [&left, &right] {
            stream.set_nonblocking(true).unwrap();
            prepare(SockRef::from(stream), SILENCE_TIMEOUT).unwrap();
        }
        (TcpLink::new(left, SILENCE_TIMEOUT), TcpLink::new(right, SILENCE_TIMEOUT))
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
        assert_eq!(left.try_write(&vec![IoSlice::new(b"y"); 5000]).unwrap(), MOST_PARTS);
    }

    #[test]
    fn a_full_link_would_block_and_moves_on() {
        let (mut left, mut right) = pair();
        let pattern: Vec<u8> = (0..65_521_usize).map(|index| (index % 251) as u8).collect();
        let mut sent = 0;
        let error = loop {
            let rest = &pattern[sent % pattern.len()..];
            // This is long enough ago that a blocked link also checks the state of the connection.
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

    /// Runs `work`, and returns whether it raised SIGPIPE on this thread. A signal that is blocked stays pending, even
    /// if the process ignores it.
    #[expect(unsafe_code, reason = "the C library's calls for the signals of a thread")]
    fn raises_sigpipe(work: impl FnOnce()) -> bool {
        let mut pipe = MaybeUninit::uninit();
        let mut pending = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` and `sigpending` initialise the sets before anything reads them. The mask is that of
        // this thread, which ends with the test.
        unsafe {
            libc::sigemptyset(pipe.as_mut_ptr());
            libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), std::ptr::null_mut()), 0);
            work();
            assert_eq!(libc::sigpending(pending.as_mut_ptr()), 0);
            libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1
        }
    }

    #[test]
    fn a_closed_end_is_an_end_and_then_an_error() {
        assert!(!raises_sigpipe(write_to_a_closed_end));
    }

    fn write_to_a_closed_end() {
        let (mut left, right) = pair();
        drop(right);
        let error = loop {
            match left.try_read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => break other.unwrap_err(),
            }
        };
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        // The first write provokes a reset, and a later one reports it.
        let error = loop {
            match left.try_write(&[IoSlice::new(b"x")]) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
    }

    #[test]
    fn the_kernel_asks_until_silence_is_borne_no_longer() {
        for seconds in (1..200).chain([3600, u64::MAX]) {
            let [idle, interval, probes] = keep_alive(Duration::from_secs(seconds));
            let (in_all, wanted) = (idle + interval * probes, seconds.clamp(2, 1 << 16));
            assert!(in_all >= wanted && in_all < wanted + interval, "{seconds} s: {idle} s and {probes} times {interval} s");
            // The kernel refuses larger values.
            assert!((1..=32767).contains(&idle) && (1..=32767).contains(&interval) && (1..=127).contains(&probes), "{seconds} s");
        }
        assert_eq!(keep_alive(Duration::from_millis(2500)), keep_alive(Duration::from_secs(3)));
    }

    #[test]
    fn a_host_that_the_kernel_gave_up_is_silent_and_stays_so() {
        let (mut left, _right) = pair();
        let said = left.ended(io::Error::from_raw_os_error(libc::ETIMEDOUT));
        assert_eq!(Silence::of(&said), Some(Silence(SILENCE_TIMEOUT)));
        assert!(Silence::of(&left.ended(ErrorKind::UnexpectedEof.into())).is_some(), "the end of the stream says nothing new");
        let (mut left, _right) = pair();
        assert!(Silence::of(&left.ended(io::Error::from_raw_os_error(libc::ECONNRESET))).is_none());
    }

    #[test]
    fn the_options_are_set() {
        let (left, _right) = pair();
        let socket = SockRef::from(&left.stream);
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        let asked =
            (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap(), socket.tcp_keepalive_retries().unwrap());
        assert_eq!(asked, (Duration::from_secs(15), Duration::from_secs(5), 9));
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
