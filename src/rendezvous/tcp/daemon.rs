//! The server's thread: moves bytes between sockets and the service.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};

use crate::deadline::Deadline;
use crate::proof::Secret;
use crate::rendezvous::service::{ClientId, Service};

/// How long a connection may take to show that it speaks the protocol.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How many connections may be open that have not shown it yet, if the limit on descriptors is no lower.
const MOST_PENDING: usize = 512;
/// How long each of them is left in peace when others want its place.
const GRACE: Duration = Duration::from_millis(200);
/// How many connections are accepted at a time, before those that are there are heard.
const ACCEPTS: usize = 64;
/// How often connections are looked at that have not shown it yet.
const SWEEP: Duration = Duration::from_secs(1);
/// How long nothing is accepted where there is no room, or after the system has refused to for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How many connections that have something to say are attended to between two looks at everything else.
const EVENTS: usize = 256;
/// What stands for the wake-up event and the listener where others are known by their number, which never gets so large.
const WAKE_UP: ClientId = ClientId::MAX;
const LISTENER: ClientId = ClientId::MAX - 1;

/// One connection.
struct Client {
    stream: TcpStream,
    /// What is waited for on it.
    interest: EventFlags,
    /// It has sent its last byte; what it is owed is still sent.
    finished: bool,
}

/// The thread's state. What one request costs does not depend on how many clients there are.
pub(super) struct Daemon {
    epoll: OwnedFd,
    listener: TcpListener,
    wake_up: Arc<OwnedFd>,
    linger: Duration,
    /// Set once the server is being dropped.
    shutdown: Option<Deadline>,
    accept_pause: Option<Deadline>,
    /// How many unproven connections there may be.
    most_pending: usize,
    /// How many clients were dropped for what they said.
    dropped: u64,
    service: Service,
    clients: HashMap<ClientId, Client>,
    /// Who has come since when, the longest first; whoever speaks the protocol is taken out in its turn.
    fresh: VecDeque<(ClientId, Instant)>,
    next: ClientId,
    scratch: Vec<u8>,
}

/// What a wait has found.
#[derive(Default)]
struct Found {
    wake_up: bool,
    listener: bool,
    clients: Vec<(ClientId, EventFlags)>,
}

impl Daemon {
    /// A thread to be, for a listener that does not block.
    pub(super) fn new(listener: TcpListener, wake_up: Arc<OwnedFd>, linger: Duration, secret: Option<Secret>) -> io::Result<Self> {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let share = descriptors.map_or(MOST_PENDING, |most| usize::try_from(most / 4).unwrap_or(MOST_PENDING));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*wake_up, EventData::new_u64(WAKE_UP), EventFlags::IN)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        Ok(Self {
            epoll,
            listener,
            wake_up,
            linger,
            shutdown: None,
            accept_pause: None,
            most_pending: share.clamp(1, MOST_PENDING),
            dropped: 0,
            service: Service::new(secret),
            clients: HashMap::new(),
            fresh: VecDeque::new(),
            next: 0,
            scratch: vec![0; 64 << 10],
        })
    }

    /// Counts the requests that have been carried out.
    pub(super) fn served(&self) -> Arc<AtomicU64> {
        self.service.served()
    }

    /// Serves until the server is dropped and its clients have left.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let found = self.wait(&mut events);
            if found.wake_up {
                self.shutdown = Some(Deadline::after(self.linger));
                // It has been heard; it would ring for ever.
                let _ = epoll::delete(&self.epoll, &*self.wake_up);
            }
            if self.accept_pause.take_if(|pause| pause.has_passed()).is_some() {
                self.watch_listener(EventFlags::IN);
            }
            // Those that are there first: whoever has just spoken need not make room.
            for (id, flags) in &found.clients {
                self.attend(*id, *flags);
            }
            if found.listener {
                self.accept();
            }
            self.send_answers();
            self.sweep();
            let idle = !found.wake_up && !found.listener && found.clients.is_empty();
            if self.shutdown.as_ref().is_some_and(|shutdown| shutdown.has_passed() || (idle && !self.has_guests())) {
                return self.shut_down();
            }
        }
    }

    /// Whether a client that speaks the protocol is still connected.
    fn has_guests(&self) -> bool {
        self.clients.keys().any(|&id| self.service.is_validated(id))
    }

    /// Waits until there is something to do.
    fn wait(&self, events: &mut Vec<Event>) -> Found {
        events.clear();
        let mut found = Found::default();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), self.patience().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Cannot be, unless memory is short for the moment: there is nobody to tell, so try again a little later.
            Err(_) => std::thread::sleep(ACCEPT_PAUSE),
        }
        for Event { flags, data, .. } in events.iter().copied() {
            match data.u64() {
                WAKE_UP => found.wake_up = true,
                LISTENER => found.listener = true,
                id => found.clients.push((id, flags)),
            }
        }
        found
    }

    /// How long a wait may take.
    fn patience(&self) -> Option<Timespec> {
        let shutdown = self.shutdown.as_ref().map(|shutdown| if self.has_guests() { shutdown.remaining() } else { Duration::ZERO });
        let pause = self.accept_pause.as_ref().map(Deadline::remaining);
        let sweep = (!self.fresh.is_empty()).then_some(SWEEP);
        let shortest = [shutdown, pause, sweep].into_iter().flatten().min()?;
        Timespec::try_from(shortest).ok()
    }

    /// Whether connections are accepted: `IN` or nothing.
    fn watch_listener(&self, flags: EventFlags) {
        if let Err(error) = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), flags) {
            crate::event::warn!(%error, "the store server cannot watch its listener");
        }
    }

    /// Accepts whoever has come, as far as there is room.
    fn accept(&mut self) {
        let room = self.make_room();
        if room == 0 {
            return self.pause_accepting();
        }
        for _ in 0..room.min(ACCEPTS) {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    crate::event::warn!(%error, clients = self.clients.len(), "the store server cannot accept more clients for now");
                    return self.pause_accepting();
                }
            }
        }
    }

    /// Accepts nothing for a while.
    fn pause_accepting(&mut self) {
        self.accept_pause = Some(Deadline::after(ACCEPT_PAUSE));
        self.watch_listener(EventFlags::empty());
    }

    /// For how many unproven connections there is room. Where there is none, those that have been silent for long make some.
    fn make_room(&mut self) -> usize {
        self.fresh.retain(|(id, _)| self.clients.contains_key(id) && !self.service.is_validated(*id));
        let room = self.most_pending.saturating_sub(self.fresh.len());
        if room > 0 {
            return room;
        }
        let late: Vec<ClientId> = self.fresh.iter().take(ACCEPTS).filter(|(_, since)| since.elapsed() > GRACE).map(|(id, _)| *id).collect();
        let made = late.len();
        for id in late {
            self.service.turn_away(id);
            self.send(id);
            self.drop_client(id);
        }
        made
    }

    /// Takes in a new connection.
    fn admit(&mut self, stream: TcpStream) {
        // A socket that cannot be made ready is one whose peer is gone already.
        if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
            return;
        }
        let id = self.next;
        let interest = EventFlags::IN;
        if let Err(error) = epoll::add(&self.epoll, &stream, EventData::new_u64(id), interest) {
            return crate::event::warn!(%error, clients = self.clients.len(), "the store server cannot watch one more client");
        }
        self.next += 1;
        self.service.connect(id);
        self.fresh.push_back((id, Instant::now()));
        self.clients.insert(id, Client { stream, interest, finished: false });
    }

    /// Reads from a connection, or abort reasons that it is gone.
    fn attend(&mut self, id: ClientId, flags: EventFlags) {
        let broken = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        if flags.contains(EventFlags::IN) {
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
                crate::event::warn!(%peer, %reason, number = self.dropped, "the store server drops a client");
            }
            self.drop_client(id);
        } else if client.finished && !owed {
            self.drop_client(id);
        } else {
            self.watch(id, owed);
        }
    }

    /// Watches a client for what is now waited for. What that is changes with its own bytes and where it has been answered, and after
    /// both there is [`Daemon::send`].
    fn watch(&mut self, id: ClientId, owed: bool) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, !client.finished && self.service.wants_input(id));
        interest.set(EventFlags::OUT, owed);
        if interest != client.interest {
            client.interest = interest;
            if let Err(error) = epoll::modify(&self.epoll, &client.stream, EventData::new_u64(id), interest) {
                crate::event::warn!(%error, "the store server loses sight of a client and drops it");
                self.drop_client(id);
            }
        }
    }

    /// Forgets a client; its waits are no longer anybody's.
    fn drop_client(&mut self, id: ClientId) {
        if let Some(client) = self.clients.remove(&id) {
            // Closing alone would not do where the process is being forked at this moment.
            let _ = epoll::delete(&self.epoll, &client.stream);
        }
        self.service.disconnect(id);
    }

    /// Drops connections that have not shown in time that they speak the protocol.
    fn sweep(&mut self) {
        while let Some(&(id, since)) = self.fresh.front() {
            let settled = !self.clients.contains_key(&id) || self.service.is_validated(id);
            if !settled && since.elapsed() <= HANDSHAKE {
                return;
            }
            self.fresh.pop_front();
            if !settled {
                self.drop_client(id);
            }
        }
    }

    /// Ends the connections that are left in order: what was written still arrives.
    fn shut_down(self) {
        for client in self.clients.values() {
            // A client that is gone already needs no last word.
            drop(client.stream.shutdown(Shutdown::Write));
        }
    }
}
