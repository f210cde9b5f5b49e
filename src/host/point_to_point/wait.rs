//! Waiting for requests: briefly on the core, then by giving it up, then asleep on the links' descriptors.

use std::hint;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_yield;

use crate::host::link::ByteLink;

use super::{Connector, Messages};

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

/// How long the first sleep on descriptors may take; each further one twice as long, up to 16 times.
const SLEEP: Duration = Duration::from_millis(1);

/// The same where some link cannot be slept on, up to 4 times.
const NAP: Duration = Duration::from_micros(50);

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

impl<C: Connector> Messages<C> {
    /// Rounds until something moves or, after a few fruitless ones, one sleep of at most `budget` is over; whether anything
    /// moved. For a thread that shares the engine and must let go of it in between.
    pub(crate) fn wait_step(&mut self, budget: Duration) -> bool {
        loop {
            if self.round() {
                return true;
            }
            let rest = self.patience.next();
            if matches!(rest, Rest::Sleep(_)) {
                self.tell_all_credit();
            }
            self.rest(rest, budget);
            if matches!(rest, Rest::Sleep(_)) {
                return self.progress();
            }
        }
    }

    /// Passes the time after a fruitless round, at most `limit` of it.
    pub(super) fn rest(&self, rest: Rest, limit: Duration) {
        match rest {
            Rest::Spin => hint::spin_loop(),
            Rest::Yield => sched_yield(),
            Rest::Sleep(times) => self.sleep(limit.min(SLEEP * (1 << times.min(4))), NAP * (1 << times.min(2))),
        }
    }

    /// Sleeps until a link or the connector has something, at most `limit`; at most `nap` where not all can be slept on.
    fn sleep<'a>(&'a self, limit: Duration, nap: Duration) {
        let mut descriptors = Vec::with_capacity(self.channels.len() + 1);
        let mut all = true;
        let mut add = |descriptor: Option<BorrowedFd<'a>>, events| match descriptor {
            Some(descriptor) => descriptors.push(PollFd::from_borrowed_fd(descriptor, events)),
            None => all = false,
        };
        add(self.connector.descriptor(), PollFlags::IN);
        for channel in self.channels.iter().flatten().filter(|channel| channel.end().is_none()) {
            let write = if channel.outgoing.is_stuck() { PollFlags::OUT } else { PollFlags::empty() };
            add(channel.link.descriptor(), PollFlags::IN | write);
        }
        let limit = if all { limit } else { limit.min(nap) };
        let mut sleep = |limit| if cfg!(miri) { Err(rustix::io::Errno::NOSYS) } else { poll(&mut descriptors, Some(&limit)) };
        let result = Timespec::try_from(limit).map(&mut sleep);
        if !matches!(result, Ok(Ok(_) | Err(rustix::io::Errno::INTR))) {
            // No descriptor to sleep on, for whatever reason: the clock remains.
            thread::sleep(limit.min(nap));
        }
    }
}
