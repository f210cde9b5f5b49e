//! Peers and their links: opened when needed, accepted when a peer opens one, closed when nothing more can arrive.

use crate::base::deadline::Deadline;
use crate::base::tuning::point_to_point::LAST_READS;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::ByteLink;

use super::channel::{Channel, End, PeerState};
use super::frame::Frame;
use super::{Connector, Messages};

impl<C: Connector> Messages<C> {
    /// Returns the link that messages to this peer take.
    pub(super) fn chosen_link(&mut self, peer: usize) -> Result<usize, Interrupted> {
        if let Some(abort_reason) = self.peers[peer].gone {
            return Err(abort_reason.into());
        }
        let link = match self.peers[peer].chosen {
            Some(link) => link,
            None => self.choose_link(peer)?,
        };
        self.peers[peer].chosen = Some(link);
        match self.channels[link].as_ref().and_then(Channel::end) {
            None => Ok(link),
            Some(end) => Err(end.abort_reason(peer, self.rank).into()),
        }
    }

    /// Chooses a link if there are two, as both ranks do: the one on which the peer sends, otherwise that of the lower
    /// rank. With one stream in both directions, acknowledgements travel with messages.
    fn choose_link(&mut self, peer: usize) -> Result<usize, Interrupted> {
        self.take_links();
        let state = &self.peers[peer];
        let of_lower_rank = if self.rank < peer { state.opened } else { state.accepted };
        match self.matching_state.link_of(peer).or(of_lower_rank) {
            Some(link) => Ok(link),
            None => self.any_link(peer),
        }
    }

    /// Returns a link to this peer, and opens one if there is none.
    pub(super) fn any_link(&mut self, peer: usize) -> Result<usize, Interrupted> {
        let known = |state: &PeerState| state.opened.or(state.accepted);
        if let Some(link) = known(&self.peers[peer]) {
            return Ok(link);
        }
        self.take_links();
        if let Some(link) = known(&self.peers[peer]) {
            return Ok(link);
        }
        match self.connector.connect(peer) {
            Ok(link) => {
                let number = self.add_channel(peer, link);
                self.peers[peer].opened = Some(number);
                Ok(number)
            }
            Err(stop) => {
                // The peer may have opened a link, sent its messages, and left.
                self.take_links();
                known(&self.peers[peer]).ok_or(stop)
            }
        }
    }

    fn add_channel(&mut self, peer: usize, link: C::Link) -> usize {
        let number = self.channels.len();
        self.channels.push(Some(Channel::new(link, number, peer, self.matching_state.limit())));
        number
    }

    /// Takes the links that peers have opened. Returns whether there were any.
    pub(super) fn take_links(&mut self) -> bool {
        let mut taken = false;
        for (peer, link) in self.connector.accept() {
            let is_welcome =
                peer != self.rank && self.peers.get(peer).is_some_and(|state| state.accepted.is_none() && state.gone.is_none());
            if !is_welcome {
                crate::base::event::warn!(peer, "closed an unexpected link for messages from this rank");
                continue;
            }
            let number = self.add_channel(peer, link);
            self.peers[peer].accepted = Some(number);
            self.tell_on(number);
            taken = true;
        }
        taken
    }

    /// Handles links that have ended: a peer is gone when nothing more can arrive from it.
    pub(super) fn normalise(&mut self, link: usize) {
        let Some(channel) = &self.channels[link] else { return };
        if channel.end().is_none() {
            return;
        }
        let peer = channel.peer;
        // A link that the peer opened may be waiting at the listener with its last messages.
        self.take_links();
        let broken = self.ends_of(peer).flatten().find(|end| matches!(end, End::Broken(_)));
        if let Some(broken) = broken {
            self.read_last(peer);
            // A peer that leaves sends nothing on a link that it has not accepted yet.
            let left = self.ends_of(peer).flatten().find(|end| matches!(end, End::Left { .. }));
            self.end_peer(peer, left.unwrap_or(broken).abort_reason(peer, self.rank));
            return;
        }
        let announces_another = |end| matches!(end, Some(End::Left { opened: 1.. }));
        let is_awaited = self.peers[peer].accepted.is_none() && self.ends_of(peer).any(announces_another);
        if !is_awaited && self.ends_of(peer).all(|end| end.is_some()) {
            self.end_peer(peer, AbortReason::Left { rank: peer as u32 });
        }
    }

    /// Returns how each link of a peer has ended, if it has.
    fn ends_of(&self, peer: usize) -> impl Iterator<Item = Option<End>> {
        self.links_of(peer).filter_map(|link| self.channels[link].as_ref()).map(Channel::end)
    }

    fn links_of(&self, peer: usize) -> impl Iterator<Item = usize> + use<C> {
        let state = &self.peers[peer];
        [state.opened, state.accepted].into_iter().flatten()
    }

    /// Reads what remains on the second link of a peer, after the first has shown that the peer is lost.
    fn read_last(&mut self, peer: usize) {
        for link in self.links_of(peer) {
            let Some(channel) = &mut self.channels[link] else { continue };
            // Bounded: the peer might be alive and send forever.
            for _ in 0..LAST_READS {
                if !channel.drive(&mut self.matching_state) {
                    break;
                }
            }
        }
    }

    /// Handles a peer that is gone: its links are closed, and the requests that need it fail.
    pub(super) fn end_peer(&mut self, peer: usize, abort_reason: AbortReason) {
        if self.peers[peer].gone.is_some() {
            return;
        }
        for link in self.links_of(peer) {
            self.channels[link] = None;
        }
        self.peers[peer].gone = Some(abort_reason);
        let was_last = self.all_gone().is_some();
        self.matching_state.end_peer(peer, abort_reason, was_last);
    }

    /// If all peers are gone, returns how one of them ended. `None` for a rank without peers.
    pub(super) fn all_gone(&self) -> Option<AbortReason> {
        let mut last = None;
        for (_, state) in self.peers.iter().enumerate().filter(|(peer, _)| *peer != self.rank) {
            last = Some(state.gone?);
        }
        last
    }

    /// Returns the links with unwritten output. A link that has ended is not included, even if this rank still waits
    /// for its peer. Such a peer has announced another link, which never arrives if the peer leaves before this rank
    /// accepts that link.
    fn unwritten(&self) -> impl Iterator<Item = &Channel<C::Link>> {
        self.channels.iter().flatten().filter(|channel| channel.end().is_none() && !channel.outgoing.is_empty())
    }

    /// Ends the engine normally. Hands pending output to the links (except long sends that have not been matched),
    /// notifies each link that this rank leaves, and closes them. Remaining requests fail. If the deadline passes
    /// first, the error names the peers that did not take everything, and the links are closed too.
    pub(crate) fn leave(&mut self, deadline: &Deadline) -> Result<(), Interrupted> {
        self.take_links();
        self.flush(deadline);
        for link in 0..self.channels.len() {
            if let Some(channel) = &mut self.channels[link] {
                let opened = u32::from(self.peers[channel.peer].opened.is_some());
                channel.outgoing.in_turn(Frame::Leave { opened });
            }
        }
        self.flush(deadline);
        self.send_off(deadline);
        let mut missing: Vec<u32> = self.unwritten().map(|channel| channel.peer as u32).collect();
        missing.dedup();
        for channel in self.channels.iter_mut().flatten() {
            channel.incoming.drain(&mut channel.link);
        }
        let rank = self.rank;
        for peer in (0..self.peers.len()).filter(|peer| *peer != rank) {
            self.end_peer(peer, AbortReason::Left { rank: rank as u32 });
        }
        match missing.first() {
            None => Ok(()),
            Some(&first) => {
                let abort_reason = AbortReason::TimedOut { waiting: self.rank as u32, missing: first };
                Err(Interrupted { abort_reason, missing, arrived: vec![self.rank as u32] })
            }
        }
    }

    /// Waits until everything that was written has left this host, or the deadline has passed. A peer that still writes
    /// credit to a link that this rank has closed would otherwise never get the rest.
    fn send_off(&mut self, deadline: &Deadline) {
        let has_unsent = |channel: &Channel<C::Link>| channel.end().is_none() && channel.link.has_unsent();
        while self.channels.iter().flatten().any(has_unsent) && !deadline.has_passed() {
            if !self.progress() {
                self.rest(deadline.remaining());
            }
        }
    }

    /// Moves messages until everything is written or the deadline has passed.
    fn flush(&mut self, deadline: &Deadline) {
        while self.unwritten().next().is_some() && !deadline.has_passed() {
            if !self.progress() {
                self.rest(deadline.remaining());
            }
        }
    }
}
