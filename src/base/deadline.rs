//! When a wait began and when it must end.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A limit on a wait, from when it began.
#[derive(Debug, Clone)]
pub(crate) struct Deadline {
    limit: Duration,
    /// Set when somebody asks.
    began: OnceLock<Instant>,
}

impl Deadline {
    /// A deadline `limit` from now.
    pub(crate) fn after(limit: Duration) -> Self {
        Self { limit, began: OnceLock::from(now()) }
    }

    /// A deadline `limit` from when it is first asked anything: for waits that mostly end before it is worth reading a clock.
    #[inline]
    pub(crate) fn lazily(limit: Duration) -> Self {
        Self { limit, began: OnceLock::new() }
    }

    /// The same wait, which may take longer by so much.
    pub(crate) fn later(&self, by: Duration) -> Self {
        Self { limit: self.limit.saturating_add(by), began: self.began.clone() }
    }

    /// How long the wait may take in all.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// How long it has been since the wait began.
    pub(crate) fn elapsed(&self) -> Duration {
        let now = now();
        now.saturating_duration_since(*self.began.get_or_init(|| now))
    }

    /// What is left; zero once it has passed.
    pub(crate) fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }

    /// Whether it has passed.
    pub(crate) fn has_passed(&self) -> bool {
        self.elapsed() >= self.limit
    }
}

/// The time: the system's, or what a test that simulates one has set for its thread.
#[inline]
fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = simulated::NOW.get() {
        return now;
    }
    Instant::now()
}

/// The bits of a packed time that are nanoseconds. A number of nanoseconds alone would be divided at every call, for 3 ns.
const NANOSECOND_BITS: u32 = 30;

/// Gives a time as seconds and nanoseconds in one word; more than 500 years are that.
#[inline]
pub(crate) fn packed(time: Duration) -> u64 {
    time.as_secs().min(u64::MAX >> NANOSECOND_BITS) << NANOSECOND_BITS | u64::from(time.subsec_nanos())
}

/// The reverse of [`packed`].
#[inline]
pub(crate) fn unpacked(word: u64) -> Duration {
    Duration::new(word >> NANOSECOND_BITS, (word & ((1 << NANOSECOND_BITS) - 1)) as u32)
}

#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::Instant;

    thread_local! {
        /// The time by which deadlines of this thread go; the system's where it is not set.
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
