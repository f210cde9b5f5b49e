//! The stores with which a rank writes what another rank reads next: ordinary stores, or stores that bypass the cache.
//!
//! If writer and reader share a cache, ordinary stores are best, because the reader finds the bytes in the cache. If
//! writer and reader share no cache, each ordinary store first takes its line away from the reader's core, and a rank
//! writes at 2 to 6 GB/s. Stores that bypass the cache avoid this: they reach 17 to 33 GB/s, and the reader gets the
//! bytes from memory.
//!
//! Which of the two is better changes while a program runs: threads move from core to core, and so do virtual
//! processors. So a writer measures both kinds of stores on its own payloads, from time to time. Each writer decides
//! alone, because a reader gets the same bytes from both kinds of stores.

#![expect(unsafe_code, reason = "copies to memory that ranks share")]

use std::fmt;
use std::time::Instant;

use crate::base::tuning::shm::{PASSING_LEAST_BYTES, STORE_TRIALS, STORE_TRIALS_EVERY_BYTES};
use crate::host::copy::{Copy, copy, copy_streaming};

/// The choice of one writer.
#[derive(Debug)]
pub(super) struct Stores {
    passes_cache: bool,
    /// The bytes that are written before the next trial: how many are left, and how many there were right after the
    /// last trial.
    until_trial: usize,
    interval: usize,
    /// How many copies of the current trial are done.
    tried: u32,
    /// The best times of this trial in picoseconds per byte: of ordinary stores, and of those that bypass the cache.
    best: [u64; 2],
    /// The best times of the last trial.
    last: Option<[u64; 2]>,
}

impl Stores {
    /// Creates the choice of ordinary stores, which are used until the first trial.
    pub(super) fn new() -> Self {
        let interval = STORE_TRIALS_EVERY_BYTES.0;
        Self { passes_cache: false, until_trial: interval, interval, tried: 0, best: [u64::MAX; 2], last: None }
    }

    /// Returns how to copy a result that was folded in pieces.
    #[inline]
    pub(super) fn way(&self) -> Copy {
        if self.passes_cache { copy_streaming } else { copy }
    }

    /// Whether the stores bypass the cache.
    #[inline]
    pub(super) fn passes_cache(&self) -> bool {
        self.passes_cache
    }

    /// Copies what another rank reads next.
    ///
    /// # Safety
    ///
    /// As [`copy`].
    #[inline]
    pub(super) unsafe fn copy(&mut self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: this function's caller promised what each callee requires.
        unsafe {
            if bytes < PASSING_LEAST_BYTES {
                copy(from, to, bytes);
            } else if bytes <= self.until_trial {
                self.until_trial -= bytes;
                self.way()(from, to, bytes);
            } else {
                self.try_copy(from, to, bytes);
            }
        }
    }

    /// Copies with both kinds of stores in turn, and measures the time.
    ///
    /// # Safety
    ///
    /// As [`copy`].
    #[cold]
    unsafe fn try_copy(&mut self, from: *const u8, to: *mut u8, bytes: usize) {
        let passes_cache = !self.tried.is_multiple_of(2);
        let way = if passes_cache { copy_streaming } else { copy };
        let began = Instant::now();
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { way(from, to, bytes) };
        self.take(passes_cache, began.elapsed().as_nanos() as u64, bytes);
    }

    /// Records one time. The last one of a trial decides.
    fn take(&mut self, passes_cache: bool, nanoseconds: u64, bytes: usize) {
        let best = &mut self.best[usize::from(passes_cache)];
        *best = (*best).min(nanoseconds.saturating_mul(1000) / bytes as u64);
        self.tried += 1;
        if self.tried == 2 * STORE_TRIALS {
            let [ordinary, passing] = self.best;
            // The first trials meet untouched pages, so they show little.
            let interval = (2 * self.interval).min(STORE_TRIALS_EVERY_BYTES.1);
            // Bytes that bypassed the cache are read from memory, which takes longer than from a cache.
            let passes_cache = ordinary > passing.saturating_mul(3);
            *self = Self { passes_cache, until_trial: interval, interval, last: Some(self.best), ..Self::new() };
        }
    }
}

impl fmt::Display for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.passes_cache { "non-temporal stores" } else { "ordinary stores" })?;
        match self.last {
            None => f.write_str(" (not measured yet)"),
            Some([ordinary, passing]) => write!(f, " (ordinary stores take {ordinary} ps per byte, non-temporal ones {passing} ps)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the choice if ordinary stores and those that bypass the cache take these best times in nanoseconds for
    /// 16 KiB.
    fn chosen(ordinary: u64, passing: u64) -> bool {
        let mut stores = Stores::new();
        for trial in 0..2 * u64::from(STORE_TRIALS) {
            let is_passing = trial % 2 == 1;
            stores.take(is_passing, if is_passing { passing } else { ordinary } + trial * 50_000 % 150_000, 16 << 10);
        }
        stores.passes_cache()
    }

    #[test]
    fn stores_pass_the_cache_if_ordinary_ones_take_three_times_as_long() {
        assert_eq!(
            [(500, 500), (1400, 500), (1600, 500), (5600, 600)].map(|(ordinary, passing)| chosen(ordinary, passing)),
            [false, false, true, true]
        );
    }

    #[test]
    fn trials_come_at_growing_distances_up_to_the_longest() {
        let mut stores = Stores::new();
        let mut intervals = vec![stores.until_trial];
        for _ in 0..10 * 2 * STORE_TRIALS {
            stores.take(false, 100, 4096);
            intervals.push(stores.until_trial);
        }
        intervals.dedup();
        let [first, longest] = <[usize; 2]>::from(STORE_TRIALS_EVERY_BYTES);
        assert_eq!((intervals[0], intervals[1], *intervals.last().unwrap()), (first, 2 * first, longest));
    }

    #[test]
    fn every_copy_is_whole_whichever_stores_are_tried() {
        let from: Vec<u8> = (0..40_000_u32).map(|at| (at * 7 % 251) as u8).collect();
        let mut stores = Stores { until_trial: 0, ..Stores::new() };
        for bytes in [0, 1, 4095, 4096, 4097, 16 << 10, 40_000].into_iter().cycle().take(70) {
            let mut to = vec![0; bytes + 1];
            // SAFETY: both hold that many bytes, and are two vectors.
            unsafe { stores.copy(from.as_ptr(), to.as_mut_ptr(), bytes) };
            assert!(to[..bytes] == from[..bytes] && to[bytes] == 0, "{bytes} B");
        }
    }
}
