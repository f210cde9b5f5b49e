//! Links of both kinds under one type, and who is reached by which.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::topology::Topology;
use crate::deadline::Deadline;
use crate::host::engine::{Engine, Links};
use crate::host::health::Health;
use crate::host::link::ByteLink;
use crate::host::net::Connector;
use crate::host::net::collective::CollectiveLinks;
use crate::host::net::mesh::Mesh;
use crate::host::net::tcp::TcpLink;
use crate::host::notice::{Notice, Stop};
use crate::host::shm::{Channel, Group, RingLink};

/// A stream to a rank of this host or of another.
pub(crate) enum PlaneLink {
    Ring(RingLink),
    Tcp(TcpLink),
    /// Being opened from here: nothing moves until the peer has answered.
    Opening(Box<Connector>),
}

impl PlaneLink {
    /// Goes on with opening; `WouldBlock` while the peer has not answered.
    fn open(&mut self) -> io::Result<()> {
        if let PlaneLink::Opening(connector) = self {
            match connector.advance() {
                Ok(Some(link)) => *self = PlaneLink::Tcp(link),
                Ok(None) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) => return Err(io::Error::new(io::ErrorKind::ConnectionReset, error)),
            }
        }
        Ok(())
    }
}

impl ByteLink for PlaneLink {
    #[inline]
    fn try_write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.open()?;
        match self {
            PlaneLink::Ring(link) => link.try_write(parts),
            PlaneLink::Tcp(link) => link.try_write(parts),
            PlaneLink::Opening(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    #[inline]
    fn try_read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.open()?;
        match self {
            PlaneLink::Ring(link) => link.try_read(into),
            PlaneLink::Tcp(link) => link.try_read(into),
            PlaneLink::Opening(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            PlaneLink::Ring(link) => link.descriptor(),
            PlaneLink::Tcp(link) => link.descriptor(),
            PlaneLink::Opening(_) => None,
        }
    }
}

/// The links that collectives run on, by rank: rings from the start, TCP as it is wanted.
pub(super) struct PlaneLinks {
    open: Vec<Option<PlaneLink>>,
    remote: CollectiveLinks,
    health: Arc<Health>,
}

impl PlaneLinks {
    /// Takes the rings to the other ranks of this host.
    pub(super) fn new(mesh: &Mesh, group: Option<&mut Group>, topology: &Topology, world_size: usize, health: Arc<Health>) -> Self {
        let mut open: Vec<Option<PlaneLink>> = (0..world_size).map(|_| None).collect();
        if let Some(group) = group {
            for (local, rank) in topology.island().iter().enumerate() {
                open[*rank] = group.link(local, Channel::Collective).map(PlaneLink::Ring);
            }
        }
        Self { open, remote: mesh.collective_links(), health }
    }

    /// Opens the links by which a death is noticed and small calls travel: those at distance 1, 2, 4 … among one rank of each host.
    pub(super) fn connect_partners(&mut self, participants: &[usize], deadline: &Deadline) -> Result<(), Stop> {
        let health = Arc::clone(&self.health);
        self.remote.connect_partners(participants, deadline, &mut || health.notice().copied())?;
        for rank in participants {
            if self.open[*rank].is_none() {
                self.open[*rank] = self.remote.take_opened(*rank).map(PlaneLink::Tcp);
            }
        }
        Ok(())
    }

    /// Tells every peer that is reached over a stream that this rank leaves in good order.
    pub(super) fn leave(&mut self, engine: &mut Engine) {
        if self.health.notice().is_none() {
            engine.leave(self);
        }
    }
}

impl Links for PlaneLinks {
    type Link = PlaneLink;

    fn link(&mut self, rank: usize, deadline: &Deadline) -> Result<&mut PlaneLink, Stop> {
        let slot = &mut self.open[rank];
        if slot.is_none() {
            let health = Arc::clone(&self.health);
            self.remote.link(rank, deadline, &mut || health.notice().copied())?;
            *slot = self.remote.take_opened(rank).map(PlaneLink::Tcp);
        }
        slot.as_mut().ok_or_else(|| Notice::Lost { rank: rank as u32 }.into())
    }

    fn drop_link(&mut self, rank: usize) {
        self.open[rank] = None;
    }

    fn for_each_open(&mut self, visit: &mut dyn FnMut(usize, &mut PlaneLink)) {
        for (rank, link) in self.open.iter_mut().enumerate() {
            if let Some(link) = link {
                visit(rank, link);
            }
        }
    }
}
