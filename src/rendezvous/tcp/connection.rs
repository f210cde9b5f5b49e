//! One connection of a client to a server: made with patience, and never waited on without a deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Backoff;
use super::resolve::resolve;
use crate::deadline::Deadline;
use crate::proof::{self, Initiator, Purpose, Reason, Secret, Step, Unproven};
use crate::rendezvous::protocol::{Expect, MAGIC, Reply, ReplyDecoder, query};
use crate::rendezvous::store;
use crate::{Error, Result};

/// How long one attempt to connect may take: a host that drops packets must not eat the whole deadline.
const ATTEMPT: Duration = Duration::from_secs(10);
/// The longest single poll; waits beyond it poll again.
const LONGEST_POLL: Duration = Duration::from_secs(3600);
/// After so long without a connection a failed attempt is logged, and again after twice that, and so on.
const QUIET: Duration = Duration::from_secs(10);

/// How long a server may close every connection without a word when it is asked for a proof, before it is taken for one that knows none.
const WORDLESS: Duration = Duration::from_secs(5);

/// Why bytes do not move.
#[derive(Debug)]
pub(super) enum Failure {
    /// The deadline passed.
    Late,
    /// The system or the server ended it.
    Broken(io::Error),
    /// The server does not speak the protocol.
    Malformed(String),
    /// The server closed the connection in place of a proof: it knows none, or is going down.
    Closed,
    /// One end has not proven to the other that it knows the secret.
    Unproven(Unproven),
}

impl Failure {
    /// What went wrong in words, where another attempt may do better; `is_last` says whether one that is closed may.
    fn worth_another(self, host: &str, port: u16, is_last: bool) -> Result<String> {
        let with = || format!("what listens on {host}:{port}");
        match self {
            Self::Late => Ok("it did not answer in time".to_owned()),
            Self::Broken(error) => Ok(error.to_string()),
            Self::Closed if !is_last => Ok("it closed the connection when asked to prove that it knows the job's secret".to_owned()),
            Self::Closed => {
                let reason = "it closed the connection when asked for one; torchrun's stores and PyTorch's know none: start the ranks with \
                              collrun, or unset COLLECTIVES_SECRET";
                Err(Error::Unauthorized { with: with(), reason: reason.to_owned() })
            }
            Self::Unproven(unproven) => Err(Error::Unauthorized { with: with(), reason: unproven.to_string() }),
            Self::Malformed(reason) => Err(Error::Protocol { with: with(), reason }),
        }
    }
}

impl From<Unproven> for Failure {
    fn from(unproven: Unproven) -> Self {
        // One that has too many others to attend to is worth another try.
        if unproven == Unproven::Told(Reason::Busy) {
            Self::Broken(io::Error::other(unproven.to_string()))
        } else {
            Self::Unproven(unproven)
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

/// A connection to a server that has answered a PING.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Bytes that came behind the last answer.
    rest: Vec<u8>,
}

impl Connection {
    /// Connects to the server at `host` and `port`, and asks until the deadline whether it is there.
    pub(super) fn open(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline) -> Result<Self> {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(2));
        let mut quiet = QUIET;
        let mut wordless = None;
        loop {
            let failure = match Self::attempt(host, port, secret, deadline) {
                Ok(connection) => return Ok(connection),
                Err(failure) => failure,
            };
            wordless = matches!(failure, Failure::Closed).then(|| wordless.unwrap_or_else(Instant::now));
            let is_last = deadline.has_passed() || wordless.is_some_and(|since| since.elapsed() > WORDLESS);
            let problem = failure.worth_another(host, port, is_last)?;
            if deadline.has_passed() {
                let attempts = backoff.attempts() + 1;
                let words = format!(
                    "connecting to the store at {host}:{port} ({attempts} attempts, the last: {problem}; is rank 0 running there?)"
                );
                return Err(store::timeout(words, deadline));
            }
            if deadline.elapsed() > quiet {
                quiet *= 2;
                crate::event::warn!(host, port, %problem, "still trying to connect to the store");
            }
            backoff.pause(deadline);
        }
    }

    /// Tries each address of the host once.
    fn attempt(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline) -> std::result::Result<Self, Failure> {
        let mut last = Failure::Late;
        // Looked up each time: a host that starts late may have no address yet, or get another.
        for address in resolve(host, port, deadline)? {
            match Self::connect(address, secret, deadline) {
                Ok(connection) => return Ok(connection),
                Err(failure @ (Failure::Malformed(_) | Failure::Unproven(_))) => return Err(failure),
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// Connects to one address and asks whether a store answers there.
    fn connect(address: SocketAddr, secret: Option<&Secret>, deadline: &Deadline) -> std::result::Result<Self, Failure> {
        // A connection attempt with no time at all is an error of the system's; one millisecond is the least that is not.
        let limit = Deadline::after(ATTEMPT.min(deadline.remaining()).max(Duration::from_millis(1)));
        let stream = TcpStream::connect_timeout(&address, limit.remaining().max(Duration::from_millis(1)))?;
        if stream.local_addr()? == stream.peer_addr()? {
            // The system can connect a socket to itself where nobody listens on a port of its own range.
            return Err(io::Error::new(ErrorKind::ConnectionRefused, "nobody listens there").into());
        }
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut connection = Self { stream, rest: Vec::new() };
        if let Some(secret) = secret {
            connection.prove(secret, &limit)?;
        }
        connection.greet(&limit)?;
        Ok(connection)
    }

    /// Proves to the server that this end knows the secret, and has it prove the same.
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
                Step::Done => return Ok(()),
            }
        }
    }

    /// Says what protocol is spoken, and asks for a sign of life, both in one write: PyTorch's server drops a client
    /// whose first five bytes come in pieces.
    fn greet(&mut self, deadline: &Deadline) -> std::result::Result<(), Failure> {
        let nonce = std::process::id();
        let mut greeting = vec![query::VALIDATE];
        greeting.extend(MAGIC.to_le_bytes());
        greeting.push(query::PING);
        greeting.extend(nonce.to_le_bytes());
        self.send(&greeting, deadline)?;
        match self.receive(Expect::Nonce, deadline)? {
            Reply::Nonce(same) if same == nonce => Ok(()),
            Reply::Nonce(other) if proof::is_reply(other.to_le_bytes()) => Err(Unproven::Told(Reason::Wanted).into()),
            other => Err(Failure::Malformed(format!("{other:?} in answer to a PING with {nonce}; it is no TCPStore server"))),
        }
    }

    /// The address by which this host reached the server.
    pub(super) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Sends a request.
    pub(super) fn send(&mut self, mut message: &[u8], deadline: &Deadline) -> std::result::Result<(), Failure> {
        if !self.rest.is_empty() {
            return Err(Failure::Malformed(format!("{} bytes that nobody asked for", self.rest.len())));
        }
        while !message.is_empty() {
            match self.stream.write(message) {
                Ok(count) => message = &message[count..],
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
                Ok(count) => come.extend_from_slice(&scratch[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.ready(PollFlags::IN, deadline)?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until bytes can move.
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
