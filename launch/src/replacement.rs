//! The processes that are started in the place of failed ranks, while the others continue: how many, and when.
//!
//! A replacement joins the job at the address of a rank that runs. Each process writes its own address to a file once it
//! is a member. If no process that runs has done so for some time, no replacement can join any more.

use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use collectives::__private::regular_file;

/// The delay before the first replacement of a rank.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// The longest delay.
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// A process that has run for this long has not failed at once: the next delay is the first one again.
const LONG_RUN: Duration = Duration::from_secs(60);
/// How long to wait for an address before the next look.
const PAUSE: Duration = Duration::from_millis(250);
/// How long after the end of a rank another one must have written its address.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest address with its line feed.
const LONGEST_ADDRESS: u64 = 128;

/// Reads the address that a process has written, if it has written one.
pub(super) fn address(path: &Path) -> Option<SocketAddr> {
    let mut text = String::new();
    regular_file::open(path).and_then(|file| file.take(LONGEST_ADDRESS).read_to_string(&mut text)).ok()?;
    text.strip_suffix('\n')?.parse().ok()
}

/// One rank's replacements.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    count: u32,
    delay: Duration,
    due: Option<Instant>,
}

/// The replacements of this host's ranks.
#[derive(Debug)]
pub(super) struct Replacements {
    most: u32,
    /// How many were started, or are due.
    used: u32,
    /// By local rank.
    slots: Vec<Slot>,
    /// When to check that a replacement can still join.
    check: Option<Instant>,
}

impl Replacements {
    pub(super) fn new(most: u32, local_world_size: usize) -> Self {
        Self { most, used: 0, slots: vec![Slot::default(); local_world_size], check: None }
    }

    /// Whether failed ranks are replaced in this job.
    pub(super) fn are_allowed(&self) -> bool {
        self.most > 0
    }

    pub(super) fn most(&self) -> u32 {
        self.most
    }

    /// Returns how many processes were started.
    pub(super) fn started(&self) -> u32 {
        self.slots.iter().map(|slot| slot.count).sum()
    }

    /// Schedules the replacement of a rank whose process ran for this long. Returns its number and the delay, or `None`
    /// if no replacement is left.
    pub(super) fn schedule(&mut self, local_rank: usize, ran: Duration, now: Instant) -> Option<(u32, Duration)> {
        let slot = self.slots.get_mut(local_rank).filter(|_| self.used < self.most)?;
        self.used += 1;
        slot.delay = if ran < LONG_RUN { (slot.delay * 2).clamp(FIRST_DELAY, LONGEST_DELAY) } else { FIRST_DELAY };
        slot.due = Some(now + slot.delay);
        Some((self.used, slot.delay))
    }

    /// Notes that a process has ended, perhaps the last one that could let a replacement in.
    pub(super) fn ended(&mut self, now: Instant) {
        if self.are_allowed() {
            self.check = Some(now + PATIENCE);
        }
    }

    /// Returns the next time at which a replacement or the check is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.slots.iter().filter_map(|slot| slot.due).chain(self.check).min()
    }

    /// Returns a local rank whose replacement is due.
    pub(super) fn due(&self, now: Instant) -> Option<usize> {
        self.slots.iter().position(|slot| slot.due.is_some_and(|due| due <= now))
    }

    /// Whether a replacement waits for its start.
    pub(super) fn are_pending(&self) -> bool {
        self.slots.iter().any(|slot| slot.due.is_some())
    }

    /// Whether the check is due. If so, it is not due again before another process ends.
    pub(super) fn take_check(&mut self, now: Instant) -> bool {
        let is_due = self.check.is_some_and(|check| check <= now);
        if is_due {
            self.check = None;
        }
        is_due
    }

    /// Looks again later.
    pub(super) fn postpone(&mut self, local_rank: usize, now: Instant) {
        if let Some(slot) = self.slots.get_mut(local_rank) {
            slot.due = Some(now + PAUSE);
        }
    }

    /// Notes that a rank's replacement starts now. Returns how often the rank has been replaced, this time included.
    pub(super) fn begin(&mut self, local_rank: usize) -> u32 {
        let Some(slot) = self.slots.get_mut(local_rank) else { return 0 };
        slot.due = None;
        slot.count += 1;
        slot.count
    }

    /// Starts no further replacement.
    pub(super) fn cancel(&mut self) {
        (self.used, self.check) = (self.most, None);
        self.slots.iter_mut().for_each(|slot| slot.due = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(3);

    #[test]
    fn the_delay_of_a_rank_grows_until_one_has_run_for_long() {
        let (mut replacements, now) = (Replacements::new(100, 2), Instant::now());
        let mut seconds = |local_rank, ran| replacements.schedule(local_rank, ran, now).unwrap().1.as_secs();
        assert_eq!([0; 7].map(|rank| seconds(rank, SHORT)), [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!((seconds(1, SHORT), seconds(0, LONG_RUN), seconds(0, SHORT)), (1, 1, 2));
    }

    #[test]
    fn no_more_are_started_than_are_allowed() {
        let (mut replacements, now) = (Replacements::new(2, 3), Instant::now());
        assert!(replacements.are_allowed() && replacements.next().is_none());
        assert_eq!(replacements.schedule(2, SHORT, now), Some((1, FIRST_DELAY)));
        assert_eq!(replacements.schedule(1, SHORT, now), Some((2, FIRST_DELAY)));
        assert_eq!(replacements.schedule(0, SHORT, now), None);
        assert_eq!((replacements.due(now), replacements.next()), (None, Some(now + FIRST_DELAY)));
        assert_eq!(replacements.due(now + FIRST_DELAY), Some(1));
        replacements.postpone(1, now + FIRST_DELAY);
        assert_eq!(replacements.due(now + FIRST_DELAY), Some(2));
        assert_eq!((replacements.begin(2), replacements.started(), replacements.are_pending()), (1, 1, true));
        replacements.cancel();
        assert!(!replacements.are_pending() && replacements.next().is_none());
        assert_eq!(replacements.schedule(0, SHORT, now), None);
    }

    #[test]
    fn a_job_without_replacements_has_nothing_to_wait_for() {
        let (mut replacements, now) = (Replacements::new(0, 1), Instant::now());
        replacements.ended(now);
        assert!(!replacements.are_allowed() && replacements.next().is_none() && replacements.schedule(0, SHORT, now).is_none());
    }

    #[test]
    fn the_check_is_due_once_after_each_end() {
        let (mut replacements, now) = (Replacements::new(1, 1), Instant::now());
        replacements.ended(now);
        assert!(!replacements.take_check(now) && replacements.take_check(now + PATIENCE) && !replacements.take_check(now + PATIENCE * 2));
    }

    #[test]
    fn only_whole_addresses_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("join_address");
        assert_eq!(address(&path), None);
        for (text, expected) in [("127.0.0.1:80\n", Some("127.0.0.1:80")), ("[::1]:81\n", Some("[::1]:81"))] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(address(&path), expected.map(|address| address.parse().unwrap()));
        }
        for text in ["", "\n", "127.0.0.1:8", "a:1\n", "127.0.0.1:80\n127.0.0.1:81\n"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(address(&path), None, "{text:?}");
        }
        std::fs::write(&path, vec![b'1'; 1 << 20]).unwrap();
        assert_eq!(address(&path), None);
        assert_eq!(address(Path::new("/dev/zero")), None);
    }
}
