//! A piece of work that takes the same time on all processors of a kind.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes that a unit copies: more than most first-level caches have.
const BYTES: usize = 128 << 10;
/// Arithmetic steps in a unit, each of which needs the result of the one before.
const STEPS: u64 = 4_000;
/// The most units, in case the clock stands still.
const MOST_UNITS: u64 = 1 << 30;

/// Memory to work on.
pub(crate) struct Work {
    from: Vec<u8>,
    to: Vec<u8>,
    /// The offset at which the next unit copies.
    at: usize,
    number: u64,
}

impl Work {
    /// Works on memory that one unit copies.
    pub(crate) fn new() -> Self {
        Self::on(BYTES)
    }

    /// Works its way through two areas of `bytes`, rounded down to whole units.
    pub(crate) fn on(bytes: usize) -> Self {
        let bytes = (bytes / BYTES).max(1) * BYTES;
        Self { from: vec![1; bytes], to: vec![0; bytes], at: 0, number: 1 }
    }

    /// Does `units` units of work.
    pub(crate) fn perform(&mut self, units: u64) {
        for _ in 0..units {
            for _ in 0..STEPS {
                self.number = black_box(self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ 0x5bd1_e995);
            }
            let part = self.at..self.at + BYTES;
            self.to[part.clone()].copy_from_slice(black_box(&self.from[part]));
            black_box(&mut self.to);
            self.at = (self.at + BYTES) % self.to.len();
        }
    }

    /// Returns how many units take `time` here, by the fastest of several tries.
    pub(super) fn units_in(&mut self, time: Duration) -> u64 {
        let mut least = Duration::MAX;
        for _ in 0..20 {
            let began = Instant::now();
            self.perform(4);
            least = least.min(began.elapsed());
        }
        let units = time.as_secs_f64() / (least.as_secs_f64() / 4.0).max(1e-9);
        (units as u64).clamp(1, MOST_UNITS)
    }
}
