//! What messages travel on: the rings of this host and links to others, opened as they are wanted.

use std::os::fd::BorrowedFd;

use super::links::PlaneLink;
use crate::deadline::Deadline;
use crate::host::abort_reason::Interrupted;
use crate::host::net::Channel;
use crate::host::net::mesh::Mesh;
use crate::host::point_to_point::Connector;

/// Gives the message engine its links.
pub(crate) struct MessageConnector {
    /// The rings, until they are taken.
    pub(super) rings: Vec<(usize, PlaneLink)>,
    pub(super) mesh: Mesh,
}

impl Connector for MessageConnector {
    type Link = PlaneLink;

    fn connect(&mut self, peer: usize, _deadline: &Deadline) -> Result<PlaneLink, Interrupted> {
        self.mesh.connecting(peer).map(PlaneLink::opening)
    }

    fn accept(&mut self) -> Vec<(usize, PlaneLink)> {
        // Rings need no opening: they are handed over at the first look.
        let mut links = std::mem::take(&mut self.rings);
        links.extend(self.mesh.accepted(Channel::PointToPoint).into_iter().map(|(rank, link)| (rank, PlaneLink::tcp(link))));
        links
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.mesh.listener_descriptor()
    }
}
