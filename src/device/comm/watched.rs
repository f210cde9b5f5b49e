//! What the prober finds out about a communicator, and the timekeeper goes by: plain values behind locks that nobody holds while he calls the
//! driver, NCCL or anybody else.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::stream_tracker::{Outstanding, Term};

/// The oldest calls that the device had not done at a look.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unfinished {
    pub(super) since: Instant,
    pub(super) limit: Duration,
    /// When that look began: they were not done then.
    pub(super) looked: Instant,
}

/// How far one communicator's calls have come.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// Held while streams are looked at, which may take as long as the driver takes.
    pub(super) looking: Mutex<()>,
    unfinished: Mutex<Option<Unfinished>>,
    /// Of the oldest calls that are not done: the number of their time, and since when nothing older has been outstanding.
    head: Mutex<Option<(u64, Instant)>>,
    /// The entry into NCCL that the timekeeper saw last, and when it saw it first.
    entry: Mutex<Option<(u64, Instant)>>,
    /// How many calls were marked when the timekeeper saw others that were not, and when it saw that first.
    unmarked: Mutex<Option<(u64, Instant)>>,
    /// When a call that the device has not done is warned of, and since when the one has been waiting that was; never, where it is not set.
    stall: Mutex<(Option<Duration>, Option<Instant>)>,
}

impl Watched {
    /// Publishes what a look found.
    ///
    /// The time of the oldest calls counts from when nothing with another time was outstanding before them: a short one that can only follow a long one
    /// does not end that.
    pub(super) fn publish(&self, oldest: Option<Outstanding>, looked: Instant) -> Option<Unfinished> {
        let mut head = lock(&self.head);
        let unfinished = oldest.map(|(Term { number, limit }, since)| {
            let begun = match *head {
                Some((known, begun)) if known == number => begun,
                // Nothing was outstanding before.
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

    /// What the last look found.
    pub(super) fn unfinished(&self) -> Option<Unfinished> {
        *lock(&self.unfinished)
    }

    /// Since when calls have been unmarked of which `behind` says what is before them.
    pub(super) fn unmarked_since(&self, behind: Option<u64>, now: Instant) -> Option<Instant> {
        first_seen(&self.unmarked, behind, now)
    }

    /// Since when one thread has been inside NCCL, at least, where this is the number of its entry.
    pub(super) fn inside_since(&self, entry: Option<u64>, now: Instant) -> Option<Instant> {
        first_seen(&self.entry, entry, now)
    }

    /// After how long a call that the device has not done is warned of.
    pub(super) fn warn_after(&self, after: Option<Duration>) {
        lock(&self.stall).0 = after;
    }

    /// Whether what has been waiting since then, and may take so long, is to be warned of: once.
    pub(super) fn is_stalled(&self, since: Instant, limit: Duration, waited: Duration) -> bool {
        let mut stall = lock(&self.stall);
        let is_late = stall.0.is_some_and(|after| waited >= after.min(limit / 2));
        is_late && stall.1.replace(since) != Some(since)
    }

    /// Whether a wait is one that is warned of whatever it may take.
    pub(super) fn is_long(&self, waited: Duration) -> bool {
        lock(&self.stall).0.is_some_and(|after| waited >= after)
    }
}

/// When a number was seen first, without another one in between.
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
    fn a_stall_is_warned_of_once_and_only_where_that_was_asked_for() {
        let (watched, since, limit) = (Watched::default(), Instant::now(), Duration::from_secs(10));
        assert!(!watched.is_stalled(since, limit, limit));
        watched.warn_after(Some(Duration::from_secs(60)));
        assert!(!watched.is_stalled(since, limit, limit / 4));
        assert!(watched.is_stalled(since, limit, limit / 2), "half of what it may take is late");
        assert!(!watched.is_stalled(since, limit, limit));
        assert!(watched.is_stalled(since + limit, limit, limit));
    }
}
