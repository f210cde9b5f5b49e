//! The time at which a wait began and must end.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A limit on a wait, counted from its beginning.
#[derive(Debug, Clone)]
pub(crate) struct Deadline {
    limit: Duration,
    /// Set at the first query.
    began: OnceLock<Instant>,
}

impl Deadline {
    /// Creates a deadline `limit` from now.
    pub(crate) fn after(limit: Duration) -> Self {
        Self { limit, began: OnceLock::from(now()) }
    }

    /// Creates a deadline `limit` from the first query. Used for waits that usually end so soon that reading a clock is
    /// not worthwhile.
    #[inline]
    pub(crate) fn lazily(limit: Duration) -> Self {
        Self { limit, began: OnceLock::new() }
    }

    /// Returns a deadline for the same wait, extended by `by`.
    pub(crate) fn later(&self, by: Duration) -> Self {
        Self { limit: self.limit.saturating_add(by), began: self.began.clone() }
    }

    /// Returns how long the wait may take in all.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Returns the time since the wait began.
    pub(crate) fn elapsed(&self) -> Duration {
        let now = now();
        now.saturating_duration_since(*self.began.get_or_init(|| now))
    }

    /// Returns the time that is left; zero once the deadline has passed.
    pub(crate) fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }

    /// Returns whether the deadline has passed.
    pub(crate) fn has_passed(&self) -> bool {
        self.elapsed() >= self.limit
    }
}

/// Returns the system's time, or the time that a test has simulated for its thread.
#[inline]
fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = simulated::NOW.get() {
        return now;
    }
    Instant::now()
}

/// The bits of a packed time that are nanoseconds. With nanoseconds alone, every call would need a division, which
/// costs 3 ns.
const NANOSECOND_BITS: u32 = 30;

/// Packs a time as seconds and nanoseconds into one word. This covers more than 500 years.
#[inline]
pub(crate) fn packed(time: Duration) -> u64 {
    time.as_secs().min(u64::MAX >> NANOSECOND_BITS) << NANOSECOND_BITS | u64::from(time.subsec_nanos())
}

/// Reverses [`packed`].
#[inline]
pub(crate) fn unpacked(word: u64) -> Duration {
    Duration::new(word >> NANOSECOND_BITS, (word & ((1 << NANOSECOND_BITS) - 1)) as u32)
}

#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::Instant;

    thread_local! {
        /// The simulated time for deadlines of this thread; the system's time if it is not set.
        pub(crate) static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_kept_to_the_nanosecond() {
        for time in [Duration::ZERO, Duration::from_nanos(1), Duration::new(1, 999_999_999), Duration::from_secs(17_179_869_183)] {
            assert_eq!(unpacked(packed(time)), time);
        }
        assert_eq!(unpacked(packed(Duration::MAX)).as_secs(), 17_179_869_183);
    }
}
