//! Opens the connections of one link, all at the same time.

use std::io;

use rustix::event::PollFd;

use super::connector::{ConnectError, Connector};
use super::link::Link;

/// A link that is being opened over one or more connections. Dropping it ends the attempts.
#[derive(Debug)]
pub(crate) struct Opening {
    /// The connections in their order, each with its link once it is open.
    connections: Vec<(Connector, Option<Link>)>,
}

impl Opening {
    /// Creates the link's opening. Nothing happens before the first [`Opening::advance`].
    pub(super) fn new(connectors: impl Iterator<Item = Connector>) -> Self {
        Self { connections: connectors.map(|connector| (connector, None)).collect() }
    }

    /// Proceeds as far as it can without blocking, and returns the link once all connections are open. Call it as often
    /// as [`Connector::advance`], but not after it has returned the link.
    pub(crate) fn advance(&mut self) -> Result<Option<Link>, ConnectError> {
        for (connector, link) in &mut self.connections {
            if link.is_none() {
                *link = connector.advance()?;
            }
        }
        if self.connections.iter().any(|(_, link)| link.is_none()) {
            return Ok(None);
        }
        Ok(Some(Link::joined(self.connections.drain(..).filter_map(|(_, link)| link))))
    }

    /// Returns the connectors whose connections are not open.
    fn missing(&self) -> impl Iterator<Item = &Connector> {
        self.connections.iter().filter(|(_, link)| link.is_none()).map(|(connector, _)| connector)
    }

    /// Returns what to wait for before the next [`Opening::advance`].
    pub(super) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.missing().filter_map(Connector::interest)
    }

    /// Returns the reason why no attempt can begin, if this process has lacked a descriptor for a while.
    pub(super) fn lack(&self) -> Option<io::Error> {
        self.missing().find_map(Connector::lack)
    }

    /// Describes the progress, for use after a timeout.
    pub(super) fn progress(&self) -> String {
        self.missing().map(Connector::progress).next().unwrap_or_default()
    }
}
