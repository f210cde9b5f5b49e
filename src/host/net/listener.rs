//! Taking in links: a listener that greets whoever connects, and never waits for anyone.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::hello::{Answer, CONFIRM, Channel, Hello, Membership, Reason, Refusal, is_hello, quote};
use super::pending_connection::{PendingConnection, Verdict, is_not_yet};
use super::tcp::{self, TcpLink};
use crate::proof::{self, Secret, Unproven};

/// How many connections the kernel keeps for us: a large job may come all at once.
const BACKLOG: i32 = 1024;
/// How many connections one poll takes in, so that a flood cannot hold it.
const ACCEPTS_PER_POLL: usize = 64;
/// How many connections may be open that have not said hello.
const MOST_PENDING: usize = 256;
/// How long each of them is left in peace when others want its place.
const GRACE: Duration = Duration::from_millis(100);
/// How long each of them has for it.
const PENDING_PATIENCE: Duration = Duration::from_secs(10);
/// How long nothing is accepted where there is no room, or after the system ran out of descriptors or memory.
const REST: Duration = Duration::from_millis(50);

/// Accepts connections, reads their hellos, and keeps those that belong until they are asked for.
#[derive(Debug)]
pub(super) struct Acceptor {
    listener: TcpListener,
    /// Readable when there is something to do: a new connection, or words on one that is not a link yet.
    readiness: Arc<OwnedFd>,
    me: Membership,
    /// What callers have to know.
    secret: Option<Secret>,
    /// Connections that have not said hello, oldest first.
    pending: VecDeque<PendingConnection>,
    /// Connections that have been welcomed and have not confirmed: at most one for each channel and rank. They may take their time.
    welcomed: Vec<(Caller, TcpStream)>,
    /// Links that nobody has asked for yet: at most one for each channel and rank.
    ready: Vec<(Caller, TcpLink)>,
    /// How many connections were dropped because of what they said.
    junk: u64,
    /// Until when nothing is accepted.
    resting: Option<Instant>,
}

/// Who is at the other end: the link's purpose and the peer's rank.
type Caller = (Channel, u32);

impl Acceptor {
    /// Listens on `ip`, and on no other address, at a port that the system chooses.
    pub(super) fn bind(ip: IpAddr, me: Membership, secret: Option<Secret>) -> io::Result<Self> {
        let address = SocketAddr::new(ip, 0);
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
        if ip.is_loopback() {
            tcp::prefer_unpaced(SockRef::from(&socket));
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from(socket);
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&readiness, &listener, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self {
            listener,
            readiness: Arc::new(readiness),
            me,
            secret,
            pending: VecDeque::new(),
            welcomed: Vec::new(),
            ready: Vec::new(),
            junk: 0,
            resting: None,
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

    /// The link of this kind that `rank` has opened, if it has.
    pub(super) fn take(&mut self, channel: Channel, rank: u32) -> Option<TcpLink> {
        let at = self.ready.iter().position(|(caller, _)| *caller == (channel, rank))?;
        Some(self.ready.swap_remove(at).1)
    }

    /// All links of this kind that peers have opened since they were last asked for.
    pub(super) fn take_all(&mut self, channel: Channel) -> Vec<(usize, TcpLink)> {
        self.ready.extract_if(.., |((kind, _), _)| *kind == channel).map(|((_, rank), link)| (rank as usize, link)).collect()
    }

    /// [`Acceptor::poll`] at a given time.
    pub(super) fn poll_at(&mut self, now: Instant) {
        self.accept(now);
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.listen(&self.me) {
                Verdict::Undecided if now.saturating_duration_since(pending.since) < PENDING_PATIENCE => {
                    self.pending.push_back(pending);
                }
                Verdict::Undecided => self.drop_junk(&pending, "said too little for too long"),
                Verdict::Gone if pending.began().is_empty() => self.unwatch(&pending.stream),
                Verdict::Gone => self.drop_junk(&pending, "closed the connection in the middle of its hello"),
                Verdict::Junk(what) => self.drop_junk(&pending, &what),
                Verdict::Unproven(unproven) => self.refuse_unproven(&pending, &unproven),
                Verdict::Refused(refusal) => self.refuse(&pending, refusal),
                Verdict::Welcome(hello) => self.welcome(pending, &hello),
            }
        }
        self.hear_confirmations();
    }

    /// Takes in what the kernel has, as far as one poll may and there is room.
    fn accept(&mut self, now: Instant) {
        if self.resting.is_some_and(|until| now < until) {
            return;
        }
        if self.resting.take().is_some() {
            self.watch_listener(epoll::EventFlags::IN);
        }
        let room = self.make_room(now);
        if room == 0 {
            self.rest(now);
        }
        for _ in 0..room.min(ACCEPTS_PER_POLL) {
            match self.listener.accept() {
                Ok((stream, from)) => self.take_in(stream, from, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_exhaustion(&error) => {
                    // The connection stays pending, and would wake every wait at once for nothing.
                    crate::event::warn!("accepting a connection: {error}; trying again in {REST:?}");
                    return self.rest(now);
                }
                // The connection broke before it was accepted, or a signal came: the next one may be well.
                Err(error) => crate::event::debug!("accepting a connection: {error}"),
            }
        }
    }

    /// Accepts nothing for a while.
    fn rest(&mut self, now: Instant) {
        self.resting = Some(now + REST);
        self.watch_listener(epoll::EventFlags::empty());
    }

    /// For how many unproven connections there is room. Where there is none, those that have been silent for long make some.
    fn make_room(&mut self, now: Instant) -> usize {
        let most = if self.pending.len() < MOST_PENDING { 0 } else { ACCEPTS_PER_POLL };
        for _ in 0..most {
            if self.pending.front().is_none_or(|oldest| now.saturating_duration_since(oldest.since) <= GRACE) {
                break;
            }
            if let Some(oldest) = self.pending.pop_front() {
                self.turn_away(&oldest);
            }
        }
        MOST_PENDING.saturating_sub(self.pending.len())
    }

    /// Drops an unproven connection for the sake of others; it may try again.
    fn turn_away(&mut self, pending: &PendingConnection) {
        self.drop_junk(pending, "had to make room for others");
        if pending.is_proving() {
            // What is left unread when it is closed would take the word with it.
            pending.drain();
            let _ = (&pending.stream).write(&proof::Reason::Busy.to_reply());
        }
    }

    /// Takes a connection that is about to be dropped out of what wakes waits. Closing it would not do where a forked child has it too.
    fn unwatch(&self, stream: &TcpStream) {
        // It may not be there.
        let _ = epoll::delete(&self.readiness, stream);
    }

    /// Sets what the listener wakes waits for.
    fn watch_listener(&self, events: epoll::EventFlags) {
        if let Err(error) = epoll::modify(&self.readiness, &self.listener, epoll::EventData::new_u64(0), events) {
            crate::event::warn!("watching the listener: {error}");
        }
    }

    /// Adds a new connection to the unproven connections.
    fn take_in(&mut self, stream: TcpStream, from: SocketAddr, now: Instant) {
        let prepared = stream.set_nonblocking(true).and_then(|()| tcp::prepare(SockRef::from(&stream))).and_then(|()| {
            let same_host = stream.local_addr()?.ip() == from.ip() || from.ip().is_loopback();
            if same_host {
                tcp::prefer_unpaced(SockRef::from(&stream));
            }
            Ok(epoll::add(&self.readiness, &stream, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
        });
        if let Err(error) = prepared {
            crate::event::debug!("a connection from {from}: {error}");
            return;
        }
        self.pending.push_back(PendingConnection::new(stream, from, self.secret.as_ref(), now));
    }

    /// Says so, and counts. A flood of them is reported ever more rarely.
    fn drop_junk(&mut self, pending: &PendingConnection, what: &str) {
        self.unwatch(&pending.stream);
        self.junk += 1;
        if self.junk <= 16 || self.junk.is_power_of_two() {
            let heard = quote(pending.began());
            crate::event::warn!("dropped a connection from {}, which began with {heard}: {what} (number {})", pending.from, self.junk);
        }
    }

    /// Tells the other end why, which may well be one of this job's ranks with wrong facts.
    fn refuse(&mut self, pending: &PendingConnection, refusal: Refusal) {
        self.drop_junk(pending, &refusal.to_string());
        // An answer fits into an empty send buffer; where the connection is broken there is nobody to tell.
        let _ = (&pending.stream).write(&Answer::Refused(refusal).to_bytes());
    }

    /// Tells the other end what it lacks, in the words that it can understand.
    fn refuse_unproven(&mut self, pending: &PendingConnection, unproven: &Unproven) {
        if is_hello(pending.began()) {
            let text = "it wants a proof of the job's secret: set COLLECTIVES_SECRET (or Config::secret) as for the other ranks";
            return self.refuse(pending, Refusal::new(Reason::Unproven, text.to_owned()));
        }
        self.drop_junk(pending, &format!("no proof of the job's secret: {unproven}"));
        pending.drain();
        let _ = (&pending.stream).write(&unproven.to_reply());
    }

    /// Welcomes a peer, unless the link it wants is there already.
    fn welcome(&mut self, pending: PendingConnection, hello: &Hello) {
        let caller = (hello.channel, hello.sender.rank);
        if self.ready.iter().any(|(other, _)| *other == caller) {
            let text = format!("rank {} has a link of this kind already", hello.sender.rank);
            return self.refuse(&pending, Refusal::new(Reason::Duplicate, text));
        }
        // An earlier attempt that was not confirmed has been given up.
        for (_, stream) in self.welcomed.extract_if(.., |(other, _)| *other == caller) {
            let _ = epoll::delete(&self.readiness, &stream);
        }
        let answer = Answer::Welcome.to_bytes();
        match (&pending.stream).write(&answer) {
            Ok(written) if written == answer.len() => self.welcomed.push((caller, pending.stream)),
            // It will try again.
            other => {
                self.unwatch(&pending.stream);
                crate::event::debug!("welcoming rank {} at {}: {other:?}", hello.sender.rank, pending.from);
            }
        }
    }

    /// Makes links of those who have confirmed.
    fn hear_confirmations(&mut self) {
        for (caller, stream) in std::mem::take(&mut self.welcomed) {
            let mut word = [0];
            match (&stream).read(&mut word) {
                Ok(1) if word[0] == CONFIRM => match epoll::delete(&self.readiness, &stream) {
                    Ok(()) => self.ready.push((caller, TcpLink::new(stream))),
                    Err(error) => crate::event::warn!("taking the link of rank {} out of the poll: {error}", caller.1),
                },
                Err(error) if is_not_yet(&error) => self.welcomed.push((caller, stream)),
                // The peer gave up, or is gone; if it wants the link it will try again.
                other => {
                    self.unwatch(&stream);
                    crate::event::debug!("rank {} did not confirm: {other:?}, {word:?}", caller.1);
                }
            }
        }
    }
}

/// Whether the system has no more descriptors or memory to give.
fn is_exhaustion(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

#[cfg(test)]
impl Acceptor {
    /// How many connections have not said hello.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// The next pending connection, unheard.
    pub(super) fn accept_raw(&self) -> io::Result<TcpStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }
}
