//! One link to a peer in both directions, and the state of a peer.

use std::io;

use crate::base::tuning::point_to_point::LAST_READS;
use crate::host::abort_reason::AbortReason;
use crate::host::link::{ByteLink, Silence};

use super::incoming::{Incoming, ReadEnd};
use super::matching_state::MatchingState;
use super::outgoing::Outgoing;

/// The way in which a link ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The peer left normally. The peer had opened this many links to this rank before it left.
    Left { opened: u32 },
    /// The peer died, its host has stopped answering, the link broke, or the peer sent garbage.
    Broken(Option<Silence>),
}

/// The state of a peer: its links, by number, and whether it is gone.
#[derive(Debug, Default)]
pub(super) struct PeerState {
    pub(super) opened: Option<usize>,
    pub(super) accepted: Option<usize>,
    /// The link that messages to the peer take.
    pub(super) chosen: Option<usize>,
    pub(super) gone: Option<AbortReason>,
}

/// A link in use.
#[derive(Debug)]
pub(super) struct Channel<L> {
    pub(super) link: L,
    pub(super) peer: usize,
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
    end: Option<End>,
}

impl End {
    /// Returns the reason for the loss of a peer whose links to rank `me` ended in this way.
    pub(super) fn abort_reason(self, peer: usize, me: usize) -> AbortReason {
        let rank = peer as u32;
        match self {
            End::Left { .. } => AbortReason::Left { rank },
            End::Broken(silence) => AbortReason::of_link(rank, me as u32, silence),
        }
    }
}

impl<L: ByteLink> Channel<L> {
    /// Creates a channel on a new link with this number. `credit` is the initial total cost of the messages that it may
    /// send.
    pub(super) fn new(link: L, number: usize, peer: usize, credit: usize) -> Self {
        Self { link, peer, incoming: Incoming::new(number, peer), outgoing: Outgoing::new(number, peer, credit), end: None }
    }

    /// Returns how the link ended; `None` while it works.
    pub(super) fn end(&self) -> Option<End> {
        self.end
    }

    /// Moves what can move now. Returns whether anything did (an end counts).
    pub(super) fn drive(&mut self, matching_state: &mut MatchingState) -> bool {
        if self.end.is_some() {
            return false;
        }
        let has_read = self.read(matching_state);
        let has_written = self.end.is_none() && self.write(matching_state);
        has_read || has_written
    }

    fn read(&mut self, matching_state: &mut MatchingState) -> bool {
        match self.incoming.read(&mut self.link, matching_state, &mut self.outgoing) {
            Ok(moved) => moved,
            Err(end) => {
                self.end = Some(self.explain(end));
                true
            }
        }
    }

    /// Writes what can be written. Returns whether anything moved.
    pub(super) fn write(&mut self, matching_state: &mut MatchingState) -> bool {
        if self.end.is_some() {
            return false;
        }
        match self.outgoing.write(&mut self.link, matching_state) {
            Ok(moved) => moved,
            Err(error) => {
                // Bytes that a peer sent before it died still count.
                for _ in 0..LAST_READS {
                    if self.end.is_some() || !self.read(matching_state) {
                        break;
                    }
                }
                if self.end.is_none() {
                    self.end = Some(self.explain(error.into()));
                }
                true
            }
        }
    }

    /// Returns how the link ended, and logs the reason with `tracing`.
    fn explain(&self, end: ReadEnd) -> End {
        let peer = self.peer;
        let silence = if let ReadEnd::Failed(error) = &end { Silence::of(error) } else { None };
        match end {
            ReadEnd::Left { opened } => return End::Left { opened },
            ReadEnd::Malformed(reason) => {
                crate::base::event::warn!(peer, "a peer sent an invalid message and is considered lost: {reason}");
            }
            ReadEnd::Failed(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                crate::base::event::debug!(peer, "a peer closed its message link without announcing that it was leaving");
            }
            ReadEnd::Failed(error) => crate::base::event::debug!(peer, "a link for messages failed: {error}"),
        }
        End::Broken(silence)
    }
}
