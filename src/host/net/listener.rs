//! A rank's listener. It does the handshake of incoming connections, keeps the links until they are taken, and never
//! blocks.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::hello::{Answer, CONFIRM, Channel, Hello, Membership, NoHello, Reason, Refusal, is_hello, quote};
use super::link::{Link, Terms};
use super::{own_address, tcp};
use crate::authentication::{self, Admission, AuthenticationError, Cipher, Purpose, Responder, Secret};
use crate::base::tuning::{admission, net::BACKLOG};
use crate::config::PortRange;
use crate::host::link::ByteLink;

/// Accepts connections, reads their hellos, and keeps the valid ones until they are taken.
#[derive(Debug)]
pub(super) struct Acceptor {
    listener: TcpListener,
    /// Readable when there is something to do: a new connection, or bytes on one that is not a link yet.
    readiness: Arc<OwnedFd>,
    /// The congestion control that the system chose, for connections to other hosts.
    congestion_control: Option<Vec<u8>>,
    /// By rank: whether it runs on this host, at whatever address. Empty if unknown.
    pub(super) neighbours: Vec<bool>,
    me: Membership,
    terms: Terms,
    /// Connections that have not sent a hello.
    pending: Admission<PendingConnection>,
    /// Connections that were welcomed and have not confirmed. At most one for each connection of a link, so they need no
    /// time limit.
    welcomed: Vec<(Caller, Link)>,
    /// Links that have not been taken yet: at most one for each connection of a link.
    ready: Vec<(Caller, Link)>,
}

/// The other end: the link's purpose, the connection's number in the link, and the peer's rank.
type Caller = (Channel, u8, u32);

impl Acceptor {
    /// Listens on `ip`, and on no other address, at a port of the range that `terms` gives, or at one that the system
    /// chooses.
    pub(super) fn bind(ip: IpAddr, me: Membership, terms: Terms) -> io::Result<Self> {
        let (socket, congestion_control) = PortRange::listen(terms.ports, own_address::to_listen_on(ip), listen)?;
        let listener = TcpListener::from(socket);
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&readiness, &listener, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self {
            listener,
            readiness: Arc::new(readiness),
            congestion_control,
            neighbours: Vec::new(),
            me,
            terms,
            pending: Admission::new(admission::LINKS),
            welcomed: Vec::new(),
            ready: Vec::new(),
        })
    }

    /// Returns the address that it listens on.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns a descriptor that is readable when [`Acceptor::poll`] has something to do.
    pub(super) fn readiness(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.readiness)
    }

    /// Does the pending work without blocking.
    pub(super) fn poll(&mut self) {
        self.poll_at(Instant::now());
    }

    /// Returns the reason why no connection can be accepted, if this process lacks resources for it.
    pub(super) fn lack(&self) -> Option<io::Error> {
        let error = self.pending.starved(Instant::now())?;
        Some(error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error))
    }

    /// Takes this connection of a link of this kind if `rank` has opened it.
    pub(super) fn take(&mut self, channel: Channel, connection: u8, rank: u32) -> Option<Link> {
        let at = self.ready.iter().position(|(caller, _)| *caller == (channel, connection, rank))?;
        Some(self.ready.swap_remove(at).1)
    }

    /// Takes all links of this kind that peers have opened since the last call.
    pub(super) fn take_all(&mut self, channel: Channel) -> Vec<(usize, Link)> {
        self.ready.extract_if(.., |((kind, ..), _)| *kind == channel).map(|((.., rank), link)| (rank as usize, link)).collect()
    }

    /// Does the work of [`Acceptor::poll`] at a given time.
    pub(super) fn poll_at(&mut self, now: Instant) {
        self.accept(now);
        for mut waiting in self.pending.take() {
            match waiting.connection.listen(&self.me) {
                None => self.pending.put_back(waiting),
                Some(verdict) => self.decide(waiting.connection, verdict),
            }
        }
        for late in self.pending.overdue(now) {
            self.drop_junk(&late, "did not complete its greeting in time");
        }
        self.hear_confirmations();
    }

    /// Accepts the connections that have arrived, as far as there is room.
    fn accept(&mut self, now: Instant) {
        for oldest in self.pending.make_room(now) {
            self.turn_away(&oldest);
        }
        let listener = &self.listener;
        for (stream, from) in self.pending.accept(now, || listener.accept()) {
            self.take_in(stream, from, now);
        }
        if let Some(events) = self.pending.watch_change().map(|watch| if watch { EventFlags::IN } else { EventFlags::empty() })
            && let Err(error) = epoll::modify(&self.readiness, &self.listener, EventData::new_u64(0), events)
        {
            crate::base::event::warn!("cannot watch the listener: {error}");
        }
    }

    /// Acts on the verdict about a connection.
    fn decide(&mut self, pending: PendingConnection, verdict: Verdict) {
        match verdict {
            Verdict::Gone if pending.began().is_empty() => self.unwatch(&pending.stream),
            Verdict::Gone => self.drop_junk(&pending, "closed the connection in the middle of its hello"),
            Verdict::Junk(what) => self.drop_junk(&pending, &what),
            Verdict::Unauthenticated(unproven) => self.refuse_unauthenticated(pending, &unproven),
            Verdict::Refused(refusal) => self.refuse(pending, refusal),
            Verdict::Welcome(hello) => self.welcome(pending, &hello),
        }
    }

    /// Drops an unproven connection to make room for others. The peer may try again.
    fn turn_away(&mut self, pending: &PendingConnection) {
        self.drop_junk(pending, "its place was needed for newer connections");
        if pending.proving.is_some() {
            // If bytes are left unread when the connection is closed, the reply is lost.
            pending.drain();
            let _ = (&pending.stream).write(&authentication::Reason::Busy.to_reply());
        }
    }

    /// Ensures that a connection that is about to be dropped no longer wakes a thread that waits for the listener.
    /// Closing the connection is not enough if a forked child also has it open.
    fn unwatch(&self, stream: impl AsFd) {
        // It may not be registered.
        let _ = epoll::delete(&self.readiness, stream);
    }

    /// Adds a new connection to the unproven connections.
    fn take_in(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        if let Err(error) = self.prepare(&stream) {
            crate::base::event::debug!("cannot set up a connection from {from}: {error}");
            return;
        }
        self.pending.add(PendingConnection::new(stream, from, self.terms.secret.as_ref()), now);
    }

    /// Sets the options of an incoming connection, and registers it, so that its bytes wake a thread that waits for the
    /// listener.
    fn prepare(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        tcp::prepare(SockRef::from(stream), self.terms.silence_timeout)?;
        Ok(epoll::add(&self.readiness, stream, EventData::new_u64(0), EventFlags::IN)?)
    }

    /// Reports that a connection is dropped.
    fn drop_junk(&mut self, pending: &PendingConnection, what: &str) {
        self.unwatch(&pending.stream);
        if let Some(number) = self.pending.refuse() {
            let heard = quote(pending.began());
            crate::base::event::warn!(
                "dropped a connection from {}, which began with {heard}: {what} ({number} dropped so far)",
                pending.from
            );
        }
    }

    /// Sends the reason to the other end, which may be a rank of this job with wrong data.
    fn refuse(&mut self, pending: PendingConnection, refusal: Refusal) {
        self.drop_junk(&pending, &refusal.to_string());
        // An answer fits into an empty send buffer. If the connection is broken, there is no one to notify.
        let _ = pending.into_link(&self.terms).say(&Answer::Refused(refusal).to_bytes());
    }

    /// Tells the other end what it lacks, in a form that it can decode.
    fn refuse_unauthenticated(&mut self, pending: PendingConnection, error: &AuthenticationError) {
        if is_hello(pending.began()) {
            let text = "it requires a proof of the job's secret; set COLLECTIVES_SECRET (or Config::secret) as on the other ranks";
            return self.refuse(pending, Refusal::new(Reason::Unauthenticated, text.to_owned()));
        }
        self.drop_junk(&pending, &format!("no proof of the job's secret: {error}"));
        pending.drain();
        let _ = (&pending.stream).write(&error.to_reply());
    }

    /// Welcomes a peer, unless the link it requests exists already.
    fn welcome(&mut self, pending: PendingConnection, hello: &Hello) {
        let caller = (hello.channel, hello.connection, hello.sender.rank);
        let connections = self.terms.connections_of(hello.channel);
        if hello.connection >= connections {
            let text = format!("it opens connection {} of a link, but links of this kind have {connections} here", hello.connection);
            return self.refuse(pending, Refusal::new(Reason::Connection, text));
        }
        if self.ready.iter().any(|(other, _)| *other == caller) {
            let text = format!("rank {} already has a link of this kind", hello.sender.rank);
            return self.refuse(pending, Refusal::new(Reason::Duplicate, text));
        }
        // An earlier attempt that was not confirmed has been abandoned.
        for (_, link) in self.welcomed.extract_if(.., |(other, _)| *other == caller) {
            let _ = epoll::delete(&self.readiness, &link);
        }
        let from = pending.from;
        if !self.is_near(hello.sender.rank, &pending)
            && let Some(name) = &self.congestion_control
        {
            tcp::choose(SockRef::from(&pending.stream), name);
        }
        let mut link = pending.into_link(&self.terms);
        match link.say(&Answer::Welcome.to_bytes()) {
            Ok(()) => self.welcomed.push((caller, link)),
            // The peer will try again.
            Err(error) => {
                self.unwatch(&link);
                crate::base::event::debug!("cannot send a welcome to rank {} at {from}: {error}", hello.sender.rank);
            }
        }
    }

    /// Whether the other end of a connection, which is this rank, runs on this host.
    fn is_near(&self, rank: u32, pending: &PendingConnection) -> bool {
        let is_own = |own: SocketAddr| own.ip() == pending.from.ip() || own_address::is_own(pending.from);
        self.neighbours.get(rank as usize).is_some_and(|is_near| *is_near) || pending.stream.local_addr().is_ok_and(is_own)
    }

    /// Turns confirmed connections into links.
    fn hear_confirmations(&mut self) {
        for (caller, mut link) in std::mem::take(&mut self.welcomed) {
            let mut word = [0];
            match link.try_read(&mut word) {
                Ok(1) if word[0] == CONFIRM => match epoll::delete(&self.readiness, &link) {
                    Ok(()) => self.ready.push((caller, link)),
                    Err(error) => crate::base::event::warn!("cannot remove the link of rank {} from the poll: {error}", caller.2),
                },
                Err(error) if is_not_yet(&error) => self.welcomed.push((caller, link)),
                // The peer gave up or is gone. If it needs the link, it will try again.
                other => {
                    self.unwatch(&link);
                    crate::base::event::debug!("rank {} did not confirm: {other:?}, {word:?}", caller.2);
                }
            }
        }
    }
}

/// Returns a socket that listens at an address, and the congestion control that the system had chosen for it.
fn listen(address: SocketAddr) -> io::Result<(Socket, Option<Vec<u8>>)> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    // Accepted connections start with this congestion control, and keep it if the peer runs on this host: a connection
    // that was paced once stays paced.
    let congestion_control = SockRef::from(&socket).tcp_congestion().ok();
    tcp::prefer_unpaced(SockRef::from(&socket));
    if address.port() != 0 {
        // Closing connections of an earlier listener must not block the port.
        socket.set_reuse_address(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok((socket, congestion_control))
}

/// A connection that has not sent a complete hello.
#[derive(Debug)]
struct PendingConnection {
    stream: TcpStream,
    from: SocketAddr,
    /// The proof that replaces the hello, if there is a secret.
    proving: Option<Responder>,
    /// The keys for the rest of the stream, after a proof with encryption.
    cipher: Option<Cipher>,
    /// The first bytes that it sent.
    heard: [u8; Hello::BYTES],
    heard_bytes: usize,
}

/// The verdict about a connection that has sent everything, or too much.
enum Verdict {
    /// The peer closed the connection, or the connection broke.
    Gone,
    /// The bytes that the peer sent are not a hello.
    Junk(String),
    /// The peer has not proven that it knows the secret, or it offers a proof although this rank has no secret.
    Unauthenticated(AuthenticationError),
    /// The peer sent a hello and is refused.
    Refused(Refusal),
    /// The peer sent a hello and is accepted.
    Welcome(Hello),
}

impl PendingConnection {
    /// Creates the state of a new connection, which must prove itself if there is a secret.
    fn new(stream: TcpStream, from: SocketAddr, secret: Option<&Secret>) -> Self {
        let proving = secret.map(|secret| Responder::new(secret, Purpose::Link, Hello::BYTES));
        Self { stream, from, proving, cipher: None, heard: [0; Hello::BYTES], heard_bytes: 0 }
    }

    /// Returns the first bytes that it sent.
    fn began(&self) -> &[u8] {
        &self.heard[..self.heard_bytes]
    }

    /// Reads what has arrived and judges it. Returns `None` while it is incomplete.
    fn listen(&mut self, me: &Membership) -> Option<Verdict> {
        if let Some(responder) = self.proving.take() {
            return self.listen_for_proof(responder, me);
        }
        while self.heard_bytes < Hello::BYTES {
            match self.stream.read(&mut self.heard[self.heard_bytes..]) {
                Ok(0) => return Some(Verdict::Gone),
                Ok(read) => self.heard_bytes += read,
                Err(error) if is_not_yet(&error) => break,
                Err(_) => return Some(Verdict::Gone),
            }
        }
        let heard = &self.heard[..self.heard_bytes];
        if authentication::is_opening(heard) {
            Some(Verdict::Unauthenticated(AuthenticationError::Found(authentication::Reason::NoSecret)))
        } else {
            judge(heard, me)
        }
    }

    /// Requires the other end to prove that it knows the secret, and then judges the hello that was part of the proof.
    fn listen_for_proof(&mut self, mut responder: Responder, me: &Membership) -> Option<Verdict> {
        loop {
            let mut bytes = [0; 128];
            let read = match self.stream.read(&mut bytes) {
                Ok(0) => return Some(Verdict::Gone),
                Ok(read) => read,
                Err(error) if is_not_yet(&error) => break,
                Err(_) => return Some(Verdict::Gone),
            };
            let kept = read.min(self.heard.len() - self.heard_bytes);
            self.heard[self.heard_bytes..self.heard_bytes + kept].copy_from_slice(&bytes[..kept]);
            self.heard_bytes += kept;
            match responder.receive(&bytes[..read]) {
                // A reply fits into an empty send buffer.
                Ok(Some(reply)) if !matches!(self.stream.write(&reply), Ok(sent) if sent == reply.len()) => return Some(Verdict::Gone),
                Ok(_) => {}
                Err(unproven) => return Some(Verdict::Unauthenticated(unproven)),
            }
            if responder.proven().is_some() {
                self.cipher = responder.take_cipher();
                return judge(responder.proven().unwrap_or_default(), me);
            }
        }
        self.proving = Some(responder);
        None
    }

    /// Turns the connection into a link, encrypted if that was agreed on.
    fn into_link(self, terms: &Terms) -> Link {
        Link::new(self.stream, self.cipher, terms)
    }

    /// Reads the rest of a short message: unread bytes would make the connection lose a refusal.
    fn drain(&self) {
        let _ = (&self.stream).read(&mut [0; 256]);
    }
}

/// Judges the bytes that a connection has sent. Returns `None` if more must follow.
fn judge(heard: &[u8], me: &Membership) -> Option<Verdict> {
    Some(match Hello::decode(heard) {
        Ok(hello) => {
            let hello = hello?;
            hello.check(me).map_or_else(Verdict::Refused, |()| Verdict::Welcome(hello))
        }
        Err(NoHello::Junk(what)) => Verdict::Junk(what),
        Err(NoHello::Refused(refusal)) => Verdict::Refused(refusal),
    })
}

/// Whether to try again later.
fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
impl Acceptor {
    /// Returns how many connections have not sent a hello.
    pub(super) fn pending(&self) -> usize {
        self.pending.iter().len()
    }

    /// Accepts the next pending connection without reading from it.
    pub(super) fn accept_raw(&self) -> io::Result<TcpStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }
}
