//! Opening a link: connect, prove, say hello, hear the answer, confirm, without ever waiting.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::hello::{Answer, CONFIRM, Hello, Refusal};
use super::tcp::{self, TcpLink};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::proof::{Initiator, Purpose, Reason, Secret, Step, Unproven};

/// How long to wait after the first failed attempt; twice as long after each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(4);
/// The longest wait between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How long a rank that waits to be connected to leaves its peer in peace, before it looks whether that still lives.
const FIRST_PROBE: Duration = Duration::from_millis(100);

/// A link that is being opened from this side. Dropping it gives up.
#[derive(Debug)]
pub(crate) struct Connector {
    address: SocketAddr,
    hello: Hello,
    /// What the peer has to know.
    secret: Option<Secret>,
    /// Whether the peer runs on this host.
    same_host: bool,
    stage: Stage,
    pause: Duration,
    /// What went wrong in the last attempt.
    trouble: Option<String>,
}

/// How far an attempt has come.
#[derive(Debug)]
enum Stage {
    /// None is under way; the next begins at this time.
    Pausing(Instant),
    /// The kernel is connecting.
    Connecting(Socket),
    /// The two ends prove to each other that they know the secret.
    Proving(TcpStream, Initiator),
    /// The hello has been sent; so many bytes of the answer are there.
    Greeting(TcpStream, Vec<u8>),
}

/// Why a link cannot be had, however often it is tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectError {
    /// Every rank listens from the start, so nobody listening means that it has ended.
    #[error("rank {rank} no longer listens at {address}")]
    Gone { rank: u32, address: SocketAddr },
    /// Someone listens who will not have the link.
    #[error("{address} refused a link to rank {rank}: {refusal}")]
    Refused { rank: u32, address: SocketAddr, refusal: Refusal },
    /// Someone listens who knows no secret, or another one, or whom this rank's own did not convince.
    #[error("{address}, where rank {rank} listened: no proof of the job's secret: {why}")]
    Unproven { rank: u32, address: SocketAddr, why: Unproven },
    /// Someone listens who is no rank of any job.
    #[error("{address}, where rank {rank} listened, sent what cannot be understood: {what}")]
    Junk { rank: u32, address: SocketAddr, what: String },
}

impl From<ConnectError> for Interrupted {
    /// In each case the peer is not where it was, and that is all that others can be told.
    fn from(error: ConnectError) -> Self {
        crate::event::warn!("{error}");
        let (ConnectError::Gone { rank, .. }
        | ConnectError::Refused { rank, .. }
        | ConnectError::Unproven { rank, .. }
        | ConnectError::Junk { rank, .. }) = error;
        AbortReason::Lost { rank }.into()
    }
}

impl Connector {
    /// Nothing happens before the first [`Connector::advance`].
    pub(super) fn new(address: SocketAddr, hello: Hello, secret: Option<Secret>, same_host: bool) -> Self {
        Self { address, hello, secret, same_host, stage: Stage::Pausing(Instant::now()), pause: FIRST_PAUSE, trouble: None }
    }

    /// One that opens no link: it only looks, by [`Connector::probe`], whether the peer lives, which is to open the link itself.
    pub(super) fn probing(address: SocketAddr, hello: Hello, same_host: bool) -> Self {
        let stage = Stage::Pausing(Instant::now() + FIRST_PROBE);
        Self { stage, pause: FIRST_PROBE, ..Self::new(address, hello, None, same_host) }
    }

    /// Connects every now and then and hangs up without a word. An error where nobody listens any more: a rank that dies before
    /// it has opened its link would be waited for in vain. To be called every few milliseconds.
    pub(super) fn probe(&mut self) -> Result<(), ConnectError> {
        match self.attempt() {
            Ok(false) => return Ok(()),
            Err(Trouble::Final(error)) => return Err(error),
            // What passes is no sign of death.
            Ok(true) | Err(Trouble::Passing(_)) => {}
        }
        self.stage = Stage::Pausing(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    /// Goes on as far as it can without waiting, and hands over the link once it is open. To be called again when
    /// [`Connector::interest`] is ready, and every few milliseconds where it is `None`; not after the link was handed over.
    pub(crate) fn advance(&mut self) -> Result<Option<TcpLink>, ConnectError> {
        match self.step() {
            Ok(link) => Ok(link),
            Err(Trouble::Final(error)) => Err(error),
            Err(Trouble::Passing(what)) => {
                crate::event::debug!("opening a link to rank {} at {}: {what}", self.hello.receiver, self.address);
                self.trouble = Some(what);
                self.stage = Stage::Pausing(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                Ok(None)
            }
        }
    }

    /// What to wait for before the next [`Connector::advance`]; `None` between two attempts.
    pub(crate) fn interest(&self) -> Option<PollFd<'_>> {
        match &self.stage {
            Stage::Pausing(_) => None,
            Stage::Connecting(socket) => Some(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)),
            Stage::Proving(stream, _) | Stage::Greeting(stream, _) => Some(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)),
        }
    }

    /// How far it has come, in words, for when there is no more time.
    pub(super) fn progress(&self) -> String {
        let stage = match &self.stage {
            Stage::Pausing(_) => "not connected",
            Stage::Connecting(_) => "still connecting",
            Stage::Proving(..) => "connected, but it has not proven that it knows the job's secret",
            Stage::Greeting(..) => "connected, but not answered",
        };
        let trouble = self.trouble.as_ref().map_or(String::new(), |trouble| format!("; before that: {trouble}"));
        format!("rank {} at {}: {stage}{trouble}", self.hello.receiver, self.address)
    }

    /// [`Connector::advance`], before a failed attempt is set aside.
    fn step(&mut self) -> Result<Option<TcpLink>, Trouble> {
        if !self.attempt()? {
            return Ok(None);
        }
        if let Stage::Connecting(_) = &self.stage {
            let stage = std::mem::replace(&mut self.stage, Stage::Pausing(Instant::now()));
            let Stage::Connecting(socket) = stage else { return Ok(None) };
            let mut stream = TcpStream::from(socket);
            let hello = self.hello.to_bytes();
            self.stage = match &self.secret {
                Some(secret) => {
                    let initiator = Initiator::new(secret, Purpose::Link, &hello)?;
                    send(&mut stream, &initiator.opening())?;
                    Stage::Proving(stream, initiator)
                }
                None => {
                    send(&mut stream, &hello)?;
                    Stage::Greeting(stream, Vec::new())
                }
            };
        }
        if self.hear_proof()? { self.hear_answer() } else { Ok(None) }
    }

    /// Goes on with the proof, if one is under way; whether it is behind.
    fn hear_proof(&mut self) -> Result<bool, Trouble> {
        let Stage::Proving(stream, initiator) = &mut self.stage else { return Ok(true) };
        loop {
            let mut chunk = [0; 64];
            // No more than belongs to the proof: the answer to the hello may be right behind it.
            let wanted = initiator.wants().min(chunk.len());
            let read = match stream.read(&mut chunk[..wanted]) {
                Ok(0) => return Err(Trouble::Passing("the peer closed the connection instead of a proof".to_owned())),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            match initiator.receive(&chunk[..read]) {
                Ok(Step::Listen) => {}
                Ok(Step::Send(tag)) => send(stream, &tag)?,
                Ok(Step::Done) => break,
                Err(why @ Unproven::Told(Reason::Busy)) => return Err(Trouble::Passing(why.to_string())),
                Err(why) => return Err(Trouble::Final(ConnectError::Unproven { rank: self.hello.receiver, address: self.address, why })),
            }
        }
        if let Stage::Proving(stream, _) = std::mem::replace(&mut self.stage, Stage::Pausing(Instant::now())) {
            self.stage = Stage::Greeting(stream, Vec::new());
        }
        Ok(true)
    }

    /// Begins to connect when it is time; whether the kernel is done with it.
    fn attempt(&mut self) -> Result<bool, Trouble> {
        if let Stage::Pausing(until) = self.stage {
            if Instant::now() < until {
                return Ok(false);
            }
            self.stage = Stage::Connecting(self.begin()?);
        }
        if let Stage::Connecting(socket) = &self.stage {
            if !is_writable(socket)? {
                return Ok(false);
            }
            if let Some(error) = socket.take_error()? {
                return Err(self.failed(&error));
            }
        }
        Ok(true)
    }

    /// A socket that is connecting.
    fn begin(&self) -> Result<Socket, Trouble> {
        let socket = Socket::new(Domain::for_address(self.address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
        tcp::prepare(SockRef::from(&socket))?;
        if self.same_host {
            tcp::prefer_unpaced(SockRef::from(&socket));
        }
        match socket.connect(&self.address.into()) {
            Ok(()) => Ok(socket),
            // After a signal the kernel goes on connecting, too.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => Ok(socket),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// What a failed attempt to connect means.
    fn failed(&self, error: &io::Error) -> Trouble {
        match error.kind() {
            ErrorKind::ConnectionRefused => Trouble::Final(ConnectError::Gone { rank: self.hello.receiver, address: self.address }),
            _ => Trouble::Passing(error.to_string()),
        }
    }

    /// Reads the answer; to a welcome it confirms and gives out the link.
    fn hear_answer(&mut self) -> Result<Option<TcpLink>, Trouble> {
        let Stage::Greeting(stream, heard) = &mut self.stage else { return Ok(None) };
        let answer = loop {
            let mut chunk = [0; Answer::MAX_BYTES];
            // A connection that ends or breaks here met a peer that ran out of room, or one that is going down: the next
            // attempt will tell.
            match stream.read(&mut chunk) {
                Ok(0) => return Err(Trouble::Passing("the peer closed the connection without an answer".to_owned())),
                Ok(read) => heard.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            match Answer::decode(heard) {
                Ok(None) => {}
                Ok(Some(answer)) => break Ok(answer),
                Err(what) => break Err(what),
            }
        };
        let (rank, address) = (self.hello.receiver, self.address);
        match answer {
            Ok(Answer::Welcome) if heard.len() == Answer::Welcome.to_bytes().len() => {}
            Ok(Answer::Welcome) => {
                let what = format!("{} bytes where a welcome was expected", heard.len());
                return Err(Trouble::Final(ConnectError::Junk { rank, address, what }));
            }
            Ok(Answer::Refused(refusal)) => return Err(Trouble::Final(ConnectError::Refused { rank, address, refusal })),
            Err(what) => return Err(Trouble::Final(ConnectError::Junk { rank, address, what })),
        }
        send(stream, &[CONFIRM])?;
        match std::mem::replace(&mut self.stage, Stage::Pausing(Instant::now())) {
            Stage::Greeting(stream, _) => Ok(Some(TcpLink::new(stream))),
            _ => Ok(None),
        }
    }
}

/// Sends a few words, which fit into a send buffer that is as good as empty.
fn send(stream: &mut TcpStream, words: &[u8]) -> Result<(), Trouble> {
    match stream.write(words)? {
        written if written == words.len() => Ok(()),
        written => Err(Trouble::Passing(format!("only {written} of {} bytes could be sent", words.len()))),
    }
}

/// Why an attempt failed.
enum Trouble {
    /// The next may succeed.
    Passing(String),
    /// None will.
    Final(ConnectError),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Passing(error.to_string())
    }
}

/// Whether the kernel is done connecting, well or not.
fn is_writable(socket: &Socket) -> io::Result<bool> {
    let mut interest = [PollFd::new(socket, PollFlags::OUT)];
    let ready = rustix::event::poll(&mut interest, Some(&rustix::event::Timespec::default()))?;
    Ok(ready > 0)
}
