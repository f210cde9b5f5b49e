//! The client's side: each store call is a request and its answer.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::connection::{Connection, Failure};
use crate::authentication::Secret;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::store::{ASKING, CANCEL, QUESTIONS};
use crate::error::{Error, Result};
use crate::rendezvous::limits::{MESSAGE_BYTES, check_key, check_keys, check_pair};
use crate::rendezvous::protocol::{Expect, READY, Reply, STOP_WAITING, WAIT_CANCELED, encode, encode_keys, query};
use crate::rendezvous::store::{self, Store};

/// A client of a [`TcpStoreServer`](crate::store::TcpStoreServer) or of PyTorch's `TCPStore`. PyTorch's server supports
/// most calls from version 2.6 on, queues from 2.8 on, and [`list_keys`](Store::list_keys) and
/// [`barrier`](Store::barrier) from 2.15 on. An older server closes the connection when it gets a call that it does not
/// know.
///
/// On the wire, every key gets a slash as its prefix, as in PyTorch.
///
/// One handle is one connection, which carries one request at a time. While a thread waits in [`get`](Store::get),
/// [`wait`](Store::wait) or a similar call, other threads that use the same handle wait for the end of that call. So
/// two threads need a handle each if one waits for a key that the other sets.
///
/// A lost connection is not restored: every later call fails with [`Error::Io`].
pub struct TcpStore {
    server: String,
    patience: Patience,
    link: Mutex<Link>,
    local: IpAddr,
}

/// The connection, and the reason why it was lost, if it was.
struct Link {
    connection: Connection,
    lost: Option<String>,
    /// Whether a wait was cancelled and the server has not confirmed that yet.
    cancelling: bool,
}

/// The time limit of requests that take no timeout.
#[derive(Debug)]
enum Patience {
    /// A time limit for each request.
    Each(Duration),
    /// One deadline for all requests.
    Until(Deadline),
}

impl Patience {
    /// Returns the deadline of a request that begins now.
    fn deadline(&self) -> Deadline {
        Deadline::after(match self {
            Self::Each(timeout) => *timeout,
            Self::Until(deadline) => deadline.remaining(),
        })
    }
}

/// How a WAIT or a BARRIER that the server parked has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parked {
    /// The server reported success.
    Ended,
    /// The deadline passed.
    Late,
    /// The deadline passed, and the server does not answer.
    Unanswered,
}

impl TcpStore {
    /// Connects to the server on `host`, and retries until `timeout` has passed. `host` is a name or an address; write
    /// an IPv6 address without brackets. Returns an `Arc`, as [`Builder::with_store`](crate::Builder::with_store) and
    /// [`PrefixStore`](crate::store::PrefixStore) need.
    ///
    /// The same `timeout` limits later calls that take no timeout, such as [`set`](Store::set).
    ///
    /// # Errors
    ///
    /// - [`Error::Timeout`]: no server answers in time.
    /// - [`Error::Protocol`]: a server listens on this port, but it is not a store.
    /// - [`Error::Unauthorized`]: the server requires a secret.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Arc<Self>> {
        Self::open(host, port, timeout, None).map(Arc::new)
    }

    /// Connects like [`connect`](Self::connect), but both ends prove to each other that they know `secret`. PyTorch's
    /// servers do not support such a proof.
    ///
    /// # Errors
    ///
    /// The errors of [`connect`](Self::connect), and [`Error::Unauthorized`] if the server has no secret or a different
    /// one.
    pub fn connect_with_secret(host: &str, port: u16, timeout: Duration, secret: &Secret) -> Result<Arc<Self>> {
        Self::open(host, port, timeout, Some(secret)).map(Arc::new)
    }

    /// Connects with or without a secret.
    fn open(host: &str, port: u16, timeout: Duration, secret: Option<&Secret>) -> Result<Self> {
        Self::of(Connection::open(host, port, secret, &Deadline::after(timeout))?, host, port, Patience::Each(timeout))
    }

    /// Connects until `deadline`; requests may continue for at most `grace` after it.
    pub(crate) fn until(host: &str, port: u16, secret: Option<&Secret>, deadline: &Deadline, grace: Duration) -> Result<Self> {
        Self::of(Connection::open(host, port, secret, deadline)?, host, port, Patience::Until(deadline.later(grace)))
    }

    /// Connects to a store of a process that has listened from its start. Fails at once if the process is gone.
    pub(crate) fn of_listener(host: &str, port: u16, timeout: Duration, secret: Option<&Secret>) -> Result<Arc<Self>> {
        let connection = Connection::open_to_listener(host, port, secret, &Deadline::after(timeout))?;
        Self::of(connection, host, port, Patience::Each(timeout)).map(Arc::new)
    }

    /// Connects to a server that answered before, and fails at once if it is gone. Errors include `served`, which
    /// describes the server.
    pub(crate) fn open_again(host: &str, port: u16, timeout: Duration, secret: Option<&Secret>, served: &str) -> Result<Self> {
        let connection = Connection::open_again(host, port, secret, &Deadline::after(timeout)).map_err(|error| match error {
            Error::Io { doing, error } => Error::Io { doing: format!("{doing}, {served}"), error },
            other => other,
        })?;
        let mut store = Self::of(connection, host, port, Patience::Each(timeout))?;
        store.server = format!("{}, {served}", store.server);
        Ok(store)
    }

    /// Makes a store of an open connection.
    fn of(connection: Connection, host: &str, port: u16, patience: Patience) -> Result<Self> {
        let server = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let local = connection.local_addr().map_err(|error| Error::io(format!("connecting to the store at {server}"), error))?.ip();
        let link = Mutex::new(Link { connection, lost: None, cancelling: false });
        Ok(Self { server, patience, link, local })
    }

    /// Returns the address by which this host reached the server.
    pub(crate) fn local_address(&self) -> IpAddr {
        self.local
    }

    /// Counts this process among the store's workers, as PyTorch does. A Python rank that serves the store waits for
    /// all workers before it continues, unless it created the store with `wait_for_workers=False`. In a job that
    /// includes Python ranks, each process must make this call once. A communicator makes it on a store that it opens
    /// itself, but not on a store that is passed to [`Builder::with_store`](crate::Builder::with_store).
    ///
    /// # Errors
    ///
    /// See [`Store`].
    pub fn join(&self) -> Result<()> {
        let message = encode(query::ADD, &[b"init/"], Some(1));
        self.number("joining", &message).map(drop)
    }

    /// Locks the connection. A panic under the lock leaves the connection lost or idle, and the next call detects
    /// either.
    fn link(&self) -> event::Locked<'_, Link> {
        event::lock(&self.link)
    }

    /// Turns a failure into an error and marks the connection as lost.
    fn lose(&self, link: &mut Link, doing: &str, failure: Failure, deadline: &Deadline) -> Error {
        let doing = format!("{doing} at the store {}", self.server);
        let error = match failure {
            Failure::Late => store::timeout(format!("{doing}: the server does not answer"), deadline),
            Failure::Broken(source) | Failure::Lacking(source) => Error::io(doing, source),
            Failure::Closed => Error::io(doing, std::io::Error::from(std::io::ErrorKind::UnexpectedEof)),
            Failure::Unauthenticated(unproven) => {
                Error::Unauthorized { with: format!("the store server {}", self.server), reason: unproven.to_string() }
            }
            Failure::Malformed(reason) => Error::Protocol { with: format!("the store server {}", self.server), reason },
        };
        link.lost = Some(error.to_string());
        error
    }

    /// Fails if the connection is lost.
    fn alive(&self, link: &Link, doing: &str) -> Result<()> {
        link.lost.as_ref().map_or(Ok(()), |lost| {
            let source = std::io::Error::new(std::io::ErrorKind::NotConnected, format!("the connection was lost earlier: {lost}"));
            Err(Error::io(format!("{doing} at the store {}", self.server), source))
        })
    }

    /// Sends a request and receives its answer, if it has one.
    fn exchange(&self, link: &mut Link, doing: &str, message: &[u8], expect: Option<Expect>) -> Result<Option<Reply>> {
        self.alive(link, doing)?;
        if message.len() > MESSAGE_BYTES {
            let reason =
                format!("the request for {doing} has {} bytes, but the limit is {MESSAGE_BYTES}; send less at a time", message.len());
            return Err(Error::argument("store", reason));
        }
        let deadline = self.patience.deadline();
        if !self.is_settled(link, doing, &deadline)? {
            return Err(self.lose(link, doing, Failure::Late, &deadline));
        }
        let outcome = link.connection.send(message, &deadline).and_then(|()| match expect {
            Some(expect) => link.connection.receive(expect, &deadline).map(Some),
            None => Ok(None),
        });
        outcome.map_err(|failure| self.lose(link, doing, failure, &deadline))
    }

    /// Sends a request that has no answer.
    fn tell(&self, doing: &str, message: &[u8]) -> Result<()> {
        self.exchange(&mut self.link(), doing, message, None).map(drop)
    }

    /// Sends a request whose answer is a number.
    fn number(&self, doing: &str, message: &[u8]) -> Result<i64> {
        match self.exchange(&mut self.link(), doing, message, Some(Expect::Number))? {
            Some(Reply::Number(number)) => Ok(number),
            other => Err(self.unexpected(doing, &other)),
        }
    }

    /// Sends a request whose answer is a list of values.
    fn values(&self, link: &mut Link, doing: &str, message: &[u8], count: usize) -> Result<Vec<Vec<u8>>> {
        match self.exchange(link, doing, message, Some(Expect::Values(count)))? {
            Some(Reply::Values(values)) => Ok(values),
            other => Err(self.unexpected(doing, &other)),
        }
    }

    /// Makes the error for an answer of the right length that makes no sense.
    fn unexpected(&self, doing: &str, reply: &dyn fmt::Debug) -> Error {
        Error::Protocol { with: format!("the store server {}", self.server), reason: format!("{reply:?} in answer to {doing}") }
    }

    /// Sends a WAIT or a BARRIER and returns how it ended. One that passed its deadline is cancelled.
    fn park(&self, link: &mut Link, doing: &str, message: &[u8], deadline: &Deadline) -> Result<Parked> {
        self.alive(link, doing)?;
        if !self.is_settled(link, doing, deadline)? {
            return Ok(Parked::Unanswered);
        }
        let connection = &mut link.connection;
        let outcome = connection.send(message, &self.patience.deadline()).and_then(|()| connection.receive(Expect::Flag, deadline));
        match outcome {
            Ok(Reply::Flag(STOP_WAITING)) => Ok(Parked::Ended),
            Ok(other) => Err(self.lose(link, doing, Failure::Malformed(format!("{other:?} in answer to a wait")), deadline)),
            Err(Failure::Late) => self.cancel(link, doing, deadline),
            Err(failure) => Err(self.lose(link, doing, failure, deadline)),
        }
    }

    /// Cancels a wait. If the wait ended at the same moment, its answer comes first, and it has not failed. A blocked
    /// server does not hold up the caller: its answer is read later.
    fn cancel(&self, link: &mut Link, doing: &str, deadline: &Deadline) -> Result<Parked> {
        let limit = Deadline::after(CANCEL);
        link.connection.send(&[query::CANCEL_WAIT], &limit).map_err(|failure| self.lose(link, doing, failure, deadline))?;
        link.cancelling = true;
        self.hear_cancelled(link, doing, &limit)
    }

    /// Waits for the answer to a cancelled wait and returns how the wait ended. If the answer is late, the next
    /// request waits for it first.
    fn hear_cancelled(&self, link: &mut Link, doing: &str, limit: &Deadline) -> Result<Parked> {
        let mut parked = Parked::Late;
        loop {
            match link.connection.receive(Expect::Flag, limit) {
                Ok(Reply::Flag(STOP_WAITING)) if parked == Parked::Late => parked = Parked::Ended,
                Ok(Reply::Flag(WAIT_CANCELED)) => {
                    link.cancelling = false;
                    return Ok(parked);
                }
                Ok(other) => return Err(self.lose(link, doing, Failure::Malformed(format!("{other:?} in answer to CANCEL_WAIT")), limit)),
                Err(Failure::Late) => return Ok(Parked::Unanswered),
                Err(failure) => return Err(self.lose(link, doing, failure, limit)),
            }
        }
    }

    /// Waits until the server has answered all earlier requests, and returns whether it has.
    fn is_settled(&self, link: &mut Link, doing: &str, deadline: &Deadline) -> Result<bool> {
        Ok(!link.cancelling || self.hear_cancelled(link, doing, deadline)? != Parked::Unanswered)
    }

    /// Waits for keys.
    fn wait_for(&self, link: &mut Link, keys: &[&str], deadline: &Deadline) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        match self.park(link, "waiting for keys", &encode_wire_keys(query::WAIT, keys), deadline)? {
            Parked::Ended => Ok(()),
            Parked::Late => {
                let (asking, mut asked) = (Deadline::after(ASKING), 0);
                let mut may_ask = || {
                    asked += 1;
                    asked <= QUESTIONS && !asking.has_passed()
                };
                let missing = store::missing(keys, &mut may_ask, &mut |keys| self.is_there(link, keys))?;
                Err(store::wait_timeout(&missing.in_order(), keys.len(), deadline))
            }
            Parked::Unanswered => {
                let doing = format!("waiting for {} keys at the store {}: the server does not answer", keys.len(), self.server);
                Err(store::timeout(doing, deadline))
            }
        }
    }

    /// Asks whether keys exist.
    fn is_there(&self, link: &mut Link, keys: &[&str]) -> Result<bool> {
        let message = encode_wire_keys(query::CHECK, keys);
        match self.exchange(link, "checking keys", &message, Some(Expect::Flag))? {
            Some(Reply::Flag(flag)) => Ok(flag == READY),
            other => Err(self.unexpected("checking keys", &other)),
        }
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStore").field("server", &self.server).field("patience", &self.patience).finish_non_exhaustive()
    }
}

/// Returns a key as it is sent.
fn wire(key: &str) -> Vec<u8> {
    [b"/", key.as_bytes()].concat()
}

/// Encodes a request with several keys.
fn encode_wire_keys(code: u8, keys: &[&str]) -> Vec<u8> {
    let keys: Vec<Vec<u8>> = keys.iter().map(|key| wire(key)).collect();
    encode_keys(code, keys.len(), keys.iter().map(Vec::as_slice))
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("set", key, value)?;
        self.tell(&format!("setting {key:?}"), &encode(query::SET, &[&wire(key), value], None))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key("get", key)?;
        let mut link = self.link();
        self.wait_for(&mut link, &[key], &Deadline::after(timeout))?;
        let doing = format!("getting {key:?}");
        let values = self.values(&mut link, &doing, &encode(query::GET, &[&wire(key)], None), 1)?;
        values.into_iter().next().ok_or_else(|| self.unexpected(&doing, &"nothing"))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        check_key("add", key)?;
        let doing = format!("adding {delta} to the number at {key:?}");
        self.number(&doing, &encode(query::ADD, &[&wire(key)], Some(delta)))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        check_pair("compare_set", key, expected)?;
        check_pair("compare_set", key, desired)?;
        let doing = format!("comparing and setting {key:?}");
        let message = encode(query::COMPARE_SET, &[&wire(key), expected, desired], None);
        let values = self.values(&mut self.link(), &doing, &message, 1)?;
        values.into_iter().next().ok_or_else(|| self.unexpected(&doing, &"nothing"))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        check_keys("wait", keys)?;
        self.wait_for(&mut self.link(), keys, &Deadline::after(timeout))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        check_keys("check", keys)?;
        self.is_there(&mut self.link(), keys)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        check_key("delete_key", key)?;
        Ok(self.number(&format!("deleting {key:?}"), &encode(query::DELETE_KEY, &[&wire(key)], None))? > 0)
    }

    fn num_keys(&self) -> Result<i64> {
        self.number("counting keys", &[query::NUM_KEYS])
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("append", key, value)?;
        self.tell(&format!("appending to {key:?}"), &encode(query::APPEND, &[&wire(key), value], None))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        check_keys("multi_get", keys)?;
        let mut link = self.link();
        self.wait_for(&mut link, keys, &Deadline::after(timeout))?;
        let message = encode_wire_keys(query::MULTI_GET, keys);
        self.values(&mut link, &format!("getting {} keys", keys.len()), &message, keys.len())
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        check_keys("multi_set", &keys)?;
        pairs.iter().try_for_each(|(key, value)| check_pair("multi_set", key, value))?;
        let keys: Vec<Vec<u8>> = keys.into_iter().map(wire).collect();
        let texts = keys.iter().zip(pairs).flat_map(|(key, (_, value))| [key.as_slice(), *value]);
        self.tell(&format!("setting {} keys", pairs.len()), &encode_keys(query::MULTI_SET, pairs.len(), texts))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        check_pair("queue_push", key, value)?;
        self.tell(&format!("pushing to the queue {key:?}"), &encode(query::QUEUE_PUSH, &[&wire(key), value], None))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        check_key("queue_pop", key)?;
        let deadline = Deadline::after(timeout);
        let doing = format!("popping from the queue {key:?}");
        let mut link = self.link();
        loop {
            self.wait_for(&mut link, &[key], &deadline)?;
            let message = encode(query::QUEUE_POP, &[&wire(key)], None);
            match self.exchange(&mut link, &doing, &message, Some(Expect::Popped))? {
                Some(Reply::Popped(Some(value))) => return Ok(value),
                // Another client was faster, or `key` is a value, not a queue.
                Some(Reply::Popped(None)) if deadline.has_passed() => return Err(store::wait_timeout(&[key], 1, &deadline)),
                Some(Reply::Popped(None)) => std::thread::sleep(Duration::from_millis(1).min(deadline.remaining())),
                other => return Err(self.unexpected(&doing, &other)),
            }
        }
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        check_key("queue_len", key)?;
        self.number(&format!("measuring the queue {key:?}"), &encode(query::QUEUE_LEN, &[&wire(key)], None))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        match self.exchange(&mut self.link(), "listing keys", &[query::LIST_KEYS], Some(Expect::Keys))? {
            // Keys without the slash belong to stores, not to users.
            Some(Reply::Keys(keys)) => {
                Ok(keys.iter().filter_map(|key| key.strip_prefix(b"/")).map(|key| String::from_utf8_lossy(key).into_owned()).collect())
            }
            other => Err(self.unexpected("listing keys", &other)),
        }
    }

    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        store::check_barrier(key, world_size)?;
        let deadline = Deadline::after(timeout);
        let message = encode(query::BARRIER, &[&wire(key)], Some(i64::try_from(world_size).unwrap_or(i64::MAX)));
        let mut link = self.link();
        let parked = self.park(&mut link, &format!("waiting at the barrier {key:?}"), &message, &deadline)?;
        drop(link);
        match parked {
            Parked::Ended => Ok(()),
            Parked::Late => Err(store::barrier_timeout(key, world_size, self.add(key, 0).ok(), &deadline)),
            Parked::Unanswered => Err(store::barrier_timeout(key, world_size, None, &deadline)),
        }
    }
}
