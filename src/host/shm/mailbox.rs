//! What one rank publishes in one step: a fingerprint, and a payload in the smallest area that holds it.
//!
//! A mailbox's first line is `flag: u64, fingerprint: 4 × u64, payload: 24 bytes`, so that a tiny call costs its readers one line.
//! Up to [`LINES_BYTES`] follow in the next lines, which the processor fetches ahead. Anything larger goes through a slot.

#![expect(unsafe_code, reason = "reads and writes the mapped mailboxes")]

use super::flags::parity;
use super::group::Group;
use super::layout::{HEAD_BYTES, LINES_BYTES};

/// A call's fingerprint in words.
pub(super) type Fingerprint = [u64; 4];

/// Where the fingerprint lies in a mailbox: after the flag.
const FINGERPRINT_AT: usize = 8;

/// The longest block that is folded out of lines. Measured with 2 ranks at 4 KiB: 0.50 µs out of lines, 0.33 out of a slot.
const FOLDED_LINES_BYTES: usize = 2 << 10;

/// Which of a rank's areas holds the payload of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Area {
    /// The rest of the header line.
    Head,
    /// The lines after it.
    Lines,
    /// The slot.
    Slot,
}

impl Area {
    /// The smallest area for so many bytes that are only moved.
    #[inline]
    pub(super) const fn for_move(bytes: usize) -> Self {
        if bytes <= HEAD_BYTES {
            Area::Head
        } else if bytes <= LINES_BYTES {
            Area::Lines
        } else {
            Area::Slot
        }
    }

    /// The smallest area for `width` blocks of so many bytes, of which each rank folds one where it lies. Heads are aligned to 8 bytes,
    /// lines to 64, slots to a page; an element's alignment divides its size.
    #[inline]
    pub(super) const fn for_fold(bytes: usize, width: usize, element_bytes: usize) -> Self {
        match Self::for_move(bytes.saturating_mul(width)) {
            Area::Head if !element_bytes.is_multiple_of(16) => Area::Head,
            Area::Head | Area::Lines if !element_bytes.is_multiple_of(128) && bytes <= FOLDED_LINES_BYTES => Area::Lines,
            _ => Area::Slot,
        }
    }

    /// Where it begins in a mailbox.
    const fn offset(self) -> usize {
        match self {
            Area::Head => 64 - HEAD_BYTES,
            Area::Lines | Area::Slot => 64,
        }
    }
}

impl Group {
    /// Where the payload of `rank` for `step` lies.
    #[inline]
    pub(super) fn area(&self, rank: usize, step: u64, area: Area) -> *mut u8 {
        let layout = self.region.layout();
        match area {
            Area::Slot => self.region.at(layout.slot(rank, parity(step))),
            _ => self.region.at(layout.mailbox(rank, parity(step)) + area.offset()),
        }
    }

    /// Where the fingerprint of `rank` for `step` lies.
    #[inline]
    fn fingerprint_of(&self, rank: usize, step: u64) -> *mut Fingerprint {
        self.region.at(self.region.layout().mailbox(rank, parity(step)) + FINGERPRINT_AT).cast()
    }

    /// Publishes this rank's area for `step`: the payload has been written.
    #[inline]
    pub(super) fn publish(&mut self, step: u64, fingerprint: Fingerprint) {
        // SAFETY: inside this rank's own mailbox, aligned to 8. What others want of it they have read: each has published the step before this
        // one, after it had read the step before that, for which the mailbox served last (see `flags`).
        unsafe { self.fingerprint_of(self.me, step).write(fingerprint) };
        self.region.flag(self.me, parity(step)).publish(step);
    }

    /// Whether `rank` has published `step`.
    #[inline]
    pub(super) fn has_reached(&self, rank: usize, step: u64) -> bool {
        self.region.flag(rank, parity(step)).has_reached(step)
    }

    /// What `rank` published with `step`.
    ///
    /// # Safety
    ///
    /// `rank` has been seen to reach `step`, and this rank has not published the next one.
    #[inline]
    pub(super) unsafe fn read_fingerprint(&self, rank: usize, step: u64) -> Fingerprint {
        // SAFETY: inside the mailbox, aligned to 8; any bytes are numbers. Its owner wrote it before the flag that the caller has seen, and does
        // not write it again before this rank has published the next step, which it has not (the caller's promise).
        unsafe { self.fingerprint_of(rank, step).read() }
    }
}

#[cfg(feature = "internals")]
impl Group {
    /// One step between two ranks that publish it one after the other, `first` or second: what a benchmark measures. Says whether the
    /// other rank's came within so many looks, and what it published.
    pub(crate) fn volley(&mut self, is_first: bool, fingerprint: [u64; 4], looks: u64) -> Option<[u64; 4]> {
        assert_eq!(self.ranks, 2, "a volley is between two");
        let (step, peer) = (self.next_step(), 1 - self.me);
        if is_first {
            self.publish(step, fingerprint);
        }
        let mut left = looks;
        while !self.has_reached(peer, step) {
            left = left.checked_sub(1)?;
            if left.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // SAFETY: the peer has been seen to reach the step, and this rank publishes the next one only after this.
        let theirs = unsafe { self.read_fingerprint(peer, step) };
        if !is_first {
            self.publish(step, fingerprint);
        }
        Some(theirs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_large_and_aligned_enough() {
        assert_eq!([0, 24, 25, 4096, 4097].map(Area::for_move), [Area::Head, Area::Head, Area::Lines, Area::Lines, Area::Slot]);
        for (bytes, element_bytes, area) in [
            (24, 8, Area::Head),
            (16, 16, Area::Lines),
            (24, 24, Area::Head),
            (192, 192, Area::Lines),
            (256, 256, Area::Slot),
            (2048, 4, Area::Lines),
            (2052, 4, Area::Slot),
        ] {
            assert_eq!(Area::for_fold(bytes, 1, element_bytes), area, "{bytes} B of {element_bytes} B");
        }
        assert_eq!([2, 3].map(|width| Area::for_fold(2048, width, 4)), [Area::Lines, Area::Slot]);
    }
}
