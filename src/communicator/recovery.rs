//! Recovery listeners: the ports at which the ranks of a job find each other again after their communicator has
//! failed, and the stores there. The store at which they first met may be gone.
//!
//! Every rank listens at its own port from the start, and serves nothing there until it has to. A refused connection
//! means that the rank's process is gone. An accepted connection means that the process is alive. Until the rank serves
//! a store, the other ranks need no more information.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::authentication::Secret;
use crate::base::event;
use crate::base::tuning::recovery::{ANSWER, AT_ONCE, LINGER, PROBE};
use crate::config::PortRange;
use crate::error::{Error, Result};
use crate::host::net::own_address::to_listen_on;
use crate::rendezvous::{self, Store, TcpStore, TcpStoreServer};

/// A check for a lost rank that all others wait for; it returns a description of that rank.
pub(in crate::communicator) type PeerWatch = Box<dyn Fn() -> Option<String>>;

/// A rank's own recovery listener, which all clones share.
#[derive(Clone)]
pub(in crate::communicator) struct RecoveryListener(Arc<Mutex<Own>>);

impl RecoveryListener {
    /// Listens on this address, at a port of the range, or at one that the system chooses. If that fails, the reason is
    /// kept for later errors.
    ///
    /// # Errors
    ///
    /// `Config` if no port of the range is free.
    pub(in crate::communicator) fn new(listen: IpAddr, ports: Option<PortRange>) -> Result<Self> {
        let own = match PortRange::listen(ports, to_listen_on(listen), rendezvous::listen) {
            Ok(listener) => Own::Closed(listener),
            Err(error) => match PortRange::exhausted(&error) {
                Some(exhausted) => return Err(exhausted),
                None => Own::Missing(format!("listening on {listen}: {error}")),
            },
        };
        Ok(Self(Arc::new(Mutex::new(own))))
    }

    /// Returns the listener's address.
    pub(in crate::communicator) fn address(&self) -> Option<SocketAddr> {
        match &*event::lock(&self.0) {
            Own::Missing(_) => None,
            Own::Closed(listener) => listener.local_addr().ok(),
            Own::Open(server) => Some(server.local_addr()),
        }
    }

    /// Returns how many requests the store behind the listener has served; `None` if the listener is not open.
    pub(in crate::communicator) fn requests_served(&self) -> Option<u64> {
        match &*event::lock(&self.0) {
            Own::Open(server) => Some(server.requests_served()),
            _ => None,
        }
    }

    /// Returns the address of the listener, which is opened for `doing` if necessary: from now on it serves a store.
    fn open(&self, doing: &'static str, secret: Option<&Secret>) -> Result<SocketAddr> {
        let mut own = event::lock(&self.0);
        if let Own::Closed(listener) = &*own {
            let opening = |error| Error::io(format!("{doing}: opening this rank's recovery listener"), error);
            *own = Own::Open(TcpStoreServer::serve(listener.try_clone().map_err(opening)?, LINGER, secret)?);
        }
        match &*own {
            Own::Open(server) => Ok(server.local_addr()),
            Own::Closed(_) => Err(Error::argument(doing, "this rank's recovery listener did not open")),
            Own::Missing(reason) => Err(Error::Unsupported {
                what: doing.to_owned(),
                reason: format!("this rank has no port to which other ranks could connect ({reason}); see Config::listen_address"),
            }),
        }
    }
}

/// The current state of this rank's recovery listener.
enum Own {
    /// There is no listener. The text says why.
    Missing(String),
    Closed(TcpListener),
    Open(TcpStoreServer),
}

/// The result of a probe at a rank's recovery listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::communicator) enum Probe {
    /// The process is gone.
    Gone,
    /// The process exists.
    Alive,
    /// There was no answer, so the process may be gone or may still exist.
    NoAnswer,
}

/// The recovery listeners of all ranks of the job's first communicator, shared by all communicators made from it.
pub(in crate::communicator) struct RecoveryListeners {
    recovery_listeners: Vec<Option<SocketAddr>>,
    /// The secret that connecting ranks must know.
    secret: Option<Secret>,
    own: RecoveryListener,
}

/// Finds out whether the process behind a recovery listener lives.
pub(in crate::communicator) fn probe(address: &SocketAddr) -> Probe {
    match TcpStream::connect_timeout(address, PROBE) {
        Ok(_) => Probe::Alive,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Probe::Gone,
        Err(_) => Probe::NoAnswer,
    }
}

/// Finds out whether the processes behind these recovery listeners live. The ones that do not answer hold up no other.
pub(in crate::communicator) fn probe_all(addresses: &[SocketAddr]) -> Vec<Probe> {
    at_once(addresses, probe)
}

/// Calls a function for each item, on threads for up to [`AT_ONCE`] items at the same time. Returns the results in the
/// order of the items.
pub(in crate::communicator) fn at_once<T: Sync, R: Send>(items: &[T], call: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let mut results = Vec::with_capacity(items.len());
    for some in items.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let (call, (first, others)) = (&call, some.split_at(1));
            let start = |item| std::thread::Builder::new().spawn_scoped(scope, move || call(item));
            let threads: Vec<_> = others.iter().map(start).collect();
            results.extend(first.iter().map(call));
            for (item, thread) in others.iter().zip(threads) {
                // Without a thread, this one makes the call.
                results.push(thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(|| call(item)));
            }
        });
    }
    results
}

/// Connects to the store behind a recovery listener; `patience` limits the wait for an answer. Fails at once if the
/// process is gone.
pub(in crate::communicator) fn connect(address: SocketAddr, patience: Duration, secret: Option<&Secret>) -> Result<Arc<TcpStore>> {
    let (mut host, port) = (address.ip().to_string(), address.port());
    if let SocketAddr::V6(address) = address
        && address.scope_id() != 0
    {
        host += &format!("%{}", address.scope_id());
    }
    TcpStore::of_listener(&host, port, patience, secret)
}

impl RecoveryListeners {
    pub(in crate::communicator) fn new(
        recovery_listener: RecoveryListener,
        recovery_listeners: Vec<Option<SocketAddr>>,
        secret: Option<Secret>,
    ) -> Self {
        Self { recovery_listeners, secret, own: recovery_listener }
    }

    /// Finds out whether the process behind a recovery listener lives.
    pub(in crate::communicator) fn probe(&self, place: usize) -> Probe {
        self.recovery_listeners[place].as_ref().map_or(Probe::NoAnswer, probe)
    }

    /// Returns the store behind a recovery listener, if it is open; `patience` limits the wait for an answer.
    pub(in crate::communicator) fn visit(&self, place: usize, patience: Duration) -> Option<Arc<TcpStore>> {
        let address = self.recovery_listeners[place]?;
        self.connect(address, ANSWER).ok()?;
        self.connect(address, patience).ok()
    }

    /// Connects to the store at `address`; `patience` limits the wait for an answer.
    pub(in crate::communicator) fn connect(&self, address: SocketAddr, patience: Duration) -> Result<Arc<TcpStore>> {
        connect(address, patience, self.secret.as_ref())
    }

    /// Returns the address of a recovery listener.
    pub(in crate::communicator) fn address(&self, place: usize) -> Option<SocketAddr> {
        self.recovery_listeners[place]
    }

    /// Returns this rank's recovery listener.
    pub(in crate::communicator) fn own(&self) -> &RecoveryListener {
        &self.own
    }

    /// Returns the store behind this rank's recovery listener, which is opened if necessary. A request may take as long
    /// as `patience`, because a process that was stopped finds its deadline already passed when it continues.
    pub(in crate::communicator) fn host(&self, doing: &'static str, patience: Duration) -> Result<Arc<dyn Store>> {
        Ok(self.connect(self.own.open(doing, self.secret.as_ref())?, patience)?)
    }
}

/// The recovery listeners of a communicator's ranks.
#[derive(Clone)]
pub(in crate::communicator) struct RecoveryGroup {
    pub(in crate::communicator) listeners: Arc<RecoveryListeners>,
    /// The index of each rank's recovery listener, by rank.
    pub(in crate::communicator) places: Arc<[usize]>,
}

impl RecoveryGroup {
    /// Makes the group of a job's first communicator.
    pub(in crate::communicator) fn new(
        recovery_listener: RecoveryListener,
        recovery_listeners: &[Option<SocketAddr>],
        secret: Option<Secret>,
    ) -> Self {
        Self {
            listeners: Arc::new(RecoveryListeners::new(recovery_listener, recovery_listeners.to_vec(), secret)),
            places: (0..recovery_listeners.len()).collect(),
        }
    }

    /// Finds out whether the processes of these ranks live. The ranks that do not answer hold up no other.
    pub(in crate::communicator) fn probe_all(&self, ranks: &[usize]) -> Vec<Probe> {
        at_once(ranks, |rank| self.listeners.probe(self.places[*rank]))
    }

    pub(in crate::communicator) fn visit(&self, rank: usize, patience: Duration) -> Option<Arc<TcpStore>> {
        self.listeners.visit(self.places[rank], patience)
    }

    /// Returns the address of a rank's recovery listener.
    pub(in crate::communicator) fn address(&self, rank: usize) -> Option<SocketAddr> {
        self.listeners.address(self.places[rank])
    }

    /// Returns a function that checks whether one of the ranks is gone.
    pub(in crate::communicator) fn watch(&self) -> PeerWatch {
        let (recovery, ranks) = (self.clone(), (0..self.places.len()).collect::<Vec<_>>());
        Box::new(move || {
            let gone = recovery.probe_all(&ranks).into_iter().position(|probe| probe == Probe::Gone);
            gone.map(|rank| format!("the process of rank {rank} of the new communicator is gone"))
        })
    }

    /// Returns the group of these ranks, in this order.
    pub(in crate::communicator) fn of(&self, ranks: &[usize]) -> Self {
        Self { listeners: Arc::clone(&self.listeners), places: ranks.iter().map(|rank| self.places[*rank]).collect() }
    }
}

impl fmt::Debug for RecoveryGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecoveryGroup").field("places", &self.places).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::tuning::recovery::SERVICE;

    #[test]
    fn a_recovery_listener_tells_who_lives_before_it_opens() {
        let here = IpAddr::from([127, 0, 0, 1]);
        let (mine, theirs) = (RecoveryListener::new(here, None).unwrap(), RecoveryListener::new(here, None).unwrap());
        let recovery_listeners = vec![mine.address(), theirs.address(), None];
        let listeners = RecoveryListeners::new(mine, recovery_listeners.clone(), None);
        assert_eq!([0, 1, 2].map(|place| listeners.probe(place)), [Probe::Alive, Probe::Alive, Probe::NoAnswer]);
        assert!(listeners.visit(0, SERVICE).is_none() && listeners.visit(2, SERVICE).is_none());
        drop(theirs);
        assert_eq!(listeners.probe(1), Probe::Gone);
        // The patience is longer than any test may take.
        let error = listeners.connect(recovery_listeners[1].unwrap(), 1000 * SERVICE).map(drop).unwrap_err();
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("no process listens"), "{error}");
        listeners.host("shrink", SERVICE).unwrap().set("key", b"value").unwrap();
        let store = listeners.visit(0, SERVICE).unwrap();
        assert_eq!(store.get("key", Duration::ZERO).unwrap(), b"value");
        // It stays open, with its contents.
        assert_eq!(listeners.host("shrink", SERVICE).unwrap().get("key", Duration::ZERO).unwrap(), b"value");
    }

    #[test]
    fn calls_at_once_wait_for_each_other_and_keep_their_order() {
        let items: Vec<usize> = (0..2 * AT_ONCE + 3).collect();
        // Each call of a part waits for all others of that part.
        let parts = [AT_ONCE, AT_ONCE, 3].map(std::sync::Barrier::new);
        let results = at_once(&items, |item| {
            parts[item / AT_ONCE].wait();
            2 * item
        });
        assert_eq!(results, items.iter().map(|item| 2 * item).collect::<Vec<_>>());
        assert!(at_once(&[], |item: &usize| *item).is_empty());
    }

    #[test]
    fn a_rank_without_a_recovery_listener_says_why() {
        let recovery_listener = RecoveryListener::new(IpAddr::from([192, 0, 2, 1]), None).unwrap();
        assert_eq!(recovery_listener.address(), None);
        let error = RecoveryListeners::new(recovery_listener, vec![None], None).host("shrink", SERVICE).map(drop).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("192.0.2.1"), "{error}");
    }
}
