//! Waiting for links: a little while awake, then asleep until one of them stirs.

#![expect(unsafe_code, reason = "the poll set is reused, so it outlives the borrows it is made of")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// How long to look at the links without giving up the core, where there is a core for every rank.
const SPIN: Duration = Duration::from_micros(30);
/// How long to look at the links in all before going to sleep.
const AWAKE: Duration = Duration::from_micros(100);
/// How long to sleep at most, so that what no descriptor tells (an abort, an abort reason in shared memory) is seen.
const SLEEP: Duration = Duration::from_millis(50);
/// How long to sleep at first and at most where a link has no descriptor.
const NAP: Duration = Duration::from_micros(50);
const LONGEST_NAP: Duration = Duration::from_micros(200);
/// After how long a run first says whom it waits for.
const FIRST_REPORT: Duration = Duration::from_millis(10);

/// What to do next while nothing moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    Spin,
    Yield,
    Sleep,
}

/// One rank's patience.
#[derive(Debug)]
pub(super) struct Waiting {
    spin: Duration,
    /// Since when nothing has moved.
    idle_since: Option<Instant>,
    nap: Duration,
    /// After how long a run this rank says next whom it waits for.
    pub(super) next_report: Duration,
    descriptors: Vec<PollFd<'static>>,
    /// For each descriptor the rank, and whether it is only watched for a reason to abort.
    entries: Vec<(usize, bool)>,
}

impl Waiting {
    /// `local_ranks`: how many ranks share this host's cores.
    pub(super) fn new(local_ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = if local_ranks <= cores { SPIN } else { Duration::ZERO };
        Self { spin, idle_since: None, nap: NAP, next_report: FIRST_REPORT, descriptors: Vec::new(), entries: Vec::new() }
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
        self.idle_since = None;
        self.nap = NAP;
    }

    /// Nothing moved: what to do.
    pub(super) fn pause(&mut self) -> Pause {
        let now = Instant::now();
        let idle = now.duration_since(*self.idle_since.get_or_insert(now));
        match idle {
            idle if idle < self.spin => Pause::Spin,
            idle if idle < AWAKE => Pause::Yield,
            _ => Pause::Sleep,
        }
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

    /// Sleeps until a link of the set stirs, but not long. `is_blind`: a link that matters is not in the set. The set is
    /// empty afterwards; [`Waiting::stirred`] has what to look at.
    pub(super) fn sleep(&mut self, is_blind: bool, at_most: Duration) {
        let limit = if is_blind { self.nap } else { SLEEP }.min(at_most);
        self.nap = (self.nap * 2).min(LONGEST_NAP);
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
