//! Computes where everything lies in the region: pure arithmetic, the same on every rank.
//!
//! For `L` ranks, in this order: one control block, `L` member records, `L` pairs of mailboxes (8.4 KiB each pair), `L`
//! slot rings ([`RegionLayout::slot_ring_bytes`] each), and a ring per ordered pair and channel
//! ([`RegionLayout::ring_bytes`] each). Only pages that are touched cost memory.

use super::control::{Control, Member};

/// The alignment of every rank's parts: the two cache lines that processors fetch together.
const LINE_PAIR: usize = 128;
/// The alignment of slots.
pub(super) const PAGE: usize = 4096;

/// The largest number of ranks on one host.
pub(crate) const MAX_RANKS: usize = 1024;
/// Bytes of payload in the line of the flag and the fingerprint.
pub(super) const HEAD_BYTES: usize = 24;
/// Bytes of payload in the lines that follow.
pub(super) const LINES_BYTES: usize = 4096;
/// Bytes of a mailbox: a header line, then the payload's lines.
pub(super) const MAILBOX_BYTES: usize = (64 + LINES_BYTES).next_multiple_of(LINE_PAIR);
/// Bytes from one rank's pair of mailboxes to the next: an odd number of line pairs, so that headers spread over the
/// cache's sets.
pub(super) const MAILBOXES_STRIDE: usize = 2 * MAILBOX_BYTES + LINE_PAIR;
/// The size of the largest element that a fold can take: the smallest slot.
pub(crate) const MAX_ELEMENT_BYTES: usize = 64 << 10;
/// Number of channels per ordered pair of ranks.
pub(super) const CHANNELS: usize = 2;
/// Bytes of the two cursors at the start of a ring.
pub(super) const CURSORS_BYTES: usize = 2 * LINE_PAIR;

/// The offsets for one number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegionLayout {
    pub(super) ranks: usize,
    members: usize,
    mailboxes: usize,
    slots: usize,
    rings: usize,
    /// The size of the whole region.
    pub(super) bytes: usize,
}

impl RegionLayout {
    /// Returns the layout for 1 to [`MAX_RANKS`] ranks; `None` for any other number.
    pub(super) fn new(ranks: usize) -> Option<Self> {
        if ranks == 0 || ranks > MAX_RANKS {
            return None;
        }
        let members = size_of::<Control>().next_multiple_of(LINE_PAIR);
        let mailboxes = members + ranks * size_of::<Member>();
        let slots = (mailboxes + ranks * MAILBOXES_STRIDE).next_multiple_of(PAGE);
        let rings = slots + ranks * Self::slot_ring_bytes_for(ranks);
        let bytes = rings + ranks * ranks * CHANNELS * (CURSORS_BYTES + Self::ring_bytes_for(ranks));
        Some(Self { ranks, members, mailboxes, slots, rings, bytes: bytes.next_multiple_of(PAGE) })
    }

    /// Returns a size small enough that all slots together stay in the last-level cache, and large enough that a step
    /// costs little compared with its bytes.
    const fn slot_bytes_for(ranks: usize) -> usize {
        match ranks {
            0..=4 => 1 << 20,
            5..=8 => 512 << 10,
            9..=16 => 256 << 10,
            17..=32 => 128 << 10,
            _ => 64 << 10,
        }
    }

    /// Returns six times the largest payload. If there are few ranks, that is more than two second-level caches.
    const fn slot_ring_bytes_for(ranks: usize) -> usize {
        6 * Self::slot_bytes_for(ranks)
    }

    /// Returns 4 MiB for 2 ranks, which is more than two second-level caches, for the same reason as in
    /// [`slot_ring`](super::slot_ring). Each doubling of the ranks divides this by four, down to 4 KiB: the number of
    /// rings grows with the square of the ranks.
    const fn ring_bytes_for(ranks: usize) -> usize {
        match ranks {
            0..=2 => 4 << 20,
            3..=4 => 1 << 20,
            5..=8 => 256 << 10,
            9..=16 => 64 << 10,
            17..=32 => 16 << 10,
            _ => 4 << 10,
        }
    }

    /// Returns the maximum number of bytes that a step carries. A slot ring holds at least three times as much.
    pub(super) const fn slot_bytes(&self) -> usize {
        Self::slot_bytes_for(self.ranks)
    }

    /// Returns the capacity of one slot ring.
    pub(super) const fn slot_ring_bytes(&self) -> usize {
        Self::slot_ring_bytes_for(self.ranks)
    }

    /// Returns the capacity of one ring, a power of two.
    pub(super) const fn ring_bytes(&self) -> usize {
        Self::ring_bytes_for(self.ranks)
    }

    /// Returns where a rank's member record lies.
    pub(super) fn member(&self, rank: usize) -> usize {
        debug_assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        self.members + rank * size_of::<Member>()
    }

    /// Returns where a rank's mailbox of a parity lies.
    #[inline]
    pub(super) const fn mailbox(&self, rank: usize, parity: usize) -> usize {
        debug_assert!(rank < self.ranks && parity < 2);
        self.mailboxes + rank * MAILBOXES_STRIDE + parity * MAILBOX_BYTES
    }

    /// Returns where a rank's slot ring lies.
    #[inline]
    pub(super) const fn slot_ring(&self, rank: usize) -> usize {
        debug_assert!(rank < self.ranks);
        self.slots + rank * self.slot_ring_bytes()
    }

    /// Returns where the ring from one rank to another lies: its cursors, then its bytes.
    pub(super) fn ring(&self, from: usize, to: usize, channel: usize) -> usize {
        debug_assert!(from < self.ranks && to < self.ranks && channel < CHANNELS);
        self.rings + ((from * self.ranks + to) * CHANNELS + channel) * (CURSORS_BYTES + self.ring_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns every part as (start, end), in any order.
    fn parts(layout: &RegionLayout) -> Vec<(usize, usize)> {
        let mut parts = vec![(0, size_of::<Control>())];
        for rank in 0..layout.ranks {
            parts.push((layout.member(rank), layout.member(rank) + size_of::<Member>()));
            for parity in 0..2 {
                parts.push((layout.mailbox(rank, parity), layout.mailbox(rank, parity) + MAILBOX_BYTES));
            }
            parts.push((layout.slot_ring(rank), layout.slot_ring(rank) + layout.slot_ring_bytes()));
            for to in 0..layout.ranks {
                for channel in 0..CHANNELS {
                    let start = layout.ring(rank, to, channel);
                    parts.push((start, start + CURSORS_BYTES + layout.ring_bytes()));
                }
            }
        }
        parts
    }

    #[test]
    fn no_two_parts_share_a_byte() {
        for ranks in [1, 2, 3, 8, 9, 13, 33] {
            let layout = RegionLayout::new(ranks).unwrap();
            let mut parts = parts(&layout);
            parts.sort_unstable();
            assert!(parts.iter().all(|(start, _)| start % LINE_PAIR == 0), "{ranks} ranks");
            assert!(parts.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranks} ranks");
            assert!(parts.last().unwrap().1 <= layout.bytes, "{ranks} ranks");
            assert_eq!(layout.slot_ring(ranks - 1) % PAGE, 0);
        }
    }

    #[test]
    fn the_number_of_ranks_is_bounded() {
        assert!(RegionLayout::new(0).is_none() && RegionLayout::new(MAX_RANKS + 1).is_none());
        let largest = RegionLayout::new(MAX_RANKS).unwrap();
        assert!(largest.slot_bytes() >= MAX_ELEMENT_BYTES && largest.bytes < 16 << 30, "{}", largest.bytes);
    }
}
