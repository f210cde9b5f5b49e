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

#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::Instant;

    thread_local! {
        /// The time by which deadlines of this thread go; the system's where it is not set.
        pub(crate) static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }
}
