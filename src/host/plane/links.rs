//! Links of both kinds under one type, and who is reached by which.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::topology::Topology;
use crate::deadline::Deadline;
use crate::event;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::engine::{Engine, Links};
use crate::host::health::Health;
use crate::host::link::ByteLink;
use crate::host::net::Connector;
use crate::host::net::collective::CollectiveLinks;
use crate::host::net::mesh::Mesh;
use crate::host::net::tcp::TcpLink;
use crate::host::shm::{Channel, Group, RingLink};

/// How long a broken stream is not yet taken for a lost peer: whoever knows why it broke gets a moment to pass it on.
const GRACE: Duration = Duration::from_millis(200);

/// A stream to a rank of this host or of another.
pub(crate) struct PlaneLink {
    stream: Stream,
    /// Since when it is known to be broken.
    broken: Option<Instant>,
}

/// What carries it.
enum Stream {
    Ring(RingLink),
    Tcp(TcpLink),
    /// For messages, being opened from here: nothing moves until the peer has answered.
    Opening(Box<Connector>),
    /// For collectives, being opened by this rank or by that peer. The engine looks after all its links meanwhile, so what another
    /// peer tells is heard.
    Pending(Arc<Mutex<CollectiveLinks>>, usize),
}

impl PlaneLink {
    fn new(stream: Stream) -> Self {
        Self { stream, broken: None }
    }

    /// Over shared memory.
    pub(super) fn ring(link: RingLink) -> Self {
        Self::new(Stream::Ring(link))
    }

    /// Over TCP.
    pub(super) fn tcp(link: TcpLink) -> Self {
        Self::new(Stream::Tcp(link))
    }

    /// Over TCP, once the peer has answered.
    pub(super) fn opening(connector: Connector) -> Self {
        Self::new(Stream::Opening(Box::new(connector)))
    }

    /// Whether anything can move already.
    fn is_open(&self) -> bool {
        matches!(self.stream, Stream::Ring(_) | Stream::Tcp(_))
    }

    /// Goes on with opening; `WouldBlock` while the peer has not answered.
    fn open(&mut self) -> io::Result<()> {
        let opened = match &mut self.stream {
            Stream::Ring(_) | Stream::Tcp(_) => return Ok(()),
            Stream::Opening(connector) => connector.advance().map_err(Interrupted::from),
            Stream::Pending(links, peer) => {
                let mut links = event::lock(links);
                links.advance(*peer).map(|_| links.take_opened(*peer))
            }
        };
        match opened {
            Ok(Some(link)) => self.stream = Stream::Tcp(link),
            Ok(None) => return Err(io::ErrorKind::WouldBlock.into()),
            Err(_) => return Err(io::ErrorKind::ConnectionReset.into()),
        }
        Ok(())
    }

    /// Holds the report of a break back for a moment.
    #[cold]
    fn softened(&mut self, error: io::Error) -> io::Error {
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
            return error;
        }
        match self.broken.get_or_insert_with(Instant::now).elapsed() < GRACE {
            true => io::ErrorKind::WouldBlock.into(),
            false => error,
        }
    }
}

impl ByteLink for PlaneLink {
    #[inline]
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = match &mut self.stream {
            _ if self.broken.is_some() => Err(io::ErrorKind::BrokenPipe.into()),
            Stream::Ring(link) => link.try_write(parts),
            Stream::Tcp(link) => link.try_write(parts),
            Stream::Opening(_) | Stream::Pending(..) => self.open().and(Err(io::ErrorKind::WouldBlock.into())),
        };
        written.map_err(|error| self.softened(error))
    }

    #[inline]
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // Also when it is broken: what the peer has said before may still be there.
        let read = match &mut self.stream {
            Stream::Ring(link) => link.try_read(into),
            Stream::Tcp(link) => link.try_read(into),
            Stream::Opening(_) | Stream::Pending(..) => self.open().and(Err(io::ErrorKind::WouldBlock.into())),
        };
        read.map_err(|error| self.softened(error))
    }

    fn try_read_past(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            Stream::Ring(link) => link.try_read_past(into).map_err(|error| self.softened(error)),
            _ => self.try_read(into),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.stream {
            // A poll on it would return at once.
            _ if self.broken.is_some() => None,
            Stream::Ring(link) => link.descriptor(),
            Stream::Tcp(link) => link.descriptor(),
            Stream::Opening(_) | Stream::Pending(..) => None,
        }
    }
}

/// The links that collectives run on, by rank: rings from the start, TCP as it is wanted.
pub(super) struct PlaneLinks {
    open: Vec<Option<PlaneLink>>,
    remote: Arc<Mutex<CollectiveLinks>>,
    health: Arc<Health>,
}

impl PlaneLinks {
    /// Takes the rings to the other ranks of this host.
    pub(super) fn new(mesh: &Mesh, group: Option<&mut Group>, topology: &Topology, world_size: usize, health: Arc<Health>) -> Self {
        let mut open: Vec<Option<PlaneLink>> = (0..world_size).map(|_| None).collect();
        if let Some(group) = group {
            for (local, rank) in topology.local_ranks().iter().enumerate() {
                open[*rank] = group.link(local, Channel::Collective).map(PlaneLink::ring);
            }
        }
        Self { open, remote: Arc::new(Mutex::new(CollectiveLinks::of(mesh))), health }
    }

    /// Opens the links by which a death is noticed and small calls travel: those at distance 1, 2, 4 … among one rank of each host.
    pub(super) fn connect_partners(&mut self, participants: &[usize], deadline: &Deadline) -> Result<(), Interrupted> {
        let health = Arc::clone(&self.health);
        let mut remote = event::lock(&self.remote);
        remote.connect_partners(participants, deadline, &mut || health.abort_reason().copied())?;
        for rank in participants {
            if self.open[*rank].is_none() {
                self.open[*rank] = remote.take_opened(*rank).map(PlaneLink::tcp);
            }
        }
        Ok(())
    }

    /// Tells every peer that is reached over a stream that this rank leaves in good order.
    pub(super) fn leave(&mut self, engine: &mut Engine) {
        if self.health.abort_reason().is_none() {
            engine.leave(self);
        }
    }
}

impl Links for PlaneLinks {
    type Link = PlaneLink;

    fn link(&mut self, rank: usize, _deadline: &Deadline) -> Result<&mut PlaneLink, Interrupted> {
        let slot = self.open.get_mut(rank).ok_or(AbortReason::Lost { rank: rank as u32 })?;
        Ok(slot.get_or_insert_with(|| PlaneLink::new(Stream::Pending(Arc::clone(&self.remote), rank))))
    }

    fn drop_link(&mut self, rank: usize) {
        self.open[rank] = None;
    }

    fn for_each_open(&mut self, visit: &mut dyn FnMut(usize, &mut PlaneLink)) {
        for (rank, link) in self.open.iter_mut().enumerate() {
            if let Some(link) = link.as_mut().filter(|link| link.is_open()) {
                visit(rank, link);
            }
        }
    }
}
