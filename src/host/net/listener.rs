//! A rank's listener: it greets whoever connects, keeps the links until they are asked for, and never waits for anyone.

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
use crate::host::link::ByteLink;

/// Accepts connections, reads their hellos, and keeps those that belong until they are asked for.
#[derive(Debug)]
pub(super) struct Acceptor {
    listener: TcpListener,
    /// Readable when there is something to do: a new connection, or words on one that is not a link yet.
    readiness: Arc<OwnedFd>,
    /// The system's choice, for connections to other hosts.
    congestion_control: Option<Vec<u8>>,
    me: Membership,
    terms: Terms,
    /// Connections that have not said hello.
    pending: Admission<PendingConnection>,
    /// Connections that have been welcomed and have not confirmed: at most one for each channel and rank, so they need no limit in time.
    welcomed: Vec<(Caller, Link)>,
    /// Links that nobody has asked for yet: at most one for each channel and rank.
    ready: Vec<(Caller, Link)>,
}

/// Who is at the other end: the link's purpose and the peer's rank.
type Caller = (Channel, u32);

impl Acceptor {
    /// Listens on `ip`, and on no other address, at a port that the system chooses.
    pub(super) fn bind(ip: IpAddr, me: Membership, terms: Terms) -> io::Result<Self> {
        let address = own_address::to_listen_on(ip);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
        // What comes of it begins so: a connection that was paced once stays paced.
        let congestion_control = SockRef::from(&socket).tcp_congestion().ok();
        tcp::prefer_unpaced(SockRef::from(&socket));
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from(socket);
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&readiness, &listener, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self {
            listener,
            readiness: Arc::new(readiness),
            congestion_control,
            me,
            terms,
            pending: Admission::new(admission::LINKS),
            welcomed: Vec::new(),
            ready: Vec::new(),
        })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// What a poll can wait on, for reading, until [`Acceptor::poll`] has something to do.
    pub(super) fn readiness(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.readiness)
    }

    /// Does what there is to do, without waiting.
    pub(super) fn poll(&mut self) {
        self.poll_at(Instant::now());
    }

    /// Why nobody can be let in, where that is for a lack of this process.
    pub(super) fn lack(&self) -> Option<io::Error> {
        let error = self.pending.starved(Instant::now())?;
        Some(error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error))
    }

    /// The link of this kind that `rank` has opened, if it has.
    pub(super) fn take(&mut self, channel: Channel, rank: u32) -> Option<Link> {
        let at = self.ready.iter().position(|(caller, _)| *caller == (channel, rank))?;
        Some(self.ready.swap_remove(at).1)
    }

    /// All links of this kind that peers have opened since they were last asked for.
    pub(super) fn take_all(&mut self, channel: Channel) -> Vec<(usize, Link)> {
        self.ready.extract_if(.., |((kind, _), _)| *kind == channel).map(|((_, rank), link)| (rank as usize, link)).collect()
    }

    /// [`Acceptor::poll`] at a given time.
    pub(super) fn poll_at(&mut self, now: Instant) {
        self.accept(now);
        for mut waiting in self.pending.take() {
            match waiting.connection.listen(&self.me) {
                None => self.pending.put_back(waiting),
                Some(verdict) => self.decide(waiting.connection, verdict),
            }
        }
        for late in self.pending.overdue(now) {
            self.drop_junk(&late, "said too little for too long");
        }
        self.hear_confirmations();
    }

    /// Accepts the connections that have come, as far as there is room.
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
            crate::base::event::warn!("watching the listener: {error}");
        }
    }

    /// Does what follows from what a connection has said.
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

    /// Drops an unproven connection for the sake of others; it may try again.
    fn turn_away(&mut self, pending: &PendingConnection) {
        self.drop_junk(pending, "had to make room for others");
        if pending.proving.is_some() {
            // What is left unread when it is closed would take the word with it.
            pending.drain();
            let _ = (&pending.stream).write(&authentication::Reason::Busy.to_reply());
        }
    }

    /// Lets a connection that is about to be dropped end no more waits. Closing it is not enough where a forked child has it too.
    fn unwatch(&self, stream: impl AsFd) {
        // It may not be there.
        let _ = epoll::delete(&self.readiness, stream);
    }

    /// Adds a new connection to the unproven connections.
    fn take_in(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        if let Err(error) = self.prepare(&stream, from) {
            crate::base::event::debug!("a connection from {from}: {error}");
            return;
        }
        self.pending.add(PendingConnection::new(stream, from, self.terms.secret.as_ref()), now);
    }

    /// Sets the options of a connection that has come, and has it end waits.
    fn prepare(&self, stream: &TcpStream, from: SocketAddr) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        tcp::prepare(SockRef::from(stream), self.terms.silence_timeout)?;
        if stream.local_addr()?.ip() == from.ip() || own_address::is_own(from) {
            tcp::prefer_unpaced(SockRef::from(stream));
        } else if let Some(name) = &self.congestion_control {
            tcp::choose(SockRef::from(stream), name);
        }
        Ok(epoll::add(&self.readiness, stream, EventData::new_u64(0), EventFlags::IN)?)
    }

    /// Reports that a connection is dropped.
    fn drop_junk(&mut self, pending: &PendingConnection, what: &str) {
        self.unwatch(&pending.stream);
        if let Some(number) = self.pending.refuse() {
            let heard = quote(pending.began());
            crate::base::event::warn!("dropped a connection from {}, which began with {heard}: {what} (number {number})", pending.from);
        }
    }

    /// Tells the other end why: it may be a rank of this job with wrong facts.
    fn refuse(&mut self, pending: PendingConnection, refusal: Refusal) {
        self.drop_junk(&pending, &refusal.to_string());
        // An answer fits into an empty send buffer; where the connection is broken there is nobody to tell.
        let _ = pending.into_link(&self.terms).say(&Answer::Refused(refusal).to_bytes());
    }

    /// Tells the other end what it lacks, in the words that it can understand.
    fn refuse_unauthenticated(&mut self, pending: PendingConnection, error: &AuthenticationError) {
        if is_hello(pending.began()) {
            let text = "it wants a proof of the job's secret: set COLLECTIVES_SECRET (or Config::secret) as for the other ranks";
            return self.refuse(pending, Refusal::new(Reason::Unauthenticated, text.to_owned()));
        }
        self.drop_junk(&pending, &format!("no proof of the job's secret: {error}"));
        pending.drain();
        let _ = (&pending.stream).write(&error.to_reply());
    }

    /// Welcomes a peer, unless the link it wants is there already.
    fn welcome(&mut self, pending: PendingConnection, hello: &Hello) {
        let caller = (hello.channel, hello.sender.rank);
        if self.ready.iter().any(|(other, _)| *other == caller) {
            let text = format!("rank {} has a link of this kind already", hello.sender.rank);
            return self.refuse(pending, Refusal::new(Reason::Duplicate, text));
        }
        // An earlier attempt that was not confirmed has been given up.
        for (_, link) in self.welcomed.extract_if(.., |(other, _)| *other == caller) {
            let _ = epoll::delete(&self.readiness, &link);
        }
        let from = pending.from;
        let mut link = pending.into_link(&self.terms);
        match link.say(&Answer::Welcome.to_bytes()) {
            Ok(()) => self.welcomed.push((caller, link)),
            // It will try again.
            Err(error) => {
                self.unwatch(&link);
                crate::base::event::debug!("welcoming rank {} at {from}: {error}", hello.sender.rank);
            }
        }
    }

    /// Makes links of those who have confirmed.
    fn hear_confirmations(&mut self) {
        for (caller, mut link) in std::mem::take(&mut self.welcomed) {
            let mut word = [0];
            match link.try_read(&mut word) {
                Ok(1) if word[0] == CONFIRM => match epoll::delete(&self.readiness, &link) {
                    Ok(()) => self.ready.push((caller, link)),
                    Err(error) => crate::base::event::warn!("taking the link of rank {} out of the poll: {error}", caller.1),
                },
                Err(error) if is_not_yet(&error) => self.welcomed.push((caller, link)),
                // The peer gave up, or is gone; if it wants the link it will try again.
                other => {
                    self.unwatch(&link);
                    crate::base::event::debug!("rank {} did not confirm: {other:?}, {word:?}", caller.1);
                }
            }
        }
    }
}

/// A connection that has not said hello, or not all of it.
#[derive(Debug)]
struct PendingConnection {
    stream: TcpStream,
    from: SocketAddr,
    /// The proof in place of a hello, where there is a secret.
    proving: Option<Responder>,
    /// The keys of what follows, once there is a proof and it is encrypted.
    cipher: Option<Cipher>,
    /// What it began with.
    heard: [u8; Hello::BYTES],
    heard_bytes: usize,
}

/// What has become of a connection that has said all, or too much.
enum Verdict {
    /// It closed the connection, or the connection broke.
    Gone,
    /// What it said is no hello.
    Junk(String),
    /// It has not proven that it knows the secret, or offers a proof where there is none.
    Unauthenticated(AuthenticationError),
    /// It said hello and will not be taken.
    Refused(Refusal),
    /// It said hello and may come in.
    Welcome(Hello),
}

impl PendingConnection {
    /// One that has just come, and has to prove itself where there is a secret.
    fn new(stream: TcpStream, from: SocketAddr, secret: Option<&Secret>) -> Self {
        let proving = secret.map(|secret| Responder::new(secret, Purpose::Link, Hello::BYTES));
        Self { stream, from, proving, cipher: None, heard: [0; Hello::BYTES], heard_bytes: 0 }
    }

    /// What it began with.
    fn began(&self) -> &[u8] {
        &self.heard[..self.heard_bytes]
    }

    /// Reads what there is and judges it; `None` while it has not said all.
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

    /// Has the other end prove that it knows the secret, and then judges the hello that was part of it.
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

    /// The connection as a link, encrypted where that was agreed on.
    fn into_link(self, terms: &Terms) -> Link {
        Link::new(self.stream, self.cipher, terms)
    }

    /// Reads what is left of a few words: bytes that nobody has read would take the words of a refusal with them.
    fn drain(&self) {
        let _ = (&self.stream).read(&mut [0; 256]);
    }
}

/// What becomes of a connection that has said so much; `None` where more is to come.
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

/// Whether it is worth trying again later.
fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
impl Acceptor {
    /// How many connections have not said hello.
    pub(super) fn pending(&self) -> usize {
        self.pending.iter().len()
    }

    /// The next pending connection, unheard.
    pub(super) fn accept_raw(&self) -> io::Result<TcpStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }
}
