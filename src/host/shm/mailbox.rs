//! What one rank publishes in one step: a fingerprint, and a payload in the smallest area that holds it.
//!
//! A mailbox's first line is `flag: u64, fingerprint: 4 × u64, payload: 24 bytes`, so that a tiny call costs its readers one line.
//! Up to [`LINES_BYTES`](super::layout::LINES_BYTES) follow in the next lines, which the processor fetches ahead. Anything larger goes
//! through a slot.

#![expect(unsafe_code, reason = "reads and writes the mapped mailboxes")]

use super::chunking::Area;
use super::flags::parity;
use super::group::Group;
use super::state::Fingerprint;

/// Where the fingerprint lies in a mailbox: after the flag.
const FINGERPRINT_AT: usize = 8;

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
