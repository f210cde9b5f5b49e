//! The server's thread: moves bytes between sockets and the service.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::deadline::Deadline;
use crate::proof::Secret;
use crate::rendezvous::service::{ClientId, Service};

/// How long a connection may take to show that it speaks the protocol.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How many connections may be open that have not shown it yet, if the limit on descriptors is no lower.
const STRANGERS: usize = 512;
/// How long each of them is left in peace when others want its place.
const GRACE: Duration = Duration::from_millis(200);
/// How many connections are accepted at a time, before those that are there are heard.
const ACCEPTS: usize = 64;
/// How often connections are looked at that have not shown it yet.
const SWEEP: Duration = Duration::from_secs(1);
/// How long nothing is accepted where there is no room, or after the system has refused to for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One connection.
struct Client {
    stream: TcpStream,
    accepted: Instant,
    /// It has sent its last byte; what it is owed is still sent.
    finished: bool,
}

/// The thread's state.
pub(super) struct Daemon {
    listener: TcpListener,
    bell: Arc<OwnedFd>,
    linger: Duration,
    /// Set once the server is being dropped.
    ending: Option<Deadline>,
    accept_pause: Option<Deadline>,
    /// How many strangers there may be.
    most_strangers: usize,
    /// How many clients were dropped for what they said.
    dropped: u64,
    service: Service,
    clients: HashMap<ClientId, Client>,
    next: ClientId,
    scratch: Vec<u8>,
}

/// What a poll has found.
struct Found {
    bell: bool,
    listener: bool,
    clients: Vec<(ClientId, PollFlags)>,
}

impl Daemon {
    /// A thread to be, for a listener that does not block.
    pub(super) fn new(listener: TcpListener, bell: Arc<OwnedFd>, linger: Duration, secret: Option<Secret>) -> Self {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let share = descriptors.map_or(STRANGERS, |most| usize::try_from(most / 4).unwrap_or(STRANGERS));
        Self {
            listener,
            bell,
            linger,
            ending: None,
            accept_pause: None,
            most_strangers: share.clamp(1, STRANGERS),
            dropped: 0,
            service: Service::new(secret),
            clients: HashMap::new(),
            next: 0,
            scratch: vec![0; 64 << 10],
        }
    }

    /// Serves until the server is dropped and its clients have left.
    pub(super) fn run(mut self) {
        loop {
            let found = self.poll();
            if found.bell {
                self.ending = Some(Deadline::after(self.linger));
            }
            if found.listener {
                self.accept();
            }
            for (id, flags) in &found.clients {
                self.attend(*id, *flags);
            }
            self.send_answers();
            self.sweep();
            let idle = !found.bell && !found.listener && found.clients.is_empty();
            if self.ending.as_ref().is_some_and(|ending| ending.has_passed() || (idle && !self.has_guests())) {
                return self.farewell();
            }
        }
    }

    /// Whether a client that speaks the protocol is still connected.
    fn has_guests(&self) -> bool {
        self.clients.keys().any(|&id| self.service.is_validated(id))
    }

    /// Waits until there is something to do.
    fn poll(&self) -> Found {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        let watch_bell = if self.ending.is_none() { PollFlags::IN } else { PollFlags::empty() };
        let paused = self.accept_pause.as_ref().is_some_and(|pause| !pause.has_passed());
        let watch_listener = if paused { PollFlags::empty() } else { PollFlags::IN };
        let mut watched = Vec::with_capacity(ids.len() + 2);
        watched.push(PollFd::from_borrowed_fd(self.bell.as_fd(), watch_bell));
        watched.push(PollFd::from_borrowed_fd(self.listener.as_fd(), watch_listener));
        watched.extend(self.clients.iter().map(|(&id, client)| PollFd::from_borrowed_fd(client.stream.as_fd(), self.interest(id, client))));
        match poll(&mut watched, self.patience(paused).as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Found { bell: false, listener: false, clients: Vec::new() },
            // Out of memory for the moment: there is nobody to tell, so try again a little later.
            Err(_) => {
                std::thread::sleep(ACCEPT_PAUSE);
                return Found { bell: false, listener: false, clients: Vec::new() };
            }
        }
        let clients = ids.into_iter().zip(watched[2..].iter().map(PollFd::revents)).filter(|(_, flags)| !flags.is_empty()).collect();
        Found { bell: !watched[0].revents().is_empty(), listener: !watched[1].revents().is_empty(), clients }
    }

    /// What is waited for on a connection.
    fn interest(&self, id: ClientId, client: &Client) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, !client.finished && self.service.wants_input(id));
        flags.set(PollFlags::OUT, !self.service.unsent(id).is_empty());
        flags
    }

    /// How long a poll may take.
    fn patience(&self, paused: bool) -> Option<Timespec> {
        let ending = self.ending.as_ref().map(|ending| if self.has_guests() { ending.remaining() } else { Duration::ZERO });
        let pause = paused.then_some(ACCEPT_PAUSE);
        let sweep = self.strangers().next().map(|_| SWEEP);
        let shortest = [ending, pause, sweep].into_iter().flatten().min()?;
        Timespec::try_from(shortest).ok()
    }

    /// Accepts whoever has come, as far as there is room.
    fn accept(&mut self) {
        let room = self.make_room();
        if room == 0 {
            self.accept_pause = Some(Deadline::after(ACCEPT_PAUSE));
        }
        for _ in 0..room.min(ACCEPTS) {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    tracing::warn!(%error, clients = self.clients.len(), "the store server cannot accept more clients for now");
                    self.accept_pause = Some(Deadline::after(ACCEPT_PAUSE));
                    return;
                }
            }
        }
    }

    /// For how many strangers there is room. Where there is none, those that have been silent for long make some.
    fn make_room(&mut self) -> usize {
        let mut strangers: Vec<(Instant, ClientId)> = self.strangers().map(|(id, client)| (client.accepted, id)).collect();
        let room = self.most_strangers.saturating_sub(strangers.len());
        if room > 0 {
            return room;
        }
        strangers.sort_unstable();
        let late: Vec<ClientId> =
            strangers.into_iter().take(ACCEPTS).filter(|(accepted, _)| accepted.elapsed() > GRACE).map(|(_, id)| id).collect();
        let made = late.len();
        for id in late {
            self.service.turn_away(id);
            self.send(id);
            self.drop_client(id);
        }
        made
    }

    /// Connections that have not shown yet that they speak the protocol.
    fn strangers(&self) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients.iter().filter(|&(&id, _)| !self.service.is_validated(id)).map(|(&id, client)| (id, client))
    }

    /// Takes in a new connection.
    fn admit(&mut self, stream: TcpStream) {
        // A socket that cannot be made ready is one whose peer is gone already.
        if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
            return;
        }
        let id = self.next;
        self.next += 1;
        self.service.connect(id);
        self.clients.insert(id, Client { stream, accepted: Instant::now(), finished: false });
    }

    /// Reads from a connection, or notices that it is gone.
    fn attend(&mut self, id: ClientId, flags: PollFlags) {
        let broken = flags.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
        if flags.contains(PollFlags::IN) {
            match self.read(id) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => return self.drop_client(id),
            }
        } else if broken {
            return self.drop_client(id);
        }
        self.send(id);
    }

    /// Reads once.
    fn read(&mut self, id: ClientId) -> io::Result<()> {
        let Some(client) = self.clients.get_mut(&id) else { return Ok(()) };
        let count = client.stream.read(&mut self.scratch)?;
        client.finished = count == 0;
        self.service.receive(id, &self.scratch[..count]);
        Ok(())
    }

    /// Sends what clients have been answered since the last time.
    fn send_answers(&mut self) {
        loop {
            let answered = self.service.take_answered();
            if answered.is_empty() {
                return;
            }
            answered.into_iter().for_each(|id| self.send(id));
        }
    }

    /// Sends what fits of a client's answers; drops it once it is owed nothing and has gone, or has been refused.
    fn send(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        while !self.service.unsent(id).is_empty() {
            match client.stream.write(self.service.unsent(id)) {
                Ok(count) => self.service.sent(id, count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.drop_client(id),
            }
        }
        let owed = !self.service.unsent(id).is_empty();
        if let Some(reason) = self.service.refusal(id) {
            self.dropped += 1;
            // A flood of them is reported ever more rarely.
            if self.dropped <= 16 || self.dropped.is_power_of_two() {
                let peer = client.stream.peer_addr().map_or_else(|_| "gone".to_owned(), |peer| peer.to_string());
                tracing::warn!(%peer, %reason, number = self.dropped, "the store server drops a client");
            }
            self.drop_client(id);
        } else if client.finished && !owed {
            self.drop_client(id);
        }
    }

    /// Forgets a client; its waits are no longer anybody's.
    fn drop_client(&mut self, id: ClientId) {
        self.clients.remove(&id);
        self.service.disconnect(id);
    }

    /// Drops connections that have not shown in time that they speak the protocol.
    fn sweep(&mut self) {
        let late: Vec<ClientId> = self.strangers().filter(|(_, client)| client.accepted.elapsed() > HANDSHAKE).map(|(id, _)| id).collect();
        late.into_iter().for_each(|id| self.drop_client(id));
    }

    /// Ends the connections that are left in order: what was written still arrives.
    fn farewell(self) {
        for client in self.clients.values() {
            // A client that is gone already needs no farewell.
            drop(client.stream.shutdown(Shutdown::Write));
        }
    }
}
