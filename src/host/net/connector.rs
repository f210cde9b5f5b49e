//! Opens a link without blocking, whether this rank or the peer is the one to open it.
//!
//! If this rank opens the link, it connects, proves that it knows the secret, sends a hello, reads the answer and
//! confirms. If the peer opens the link, this rank takes the link from its own listener. While this rank waits for the
//! peer, it connects to the peer now and then, and closes that connection without sending anything. Otherwise this rank
//! would not notice that the peer died before opening the link.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::hello::{Answer, CONFIRM, Hello, Refusal};
use super::link::{Link, Terms};
use super::listener::Acceptor;
use super::tcp;
use crate::authentication::{AuthenticationError, Initiator, Purpose, Reason, Step};
use crate::base::event;
use crate::base::tuning::admission::STARVED;
use crate::base::tuning::net::{FIRST_PAUSE, FIRST_PROBE, LONGEST_PAUSE};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::ByteLink;

/// A link that is being opened. Dropping it ends the attempt.
#[derive(Debug)]
pub(crate) struct Connector {
    address: SocketAddr,
    hello: Hello,
    terms: Terms,
    /// Whether the peer runs on this host.
    same_host: bool,
    /// This rank's own listener, which is served meanwhile. `None` if something else serves it.
    acceptor: Option<Arc<Mutex<Acceptor>>>,
    stage: Stage,
    pause: Duration,
    /// The error of the last attempt.
    trouble: Option<String>,
    /// The time at which this process began to lack a descriptor for an attempt, and the system's error number.
    lack: Option<(Instant, i32)>,
}

/// The progress of an attempt.
#[derive(Debug)]
enum Stage {
    /// No attempt is in progress. The next attempt begins at this time.
    Pausing(Instant),
    /// The kernel is connecting.
    Connecting(Socket),
    /// The two ends prove to each other that they know the secret.
    Proving(TcpStream, Initiator),
    /// The hello has been sent, and these bytes of the answer have arrived.
    Greeting(Link, Vec<u8>),
}

/// The outcome of a stage.
enum Turn {
    /// Nothing more can be done now.
    Waits(Stage),
    Goes(Stage),
    Opens(Link),
}

/// The reason why a link cannot be opened, no matter how often it is tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectError {
    /// Every rank listens from the start, so a refused connection means that the rank has ended.
    #[error("rank {rank} no longer listens at {address}")]
    Gone { rank: u32, address: SocketAddr },
    /// A listener refuses the link.
    #[error("{address} refused a link to rank {rank}: {refusal}")]
    Refused { rank: u32, address: SocketAddr, refusal: Refusal },
    /// The listener has no secret, has a different secret, or has refused this rank's proof.
    #[error("{address}, where rank {rank} listened: no proof of the job's secret: {why}")]
    Unauthenticated { rank: u32, address: SocketAddr, why: AuthenticationError },
    /// The listener is not a rank of any job.
    #[error("{address}, where rank {rank} listened, sent an invalid answer: {what}")]
    Junk { rank: u32, address: SocketAddr, what: String },
}

impl ConnectError {
    /// Returns how this error interrupts a call on rank `me`. In each case, `me` does not reach the peer at the peer's
    /// address, and that is all that can be reported to other ranks.
    pub(crate) fn met_by(self, me: u32) -> Interrupted {
        event::warn!("{self}");
        let (ConnectError::Gone { rank, .. }
        | ConnectError::Refused { rank, .. }
        | ConnectError::Unauthenticated { rank, .. }
        | ConnectError::Junk { rank, .. }) = self;
        AbortReason::Lost { rank, by: me }.into()
    }
}

impl Connector {
    /// Creates a connector. Nothing happens before the first [`Connector::advance`].
    pub(super) fn new(address: SocketAddr, hello: Hello, terms: Terms, same_host: bool, acceptor: Option<Arc<Mutex<Acceptor>>>) -> Self {
        let now = Instant::now();
        let (begin, pause) = if hello.is_opened_by_receiver() { (now + FIRST_PROBE, FIRST_PROBE) } else { (now, FIRST_PAUSE) };
        Self { address, hello, terms, same_host, acceptor, stage: Stage::Pausing(begin), pause, trouble: None, lack: None }
    }

    /// Proceeds as far as it can without blocking, and returns the link once it is open. Call it again when
    /// [`Connector::interest`] or this rank's listener is ready, and every few milliseconds, but not after it has
    /// returned the link. After an error it starts over.
    pub(crate) fn advance(&mut self) -> Result<Option<Link>, ConnectError> {
        if let Some(link) = self.serve() {
            return Ok(Some(link));
        }
        self.step().or_else(|trouble| {
            self.stage = self.later();
            match trouble {
                Trouble::Final(error) => Err(error),
                Trouble::Passing(what) => {
                    event::debug!("opening a link to rank {} at {}: {what}", self.hello.receiver, self.address);
                    self.trouble = Some(what);
                    Ok(None)
                }
            }
        })
    }

    /// Returns what to wait for before the next [`Connector::advance`]; `None` between two attempts.
    pub(crate) fn interest(&self) -> Option<PollFd<'_>> {
        match &self.stage {
            Stage::Pausing(_) => None,
            Stage::Connecting(socket) => Some(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)),
            Stage::Proving(stream, _) => Some(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)),
            Stage::Greeting(link, _) => Some(PollFd::from_borrowed_fd(link.as_fd(), PollFlags::IN)),
        }
    }

    /// Returns the reason why no attempt can begin, if this process has lacked a descriptor for a while.
    pub(super) fn lack(&self) -> Option<io::Error> {
        let (_, number) = self.lack.filter(|(since, _)| since.elapsed() >= STARVED)?;
        Some(io::Error::from_raw_os_error(number))
    }

    /// Describes the progress, for use after a timeout.
    pub(super) fn progress(&self) -> String {
        let stage = match &self.stage {
            _ if self.hello.is_opened_by_receiver() => "it listens, but has not opened the link",
            Stage::Pausing(_) => "not connected",
            Stage::Connecting(_) => "still connecting",
            Stage::Proving(..) => "connected, but it has not proven that it knows the job's secret",
            Stage::Greeting(..) => "connected, but it has not answered",
        };
        let trouble = self.trouble.as_ref().map_or(String::new(), |trouble| format!("; before that: {trouble}"));
        format!("rank {} at {}: {stage}{trouble}", self.hello.receiver, self.address)
    }

    /// Serves ranks that have connected to this rank meanwhile; otherwise ranks that wait for each other in a circle
    /// would block. Returns the link if the peer is the one to open it and has done so.
    fn serve(&self) -> Option<Link> {
        let mut acceptor = event::lock(self.acceptor.as_ref()?);
        acceptor.poll();
        if self.hello.is_opened_by_receiver() {
            acceptor.take(self.hello.channel, self.hello.connection, self.hello.receiver)
        } else {
            None
        }
    }

    /// Does the work of [`Connector::advance`], except for handling a failed attempt.
    fn step(&mut self) -> Result<Option<Link>, Trouble> {
        let mut stage = std::mem::replace(&mut self.stage, Stage::Pausing(Instant::now()));
        loop {
            match self.turn(stage)? {
                Turn::Goes(next) => stage = next,
                Turn::Opens(link) => return Ok(Some(link)),
                Turn::Waits(same) => {
                    self.stage = same;
                    return Ok(None);
                }
            }
        }
    }

    /// Proceeds from one stage. An error ends the attempt and closes its connection.
    fn turn(&mut self, stage: Stage) -> Result<Turn, Trouble> {
        match stage {
            Stage::Pausing(until) if Instant::now() < until => Ok(Turn::Waits(stage)),
            Stage::Pausing(_) => self.connect().map(|socket| Turn::Goes(Stage::Connecting(socket))),
            Stage::Connecting(socket) if !is_writable(&socket)? => Ok(Turn::Waits(Stage::Connecting(socket))),
            Stage::Connecting(socket) => match socket.take_error()? {
                Some(error) => Err(self.failed(&error)),
                // The peer is alive, and is the one to open the link.
                None if self.hello.is_opened_by_receiver() => Ok(Turn::Waits(self.later())),
                None => self.greet(socket.into()).map(Turn::Goes),
            },
            Stage::Proving(stream, initiator) => self.hear_proof(stream, initiator),
            Stage::Greeting(link, heard) => self.hear_answer(link, heard),
        }
    }

    /// Returns a pause before the next attempt, longer each time.
    fn later(&mut self) -> Stage {
        let until = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Stage::Pausing(until)
    }

    /// Returns a socket that is connecting.
    fn connect(&mut self) -> Result<Socket, Trouble> {
        let socket = Socket::new(Domain::for_address(self.address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP));
        self.lack = match socket.as_ref().err().and_then(io::Error::raw_os_error) {
            Some(number @ (libc::EMFILE | libc::ENFILE)) => Some((self.lack.map_or_else(Instant::now, |(since, _)| since), number)),
            _ => None,
        };
        let socket = socket?;
        tcp::prepare(SockRef::from(&socket), self.terms.silence_timeout)?;
        if self.same_host {
            tcp::prefer_unpaced(SockRef::from(&socket));
        }
        match socket.connect(&self.address.into()) {
            Ok(()) => Ok(socket),
            // After a signal, too, the kernel goes on connecting.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINPROGRESS | libc::EINTR)) => Ok(socket),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Classifies a failed attempt to connect.
    fn failed(&self, error: &io::Error) -> Trouble {
        match error.kind() {
            ErrorKind::ConnectionRefused => Trouble::Final(ConnectError::Gone { rank: self.hello.receiver, address: self.address }),
            _ => Trouble::Passing(error.to_string()),
        }
    }

    /// Sends the first message: the opening of a proof if there is a secret, otherwise the hello.
    fn greet(&self, mut stream: TcpStream) -> Result<Stage, Trouble> {
        let hello = self.hello.to_bytes();
        let Some(secret) = &self.terms.secret else {
            send(&mut stream, &hello)?;
            return Ok(Stage::Greeting(Link::new(stream, None, &self.terms), Vec::new()));
        };
        let initiator = Initiator::new(secret, Purpose::Link, &hello)?;
        send(&mut stream, &initiator.opening())?;
        Ok(Stage::Proving(stream, initiator))
    }

    /// Continues the proof.
    fn hear_proof(&self, mut stream: TcpStream, mut initiator: Initiator) -> Result<Turn, Trouble> {
        loop {
            let mut chunk = [0; 64];
            // Read only what belongs to the proof: the answer to the hello may follow directly.
            let wanted = initiator.wants().min(chunk.len());
            let read = match stream.read(&mut chunk[..wanted]) {
                Ok(0) => return Err(Trouble::Passing("the peer closed the connection instead of sending a proof".to_owned())),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Turn::Waits(Stage::Proving(stream, initiator))),
                Err(error) => return Err(error.into()),
            };
            match initiator.receive(&chunk[..read]) {
                Ok(Step::Listen) => {}
                Ok(Step::Send(tag)) => send(&mut stream, &tag)?,
                Ok(Step::Done) => {
                    let link = Link::new(stream, initiator.into_cipher(), &self.terms);
                    return Ok(Turn::Goes(Stage::Greeting(link, Vec::new())));
                }
                Err(why @ AuthenticationError::Refused(Reason::Busy)) => return Err(Trouble::Passing(why.to_string())),
                Err(why) => {
                    return Err(Trouble::Final(ConnectError::Unauthenticated { rank: self.hello.receiver, address: self.address, why }));
                }
            }
        }
    }

    /// Reads the answer. If it is a welcome, confirms and returns the link.
    fn hear_answer(&self, mut link: Link, mut heard: Vec<u8>) -> Result<Turn, Trouble> {
        let answer = loop {
            let mut chunk = [0; Answer::MAX_BYTES];
            // If a connection ends or breaks here, the peer had no room left or is shutting down. The next attempt will
            // show which.
            match link.try_read(&mut chunk) {
                Ok(read) => heard.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Turn::Waits(Stage::Greeting(link, heard))),
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(Trouble::Passing("the peer closed the connection without an answer".to_owned()));
                }
                Err(error) => return Err(error.into()),
            }
            match Answer::decode(&heard) {
                Ok(None) => {}
                Ok(Some(answer)) => break Ok(answer),
                Err(what) => break Err(what),
            }
        };
        let (rank, address) = (self.hello.receiver, self.address);
        let junk = |what| Err(Trouble::Final(ConnectError::Junk { rank, address, what }));
        match answer {
            Ok(Answer::Welcome) if heard.len() == Answer::Welcome.to_bytes().len() => {}
            Ok(Answer::Welcome) => return junk(format!("a welcome was expected, but {} bytes came", heard.len())),
            Ok(Answer::Refused(refusal)) => return Err(Trouble::Final(ConnectError::Refused { rank, address, refusal })),
            Err(what) => return junk(what),
        }
        link.say(&[CONFIRM])?;
        Ok(Turn::Opens(link))
    }
}

/// Sends a short message, which fits because the send buffer is almost empty.
fn send(stream: &mut TcpStream, words: &[u8]) -> Result<(), Trouble> {
    match stream.write(words)? {
        written if written == words.len() => Ok(()),
        written => Err(Trouble::Passing(format!("only {written} of {} bytes could be sent", words.len()))),
    }
}

/// The reason why an attempt failed.
enum Trouble {
    /// The next attempt may succeed.
    Passing(String),
    /// No attempt will succeed.
    Final(ConnectError),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Passing(error.to_string())
    }
}

/// Whether the kernel has finished connecting, successfully or not.
fn is_writable(socket: &Socket) -> io::Result<bool> {
    let mut interest = [PollFd::new(socket, PollFlags::OUT)];
    let ready = rustix::event::poll(&mut interest, Some(&rustix::event::Timespec::default()))?;
    Ok(ready > 0)
}
