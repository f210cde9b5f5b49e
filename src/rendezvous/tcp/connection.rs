//! One connection of a client to a server: name lookup, attempts until a deadline, requests and answers. Every wait
//! has a deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Attempts, Backoff};
use crate::authentication::record::Records;
use crate::authentication::{self, AuthenticationError, Initiator, Purpose, Reason, Secret, Step};
use crate::base::deadline::Deadline;
use crate::base::tuning::store::{ATTEMPT, CLOSING_GRACE, FIRST_PAUSE, LEAST_RESOLVE, LONGEST_PAUSE, LONGEST_POLL, REPORT_AFTER};
use crate::error::{Error, Result};
use crate::rendezvous::protocol::{Expect, MAGIC, Reply, ReplyDecoder, query};
use crate::rendezvous::store;

/// Why a transfer failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The deadline passed.
    Late,
    /// The system or the server ended the connection.
    Broken(io::Error),
    /// The server does not speak the protocol.
    Malformed(String),
    /// The server closed the connection instead of sending a proof. The server does not know the proof protocol, or is
    /// shutting down.
    Closed,
    /// One end has not proven to the other that it knows the secret.
    Unauthenticated(AuthenticationError),
    /// This process or the server's process lacks the resources for one more connection.
    Lacking(io::Error),
}

impl Failure {
    /// Returns the kind of the system's error, if it was one.
    fn kind(&self) -> Option<ErrorKind> {
        if let Self::Broken(error) = self { Some(error.kind()) } else { None }
    }

    /// Returns a description of the problem if another attempt may succeed, else the error. After
    /// [`Failure::Closed`], no attempt follows if this one `is_last`.
    fn worth_another(self, host: &str, port: u16, is_last: bool) -> Result<String> {
        let with = || format!("the process that listens on {host}:{port}");
        match self {
            Self::Late => Ok("it did not answer in time".to_owned()),
            Self::Broken(error) => Ok(error.to_string()),
            Self::Closed if !is_last => Ok("it closed the connection when asked to prove that it knows the job's secret".to_owned()),
            Self::Closed => {
                let reason = "it closed the connection when asked for a proof; the stores of torchrun and PyTorch support none: start the \
                              ranks with collrun, or unset COLLECTIVES_SECRET";
                Err(Error::Unauthorized { with: with(), reason: reason.to_owned() })
            }
            Self::Unauthenticated(unproven) => Err(Error::Unauthorized { with: with(), reason: unproven.to_string() }),
            Self::Malformed(reason) => Err(Error::Protocol { with: with(), reason }),
            Self::Lacking(error) => Err(Error::io(format!("connecting to the store at {host}:{port}"), error)),
        }
    }
}

impl From<AuthenticationError> for Failure {
    fn from(unproven: AuthenticationError) -> Self {
        // A busy server is worth another attempt.
        match unproven {
            AuthenticationError::Refused(Reason::Busy) => Self::Broken(io::Error::other(unproven.to_string())),
            AuthenticationError::Refused(Reason::Starved) => Self::Lacking(io::Error::other(unproven.to_string())),
            _ => Self::Unauthenticated(unproven),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            // No pause frees descriptors in this process.
            Some(libc::EMFILE | libc::ENFILE) => Self::Lacking(error),
            None if error.get_ref().is_some_and(|inner| inner.is::<NoThread>()) => Self::Lacking(error),
            _ => Self::Broken(error),
        }
    }
}

/// A connection to a server that has answered a PING.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Bytes that followed the last answer.
    rest: Vec<u8>,
    /// Encrypts everything after the proof, if the connection is encrypted.
    records: Option<Records>,
}

impl Connection {
    /// Connects to the server at `host` and `port`, and retries until the deadline.
    pub(super) fn open(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline) -> Result<Self> {
        Self::open_with(host, port, secret, deadline, false)
    }

    /// Connects like [`open`](Self::open) to a process that has listened from its start: if the connection is refused, the
    /// process is gone.
    pub(super) fn open_to_listener(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline) -> Result<Self> {
        Self::open_with(host, port, secret, deadline, true)
    }

    fn open_with(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline, refused_is_gone: bool) -> Result<Self> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut report_after = REPORT_AFTER;
        let (mut attempts, mut closing_since) = (Attempts::default(), None);
        loop {
            let failure = match Self::attempt(host, port, secret, deadline) {
                Ok(connection) => return Ok(connection),
                // A timeout adds no information about a server that has closed every connection so far.
                Err(Failure::Late) if closing_since.is_some() && deadline.has_passed() => Failure::Closed,
                Err(failure) => failure,
            };
            closing_since = matches!(failure, Failure::Closed).then(|| closing_since.unwrap_or_else(Instant::now));
            let is_last = deadline.has_passed() || closing_since.is_some_and(|since| since.elapsed() > CLOSING_GRACE);
            let kind = failure.kind();
            let problem = failure.worth_another(host, port, is_last)?;
            if refused_is_gone && kind == Some(ErrorKind::ConnectionRefused) {
                let gone = io::Error::new(ErrorKind::ConnectionRefused, "no process listens on this port any more");
                return Err(Error::io(format!("connecting to the store at {host}:{port}"), gone));
            }
            attempts.add(kind, &problem);
            if deadline.has_passed() {
                return Err(store::timeout(format!("connecting to the store at {host}:{port} ({attempts})"), deadline));
            }
            if deadline.elapsed() > report_after {
                report_after *= 2;
                let (host, problem) = (host.to_owned(), problem.to_string());
                let line = format!("still trying to connect to the store at {host}:{port}: {problem}");
                crate::base::event::tell_aloud(Some(line), move || {
                    crate::base::event::warn!(host, port, %problem, "still trying to connect to the store");
                });
            }
            backoff.pause(deadline);
        }
    }

    /// Connects to a server that answered before. If it does not answer at once, it is gone.
    pub(super) fn open_again(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline) -> Result<Self> {
        Self::attempt(host, port, secret, deadline).or_else(|failure| {
            let problem = failure.worth_another(host, port, true)?;
            Err(Error::io(format!("connecting to the store at {host}:{port} again"), io::Error::other(problem)))
        })
    }

    /// Tries each address of the host once.
    fn attempt(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline) -> std::result::Result<Self, Failure> {
        let mut last = Failure::Late;
        // Resolves each time: a host that starts late may have no address yet, or get a different one.
        for address in resolve(host, port, deadline)? {
            match Self::connect(address, secret, deadline) {
                Ok(connection) => return Ok(connection),
                Err(failure @ (Failure::Malformed(_) | Failure::Unauthenticated(_) | Failure::Lacking(_))) => return Err(failure),
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// Connects to one address and checks that a store answers there.
    fn connect(address: SocketAddr, secret: Option<&Secret>, deadline: &Deadline) -> std::result::Result<Self, Failure> {
        // The system refuses an attempt with no time at all.
        let limit = Deadline::after(ATTEMPT.min(deadline.remaining()).max(Duration::from_millis(1)));
        let stream = TcpStream::connect_timeout(&address, limit.remaining().max(Duration::from_millis(1)))?;
        if stream.local_addr()? == stream.peer_addr()? {
            // The system can connect a socket to itself if no server listens on a port of the ephemeral range.
            return Err(io::Error::new(ErrorKind::ConnectionRefused, "no process listens there").into());
        }
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut connection = Self { stream, rest: Vec::new(), records: None };
        if let Some(secret) = secret {
            connection.prove(secret, &limit)?;
        }
        connection.greet(&limit)?;
        Ok(connection)
    }

    /// Proves to the server that this end knows the secret, and verifies the server's proof.
    fn prove(&mut self, secret: &Secret, deadline: &Deadline) -> std::result::Result<(), Failure> {
        let mut initiator = Initiator::new(secret, Purpose::Store, &[])?;
        self.send(&initiator.opening(), deadline)?;
        let mut scratch = [0; 64];
        loop {
            let wanted = initiator.wants().min(scratch.len());
            let read = match self.stream.read(&mut scratch[..wanted]) {
                Ok(0) => return Err(Failure::Closed),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(Failure::Closed),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.ready(PollFlags::IN, deadline)?;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            match initiator.receive(&scratch[..read])? {
                Step::Listen => {}
                Step::Send(tag) => self.send(&tag, deadline)?,
                Step::Done => {
                    self.records = initiator.into_cipher().map(Records::new);
                    return Ok(());
                }
            }
        }
    }

    /// Sends VALIDATE and PING in one write: PyTorch's server drops a client whose first five bytes arrive in pieces.
    fn greet(&mut self, deadline: &Deadline) -> std::result::Result<(), Failure> {
        let nonce = std::process::id();
        let mut greeting = vec![query::VALIDATE];
        greeting.extend(MAGIC.to_le_bytes());
        greeting.push(query::PING);
        greeting.extend(nonce.to_le_bytes());
        self.send(&greeting, deadline)?;
        match self.receive(Expect::Nonce, deadline)? {
            Reply::Nonce(same) if same == nonce => Ok(()),
            Reply::Nonce(other) if authentication::is_reply(other.to_le_bytes()) => Err(AuthenticationError::Refused(
                Reason::of_refusal(&self.rest).filter(|reason| *reason == Reason::Starved).unwrap_or(Reason::Wanted),
            )
            .into()),
            other => Err(Failure::Malformed(format!("it answered a PING with {nonce} by {other:?}, so it is not a TCPStore server"))),
        }
    }

    /// Returns the local address of the connection.
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Sends a request.
    pub(super) fn send(&mut self, message: &[u8], deadline: &Deadline) -> std::result::Result<(), Failure> {
        if !self.rest.is_empty() {
            return Err(Failure::Malformed(format!("{} bytes without a request", self.rest.len())));
        }
        let mut sealed = Vec::new();
        let mut left = match &mut self.records {
            Some(records) => {
                records.seal(message, &mut sealed)?;
                &sealed[..]
            }
            None => message,
        };
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(count) => left = &left[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(PollFlags::OUT, deadline)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Receives an answer.
    pub(super) fn receive(&mut self, expect: Expect, deadline: &Deadline) -> std::result::Result<Reply, Failure> {
        let mut decoder = ReplyDecoder::new(expect);
        let mut scratch = [0; 16 << 10];
        let mut come = std::mem::take(&mut self.rest);
        loop {
            if let Some((reply, rest)) = decoder.push(&come).map_err(|malformed| Failure::Malformed(malformed.0))? {
                self.rest = rest;
                return Ok(reply);
            }
            come.clear();
            match self.stream.read(&mut scratch) {
                Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "the server closed the connection").into()),
                Ok(count) => match &mut self.records {
                    Some(records) => records.open(&scratch[..count], &mut come)?,
                    None => come.extend_from_slice(&scratch[..count]),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(PollFlags::IN, deadline)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until bytes can be transferred.
    fn ready(&self, flags: PollFlags, deadline: &Deadline) -> std::result::Result<(), Failure> {
        loop {
            if deadline.has_passed() {
                return Err(Failure::Late);
            }
            let patience = Timespec::try_from(deadline.remaining().min(LONGEST_POLL)).unwrap_or_default();
            match poll(&mut [PollFd::from_borrowed_fd(self.stream.as_fd(), flags)], Some(&patience)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}

/// Returns the addresses of a host, at least one. The system's resolver has no deadline, so it runs on a thread of its
/// own. If no answer comes in time, that thread is left behind and ends with the answer.
pub(in crate::rendezvous) fn resolve(host: &str, port: u16, deadline: &Deadline) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = host.to_owned();
    let addresses: Vec<_> = within(deadline, move || Ok((name.as_str(), port).to_socket_addrs()?.collect()))?;
    if addresses.is_empty() {
        return Err(io::Error::new(ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

/// The error if no thread can be started to look up a name. A pause would not free one.
#[derive(Debug, thiserror::Error)]
#[error(
    "no thread can be started to look the name up: {0}; raise the limit on processes and threads (RLIMIT_NPROC, pids.max), or set \
     an IP address"
)]
struct NoThread(io::Error);

impl NoThread {
    fn io(error: io::Error) -> io::Error {
        io::Error::other(Self(error))
    }
}

fn within<T: Send + 'static>(deadline: &Deadline, ask: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    let (answer, answered) = mpsc::sync_channel(1);
    std::thread::Builder::new().name("resolver".to_owned()).spawn(move || answer.send(ask())).map_err(NoThread::io)?;
    match answered.recv_timeout(deadline.remaining().max(LEAST_RESOLVE)) {
        Ok(addresses) => addresses,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(io::Error::new(ErrorKind::TimedOut, "the name was not resolved in time")),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(io::Error::other("the thread that resolves the name panicked")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_its_own_and_a_name_is_looked_up() {
        let soon = Deadline::after(Duration::from_secs(20));
        assert_eq!(resolve("192.0.2.7", 5, &soon).unwrap(), [SocketAddr::from(([192, 0, 2, 7], 5))]);
        assert_eq!(resolve("::1", 5, &soon).unwrap(), [SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 5))]);
        let own = resolve("localhost", 5, &soon).unwrap();
        assert!(own.iter().all(|address| address.ip().is_loopback() && address.port() == 5) && !own.is_empty(), "{own:?}");
    }

    #[test]
    fn a_resolver_that_does_not_answer_is_waited_for_until_the_deadline_alone() {
        let (end, ended) = mpsc::channel::<()>();
        let silent = move || ended.recv().map_err(io::Error::other);
        let error = within(&Deadline::after(Duration::from_millis(20)), silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        end.send(()).unwrap();
        assert_eq!(within(&Deadline::after(Duration::from_secs(20)), || Ok(7)).unwrap(), 7);
    }
}
