//! Waiting for links: a little while awake, then asleep until one of them stirs.

#![expect(unsafe_code, reason = "the poll set is reused, so it outlives the borrows it is made of")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::base::tuning::engine::FIRST_REPORT;
use crate::base::tuning::waiting::LINKS;
use crate::config;
use crate::host::waiting::{Patience, Pause, Sleep};

/// One rank's patience, and what it sleeps on.
#[derive(Debug)]
pub(super) struct Waiting {
    patience: Patience,
    /// After how long a run this rank says next whom it waits for.
    pub(super) next_report: Duration,
    descriptors: Vec<PollFd<'static>>,
    /// For each descriptor the rank, and whether it is only watched for a reason to abort.
    entries: Vec<(usize, bool)>,
}

impl Waiting {
    /// `is_crowded`: whether the ranks of this host are more than its processors.
    pub(super) fn new(is_crowded: bool) -> Self {
        let patience = Patience::new(&LINKS, is_crowded);
        Self { patience, next_report: FIRST_REPORT, descriptors: Vec::new(), entries: Vec::new() }
    }

    /// Has the program decide how this rank waits.
    pub(super) fn set_waiting(&mut self, waiting: config::Waiting) {
        self.patience.set_waiting(waiting);
    }

    /// A new run.
    pub(super) fn begin(&mut self) {
        self.reset();
        self.next_report = FIRST_REPORT;
    }

    /// Whether a run that has taken this long should say whom it waits for.
    #[inline]
    pub(super) fn is_due(&self, elapsed: Duration) -> bool {
        elapsed >= self.next_report
    }

    /// Something moved.
    pub(super) fn reset(&mut self) {
        self.patience.reset();
    }

    /// Nothing moved: what to do.
    pub(super) fn pause(&mut self) -> Pause {
        self.patience.next()
    }

    /// Gives up the core.
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
        // SAFETY: the one caller (`Engine::sleep`) has all links to itself from before the first is added until the set has been polled, which
        // clears it, or been cleared without, and closes none of them meanwhile: so the descriptor is open as long as it is in the set.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor.as_raw_fd()) };
        self.descriptors.push(PollFd::from_borrowed_fd(descriptor, flags));
        self.entries.push((rank, is_watched));
    }

    /// Sleeps until a link of the set stirs, but not long. `is_blind`: a link that matters is not in the set. The set is empty afterwards;
    /// [`Waiting::stirred`] has what to look at.
    pub(super) fn sleep(&mut self, sleep: Sleep, is_blind: bool, at_most: Duration) {
        let limit = if is_blind { sleep.nap } else { sleep.limit }.min(at_most);
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // A failure (a signal, no memory in the kernel) only means that the links are looked at sooner.
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

    /// The ranks that are only watched, and whose link stirred during the last sleep, one at a time.
    pub(super) fn stirred(&mut self) -> Option<usize> {
        self.entries.pop().map(|(rank, _)| rank)
    }
}
