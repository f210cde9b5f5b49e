//! The server's thread: moves bytes between sockets and the service.

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

/// What the wake-up event counts when the server is to end once its clients have left, for which it waits so long at most.
pub(super) fn last_word(linger: Duration) -> u64 {
    u64::try_from(linger.as_millis()).unwrap_or(u64::MAX).min(u64::MAX - 2) + 1
}

/// The reverse.
fn linger(last_word: u64) -> Duration {
    Duration::from_millis(last_word.saturating_sub(1))
}

/// The wake-up event and the listener, among the numbers of clients, which never get so large.
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
    /// Set once the server is being dropped.
    shutdown: Option<Deadline>,
    service: Service,
    clients: HashMap<ClientId, Client>,
    /// Clients that have not shown that they speak the protocol. Those that have, or are gone, are taken out in their turn.
    fresh: Admission<ClientId>,
    /// For telling clients that there is no other descriptor.
    spare: Spare,
    /// Why clients cannot be let in, where that is for a lack of this process.
    lack: Arc<OnceLock<String>>,
    next: ClientId,
    scratch: Vec<u8>,
}

/// Tells a client that it cannot be let in for a lack of this process, in words of a proof: others have no room for any.
fn refuse_for_lack(mut stream: TcpStream) {
    // What is left unread when it is closed would take the words with it.
    let _ = stream.set_nonblocking(true).and_then(|()| stream.read(&mut [0; 256]));
    let _ = stream.write(&Reason::Starved.to_reply());
}

/// What a wait has found.
#[derive(Default)]
struct Found {
    wake_up: bool,
    listener: bool,
    clients: Vec<(ClientId, EventFlags)>,
}

impl Daemon {
    /// For a listener that does not block.
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

    /// Counts the requests that have been carried out.
    pub(super) fn served(&self) -> Arc<AtomicU64> {
        self.service.served()
    }

    /// Where it says why clients cannot be let in, should that be for a lack of this process.
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
                // It has been seen, and would end every wait at once.
                let _ = epoll::delete(&self.epoll, &*self.wake_up);
            }
            // Before others are accepted: a client that has just spoken need not make room.
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
            // Memory is short for the moment, and there is nobody to tell.
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

    /// How long a wait may take.
    fn patience(&self) -> Option<Timespec> {
        let shutdown = self.shutdown.as_ref().map(|shutdown| if self.has_guests() { shutdown.remaining() } else { Duration::ZERO });
        let shortest = [shutdown, self.fresh.patience(Instant::now())].into_iter().flatten().min()?;
        Timespec::try_from(shortest).ok()
    }

    /// Accepts the clients that have come, as far as there is room.
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
        // It fails where the peer is gone already.
        if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
            return;
        }
        let id = self.next;
        let interest = EventFlags::IN;
        if let Err(error) = epoll::add(&self.epoll, &stream, EventData::new_u64(id), interest) {
            return crate::base::event::warn!(%error, clients = self.clients.len(), "the store server cannot watch one more client");
        }
        self.next += 1;
        self.service.connect(id);
        self.fresh.add(id, now);
        self.clients.insert(id, Client { stream, interest, finished: false });
    }

    /// Reads from a connection, or drops it where it is gone.
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

    /// Watches a client for what is now waited for, which changes where bytes came from it or answers went to it: [`Daemon::send`] follows both.
    fn watch(&mut self, id: ClientId, owed: bool) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, !client.finished && self.service.wants_input(id));
        interest.set(EventFlags::OUT, owed);
        if interest != client.interest {
            client.interest = interest;
            if let Err(error) = epoll::modify(&self.epoll, &client.stream, EventData::new_u64(id), interest) {
                crate::base::event::warn!(%error, "the store server loses sight of a client and drops it");
                self.drop_client(id);
            }
        }
    }

    /// Forgets a client and its waits.
    fn drop_client(&mut self, id: ClientId) {
        if let Some(client) = self.clients.remove(&id) {
            // Closing alone is not enough where the process is being forked at this moment.
            let _ = epoll::delete(&self.epoll, &client.stream);
        }
        self.service.disconnect(id);
    }

    /// Drops clients that have not shown in time that they speak the protocol.
    fn drop_overdue(&mut self, now: Instant) {
        for id in self.fresh.overdue(now) {
            if !self.service.is_validated(id) {
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
