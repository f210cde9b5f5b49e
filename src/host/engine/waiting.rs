//! Waiting for links: awake for a short time, then asleep until one of them is ready.

#![expect(unsafe_code, reason = "the poll set is reused, so it outlives the borrows it is made of")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::base::tuning::engine::FIRST_REPORT;
use crate::base::tuning::waiting::LINKS;
use crate::config;
use crate::host::waiting::{Patience, Pause, Sleep};

/// How one rank waits, and the descriptors it sleeps on.
#[derive(Debug)]
pub(super) struct Waiting {
    patience: Patience,
    /// The elapsed time after which this rank next reports which ranks it waits for.
    pub(super) next_report: Duration,
    descriptors: Vec<PollFd<'static>>,
    /// For each descriptor: the rank, and whether it is watched only for a reason to abort.
    entries: Vec<(usize, bool)>,
}

impl Waiting {
    /// Creates the waiting state. `is_crowded`: the ranks of this host outnumber its processors.
    pub(super) fn new(is_crowded: bool) -> Self {
        let patience = Patience::new(&LINKS, is_crowded);
        Self { patience, next_report: FIRST_REPORT, descriptors: Vec::new(), entries: Vec::new() }
    }

    /// Sets how this rank waits, as configured by the program.
    pub(super) fn set_waiting(&mut self, waiting: config::Waiting) {
        self.patience.set_waiting(waiting);
    }

    /// Begins a new run.
    pub(super) fn begin(&mut self) {
        self.reset();
        self.next_report = FIRST_REPORT;
    }

    /// Whether a run that has taken this long should report which ranks it waits for.
    #[inline]
    pub(super) fn is_due(&self, elapsed: Duration) -> bool {
        elapsed >= self.next_report
    }

    /// Restarts the wait, because something moved.
    pub(super) fn reset(&mut self) {
        self.patience.reset();
    }

    /// Returns what to do after a round in which nothing moved.
    pub(super) fn pause(&mut self) -> Pause {
        self.patience.next()
    }

    /// Yields the core.
    pub(super) fn yield_now(&mut self) {
        self.patience.yield_now();
    }

    /// Begins a new poll set.
    pub(super) fn clear(&mut self) {
        self.descriptors.clear();
        self.entries.clear();
    }

    /// Adds a link to the poll set.
    pub(super) fn add(&mut self, descriptor: BorrowedFd<'_>, flags: PollFlags, rank: usize, is_watched: bool) {
        // SAFETY: the one caller (`Engine::sleep`) has exclusive access to all links from before the first is added
        // until the set is empty again: polling clears it, or it is cleared without polling. The caller closes none of
        // the links meanwhile. So the descriptor is open as long as it is in the set.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor.as_raw_fd()) };
        self.descriptors.push(PollFd::from_borrowed_fd(descriptor, flags));
        self.entries.push((rank, is_watched));
    }

    /// Sleeps until a link of the set is ready, but not long. `is_blind`: a link that matters is not in the set. The
    /// set is empty afterwards; [`Waiting::stirred`] returns the links to look at.
    pub(super) fn sleep(&mut self, sleep: Sleep, is_blind: bool, at_most: Duration) {
        let limit = if is_blind { sleep.nap } else { sleep.limit }.min(at_most);
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // A failure (a signal, no memory in the kernel) only means that the links are checked sooner.
        let result = if cfg!(miri) { Err(rustix::io::Errno::NOSYS) } else { rustix::event::poll(&mut self.descriptors, Some(&limit)) };
        if result.is_err() {
            std::thread::yield_now();
        }
        let (descriptors, mut index) = (&self.descriptors, 0);
        self.entries.retain(|(_, is_watched)| {
            index += 1;
            *is_watched && result.is_ok() && !descriptors[index - 1].revents().is_empty()
        });
        self.descriptors.clear();
    }

    /// Returns, one at a time, the ranks that are only watched and whose link became ready during the last sleep.
    pub(super) fn stirred(&mut self) -> Option<usize> {
        self.entries.pop().map(|(rank, _)| rank)
    }
}
