//! The values that the prober learns about a communicator and on which the timekeeper relies. The values are protected
//! by locks. No thread holds these locks while it calls the driver, NCCL or other code.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::stream_tracker::{Outstanding, Term};
use crate::base::tuning::flight::WARN_EVERY;

/// The oldest calls that the device had not completed when it was queried.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unfinished {
    pub(super) since: Instant,
    pub(super) limit: Duration,
    /// The time at which that query began: the calls were not complete then.
    pub(super) looked: Instant,
}

/// The progress of one communicator's calls.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// Held while streams are queried. A query may take as long as the driver takes.
    pub(super) looking: Mutex<()>,
    unfinished: Mutex<Option<Unfinished>>,
    /// The number of the oldest unfinished calls' limit, and the time since which nothing older has been outstanding.
    head: Mutex<Option<(u64, Instant)>>,
    /// The entry into NCCL that the timekeeper saw last, and when it first saw it.
    entry: Mutex<Option<(u64, Instant)>>,
    /// The number of marked calls when the timekeeper saw unmarked ones, and the time at which it first saw that.
    unmarked: Mutex<Option<(u64, Instant)>>,
    stall: Mutex<Stall>,
}

/// The warnings about unfinished calls.
#[derive(Debug, Default)]
struct Stall {
    /// The time after which there is a warning; never, if not set.
    after: Option<Duration>,
    /// The start of the wait that the last warning was about, and how long it had lasted then.
    warned: Option<(Instant, Duration)>,
}

impl Watched {
    /// Publishes the result of a query.
    ///
    /// The time of the oldest calls counts from the moment when no earlier calls with another limit were outstanding.
    /// So a short limit does not cut off earlier calls with a long one.
    pub(super) fn publish(&self, oldest: Option<Outstanding>, looked: Instant) -> Option<Unfinished> {
        let mut head = lock(&self.head);
        let unfinished = oldest.map(|(Term { number, limit }, since)| {
            let begun = match *head {
                Some((known, begun)) if known == number => begun,
                // No call was outstanding before.
                None => since,
                Some(_) => looked,
            };
            *head = Some((number, begun));
            Unfinished { since: since.max(begun), limit, looked }
        });
        if unfinished.is_none() {
            *head = None;
        }
        *lock(&self.unfinished) = unfinished;
        unfinished
    }

    /// Returns the result of the last query.
    pub(super) fn unfinished(&self) -> Option<Unfinished> {
        *lock(&self.unfinished)
    }

    /// Returns the time since which calls have been unmarked; `behind` is the number of marked calls before them.
    pub(super) fn unmarked_since(&self, behind: Option<u64>, now: Instant) -> Option<Instant> {
        first_seen(&self.unmarked, behind, now)
    }

    /// Returns a time since which one thread has been inside NCCL without a break; `entry` is the number of its entry.
    pub(super) fn inside_since(&self, entry: Option<u64>, now: Instant) -> Option<Instant> {
        first_seen(&self.entry, entry, now)
    }

    /// Sets the time after which there is a warning about a call that the device has not completed.
    pub(super) fn warn_after(&self, after: Option<Duration>) {
        lock(&self.stall).after = after;
    }

    /// Whether to warn now about a wait that began at `since` and may take `limit`. True once a minute for each wait.
    pub(super) fn is_stalled(&self, since: Instant, limit: Duration, waited: Duration) -> bool {
        let mut stall = lock(&self.stall);
        let warned = stall.warned.filter(|(known, _)| *known == since).map(|(_, at)| at);
        let due = warned.map_or_else(|| stall.after.map(|after| after.min(limit / 2)), |at| Some(at + WARN_EVERY));
        let is_due = due.is_some_and(|due| waited >= due);
        if is_due {
            stall.warned = Some((since, waited));
        }
        is_due
    }

    /// Whether a wait is long enough for a warning, whatever its limit.
    pub(super) fn is_long(&self, waited: Duration) -> bool {
        lock(&self.stall).after.is_some_and(|after| waited >= after)
    }
}

/// Returns the time at which a number was first seen, without another number in between.
fn first_seen(seen: &Mutex<Option<(u64, Instant)>>, number: Option<u64>, now: Instant) -> Option<Instant> {
    let mut seen = lock(seen);
    let since = number.map(|number| seen.filter(|(known, _)| *known == number).map_or((number, now), |known| known));
    *seen = since;
    since.map(|(_, since)| since)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_counts_from_when_it_was_seen_first() {
        let (watched, begin) = (Watched::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(watched.unmarked_since(Some(3), at(0)), Some(at(0)));
        assert_eq!(watched.unmarked_since(Some(3), at(5)), Some(at(0)));
        assert_eq!(watched.unmarked_since(Some(4), at(6)), Some(at(6)), "others were marked in between");
        assert_eq!(watched.unmarked_since(None, at(7)), None);
        assert_eq!(watched.unmarked_since(Some(4), at(8)), Some(at(8)));
    }

    #[test]
    fn the_time_of_calls_counts_from_the_end_of_those_with_another_time() {
        let (watched, begin) = (Watched::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let (long, short) = (Term { number: 1, limit: at(100) - begin }, Term { number: 2, limit: at(10) - begin });
        let since = |oldest, looked| watched.publish(oldest, looked).map(|unfinished| unfinished.since);
        assert_eq!(since(Some((long, at(0))), at(1)), Some(at(0)));
        assert_eq!(since(Some((short, at(1))), at(50)), Some(at(50)), "the short ones were marked long ago, but it is their turn only now");
        assert_eq!(since(Some((short, at(1))), at(55)), Some(at(50)));
        assert_eq!(since(None, at(60)), None);
        assert_eq!(since(Some((short, at(61))), at(62)), Some(at(61)));
    }

    #[test]
    fn a_stall_is_warned_of_once_a_minute_and_only_where_that_was_asked_for() {
        let (watched, since, limit) = (Watched::default(), Instant::now(), Duration::from_secs(10));
        assert!(!watched.is_stalled(since, limit, limit));
        watched.warn_after(Some(Duration::from_secs(60)));
        assert!(!watched.is_stalled(since, limit, limit / 4));
        assert!(watched.is_stalled(since, limit, limit / 2), "half of what it may take is late");
        assert!(!watched.is_stalled(since, limit, limit));
        assert!(watched.is_stalled(since + limit, limit, limit));
        let seconds = |seconds| Duration::from_secs(seconds);
        let times = (0..300).filter(|second| watched.is_stalled(since, seconds(1000), seconds(*second)));
        assert_eq!(times.collect::<Vec<_>>(), [60, 120, 180, 240]);
    }
}
