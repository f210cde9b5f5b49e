//! Opening a link, by this rank or by the peer, without ever waiting.
//!
//! Where this rank opens it: connect, prove, say hello, hear the answer, confirm. Where the peer does, this rank takes the link from its own
//! listener. Meanwhile it connects to the peer now and then and hangs up without a word: a peer that died before it opened its link would be
//! waited for in vain.

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

/// A link that is being opened. Dropping it gives up.
#[derive(Debug)]
pub(crate) struct Connector {
    address: SocketAddr,
    hello: Hello,
    terms: Terms,
    /// Whether the peer runs on this host.
    same_host: bool,
    /// This rank's own listener, which is served meanwhile. `None` where somebody else serves it.
    acceptor: Option<Arc<Mutex<Acceptor>>>,
    stage: Stage,
    pause: Duration,
    /// What went wrong in the last attempt.
    trouble: Option<String>,
    /// Since when this process has had no descriptor for an attempt, by the system's number.
    lack: Option<(Instant, i32)>,
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
    /// The hello has been sent; these bytes of the answer are there.
    Greeting(Link, Vec<u8>),
}

/// What a stage leads to.
enum Turn {
    /// Nothing more can be done now.
    Waits(Stage),
    Goes(Stage),
    Opens(Link),
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
    Unauthenticated { rank: u32, address: SocketAddr, why: AuthenticationError },
    /// Someone listens who is no rank of any job.
    #[error("{address}, where rank {rank} listened, sent what cannot be understood: {what}")]
    Junk { rank: u32, address: SocketAddr, what: String },
}

impl From<ConnectError> for Interrupted {
    /// In each case the peer is not where it was, and that is all that others can be told.
    fn from(error: ConnectError) -> Self {
        event::warn!("{error}");
        let (ConnectError::Gone { rank, .. }
        | ConnectError::Refused { rank, .. }
        | ConnectError::Unauthenticated { rank, .. }
        | ConnectError::Junk { rank, .. }) = error;
        AbortReason::Lost { rank }.into()
    }
}

impl Connector {
    /// Nothing happens before the first [`Connector::advance`].
    pub(super) fn new(address: SocketAddr, hello: Hello, terms: Terms, same_host: bool, acceptor: Option<Arc<Mutex<Acceptor>>>) -> Self {
        let now = Instant::now();
        let (begin, pause) = if hello.is_opened_by_receiver() { (now + FIRST_PROBE, FIRST_PROBE) } else { (now, FIRST_PAUSE) };
        Self { address, hello, terms, same_host, acceptor, stage: Stage::Pausing(begin), pause, trouble: None, lack: None }
    }

    /// Goes on as far as it can without waiting, and hands over the link once it is open. To be called again when
    /// [`Connector::interest`] or this rank's listener is ready, and every few milliseconds; not after the link was handed over. After an
    /// error it begins anew.
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

    /// What to wait for before the next [`Connector::advance`]; `None` between two attempts.
    pub(crate) fn interest(&self) -> Option<PollFd<'_>> {
        match &self.stage {
            Stage::Pausing(_) => None,
            Stage::Connecting(socket) => Some(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)),
            Stage::Proving(stream, _) => Some(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)),
            Stage::Greeting(link, _) => Some(PollFd::from_borrowed_fd(link.as_fd(), PollFlags::IN)),
        }
    }

    /// Why it cannot even begin, where that has been for a lack of this process for a while.
    pub(super) fn lack(&self) -> Option<io::Error> {
        let (_, number) = self.lack.filter(|(since, _)| since.elapsed() >= STARVED)?;
        Some(io::Error::from_raw_os_error(number))
    }

    /// How far it has come, in words, for when there is no more time.
    pub(super) fn progress(&self) -> String {
        let stage = match &self.stage {
            _ if self.hello.is_opened_by_receiver() => "it listens, but has not opened the link",
            Stage::Pausing(_) => "not connected",
            Stage::Connecting(_) => "still connecting",
            Stage::Proving(..) => "connected, but it has not proven that it knows the job's secret",
            Stage::Greeting(..) => "connected, but not answered",
        };
        let trouble = self.trouble.as_ref().map_or(String::new(), |trouble| format!("; before that: {trouble}"));
        format!("rank {} at {}: {stage}{trouble}", self.hello.receiver, self.address)
    }

    /// Greets who has connected to this rank meanwhile: ranks that wait for each other in a circle would otherwise not get on. Returns the
    /// link where the peer is to open it and has.
    fn serve(&self) -> Option<Link> {
        let mut acceptor = event::lock(self.acceptor.as_ref()?);
        acceptor.poll();
        if self.hello.is_opened_by_receiver() { acceptor.take(self.hello.channel, self.hello.receiver) } else { None }
    }

    /// [`Connector::advance`], before a failed attempt is set aside.
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

    /// Goes on from one stage. An error ends the attempt, and the connection with it.
    fn turn(&mut self, stage: Stage) -> Result<Turn, Trouble> {
        match stage {
            Stage::Pausing(until) if Instant::now() < until => Ok(Turn::Waits(stage)),
            Stage::Pausing(_) => self.connect().map(|socket| Turn::Goes(Stage::Connecting(socket))),
            Stage::Connecting(socket) if !is_writable(&socket)? => Ok(Turn::Waits(Stage::Connecting(socket))),
            Stage::Connecting(socket) => match socket.take_error()? {
                Some(error) => Err(self.failed(&error)),
                // The peer lives, and is to open the link.
                None if self.hello.is_opened_by_receiver() => Ok(Turn::Waits(self.later())),
                None => self.greet(socket.into()).map(Turn::Goes),
            },
            Stage::Proving(stream, initiator) => self.hear_proof(stream, initiator),
            Stage::Greeting(link, heard) => self.hear_answer(link, heard),
        }
    }

    /// A pause before the next attempt, longer each time.
    fn later(&mut self) -> Stage {
        let until = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Stage::Pausing(until)
    }

    /// A socket that is connecting.
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

    /// Sends the first words: of a proof where there is a secret, else the hello.
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

    /// Goes on with the proof.
    fn hear_proof(&self, mut stream: TcpStream, mut initiator: Initiator) -> Result<Turn, Trouble> {
        loop {
            let mut chunk = [0; 64];
            // No more than belongs to the proof: the answer to the hello may be right behind it.
            let wanted = initiator.wants().min(chunk.len());
            let read = match stream.read(&mut chunk[..wanted]) {
                Ok(0) => return Err(Trouble::Passing("the peer closed the connection instead of a proof".to_owned())),
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

    /// Reads the answer; to a welcome it confirms and gives out the link.
    fn hear_answer(&self, mut link: Link, mut heard: Vec<u8>) -> Result<Turn, Trouble> {
        let answer = loop {
            let mut chunk = [0; Answer::MAX_BYTES];
            // A connection that ends or breaks here met a peer that ran out of room, or one that is going down: the next
            // attempt will tell.
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
            Ok(Answer::Welcome) => return junk(format!("{} bytes where a welcome was expected", heard.len())),
            Ok(Answer::Refused(refusal)) => return Err(Trouble::Final(ConnectError::Refused { rank, address, refusal })),
            Err(what) => return junk(what),
        }
        link.say(&[CONFIRM])?;
        Ok(Turn::Opens(link))
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
