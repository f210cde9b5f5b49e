//! The one policy of waiting: a rank for which nothing moves looks again at once, then gives up its core between looks, then sleeps.
//!
//! When it goes on to the next of these is in [`Limits`], of which there is one for each kind of wait (`tuning::waiting`). Who waits looks
//! at the health in every round, and at the deadline in every round in which nothing moved.

use std::time::{Duration, Instant};

use crate::tuning::waiting::{FIRST_NAP, LONGEST_NAP, Limits};

/// Whether so many ranks of one host have fewer cores than they are: ranks elsewhere want none of them.
pub(crate) fn is_crowded(local_ranks: usize) -> bool {
    std::thread::available_parallelism().map_or(1, usize::from) < local_ranks
}

/// What to do after a round in which nothing moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Look again at once.
    Spin,
    /// Give up the core for others.
    Yield,
    /// Sleep.
    Sleep(Sleep),
}

/// How long a sleep may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sleep {
    /// On something that wakes the sleeper.
    pub(crate) limit: Duration,
    /// Where something cannot be slept on.
    pub(crate) nap: Duration,
}

/// One rank's patience: counts fruitless rounds.
#[derive(Debug)]
pub(crate) struct Patience {
    limits: &'static Limits,
    is_crowded: bool,
    rounds: u32,
    sleeps: u32,
    /// When the clock was read first, and last.
    clock: Option<(Instant, Instant)>,
}

impl Patience {
    /// Where there are more ranks than cores, cores are given up at once.
    pub(crate) fn new(limits: &'static Limits, is_crowded: bool) -> Self {
        Self { limits, is_crowded, rounds: 0, sleeps: 0, clock: None }
    }

    /// Whether there are more ranks than cores.
    #[inline]
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded
    }

    /// What to do after one more fruitless round.
    pub(crate) fn next(&mut self) -> Pause {
        self.rounds = self.rounds.saturating_add(1);
        if let Some(rounds) = self.limits.crowded_rounds.filter(|_| self.is_crowded) {
            return if self.rounds <= rounds { Pause::Yield } else { self.sleep() };
        }
        if self.rounds.is_multiple_of(self.limits.rounds_per_look) {
            let now = Instant::now();
            self.clock = Some((self.clock.map_or(now, |(began, _)| began), now));
        }
        match self.clock.map_or(Duration::ZERO, |(began, now)| now.duration_since(began)) {
            waited if waited < self.limits.spin_for && !self.is_crowded => Pause::Spin,
            waited if waited < self.limits.awake_for => Pause::Yield,
            _ => self.sleep(),
        }
    }

    /// The time as it was when [`Patience::next`] last looked at the clock, or now.
    pub(crate) fn now(&self) -> Instant {
        self.clock.map_or_else(Instant::now, |(_, now)| now)
    }

    fn sleep(&mut self) -> Pause {
        let doubled = |first: Duration, longest: Duration| (first * (1 << self.sleeps.min(10))).min(longest);
        let sleep = Sleep { limit: doubled(self.limits.first_sleep, self.limits.longest_sleep), nap: doubled(FIRST_NAP, LONGEST_NAP) };
        self.sleeps = self.sleeps.saturating_add(1);
        Pause::Sleep(sleep)
    }

    /// Something moved.
    #[inline]
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.limits, self.is_crowded);
    }
}

/// Says when something that is dear is due again: an interval after it was last, or after it was first asked.
#[derive(Debug, Default)]
pub(crate) struct Interval(Option<Instant>);

impl Interval {
    /// Whether it is due now; then it is not for another interval.
    pub(crate) fn is_due(&mut self, now: Instant, interval: Duration) -> bool {
        let is_due = now.duration_since(*self.0.get_or_insert(now)) >= interval;
        if is_due {
            self.0 = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_TIME: Duration = Duration::ZERO;
    const SPINS: Limits = Limits {
        first_looks: [0, 0],
        spin_for: Duration::MAX,
        awake_for: Duration::MAX,
        rounds_per_look: 1,
        crowded_rounds: None,
        first_sleep: Duration::from_millis(1),
        longest_sleep: Duration::from_millis(3),
    };
    /// The sleeps that follow each other with these limits.
    const SLEEPS: [Pause; 4] = {
        const fn sleep(limit: u64, nap: u64) -> Pause {
            Pause::Sleep(Sleep { limit: Duration::from_millis(limit), nap: Duration::from_micros(nap) })
        }
        [sleep(1, 50), sleep(2, 100), sleep(3, 200), sleep(3, 200)]
    };

    #[test]
    fn limits_say_what_comes_next() {
        static SPIN: Limits = SPINS;
        static YIELD: Limits = Limits { spin_for: NO_TIME, ..SPINS };
        static SLEEP: Limits = Limits { spin_for: NO_TIME, awake_for: NO_TIME, ..SPINS };
        for (limits, is_crowded, pause) in [
            (&SPIN, false, Pause::Spin),
            (&SPIN, true, Pause::Yield),
            (&YIELD, false, Pause::Yield),
            (&SLEEP, false, SLEEPS[0]),
            (&SLEEP, true, SLEEPS[0]),
        ] {
            assert_eq!(Patience::new(limits, is_crowded).next(), pause, "{limits:?}, crowded: {is_crowded}");
        }
    }

    #[test]
    fn rounds_count_where_cores_are_few() {
        static LIMITS: Limits = Limits { awake_for: NO_TIME, crowded_rounds: Some(2), ..SPINS };
        let mut patience = Patience::new(&LIMITS, true);
        let pauses = [Pause::Yield, Pause::Yield, SLEEPS[0], SLEEPS[1]];
        assert_eq!(std::array::from_fn(|_| patience.next()), pauses);
        patience.reset();
        assert_eq!(std::array::from_fn(|_| patience.next()), pauses);
    }

    #[test]
    fn naps_grow_to_a_limit() {
        static LIMITS: Limits = Limits { spin_for: NO_TIME, awake_for: NO_TIME, ..SPINS };
        let mut patience = Patience::new(&LIMITS, false);
        assert_eq!(std::array::from_fn(|_| patience.next()), SLEEPS);
        patience.sleeps = u32::MAX;
        assert_eq!(patience.next(), SLEEPS[3]);
    }

    #[test]
    fn an_interval_begins_when_it_is_first_asked_for() {
        let (mut interval, began, five) = (Interval::default(), Instant::now(), Duration::from_millis(5));
        let due = [0, 4, 5, 9, 12, 16, 17].map(|at| interval.is_due(began + Duration::from_millis(at), five));
        assert_eq!(due, [false, false, true, false, true, false, true]);
    }
}
