//! What to do while nothing moves: look again, give up the core, or sleep.

use std::thread;
use std::time::{Duration, Instant};

/// For how long the core is kept, where there seem to be cores enough.
const SPIN_FOR: Duration = Duration::from_micros(8);

/// For how long it is then given up again and again before sleeping.
const YIELD_FOR: Duration = Duration::from_micros(200);

/// Fruitless rounds between two looks at the clock.
const ROUNDS: u32 = 32;

/// Fruitless rounds with the core given up before sleeping, where there are more ranks than cores.
const YIELDS: u32 = 64;

/// How often a receive looks for its message before it is posted.
const LOOKS: u32 = 256;

/// Whether so many ranks of one host have fewer cores than they are: ranks elsewhere want none of them.
pub(super) fn is_crowded(local_ranks: usize) -> bool {
    thread::available_parallelism().map_or(1, usize::from) < local_ranks
}

/// What to do after a round in which nothing moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// Try again at once.
    Spin,
    /// Give up the core for others.
    Yield,
    /// Sleep; the how-manieth time.
    Sleep(u32),
}

/// Counts fruitless rounds.
#[derive(Debug)]
pub(super) struct Patience {
    is_crowded: bool,
    rounds: u32,
    sleeps: u32,
    /// When the clock was first looked at, and how long it had been when it was last.
    began: Option<Instant>,
    waited: Duration,
}

impl Patience {
    /// Where there are more ranks than cores, cores are given up at once.
    pub(super) fn new(is_crowded: bool) -> Self {
        Self { is_crowded, rounds: 0, sleeps: 0, began: None, waited: Duration::ZERO }
    }

    /// How often to look again at one stream before anything else is done.
    #[inline]
    pub(super) fn looks(&self) -> u32 {
        if self.is_crowded { 0 } else { LOOKS }
    }

    /// What to do after one more fruitless round.
    pub(super) fn next(&mut self) -> Rest {
        self.rounds = self.rounds.saturating_add(1);
        if self.is_crowded {
            return if self.rounds <= YIELDS { Rest::Yield } else { self.sleep() };
        }
        if self.rounds.is_multiple_of(ROUNDS) {
            self.waited = self.began.get_or_insert_with(Instant::now).elapsed();
        }
        match self.waited {
            waited if waited < SPIN_FOR => Rest::Spin,
            waited if waited < YIELD_FOR => Rest::Yield,
            _ => self.sleep(),
        }
    }

    fn sleep(&mut self) -> Rest {
        self.sleeps = self.sleeps.saturating_add(1);
        Rest::Sleep(self.sleeps - 1)
    }

    /// Something moved.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.is_crowded);
    }
}
