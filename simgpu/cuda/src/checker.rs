//! Finds buffers that are used or freed without a wait: two jobs touch the same bytes, one of them writes, and neither is known to be
//! over before the other begins.
//!
//! What the jobs of the past did is kept with the allocation they did it to, so an address that comes back brings no old stories. Jobs
//! whose ranges are known are recorded when they are submitted, kernels when they are over; two records are compared in both
//! directions, so the order of recording does not matter.
//!
//! Kernels of libraries on different devices are not held against each other, since flags in memory order them. To all else, what such a
//! kernel does to the memory of another device counts as done by the kernels that ran there at the same time.

use std::ops::Range;
use std::sync::Arc;

use crate::clock::{Clock, Stamp};
use crate::memory::{Allocation, Freed, Memory};
use crate::report::Reports;

/// Beyond this many records of one allocation, those that the host has waited for are dropped when nothing is running.
const MANY: usize = 256;

/// Bytes of the word in which a kernel of a library reads what is smaller.
const WORD: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write,
    Allocate,
}

impl Verb {
    fn text(self) -> &'static str {
        match self {
            Verb::Read => "read",
            Verb::Write => "written",
            Verb::Allocate => "allocated",
        }
    }
}

/// One job used these bytes.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) verb: Verb,
    pub(crate) stamp: Stamp,
    pub(crate) what: Arc<str>,
    /// The device on which a kernel of a library did it.
    pub(crate) library: Option<usize>,
    /// Kernels of libraries on the device of the memory, if that is another one, that ran at the same time.
    pub(crate) beside: Arc<[Stamp]>,
}

impl Record {
    fn conflicts(&self, other: &Record) -> bool {
        let (own, others) = (self.used(), other.used());
        own.start.max(others.start) < own.end.min(others.end)
            && (self.verb != Verb::Read || other.verb != Verb::Read)
            && !self.ordered(other)
    }

    /// The bytes that were used for certain. Kernels of libraries read the whole word in which their data begins or ends, whatever it is that
    /// lies beside it.
    fn used(&self) -> Range<u64> {
        let beside = if self.library.is_some() && self.verb == Verb::Read { WORD - 1 } else { 0 };
        self.start + beside..self.end.saturating_sub(beside)
    }

    fn ordered(&self, other: &Record) -> bool {
        let by_flags = self.library.zip(other.library).is_some_and(|(own, others)| own != others);
        by_flags || self.stamps().any(|stamp| stamp.ordered(&other.stamp)) || other.beside.iter().any(|stamp| stamp.ordered(&self.stamp))
    }

    /// What this counts as done by.
    fn stamps(&self) -> impl Iterator<Item = &Stamp> {
        std::iter::once(&self.stamp).chain(&*self.beside)
    }

    fn before(&self, stamp: &Stamp) -> bool {
        self.stamps().any(|own| own.before(stamp))
    }

    /// Whether nothing can be unordered with `self` that is not unordered with `later`, too.
    fn replaced_by(&self, later: &Record) -> bool {
        let same = self.stamp.component == later.stamp.component && self.stamp.epoch == later.stamp.epoch;
        !same
            && (later.library.is_none() || later.library == self.library)
            && later.start <= self.start
            && self.end <= later.end
            && (later.verb != Verb::Read || self.verb == Verb::Read)
            && self.stamp.before(&later.stamp)
    }
}

fn conflict(allocation: &Allocation, earlier: &Record, later: &Record) -> String {
    let (start, end) = (earlier.start.max(later.start) - allocation.start, earlier.end.min(later.end) - allocation.start);
    let (done, doing) = (earlier.verb.text(), later.verb.text());
    format!("{}: {done} by {} and {doing} by {} without a wait between (bytes {start}..{end})", allocation.name(), earlier.what, later.what)
}

fn freed_in_use(allocation: &Allocation, freed: &Freed, record: &Record) -> String {
    let text = record.verb.text();
    if freed.stamp.before(&record.stamp) {
        return format!("{}: {text} by {} after it was freed by {}", allocation.name(), record.what, freed.what);
    }
    format!("{}: freed while in use: {text} by {}, freed by {} without a wait between", allocation.name(), record.what, freed.what)
}

/// Records what a job did or is going to do, and reports what it is not ordered with. Memory that the driver does not know is the host's
/// own business.
pub(crate) fn access(memory: &mut Memory, reports: &mut Reports, mut record: Record) {
    let Some(allocation) = memory.at_mut(record.start) else { return };
    record.end = record.end.min(allocation.end());
    if record.start >= record.end {
        return;
    }
    for earlier in allocation.records.iter().filter(|earlier| earlier.conflicts(&record)) {
        reports.add(conflict(allocation, earlier, &record));
    }
    if let Some(freed) = &allocation.freed
        && !record.before(&freed.stamp)
    {
        reports.add(freed_in_use(allocation, freed, &record));
    }
    let same = |old: &Record| {
        let (a, b) = (&old.stamp, &record.stamp);
        a.component == b.component && a.epoch == b.epoch && (old.start, old.end, old.verb) == (record.start, record.end, record.verb)
    };
    if !allocation.records.iter().any(same) {
        allocation.records.push(record);
    }
}

/// Forgets what no longer matters now that the job of `record` is over. All that comes before it has been recorded by then.
pub(crate) fn settle(memory: &mut Memory, record: &Record, host: &Clock, idle: bool) {
    let Some(allocation) = memory.at_mut(record.start) else { return };
    allocation.records.retain(|old| !old.replaced_by(record));
    if idle && allocation.records.len() > MANY {
        allocation.records.retain(|old| host.get(old.stamp.component) < old.stamp.epoch);
    }
}

/// Notes that an allocation is freed, and reports the jobs that are not known to be over by then. A kernel of a library on another device
/// that is over is not: how its rank told the owner of the memory cannot be seen from here. One that still runs is found when it ends.
pub(crate) fn free(memory: &mut Memory, reports: &mut Reports, start: u64, freed: Freed) {
    let Some(allocation) = memory.at_mut(start) else { return };
    let owner = allocation.device;
    let told = |record: &Record| record.library.is_some_and(|device| device != owner);
    for record in allocation.records.iter().filter(|record| !record.before(&freed.stamp) && !told(record)) {
        reports.add(freed_in_use(allocation, &freed, record));
    }
    allocation.freed = Some(freed);
}
