//! The links that collective calls run on, opened when they are first wanted.

use std::sync::Arc;

use super::Channel;
use super::connector::Connector;
use super::mesh::{Mesh, Shared};
use super::tcp::TcpLink;
use crate::deadline::Deadline;
use crate::host::abort_reason::{AbortReason, Interrupted};

/// At most one link to each peer. Of two ranks the lower connects and the higher accepts.
#[derive(Debug)]
pub(crate) struct CollectiveLinks {
    shared: Arc<Shared>,
    /// By rank.
    slots: Vec<Slot>,
}

/// What there is between this rank and one peer.
#[derive(Debug)]
enum Slot {
    Closed,
    /// To be opened by the peer, which is looked for meanwhile.
    Expected(Box<Connector>),
    /// Being opened from here. A deadline that passes leaves it so, and the next wait goes on.
    Opening(Box<Connector>),
    Open(TcpLink),
}

impl CollectiveLinks {
    /// Those of a mesh, of which none is open yet. A mesh has one owner of these.
    pub(crate) fn of(mesh: &Mesh) -> Self {
        let shared = Arc::clone(&mesh.shared);
        Self { slots: std::iter::repeat_with(|| Slot::Closed).take(shared.addresses.len()).collect(), shared }
    }

    /// The link to `peer`, opened if need be. `interrupted` is asked now and then whether to give up.
    #[cfg(test)]
    pub(crate) fn link(
        &mut self,
        peer: usize,
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> Result<&mut TcpLink, Interrupted> {
        if self.opened(peer).is_none() {
            self.open(&[peer], deadline, interrupted)?;
        }
        let me = self.shared.me.rank;
        self.opened(peer).ok_or_else(|| AbortReason::Failed { rank: me }.into())
    }

    /// The link to `peer`, if it is open.
    pub(crate) fn opened(&mut self, peer: usize) -> Option<&mut TcpLink> {
        match self.slots.get_mut(peer) {
            Some(Slot::Open(link)) => Some(link),
            _ => None,
        }
    }

    /// Hands the link to `peer` over, if it is open: its owner keeps it from then on, and does not ask for it again.
    pub(crate) fn take_opened(&mut self, peer: usize) -> Option<TcpLink> {
        match self.slots.get_mut(peer).map(|slot| std::mem::replace(slot, Slot::Closed)) {
            Some(Slot::Open(link)) => Some(link),
            Some(other) => {
                self.slots[peer] = other;
                None
            }
            None => None,
        }
    }

    /// Goes on with opening the link to `peer`, without waiting, and says whether it is open. For those who have other links to
    /// look after meanwhile: to be called again every few milliseconds, or when the mesh's listener is ready.
    pub(crate) fn advance(&mut self, peer: usize) -> Result<bool, Interrupted> {
        if self.opened(peer).is_some() {
            return Ok(true);
        }
        if peer < self.shared.me.rank as usize {
            return self.expect(peer);
        }
        self.shared.serve();
        // An error leaves the slot closed, and whoever tries again begins anew.
        let mut connector = match self.slots.get_mut(peer).map(|slot| std::mem::replace(slot, Slot::Closed)) {
            Some(Slot::Opening(connector)) => connector,
            _ => Box::new(self.shared.connector(Channel::Collective, peer)?),
        };
        let link = connector.advance()?;
        let is_open = link.is_some();
        self.slots[peer] = link.map_or(Slot::Opening(connector), Slot::Open);
        Ok(is_open)
    }

    /// Takes the link that `peer` opens, if it has; an error where it is not there any more to open it.
    fn expect(&mut self, peer: usize) -> Result<bool, Interrupted> {
        if let Some(link) = self.shared.take(Channel::Collective, peer)? {
            self.slots[peer] = Slot::Open(link);
            return Ok(true);
        }
        if let Slot::Expected(probing) = &mut self.slots[peer] {
            probing.probe()?;
        } else {
            self.slots[peer] = Slot::Expected(Box::new(self.shared.probing(peer)?));
        }
        Ok(false)
    }

    /// Opens the links to the partners of a dissemination among `participants` (ranks, in an order that all share): those at
    /// distance 1, 2, 4 … in both directions. Every participant calls it. Afterwards each rank's death is seen by several.
    pub(crate) fn connect_partners(
        &mut self,
        participants: &[usize],
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> Result<(), Interrupted> {
        let me = self.shared.me.rank as usize;
        let Some(position) = participants.iter().position(|&rank| rank == me) else { return Ok(()) };
        let partners: Vec<usize> = partners(position, participants.len()).iter().map(|&at| participants[at]).collect();
        self.open(&partners, deadline, interrupted)
    }

    /// Calls `visit` with every open link and its peer's rank.
    #[cfg(test)]
    pub(crate) fn for_each_open(&mut self, mut visit: impl FnMut(usize, &mut TcpLink)) {
        for (peer, slot) in self.slots.iter_mut().enumerate() {
            if let Slot::Open(link) = slot {
                visit(peer, link);
            }
        }
    }

    /// Opens the links to `peers`, all at once, and waits for them.
    fn open(
        &mut self,
        peers: &[usize],
        deadline: &Deadline,
        interrupted: &mut dyn FnMut() -> Option<AbortReason>,
    ) -> Result<(), Interrupted> {
        loop {
            let (mut missing, mut arrived) = (Vec::new(), Vec::new());
            for &peer in peers {
                if self.advance(peer)? { &mut arrived } else { &mut missing }.push(peer);
            }
            if missing.is_empty() {
                return Ok(());
            }
            if let Some(abort_reason) = interrupted() {
                return Err(abort_reason.into());
            }
            let opening = || {
                missing.iter().filter_map(|&peer| match &self.slots[peer] {
                    Slot::Opening(connector) => Some(connector),
                    _ => None,
                })
            };
            if deadline.has_passed() {
                opening().for_each(|connector| crate::event::warn!("no link to {}", connector.progress()));
                return Err(self.shared.timed_out(&missing, &arrived));
            }
            self.shared.wait(opening().filter_map(|connector| connector.interest()).collect(), deadline);
        }
    }
}

/// The positions at distance 1, 2, 4 … from `position` around a ring of `len`, each once, in order.
fn partners(position: usize, len: usize) -> Vec<usize> {
    let mut partners = Vec::new();
    let mut distance = 1;
    while distance < len {
        partners.extend([(position + distance) % len, (position + len - distance) % len]);
        distance *= 2;
    }
    partners.sort_unstable();
    partners.dedup();
    partners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partnership_is_mutual_and_reaches_everyone() {
        assert!(partners(0, 0).is_empty());
        assert!(partners(0, 1).is_empty());
        assert_eq!(partners(1, 2), [0]);
        assert_eq!(partners(4, 5), [0, 1, 2, 3]);
        assert_eq!(partners(0, 13), [1, 2, 4, 5, 8, 9, 11, 12]);
        for len in 1..40 {
            for position in 0..len {
                let mine = partners(position, len);
                assert!(!mine.contains(&position), "{position} of {len}");
                assert!(mine.iter().all(|&other| partners(other, len).contains(&position)), "{position} of {len}");
                assert!(len == 1 || mine.contains(&((position + 1) % len)), "{position} of {len}");
            }
        }
    }
}
