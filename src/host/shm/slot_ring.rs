//! Computes where the payloads of steps lie in their writers' slot rings: pure arithmetic, the same on every rank.
//!
//! A rank has one ring of bytes for all payloads that do not fit into a mailbox. The payloads follow each other in the
//! ring, and start over once a lap is so long that its first bytes have left the caches of the ranks that read them. If
//! a reader's core still holds a line, the line must be taken from it before it can be written. That costs up to ten
//! times as much as the store.
//!
//! A step's payload shares no byte with that of the step before, which others may still be reading while the new
//! payload is written. The payloads of earlier steps have been read (see [`flags`](super::flags)).

use super::flags::parity;
use super::layout::PAGE;

/// The positions of one group's payloads. Every rank has the same positions in its own ring.
#[derive(Debug)]
pub(super) struct SlotRing {
    capacity: usize,
    /// A lap ends as soon as it is this long, in bytes.
    lap: usize,
    /// Where the payloads of the last two steps that had one begin, by their parity.
    starts: [usize; 2],
    /// Start and end of the last payload.
    last: (usize, usize),
}

impl SlotRing {
    /// Creates it for rings of `capacity` bytes, at least three times the longest payload.
    pub(super) fn new(capacity: usize, lap: usize) -> Self {
        Self { capacity, lap, starts: [0; 2], last: (0, 0) }
    }

    /// Chooses the position of the payload of `step`, of up to a third of the capacity.
    #[inline]
    pub(super) fn advance(&mut self, step: u64, bytes: usize) {
        let bytes = bytes.next_multiple_of(PAGE);
        let (start, end) = self.last;
        let is_over = end >= self.lap && bytes <= start || end + bytes > self.capacity;
        let begin = if is_over { 0 } else { end };
        debug_assert!(bytes <= self.capacity / 3 && (begin >= end || begin + bytes <= start), "{bytes} B in {self:?}");
        self.starts[parity(step)] = begin;
        self.last = (begin, begin + bytes);
    }

    /// Returns the bytes after which a ring starts over.
    pub(super) fn lap(&self) -> usize {
        self.lap
    }

    /// Returns where the payload of `step` begins: the last step that had one, or the step before it.
    #[inline]
    pub(super) fn start(&self, step: u64) -> usize {
        self.starts[parity(step)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    #[test]
    fn a_payload_shares_no_byte_with_the_one_before() {
        let seed = 0x5eed_0036;
        let mut random = Random(seed);
        for lap in [0, 8 * PAGE, 20 * PAGE, usize::MAX] {
            let mut ring = SlotRing::new(24 * PAGE, lap);
            let mut before = 0..0;
            for step in 1..2000 {
                let bytes = 1 + random.below(8 * PAGE);
                ring.advance(step, bytes);
                let payload = ring.start(step)..ring.start(step) + bytes;
                assert!(payload.end <= before.start || before.end <= payload.start, "seed {seed:#x}: {payload:?} after {before:?}");
                assert!(payload.end <= ring.capacity && payload.start.is_multiple_of(PAGE), "seed {seed:#x}: {payload:?}");
                before = payload;
            }
        }
    }

    #[test]
    fn payloads_go_round_a_lap_or_take_turns() {
        let starts = |lap| {
            let mut ring = SlotRing::new(12 * PAGE, lap);
            [1, 2, 3, 4, 5].map(|step| {
                ring.advance(step, 2 * PAGE);
                ring.start(step) / PAGE
            })
        };
        assert_eq!(starts(0), [0, 2, 0, 2, 0]);
        assert_eq!(starts(8 * PAGE), [0, 2, 4, 6, 0]);
        assert_eq!(starts(usize::MAX), [0, 2, 4, 6, 8]);
    }
}
