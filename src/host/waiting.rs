//! The one policy of waiting: a rank for which nothing moves looks again at once, and then sleeps.
//!
//! When it goes on to the next of these is in [`Limits`], of which there is one for each kind of wait (`tuning::waiting`). Who waits looks
//! at the health in every round, and at the deadline in every round in which nothing moved.
//!
//! # Crowds
//!
//! A rank with a core to itself does best to stay awake for as long as most waits take. Beside others who want that core it does best to sleep soon: the
//! scheduler counts what it spins away against it, and lets it wait for whole time slices later, where it wakes a sleeper at once. Giving up the
//! core by `sched_yield` is worse still, since that too hands whole slices to the others.
//!
//! So each waiter learns whether there are others ([`Crowd`]): the kernel counts how often it took the core from this thread, which is asked once a wait lasts
//! longer than most, and a look that comes much later than the one before tells the same. That is remembered for a while. In a crowd a wait that has lasted
//! about as long as a wake-up takes sleeps, and sooner where the waits before it all came to sleep.
//!
//! Where the ranks themselves are more than the cores, they give up the core for each other. There a late return alone tells of others.

#![expect(unsafe_code, reason = "the kernel's count of a thread's switches has no safe wrapper")]

use std::time::{Duration, Instant};

use crate::config::Waiting;
use crate::sync::thread_key;
use crate::tuning::waiting::{FIRST_NAP, LATE, LATE_YIELD, LONGEST_NAP, Limits, MEMORY, MOST_HASTE, SOON, SWITCHES_EVERY};

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

/// What a waiter has learnt of others who want the core that it runs on.
#[derive(Debug, Default)]
struct Crowd {
    /// Until when it counts on them.
    until: Option<Instant>,
    /// How often the kernel had taken the core from a thread when it was asked last, and from which.
    switches: Option<(usize, u64)>,
    /// By how much fewer waits ended awake of late than came to sleep in vain.
    haste: u32,
}

impl Crowd {
    /// Whether there are others, as far as is remembered.
    fn is_near(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Others were there just now.
    fn met(&mut self, now: Instant) {
        self.until = Some(now + MEMORY);
    }

    /// The kernel has taken the core so often from this thread.
    fn count(&mut self, thread: usize, switches: u64, now: Instant) {
        if self.switches.is_some_and(|(counted, before)| counted == thread && before < switches) {
            self.met(now);
        }
        self.switches = Some((thread, switches));
    }
}

/// How often the kernel has taken the core from this thread while it wanted to go on.
fn switches() -> u64 {
    if cfg!(any(miri, loom)) {
        return 0;
    }
    // SAFETY: all-zero bytes are a valid `rusage`: it is made of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` outlives the call, which writes one `rusage`.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    if result == 0 { usage.ru_nivcsw as u64 } else { 0 }
}

/// One rank's patience: counts fruitless rounds, and remembers what former waits have taught.
#[derive(Debug)]
pub(crate) struct Patience {
    limits: &'static Limits,
    waiting: Waiting,
    is_crowded: bool,
    rounds: u32,
    sleeps: u32,
    /// When the clock was read first, and last.
    clock: Option<(Instant, Instant)>,
    crowd: Crowd,
}

impl Patience {
    /// Where there are more ranks than cores, cores are given up at once.
    pub(crate) fn new(limits: &'static Limits, is_crowded: bool) -> Self {
        Self { limits, waiting: Waiting::Auto, is_crowded, rounds: 0, sleeps: 0, clock: None, crowd: Crowd::default() }
    }

    /// Has the program decide how this rank waits.
    pub(crate) fn set_waiting(&mut self, waiting: Waiting) {
        self.waiting = waiting;
    }

    /// Whether there are more ranks than cores.
    #[inline]
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded
    }

    /// How often to look, of so many looks, before the first round.
    #[inline]
    pub(crate) fn looks(&self, most: u32) -> u32 {
        match self.waiting {
            Waiting::Auto => most >> self.crowd.haste,
            Waiting::Spin => most,
            Waiting::Sleep => 0,
        }
    }

    /// A wait was over within the first looks.
    #[inline]
    pub(crate) fn was_brief(&mut self) {
        self.crowd.haste = self.crowd.haste.saturating_sub(1);
    }

    /// What to do after one more fruitless round.
    pub(crate) fn next(&mut self) -> Pause {
        self.rounds = self.rounds.saturating_add(1);
        match self.waiting {
            Waiting::Sleep => return self.sleep(),
            Waiting::Auto if self.rounds.is_multiple_of(self.limits.rounds_per_look) || self.is_crowded => self.look(Instant::now()),
            Waiting::Spin if self.rounds.is_multiple_of(self.limits.rounds_per_look) => self.look(Instant::now()),
            Waiting::Auto | Waiting::Spin => {}
        }
        self.decide(switches)
    }

    /// The clock was read.
    fn look(&mut self, now: Instant) {
        let (began, last) = self.clock.unwrap_or((now, now));
        let late = if self.is_crowded { LATE_YIELD } else { LATE };
        if self.sleeps == 0 && now.duration_since(last) >= late {
            self.crowd.met(now);
        }
        self.clock = Some((began, now));
    }

    /// What to do by what the clock said last.
    fn decide(&mut self, switches: impl FnOnce() -> u64) -> Pause {
        let awake = if self.is_crowded { Pause::Yield } else { Pause::Spin };
        let (waited, now) = match self.clock {
            _ if self.waiting == Waiting::Spin => return awake,
            Some((began, now)) => (now.duration_since(began), now),
            None => return awake,
        };
        if self.is_crowded {
            let is_over = self.limits.crowded_rounds.map_or(waited >= self.limits.awake_for, |rounds| self.rounds > rounds);
            return if is_over || self.crowd.is_near(now) { self.sleep() } else { awake };
        }
        if waited < self.limits.spin_for / (1 << self.crowd.haste) {
            return awake;
        }
        if self.rounds.is_multiple_of(SWITCHES_EVERY) || self.crowd.switches.is_none() {
            self.crowd.count(thread_key(), switches(), now);
        }
        if waited >= self.limits.awake_for / (1 << self.crowd.haste) || self.crowd.is_near(now) { self.sleep() } else { awake }
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
        if self.rounds > 0 {
            self.learn();
        }
    }

    /// Begins anew, knowing how this wait has ended. A sleep that is soon over says that the other rank may have wanted this core.
    fn learn(&mut self) {
        let Some((_, last)) = self.clock.filter(|_| self.sleeps > 0) else {
            self.crowd.haste = self.crowd.haste.saturating_sub(1);
            (self.rounds, self.sleeps, self.clock) = (0, 0, None);
            return;
        };
        let now = Instant::now();
        if self.crowd.is_near(now) || now.duration_since(last) < SOON {
            self.crowd.haste = (self.crowd.haste + 1).min(MOST_HASTE);
        }
        (self.rounds, self.sleeps, self.clock) = (0, 0, None);
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
