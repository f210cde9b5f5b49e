//! What a rank does while nothing moves: it looks again at once, then gives up the core between looks, then sleeps.

use std::time::{Duration, Instant};

/// How long the first sleep may take where something cannot be slept on; each further one twice as long, up to 4 times.
const NAP: Duration = Duration::from_micros(50);

/// Whether so many ranks of one host have fewer cores than they are: ranks elsewhere want none of them.
pub(crate) fn is_crowded(local_ranks: usize) -> bool {
    std::thread::available_parallelism().map_or(1, usize::from) < local_ranks
}

/// How long a sleep may take where something cannot be slept on, by how many sleeps there were before it.
pub(crate) fn nap(sleeps: u32) -> Duration {
    NAP * (1 << sleeps.min(2))
}

/// What to do after a round in which nothing moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Look again at once.
    Spin,
    /// Give up the core for others.
    Yield,
    /// Sleep, after so many sleeps.
    Sleep(u32),
}

/// When a rank goes on to the next pause.
#[derive(Debug)]
pub(crate) struct Limits {
    /// For how long it keeps the core, where there is one for every rank.
    pub(crate) spin_for: Duration,
    /// For how long in all it stays awake.
    pub(crate) awake_for: Duration,
    /// Fruitless rounds between two looks at the clock.
    pub(crate) rounds_per_look: u32,
    /// With more ranks than cores: after how many rounds it sleeps, without a look at the clock. `None`: by the clock there too.
    pub(crate) crowded_rounds: Option<u32>,
}

/// One rank's patience: counts fruitless rounds.
#[derive(Debug)]
pub(crate) struct Patience {
    limits: &'static Limits,
    is_crowded: bool,
    rounds: u32,
    sleeps: u32,
    /// When the clock was first looked at, and how long it had been when it was last.
    began: Option<Instant>,
    waited: Duration,
}

impl Patience {
    /// Where there are more ranks than cores, cores are given up at once.
    pub(crate) fn new(limits: &'static Limits, is_crowded: bool) -> Self {
        Self { limits, is_crowded, rounds: 0, sleeps: 0, began: None, waited: Duration::ZERO }
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
            self.waited = now.duration_since(*self.began.get_or_insert(now));
        }
        match self.waited {
            waited if waited < self.limits.spin_for && !self.is_crowded => Pause::Spin,
            waited if waited < self.limits.awake_for => Pause::Yield,
            _ => self.sleep(),
        }
    }

    fn sleep(&mut self) -> Pause {
        self.sleeps = self.sleeps.saturating_add(1);
        Pause::Sleep(self.sleeps - 1)
    }

    /// Something moved.
    #[inline]
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.limits, self.is_crowded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_TIME: Duration = Duration::ZERO;

    #[test]
    fn limits_say_what_comes_next() {
        static SPINS: Limits = Limits { spin_for: Duration::MAX, awake_for: Duration::MAX, rounds_per_look: 1, crowded_rounds: None };
        static YIELDS: Limits = Limits { spin_for: NO_TIME, ..SPINS };
        static SLEEPS: Limits = Limits { awake_for: NO_TIME, ..YIELDS };
        for (limits, is_crowded, pause) in [
            (&SPINS, false, Pause::Spin),
            (&SPINS, true, Pause::Yield),
            (&YIELDS, false, Pause::Yield),
            (&SLEEPS, false, Pause::Sleep(0)),
            (&SLEEPS, true, Pause::Sleep(0)),
        ] {
            assert_eq!(Patience::new(limits, is_crowded).next(), pause, "{limits:?}, crowded: {is_crowded}");
        }
    }

    #[test]
    fn rounds_count_where_cores_are_few() {
        static LIMITS: Limits = Limits { spin_for: Duration::MAX, awake_for: NO_TIME, rounds_per_look: 1, crowded_rounds: Some(2) };
        let mut patience = Patience::new(&LIMITS, true);
        let pauses = [Pause::Yield, Pause::Yield, Pause::Sleep(0), Pause::Sleep(1)];
        assert_eq!(std::array::from_fn(|_| patience.next()), pauses);
        patience.reset();
        assert_eq!(std::array::from_fn(|_| patience.next()), pauses);
    }

    #[test]
    fn naps_grow_to_a_limit() {
        assert_eq!([0, 1, 2, 3, u32::MAX].map(nap), [1, 2, 4, 4, 4].map(|times| NAP * times));
    }
}
