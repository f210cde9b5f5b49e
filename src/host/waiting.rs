//! The waiting policy. A rank that sees no progress looks again at once, then yields its core between looks, then
//! sleeps.
//!
//! [`Limits`] determines when the rank goes on from each of these three to the next. There is one `Limits` for each
//! kind of wait (`tuning::waiting`). A waiter checks the communicator's health in every round, and the deadline in
//! every round in which nothing moved.
//!
//! # Crowds
//!
//! For a rank with a core to itself, it is best to stay awake for as long as most waits take. If other threads want
//! that core, it is best to sleep soon: the scheduler charges the rank for the time that it spins, and later makes it
//! wait for whole time slices. A rank that yields gives such slices to the others, but a rank that sleeps is woken at
//! once.
//!
//! So each waiter learns whether other threads want its core ([`Crowd`]). If a yield returns late, or a look comes much
//! later than the one before, another thread had the core. The waiter remembers that for a hundred times as long as the
//! delay was. In a crowd a wait never yields. It stays awake for about as long as a wake-up takes, and then sleeps. If
//! one wait after another ends asleep, later waits stay awake for less and less time. Every so often, a wait tests
//! whether that is still right.
//!
//! If there are more ranks than cores, a yield goes to another rank. Then only a yield that takes as long as a time
//! slice shows that other threads want the core.

use std::time::{Duration, Instant};

use crate::base::tuning::waiting::{
    BRIEFLY, FIRST_NAP, LATE, LATE_AMONG_RANKS, LATE_YIELD, LONGEST_NAP, Limits, MEMORY, MOST_HASTE, TRY_EVERY,
};
use crate::config::Waiting;

/// What to do after a round in which nothing moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pause {
    /// Look again at once.
    Spin,
    /// Yield the core to other threads.
    Yield,
    /// Sleep.
    Sleep(Sleep),
}

/// How long a sleep may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sleep {
    /// The limit if something wakes the sleeper.
    pub(crate) limit: Duration,
    /// The duration if there is nothing to sleep on.
    pub(crate) nap: Duration,
}

/// What a waiter has learnt about other threads that want its core.
#[derive(Debug, Default)]
struct Crowd {
    /// The time until which it expects them.
    until: Option<Instant>,
    /// How many times the time that a wait stays awake is halved: the number of waits that ended asleep, less those
    /// that ended awake. From [`MOST_HASTE`] on, that time is zero.
    haste: u32,
    /// Number of waits that lasted longer than the first looks.
    waits: u32,
}

impl Crowd {
    /// Whether other threads want the core, as far as is remembered.
    fn is_near(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Records that other threads have just had the core for `late`. Learning that again would cost as much, so it is
    /// remembered for many times as long.
    fn met(&mut self, now: Instant, late: Duration) {
        self.until = self.until.max(Some(now + late * MEMORY));
    }

    /// Returns how much of `most` a wait stays awake.
    fn hurried(&self, most: Duration) -> Duration {
        match self.haste {
            _ if self.is_trying() => most,
            MOST_HASTE.. => Duration::ZERO,
            haste => most / (1 << haste),
        }
    }

    /// Whether this wait tests if staying awake pays again.
    fn is_trying(&self) -> bool {
        self.waits.is_multiple_of(TRY_EVERY)
    }

    /// Records whether a wait ended awake or asleep.
    fn ended(&mut self, awake: bool) {
        self.haste = match awake {
            true if self.is_trying() => 0,
            true => self.haste.saturating_sub(1),
            false => (self.haste + 1).min(MOST_HASTE),
        };
    }
}

/// One rank's waiting state: counts rounds without progress, and remembers what earlier waits have shown.
#[derive(Debug)]
pub(crate) struct Patience {
    limits: &'static Limits,
    waiting: Waiting,
    is_crowded: bool,
    rounds: u32,
    sleeps: u32,
    /// The first and the last reading of the clock in this wait.
    clock: Option<(Instant, Instant)>,
    crowd: Crowd,
}

impl Patience {
    /// Creates the state. If there are more ranks than cores (`is_crowded`), the core is yielded at once.
    pub(crate) fn new(limits: &'static Limits, is_crowded: bool) -> Self {
        Self { limits, waiting: Waiting::Auto, is_crowded, rounds: 0, sleeps: 0, clock: None, crowd: Crowd::default() }
    }

    /// Sets how this rank waits, as the program chose.
    pub(crate) fn set_waiting(&mut self, waiting: Waiting) {
        self.waiting = waiting;
    }

    /// Whether there are more ranks than cores.
    #[inline]
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded
    }

    /// Returns how often to look before the first round, out of `most` looks.
    #[inline]
    pub(crate) fn looks(&self, most: u32) -> u32 {
        match self.waiting {
            Waiting::Auto if self.crowd.haste == 0 || self.crowd.is_trying() => most,
            Waiting::Auto => most >> self.crowd.haste,
            Waiting::Spin => most,
            Waiting::Sleep => 0,
        }
    }

    /// Whether a wait that begins now should sleep at once.
    pub(crate) fn is_hasty(&self) -> bool {
        self.waiting == Waiting::Auto && self.rounds == 0 && self.crowd.haste >= MOST_HASTE && !self.crowd.is_trying()
    }

    /// Records that a wait ended within the first looks.
    #[inline]
    pub(crate) fn was_brief(&mut self) {
        if self.crowd.haste > 0 {
            self.crowd.ended(true);
        }
    }

    /// Returns what to do after one more round without progress. [`Patience::yield_now`] carries out a yield.
    pub(crate) fn next(&mut self) -> Pause {
        self.rounds = self.rounds.saturating_add(1);
        match self.waiting {
            Waiting::Sleep => return self.sleep(),
            Waiting::Auto if self.rounds.is_multiple_of(self.limits.rounds_per_look) || self.is_crowded => self.look(Instant::now()),
            Waiting::Spin if self.rounds.is_multiple_of(self.limits.rounds_per_look) => self.look(Instant::now()),
            Waiting::Auto | Waiting::Spin => {}
        }
        self.decide()
    }

    /// Records a reading of the clock.
    fn look(&mut self, now: Instant) {
        let (began, last) = self.clock.unwrap_or((now, now));
        let late = now.duration_since(last);
        if !self.is_crowded && self.sleeps == 0 && late >= LATE {
            self.crowd.met(now, late);
        }
        self.clock = Some((began, now));
    }

    /// Returns what to do, given the last reading of the clock.
    fn decide(&mut self) -> Pause {
        let Some((began, now)) = self.clock else { return if self.is_crowded { Pause::Yield } else { Pause::Spin } };
        let waited = now.duration_since(began);
        let is_near = self.crowd.is_near(now);
        if self.waiting == Waiting::Spin {
            return if self.is_crowded { Pause::Yield } else { Pause::Spin };
        }
        if let Some(rounds) = self.limits.crowded_rounds.filter(|_| self.is_crowded) {
            return if self.rounds <= rounds && !is_near { Pause::Yield } else { self.sleep() };
        }
        match waited {
            waited if waited < self.crowd.hurried(self.limits.spin_for) && !self.is_crowded => Pause::Spin,
            waited if waited < self.limits.awake_for && !is_near => Pause::Yield,
            _ => self.sleep(),
        }
    }

    /// Yields the core, and learns whether other threads had it meanwhile.
    pub(crate) fn yield_now(&mut self) {
        let before = Instant::now();
        std::thread::yield_now();
        let after = Instant::now();
        self.yielded(before, after);
    }

    /// Records how long a yield took.
    fn yielded(&mut self, before: Instant, after: Instant) {
        let late = after.duration_since(before);
        if self.waiting == Waiting::Auto && late >= if self.is_crowded { LATE_AMONG_RANKS } else { LATE_YIELD } {
            self.crowd.met(after, late);
        }
        self.clock = self.clock.map(|(began, _)| (began, after));
    }

    /// Returns the number of sleeps in this wait, including the one that [`Patience::next`] has just returned.
    pub(crate) fn sleeps(&self) -> u32 {
        self.sleeps
    }

    /// Returns the time at which [`Patience::next`] last read the clock, or the current time.
    pub(crate) fn now(&self) -> Instant {
        self.clock.map_or_else(Instant::now, |(_, now)| now)
    }

    fn sleep(&mut self) -> Pause {
        if self.sleeps == 0 && self.waiting == Waiting::Auto {
            self.clock = Some((self.clock.map_or_else(Instant::now, |(began, _)| began), Instant::now()));
        }
        let doubled = |first: Duration, longest: Duration| (first * (1 << self.sleeps.min(10))).min(longest);
        let sleep = Sleep { limit: doubled(self.limits.first_sleep, self.limits.longest_sleep), nap: doubled(FIRST_NAP, LONGEST_NAP) };
        self.sleeps = self.sleeps.saturating_add(1);
        Pause::Sleep(sleep)
    }

    /// Ends the wait, because something moved.
    #[inline]
    pub(crate) fn reset(&mut self) {
        if self.rounds == 0 {
            return;
        }
        if self.crowd.until.is_some() {
            self.learn_at(Instant::now());
        } else {
            self.begin();
        }
    }

    /// Starts over, and records that this wait ended at `now`.
    fn learn_at(&mut self, now: Instant) {
        let since = self.clock.map_or(Duration::ZERO, |(_, last)| now.duration_since(last));
        match self.sleeps {
            // After a long gap it was not awake all the time: another thread had the core.
            0 => self.crowd.ended(!self.crowd.is_near(now) || since < BRIEFLY),
            _ if self.crowd.is_near(now) => self.crowd.ended(false),
            _ => {}
        }
        self.begin();
    }

    /// Starts over.
    fn begin(&mut self) {
        self.crowd.waits = self.crowd.waits.wrapping_add(1);
        (self.rounds, self.sleeps, self.clock) = (0, 0, None);
    }
}

/// A timer for something expensive: due one interval after it was last due, or after the first query.
#[derive(Debug, Default)]
pub(crate) struct Interval(Option<Instant>);

impl Interval {
    /// Whether it is due now. If so, it is next due after another interval.
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

    /// A rank that waits on a core of its own, with a simulated clock, and other threads that may take the core.
    struct Waiter {
        patience: Patience,
        now: Instant,
    }

    impl Waiter {
        fn new(limits: &'static Limits, waiting: Waiting) -> Self {
            let mut patience = Patience::new(limits, false);
            patience.set_waiting(waiting);
            Self { patience, now: Instant::now() }
        }

        /// Runs the next round, `later` after the last one.
        fn round(&mut self, later: Duration) -> Pause {
            self.now += later;
            self.patience.rounds += 1;
            self.patience.look(self.now);
            self.patience.decide()
        }

        /// Simulates a yield that takes `time`.
        fn give_up(&mut self, time: Duration) {
            let before = self.now;
            self.now += time;
            self.patience.yielded(before, self.now);
        }

        /// Returns how long a long wait stays awake, looking each microsecond.
        fn awake(&mut self) -> u32 {
            let awake = (0..1000).take_while(|_| !matches!(self.round(Duration::from_micros(1)), Pause::Sleep(_))).count();
            self.patience.learn_at(self.now);
            awake as u32
        }
    }

    /// Spins for 16 µs, and yields for 84.
    static USUAL: Limits = Limits { spin_for: Duration::from_micros(16), awake_for: Duration::from_micros(100), ..SPINS };

    #[test]
    fn who_comes_back_late_sleeps_and_remembers_it_for_a_while() {
        let mut waiter = Waiter::new(&USUAL, Waiting::Auto);
        waiter.round(NO_TIME);
        assert_eq!(waiter.round(Duration::from_micros(20)), Pause::Yield);
        waiter.give_up(LATE_YIELD / 2);
        assert_eq!(waiter.round(NO_TIME), Pause::Yield, "nobody else has had the core");
        waiter.give_up(LATE_YIELD);
        assert!(matches!(waiter.round(NO_TIME), Pause::Sleep(_)));
        waiter.patience.learn_at(waiter.now);
        assert!(waiter.awake() <= 16, "no wait yields in a crowd");
        waiter.now += LATE_YIELD * MEMORY;
        assert!(waiter.awake() > 90, "it is forgotten");
    }

    #[test]
    fn a_look_that_comes_late_tells_of_others_too() {
        let mut waiter = Waiter::new(&USUAL, Waiting::Auto);
        waiter.round(NO_TIME);
        assert!(matches!(waiter.round(LATE), Pause::Sleep(_)));
    }

    #[test]
    fn waits_that_come_to_sleep_stay_awake_for_less_and_less_and_one_of_many_tries_again() {
        let mut waiter = Waiter::new(&USUAL, Waiting::Auto);
        // The very first wait is a test.
        waiter.awake();
        waiter.round(NO_TIME);
        waiter.give_up(Duration::from_secs(1));
        waiter.patience.learn_at(waiter.now);
        let awake: Vec<u32> = (0..7).map(|_| waiter.awake()).collect();
        assert!(awake.is_sorted_by(|before, after| before >= after) && awake[6] == 0 && waiter.patience.looks(400) < 20, "{awake:?}");
        let tries = (0..TRY_EVERY).filter(|_| waiter.awake() > 0).count();
        assert_eq!(tries, 1);
        // A wait that ends awake shows that staying awake pays.
        while !waiter.patience.crowd.is_trying() {
            waiter.awake();
        }
        waiter.round(NO_TIME);
        waiter.patience.learn_at(waiter.now);
        assert!(waiter.awake() >= 15 && waiter.patience.looks(400) >= 200);
    }

    #[test]
    fn the_program_may_decide() {
        let mut waiter = Waiter::new(&USUAL, Waiting::Spin);
        assert!((0..1000).all(|_| waiter.round(Duration::from_millis(1)) == Pause::Spin) && waiter.patience.looks(400) == 400);
        let mut patience = Waiter::new(&USUAL, Waiting::Sleep).patience;
        assert_eq!((patience.looks(400), std::array::from_fn(|_| patience.next())), (0, SLEEPS));
        let mut crowded = Patience::new(&USUAL, true);
        crowded.set_waiting(Waiting::Spin);
        assert!((0..1000).all(|_| crowded.next() == Pause::Yield));
    }

    #[test]
    fn among_more_ranks_than_cores_only_a_time_slice_is_late() {
        static LIMITS: Limits = Limits { crowded_rounds: Some(64), ..SPINS };
        for limits in [&USUAL, &LIMITS] {
            let mut waiter = Waiter { patience: Patience::new(limits, true), now: Instant::now() };
            waiter.round(NO_TIME);
            waiter.give_up(USUAL.awake_for / 2);
            assert_eq!(waiter.round(NO_TIME), Pause::Yield);
            waiter.give_up(LATE_AMONG_RANKS);
            assert!(matches!(waiter.round(NO_TIME), Pause::Sleep(_)));
        }
    }

    #[test]
    fn an_interval_begins_when_it_is_first_asked_for() {
        let (mut interval, began, five) = (Interval::default(), Instant::now(), Duration::from_millis(5));
        let due = [0, 4, 5, 9, 12, 16, 17].map(|at| interval.is_due(began + Duration::from_millis(at), five));
        assert_eq!(due, [false, false, true, false, true, false, true]);
    }
}
