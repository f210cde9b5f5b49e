//! When a wait began and when it must end.

use std::time::{Duration, Instant};

/// A point in time after which a wait gives up, and when it began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    began: Instant,
    /// `None` waits for ever: a limit so large that it cannot be added to a clock.
    ends: Option<Instant>,
}

impl Deadline {
    /// A deadline `limit` from now.
    pub(crate) fn after(limit: Duration) -> Self {
        let began = Instant::now();
        Self { began, ends: began.checked_add(limit) }
    }

    /// How long it has been since the wait began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// What is left; zero once it has passed.
    pub(crate) fn remaining(&self) -> Duration {
        self.ends.map_or(Duration::MAX, |ends| ends.saturating_duration_since(Instant::now()))
    }

    /// Whether it has passed.
    pub(crate) fn has_passed(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }
}
