//! The server's thread, which moves bytes between sockets and the service.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};

use crate::authentication::{Admission, Reason, Secret, Spare};
use crate::base::deadline::Deadline;
use crate::base::tuning::admission::{BATCH, Limits, STORE};
use crate::base::tuning::store::{EVENTS, FAILED_WAIT_PAUSE};
use crate::error::Error;
use crate::rendezvous::service::{ClientId, Service};

/// Returns the value of the wake-up event that ends the server once its clients have left, after `linger` at the
/// latest.
pub(super) fn last_word(linger: Duration) -> u64 {
    u64::try_from(linger.as_millis()).unwrap_or(u64::MAX).min(u64::MAX - 2) + 1
}

/// Reverses [`last_word`].
fn linger(last_word: u64) -> Duration {
    Duration::from_millis(last_word.saturating_sub(1))
}

/// The ids of the wake-up event and the listener. Client ids never get so large.
const WAKE_UP: ClientId = ClientId::MAX;
const LISTENER: ClientId = ClientId::MAX - 1;

/// One connection.
struct Client {
    stream: TcpStream,
    /// The events to wait for on it.
    interest: EventFlags,
    /// The client has sent its last byte. Unsent answers are still sent.
    finished: bool,
}

/// The thread's state. The cost of a request does not depend on the number of clients.
pub(super) struct Daemon {
    epoll: OwnedFd,
    listener: TcpListener,
    wake_up: Arc<OwnedFd>,
    /// Set once the server is being dropped.
    shutdown: Option<Deadline>,
    service: Service,
    clients: HashMap<ClientId, Client>,
    /// Clients that have not yet spoken the protocol. Clients that have spoken it, or have disconnected, are removed
    /// later.
    fresh: Admission<ClientId>,
    /// A spare descriptor, for refusing clients when no other is left.
    spare: Spare,
    /// Why clients cannot be accepted, if this process lacks resources.
    lack: Arc<OnceLock<String>>,
    next: ClientId,
    scratch: Vec<u8>,
}

/// Refuses a client because this process lacks resources. The reply has the form of a proof's refusal: the store
/// protocol has no refusals.
fn refuse_for_lack(mut stream: TcpStream) {
    // Bytes left unread at the close would discard the reply.
    let _ = stream.set_nonblocking(true).and_then(|()| stream.read(&mut [0; 256]));
    let _ = stream.write(&Reason::Starved.to_reply());
}

/// The result of a wait.
#[derive(Default)]
struct Found {
    wake_up: bool,
    listener: bool,
    clients: Vec<(ClientId, EventFlags)>,
}

impl Daemon {
    /// Creates the state for a nonblocking listener.
    pub(super) fn new(listener: TcpListener, wake_up: Arc<OwnedFd>, secret: Option<Secret>) -> io::Result<Self> {
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let share = descriptors.map_or(STORE.most, |most| usize::try_from(most / 4).unwrap_or(STORE.most));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*wake_up, EventData::new_u64(WAKE_UP), EventFlags::IN)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        Ok(Self {
            epoll,
            listener,
            wake_up,
            shutdown: None,
            service: Service::new(secret),
            clients: HashMap::new(),
            fresh: Admission::new(Limits { most: share.clamp(1, STORE.most), ..STORE }),
            spare: Spare::new()?,
            lack: Arc::default(),
            next: 0,
            scratch: vec![0; 64 << 10],
        })
    }

    /// Returns the counter of requests served.
    pub(super) fn served(&self) -> Arc<AtomicU64> {
        self.service.served()
    }

    /// Returns the place for the reason why clients cannot be accepted, if this process lacks resources.
    pub(super) fn lack(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.lack)
    }

    /// Serves until the server is dropped and its clients have left.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let found = self.wait(&mut events);
            if found.wake_up {
                let mut word = [0; 8];
                let linger = rustix::io::read(&*self.wake_up, &mut word).map_or(Duration::ZERO, |_| linger(u64::from_ne_bytes(word)));
                self.shutdown = Some(Deadline::after(linger));
                // It has been seen, and would end every later wait at once.
                let _ = epoll::delete(&self.epoll, &*self.wake_up);
            }
            // Runs before new clients are accepted: a client that has just sent its first request need not make room.
            for (id, flags) in &found.clients {
                self.attend(*id, *flags);
            }
            let now = Instant::now();
            if found.listener || self.fresh.is_resting() {
                self.accept(now);
            }
            self.send_answers();
            self.drop_overdue(now);
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
            // Memory is short at the moment, and there is no caller to report it to.
            Err(_) => std::thread::sleep(FAILED_WAIT_PAUSE),
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

    /// Returns how long a wait may take.
    fn patience(&self) -> Option<Timespec> {
        let shutdown = self.shutdown.as_ref().map(|shutdown| if self.has_guests() { shutdown.remaining() } else { Duration::ZERO });
        let shortest = [shutdown, self.fresh.patience(Instant::now())].into_iter().flatten().min()?;
        Timespec::try_from(shortest).ok()
    }

    /// Accepts new clients as far as there is room.
    fn accept(&mut self, now: Instant) {
        self.fresh.retain(|id| self.clients.contains_key(id) && !self.service.is_validated(*id));
        for id in self.fresh.make_room(now) {
            self.service.turn_away(id);
            self.send(id);
            self.drop_client(id);
        }
        let listener = &self.listener;
        let accepted = self.fresh.accept(now, || listener.accept());
        for _ in 0..BATCH {
            if !self.fresh.lacks(now) {
                break;
            }
            let Some((stream, _)) = self.spare.accept(|| listener.accept()) else { break };
            refuse_for_lack(stream);
        }
        if let Some(error) = self.fresh.starved(now) {
            let error = error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
            self.lack.get_or_init(|| Error::io("accepting a connection to the store", error).to_string());
        }
        for (stream, _) in accepted {
            self.admit(stream, now);
        }
        if let Some(events) = self.fresh.watch_change().map(|watch| if watch { EventFlags::IN } else { EventFlags::empty() })
            && let Err(error) = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), events)
        {
            crate::base::event::warn!(%error, "the store server cannot watch its listener");
        }
    }

    /// Takes in a new connection.
    fn admit(&mut self, stream: TcpStream, now: Instant) {
        // This fails if the peer is already gone.
        if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
            return;
        }
        let id = self.next;
        let interest = EventFlags::IN;
        if let Err(error) = epoll::add(&self.epoll, &stream, EventData::new_u64(id), interest) {
            return crate::base::event::warn!(%error, clients = self.clients.len(), "the store server cannot watch a new client and drops it");
        }
        self.next += 1;
        self.service.connect(id);
        self.fresh.add(id, now);
        self.clients.insert(id, Client { stream, interest, finished: false });
    }

    /// Reads from a connection, or drops it if it is closed.
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

    /// Sends the answers that clients have received since the last call.
    fn send_answers(&mut self) {
        loop {
            let answered = self.service.take_answered();
            if answered.is_empty() {
                return;
            }
            answered.into_iter().for_each(|id| self.send(id));
        }
    }

    /// Sends as much of a client's answers as fits. Drops the client if it was refused, or if it has finished and all
    /// is sent.
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
            if let Some(number) = self.fresh.refuse() {
                let peer = client.stream.peer_addr().map_or_else(|_| "gone".to_owned(), |peer| peer.to_string());
                crate::base::event::warn!(%peer, %reason, number, "the store server drops a client");
            }
            self.drop_client(id);
        } else if client.finished && !owed {
            self.drop_client(id);
        } else {
            self.watch(id, owed);
        }
    }

    /// Updates the events watched for a client. They change when bytes have come from it or gone to it, and
    /// [`Daemon::send`] runs after both.
    fn watch(&mut self, id: ClientId, owed: bool) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, !client.finished && self.service.wants_input(id));
        interest.set(EventFlags::OUT, owed);
        if interest != client.interest {
            client.interest = interest;
            if let Err(error) = epoll::modify(&self.epoll, &client.stream, EventData::new_u64(id), interest) {
                crate::base::event::warn!(%error, "the store server cannot watch a client and drops it");
                self.drop_client(id);
            }
        }
    }

    /// Removes a client and its waits.
    fn drop_client(&mut self, id: ClientId) {
        if let Some(client) = self.clients.remove(&id) {
            // Closing alone is not enough if the process is being forked at this moment.
            let _ = epoll::delete(&self.epoll, &client.stream);
        }
        self.service.disconnect(id);
    }

    /// Drops clients that have not spoken the protocol in time.
    fn drop_overdue(&mut self, now: Instant) {
        for id in self.fresh.overdue(now) {
            if !self.service.is_validated(id) {
                self.drop_client(id);
            }
        }
    }

    /// Shuts down the remaining connections in order: bytes already written still arrive.
    fn shut_down(self) {
        for client in self.clients.values() {
            // Ignores errors: a client that is gone needs no shutdown.
            drop(client.stream.shutdown(Shutdown::Write));
        }
    }
}
