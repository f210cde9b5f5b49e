//! Growing pauses between attempts. Their lengths are random, so that many ranks do not ask at the same moment.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use crate::base::deadline::Deadline;

/// The pauses between attempts.
#[derive(Debug)]
pub(in crate::rendezvous) struct Backoff {
    next: Duration,
    longest: Duration,
    chance: RandomState,
    attempts: u64,
}

impl Backoff {
    /// Creates pauses that grow by half from `first` to `longest`.
    pub(in crate::rendezvous) fn new(first: Duration, longest: Duration) -> Self {
        Self { next: first, longest, chance: RandomState::new(), attempts: 0 }
    }

    /// Returns the next pause: between half and one and a half times its nominal length.
    fn step(&mut self) -> Duration {
        self.attempts += 1;
        // The hasher's keys come from the system's random numbers; a better source is not needed to spread pauses.
        let share = (self.chance.hash_one(self.attempts) % 1024) as f64 / 1024.0;
        let pause = self.next.mul_f64(0.5 + share);
        self.next = self.next.mul_f64(1.5).min(self.longest);
        pause
    }

    /// Pauses, but not past the deadline.
    pub(in crate::rendezvous) fn pause(&mut self, deadline: &Deadline) {
        std::thread::sleep(self.step().min(deadline.remaining()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_within_their_bounds() {
        let (first, longest) = (Duration::from_millis(8), Duration::from_millis(100));
        let mut backoff = Backoff::new(first, longest);
        let mut nominal = first;
        for _ in 0..50 {
            let pause = backoff.step();
            assert!(pause >= nominal.mul_f64(0.5) && pause < nominal.mul_f64(1.5), "{pause:?} of {nominal:?}");
            nominal = nominal.mul_f64(1.5).min(longest);
        }
        assert_eq!(backoff.attempts, 50);
    }
}
