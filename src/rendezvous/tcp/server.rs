//! Starts and ends the server's thread.

use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fmt, io};

use rustix::event::{EventfdFlags, eventfd};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::daemon::{Daemon, last_word};
use crate::authentication::Secret;
use crate::base::event;
use crate::base::fork::Process;
use crate::base::own_thread::{OwnThread, is_own};
use crate::base::tuning::own_thread::LAST;
use crate::base::tuning::store::{BACKLOG, LINGER};
use crate::config::PortRange;
use crate::error::{Error, Result};

/// A server for [`TcpStore`](crate::store::TcpStore) and PyTorch's `TCPStore`, on one thread of this process.
///
/// The server listens on exactly the given address, and on all interfaces only if that is the unspecified address, such
/// as `0.0.0.0`. PyTorch's protocol has no authentication: a peer that can reach the address can read and write every
/// key. So use an address of a trusted network or of the loopback interface, or require clients to prove that they know
/// a secret ([`bind_with_secret`](Self::bind_with_secret)). PyTorch's clients do not support such a proof.
///
/// The server disconnects a client that sends invalid data or exceeds a limit. Other clients are not affected. The
/// limits are 8 KiB per key, 8 MiB per value, 64 MiB per request, and 1 GiB of keys and values in all.
///
/// Each client costs one file descriptor, so raise the limit on open files (`ulimit -n`) for thousands of ranks. The
/// cost of a request does not depend on the number of clients.
///
/// When the server is dropped, it keeps serving until its last client has disconnected, so that no client loses an
/// answer. It does so for at most 5 s, or the time that you passed to [`bind_with_linger`](Self::bind_with_linger).
/// Before you drop the server, drop the same process's stores that are connected to it, because the server waits for
/// them too.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collectives::store::{Store, TcpStore, TcpStoreServer};
///
/// # fn main() -> collectives::Result<()> {
/// let server = TcpStoreServer::bind("127.0.0.1:0")?;
/// let store = TcpStore::connect("127.0.0.1", server.local_addr().port(), Duration::from_secs(10))?;
/// store.set("key", b"value")?;
/// assert_eq!(store.get("key", Duration::from_secs(10))?, b"value");
/// # Ok(())
/// # }
/// ```
pub struct TcpStoreServer {
    address: SocketAddr,
    /// Wakes the thread to end it.
    wake_up: Arc<OwnedFd>,
    served: Arc<AtomicU64>,
    lack: Arc<OnceLock<String>>,
    thread: OwnThread,
    /// How long it waits for its clients to leave when it ends.
    linger: Duration,
    process: Process,
}

impl TcpStoreServer {
    /// Starts a server. If `address` resolves to several addresses, the server listens on the first of them that
    /// belongs to this host. If the port is 0, the system chooses a port.
    ///
    /// # Errors
    ///
    /// - [`Error::Config`]: the address is in use or does not belong to this host.
    /// - [`Error::Io`]: the address cannot be resolved, or the system refuses to listen for another reason.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        Self::start(address, LINGER, None)
    }

    /// Starts a server like [`bind`](Self::bind), which serves only clients that prove that they know `secret`; see
    /// [`TcpStore::connect_with_secret`](crate::store::TcpStore::connect_with_secret).
    ///
    /// # Errors
    ///
    /// The errors of [`bind`](Self::bind).
    pub fn bind_with_secret(address: impl ToSocketAddrs, secret: &Secret) -> Result<Self> {
        Self::start(address, LINGER, Some(secret))
    }

    /// Starts a server at the first of `addresses` that belongs to this host. If its port is 0, the server listens on
    /// one of `ports`.
    pub(crate) fn open(addresses: &[SocketAddr], ports: Option<PortRange>, secret: Option<&Secret>) -> Result<Self> {
        Self::serve(listen_on_first(addresses, ports)?, LINGER, secret)
    }

    /// Starts a server like [`bind`](Self::bind). When this server is dropped, it waits up to `linger` for its clients
    /// to disconnect.
    ///
    /// # Errors
    ///
    /// The errors of [`bind`](Self::bind).
    pub fn bind_with_linger(address: impl ToSocketAddrs, linger: Duration) -> Result<Self> {
        Self::start(address, linger, None)
    }

    /// Listens, and starts the thread.
    fn start(address: impl ToSocketAddrs, linger: Duration, secret: Option<&Secret>) -> Result<Self> {
        let resolved = address.to_socket_addrs().map_err(|error| Error::io("resolving the address of the store server", error))?;
        Self::serve(listen_on_first(&resolved.collect::<Vec<_>>(), None)?, linger, secret)
    }

    /// Starts a server on a nonblocking listener. With a secret, clients must prove that they know it.
    pub(crate) fn serve(listener: std::net::TcpListener, linger: Duration, secret: Option<&Secret>) -> Result<Self> {
        let doing = "starting the store server";
        let address = listener.local_addr().map_err(|error| Error::io(doing, error))?;
        if secret.is_none() && !address.ip().is_loopback() {
            event::warn!(%address, "the store has no secret: any process that can reach this address can read and write the store; \
                 set COLLECTIVES_SECRET");
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_up = Arc::new(eventfd(0, flags).map_err(|error| Error::io(doing, error))?);
        let daemon = Daemon::new(listener, Arc::clone(&wake_up), secret.cloned()).map_err(|error| Error::io(doing, error))?;
        let (served, lack) = (daemon.served(), daemon.lack());
        let thread = OwnThread::spawn("store-server".to_owned(), move || {
            event::caught("the thread of a store server", || daemon.run());
        });
        let thread = thread.map_err(|error| Error::io(doing, error))?;
        Ok(Self { address, wake_up, served, lack, thread, linger, process: Process::this() })
    }

    /// Ends the server. It waits at most `linger` for clients to leave, then closes their connections.
    pub(crate) fn end_within(mut self, linger: Duration) {
        self.linger = self.linger.min(linger);
    }

    /// Returns the place for the reason why clients cannot be accepted, if this process lacks resources. Nothing else
    /// reports it.
    pub(crate) fn lack(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.lack)
    }

    /// Returns the number of requests that the server has served so far, greetings included. The start of a
    /// communicator of `n` ranks takes about 22 `n` requests.
    #[must_use]
    pub fn requests_served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// Returns the address on which the server listens. If port 0 was requested, the address contains the port that the
    /// system chose.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl fmt::Debug for TcpStoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStoreServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        if self.process.is_foreign() {
            // The thread belongs to the parent and keeps serving.
            return;
        }
        // Adding to a fresh counter cannot fail.
        if let Err(error) = rustix::io::write(&*self.wake_up, &last_word(self.linger).to_ne_bytes()) {
            event::warn!(address = %self.address, %error, "the store server could not be stopped");
            return;
        }
        // A subscriber of `tracing` runs on that thread and may drop this value.
        if !self.thread.wait(self.linger.saturating_add(LAST)) && !is_own() {
            event::warn!(address = %self.address, "the store server's thread does not end and is left running");
        }
    }
}

/// Listens on the first of `addresses` that belongs to this host.
///
/// An address in use ends the search. A client that tried the same list would reach the other server there, not this
/// one on a later address.
fn listen_on_first(addresses: &[SocketAddr], ports: Option<PortRange>) -> Result<std::net::TcpListener> {
    for &address in addresses {
        match PortRange::listen(ports.filter(|_| address.port() == 0), address, listen) {
            Ok(listener) => return Ok(listener),
            Err(error) if PortRange::exhausted(&error).is_some() => return Err(PortRange::error("listening for the store", error)),
            Err(error) if is_foreign(&error) => {}
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let reason = "address already in use: another job or program listens on this host and port, or another process of this \
                              job is also rank 0 (--node-rank 0 on two hosts); set MASTER_PORT to a free port, or use port 0 if the port need \
                              not be known beforehand";
                return Err(Error::config(format!("store server on {address}"), reason));
            }
            Err(error) => return Err(Error::io(format!("listening on {address} for the store"), error)),
        }
    }
    let list = addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
    Err(Error::config(
        format!("store server on {list}"),
        "this is not an address of this host; rank 0 must run on the host that MASTER_ADDR (or the URL) names",
    ))
}

/// Whether listening failed because the address is not this host's, or of an address family that this host lacks.
fn is_foreign(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

/// Listens on one address.
pub(crate) fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Closing connections of an earlier server must not block the port.
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
