//! Provides one type for both kinds of links (shared memory and TCP), and chooses for each peer the kind that reaches
//! it, for collectives and for messages.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use super::topology::Topology;
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::tuning::net::BROKEN_GRACE;
use crate::config::Waiting;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::engine::{Engine, Links};
use crate::host::health::Health;
use crate::host::link::{Bell, ByteLink, Head, Silence};
use crate::host::net::mesh::Mesh;
use crate::host::net::{self, Opening};
use crate::host::point_to_point;
use crate::host::shm::{Channel, Group, RingLink};

/// A stream to a rank of this host or of another host.
pub(crate) struct BackendLink {
    stream: Stream,
    broken: Option<Broken>,
}

/// How a stream broke.
#[derive(Debug, Clone, Copy)]
struct Broken {
    since: Instant,
    /// Whether the peer's host has stopped answering. This is cleared if anything arrives before the communicator has
    /// ended.
    by_silence: bool,
}

/// The transport of a stream.
enum Stream {
    Ring(RingLink),
    Tcp(net::Link),
    /// A TCP link that this rank or the peer is opening. Every read or write continues to open the link, without
    /// blocking, so that this rank can receive other peers' notifications in between. If a deadline passes, the link
    /// stays in this state.
    Opening(Box<Opening>),
}

impl BackendLink {
    fn new(stream: Stream) -> Self {
        Self { stream, broken: None }
    }

    /// Creates a link over shared memory.
    pub(super) fn ring(link: RingLink) -> Self {
        Self::new(Stream::Ring(link))
    }

    /// Creates a link over TCP.
    fn tcp(link: net::Link) -> Self {
        Self::new(Stream::Tcp(link))
    }

    /// Creates a link over TCP that is yet to open.
    fn opening(opening: Opening) -> Self {
        Self::new(Stream::Opening(Box::new(opening)))
    }

    /// Whether data can already move.
    fn is_open(&self) -> bool {
        matches!(self.stream, Stream::Ring(_) | Stream::Tcp(_))
    }

    /// Continues the opening. Returns `WouldBlock` while the link is not open.
    fn open(&mut self) -> io::Result<()> {
        let Stream::Opening(opening) = &mut self.stream else { return Ok(()) };
        match opening.advance() {
            Ok(Some(link)) => self.stream = Stream::Tcp(link),
            Ok(None) => return Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => {
                event::warn!("{error}");
                return Err(io::ErrorKind::ConnectionReset.into());
            }
        }
        Ok(())
    }

    /// Delays the report of a break for a moment, because a rank that knows the cause may still report it.
    #[cold]
    fn softened(&mut self, error: io::Error) -> io::Error {
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
            if self.broken.is_some() {
                self.heard();
            }
            return error;
        }
        let since = self.broken.map_or_else(Instant::now, |broken| broken.since);
        self.broken = Some(Broken { since, by_silence: Silence::of(&error).is_some() });
        if since.elapsed() < BROKEN_GRACE { io::ErrorKind::WouldBlock.into() } else { error }
    }

    /// Records that a link that was silent works again.
    #[cold]
    fn heard(&mut self) {
        self.broken = self.broken.filter(|broken| !broken.by_silence);
    }

    /// Makes a call on the TCP link. If that succeeds, the link is no longer silent.
    #[inline]
    fn on_tcp(&mut self, call: impl FnOnce(&mut net::Link) -> io::Result<usize>) -> io::Result<usize> {
        let Stream::Tcp(link) = &mut self.stream else { return Err(io::ErrorKind::WouldBlock.into()) };
        let moved = call(link);
        if self.broken.is_some() && moved.is_ok() {
            self.heard();
        }
        moved
    }
}

impl ByteLink for BackendLink {
    #[inline]
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = match &mut self.stream {
            _ if self.broken.is_some_and(|broken| !broken.by_silence) => Err(io::ErrorKind::BrokenPipe.into()),
            Stream::Ring(link) => link.try_write(parts),
            Stream::Tcp(_) => self.on_tcp(|link| link.try_write(parts)),
            Stream::Opening(_) => self.open().and(Err(io::ErrorKind::WouldBlock.into())),
        };
        written.map_err(|error| self.softened(error))
    }

    #[inline]
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // Also if it is broken: what the peer sent before may still be there.
        let read = match &mut self.stream {
            Stream::Ring(link) => link.try_read(into),
            Stream::Tcp(_) => self.on_tcp(|link| link.try_read(into)),
            Stream::Opening(_) => self.open().and(Err(io::ErrorKind::WouldBlock.into())),
        };
        read.map_err(|error| self.softened(error))
    }

    fn try_read_past(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Ring(link) => link.try_read_past(into).map_err(|error| self.softened(error)),
            _ => self.try_read(into),
        }
    }

    #[inline]
    fn try_write_frame(&mut self, head: &Head, payload: &[u8]) -> io::Result<bool> {
        match &mut self.stream {
            Stream::Ring(link) if self.broken.is_none() => link.try_write_frame(head, payload),
            _ => Ok(false),
        }
    }

    #[inline]
    fn peek_frame(&mut self, looks: u32) -> io::Result<Option<Head>> {
        match &mut self.stream {
            Stream::Ring(link) => link.peek_frame(looks).map_err(|error| self.softened(error)),
            _ => Ok(None),
        }
    }

    #[inline]
    fn take_frame(&mut self, header_bytes: usize, payload: &mut [u8]) {
        if let Stream::Ring(link) = &mut self.stream {
            link.take_frame(header_bytes, payload);
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.stream {
            // A poll on it would return at once.
            _ if self.broken.is_some() => None,
            Stream::Ring(link) => link.descriptor(),
            Stream::Tcp(link) => link.descriptor(),
            Stream::Opening(_) => None,
        }
    }

    fn write_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.stream {
            Stream::Tcp(link) if self.broken.is_none() => link.write_descriptor(),
            _ => self.descriptor(),
        }
    }

    fn has_unsent(&self) -> bool {
        matches!(&self.stream, Stream::Tcp(link) if link.has_unsent())
    }

    fn bell(&self) -> Option<Arc<dyn Bell>> {
        match &self.stream {
            Stream::Ring(link) if self.broken.is_none() => link.bell(),
            _ => None,
        }
    }
}

/// The links that collectives run on, by rank: rings from the start, TCP when first needed.
pub(super) struct BackendLinks {
    open: Vec<Option<BackendLink>>,
    mesh: Arc<Mesh>,
    health: Arc<Health>,
}

impl BackendLinks {
    /// Creates the set with the rings to the other ranks of this host.
    pub(super) fn new(mesh: Arc<Mesh>, group: Option<&mut Group>, topology: &Topology, world_size: usize, health: Arc<Health>) -> Self {
        let mut open: Vec<Option<BackendLink>> = (0..world_size).map(|_| None).collect();
        if let Some(group) = group {
            for (local, rank) in topology.local_ranks().iter().enumerate() {
                open[*rank] = group.link(local, Channel::Collective).map(BackendLink::ring);
            }
        }
        Self { open, mesh, health }
    }

    /// Opens the links that carry small calls and reveal a rank's death: those at distance 1, 2, 4 … among one rank of
    /// each host.
    pub(super) fn connect_partners(&mut self, participants: &[usize], deadline: &Deadline) -> Result<(), Interrupted> {
        let health = Arc::clone(&self.health);
        for (rank, link) in self.mesh.connect_partners(participants, deadline, &mut || health.abort_reason().copied())? {
            self.open[rank] = Some(BackendLink::tcp(link));
        }
        Ok(())
    }

    /// Returns the number of connections of each link over TCP.
    pub(super) fn connections(&self) -> u8 {
        self.mesh.connections()
    }

    /// Notifies every peer with an open link that this rank leaves in good order.
    pub(super) fn leave(&mut self, engine: &mut Engine) {
        if self.health.abort_reason().is_none() {
            engine.leave(self);
        }
    }
}

impl Links for BackendLinks {
    type Link = BackendLink;

    fn link(&mut self, rank: usize) -> Result<&mut BackendLink, Interrupted> {
        match self.open.get_mut(rank).ok_or(AbortReason::Lost { rank: rank as u32, by: rank as u32 })? {
            Some(link) => Ok(link),
            slot => Ok(slot.insert(BackendLink::opening(self.mesh.connecting(net::Channel::Collective, rank)?))),
        }
    }

    fn drop_link(&mut self, rank: usize) {
        self.open[rank] = None;
    }

    fn for_each_open(&mut self, visit: &mut dyn FnMut(usize, &mut BackendLink)) {
        for (rank, link) in self.open.iter_mut().enumerate() {
            if let Some(link) = link.as_mut().filter(|link| link.is_open()) {
                visit(rank, link);
            }
        }
    }
}

/// The source of the message engine's links.
pub(crate) struct MessageConnector {
    /// The rings, until they are handed over.
    pub(super) rings: Vec<(usize, BackendLink)>,
    pub(super) mesh: Arc<Mesh>,
    pub(super) health: Arc<Health>,
    pub(super) rank: u32,
    /// How this rank waits for messages.
    pub(crate) waiting: Waiting,
}

impl point_to_point::Connector for MessageConnector {
    type Link = BackendLink;

    fn connect(&mut self, peer: usize) -> Result<BackendLink, Interrupted> {
        self.mesh.connecting(net::Channel::PointToPoint, peer).map(BackendLink::opening)
    }

    fn accept(&mut self) -> Vec<(usize, BackendLink)> {
        // Rings need no opening: they are handed over at the first call.
        let mut links = std::mem::take(&mut self.rings);
        links.extend(self.mesh.accepted(net::Channel::PointToPoint).into_iter().map(|(rank, link)| (rank, BackendLink::tcp(link))));
        if let Some(lack) = self.mesh.lack() {
            // A peer that waits for a link to this rank would wait without success.
            self.health.keep_cause(lack);
            self.health.end(AbortReason::Failed { rank: self.rank });
        }
        links
    }

    fn is_complete(&self) -> bool {
        self.rings.is_empty() && self.mesh.listener_descriptor().is_none()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.mesh.listener_descriptor()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails says where")]
mod tests {
    use std::io::ErrorKind;
    use std::time::Duration;

    use super::*;
    use crate::host::exchange::local;

    /// Returns both ends of a link over TCP.
    fn pair() -> [BackendLink; 2] {
        let limit = Deadline::after(Duration::from_secs(20));
        let terms = net::Terms { secret: None, silence_timeout: Duration::from_secs(60), connections: 1, ports: None };
        let mesh = |(rank, mut exchange): (usize, local::LocalExchange)| {
            Mesh::exchange(&mut exchange, rank, 2, true, [127, 0, 0, 1].into(), [7; 16], 0, &terms, &limit).unwrap()
        };
        let meshes: Vec<Mesh> = std::thread::scope(|scope| {
            let mesh = &mesh;
            let ranks = local::exchanges(2).into_iter().enumerate().map(|exchange| scope.spawn(move || mesh(exchange)));
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let mut connector = meshes[0].connecting(net::Channel::PointToPoint, 1).unwrap();
        let (mut near, mut far) = (None, None);
        while near.is_none() || far.is_none() {
            assert!(!limit.has_passed(), "no link");
            near = near.or_else(|| connector.advance().unwrap());
            far = far.or_else(|| meshes[1].accepted(net::Channel::PointToPoint).pop());
        }
        [near.unwrap(), far.unwrap().1].map(BackendLink::tcp)
    }

    fn read(link: &mut BackendLink) -> u8 {
        let (mut byte, limit) = ([0], Deadline::after(Duration::from_secs(20)));
        while let Err(error) = link.try_read(&mut byte) {
            assert!(error.kind() == ErrorKind::WouldBlock && !limit.has_passed(), "{error}");
        }
        byte[0]
    }

    #[test]
    fn a_silent_link_works_again_once_anything_moves() {
        let [mut near, mut far] = pair();
        let silence = || Silence(Duration::from_secs(60)).into();
        assert_eq!(near.softened(silence()).kind(), ErrorKind::WouldBlock);
        assert!(near.broken.is_some() && near.descriptor().is_none());
        // The kernel no longer reports an error.
        assert_eq!(near.try_read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(near.broken.is_none() && near.descriptor().is_some());
        // A successful write ends the silence too.
        assert_eq!(near.softened(silence()).kind(), ErrorKind::WouldBlock);
        assert_eq!(near.try_write(&[IoSlice::new(b"x")]).unwrap(), 1);
        assert!(near.broken.is_none());
        assert_eq!(read(&mut far), b'x');
    }

    #[test]
    fn silence_that_lasts_is_told_and_a_link_that_broke_stays_broken() {
        let [mut near, mut far] = pair();
        near.softened(Silence(Duration::from_secs(60)).into());
        near.broken = near.broken.map(|broken| Broken { since: broken.since.checked_sub(BROKEN_GRACE).unwrap(), ..broken });
        assert!(Silence::of(&near.softened(Silence(Duration::from_secs(61)).into())).is_some());
        far.try_write(&[IoSlice::new(b"x")]).unwrap();
        near.broken = None;
        near.softened(ErrorKind::ConnectionReset.into());
        assert_eq!(read(&mut near), b'x', "what was sent before still comes");
        assert_eq!(near.try_write(&[IoSlice::new(b"y")]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(near.broken.is_some());
    }
}
