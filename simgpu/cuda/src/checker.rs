//! Finds buffers that are used or freed without a wait: two jobs use the same bytes, one of them writes, and neither
//! is known to be over before the other begins.
//!
//! The accesses of past jobs are kept with the allocation, so a reused address has no old records. Jobs whose ranges
//! are known are recorded when they are submitted, kernels when they are over. Two records are compared in both
//! directions, so the order of recording does not matter.
//!
//! Kernels of libraries on different devices are not compared with each other, since flags in memory order them.
//! Compared with all other jobs, the accesses of such a kernel to the memory of another device count as made by the
//! kernels that ran there at the same time.

use std::ops::Range;
use std::sync::Arc;

use crate::clock::{Clock, Stamp};
use crate::memory::{Allocation, Freed, Memory};
use crate::report::Reports;

/// The number of records of one allocation beyond which those that the host has waited for are dropped when nothing is
/// running.
const MANY: usize = 256;

/// Bytes of the word in which a kernel of a library reads smaller data.
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

/// The use of a range of bytes by one job.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) verb: Verb,
    pub(crate) stamp: Stamp,
    pub(crate) what: Arc<str>,
    /// The device, if a kernel of a library made the access.
    pub(crate) library: Option<usize>,
    /// If the memory is on another device: the kernels of libraries that ran on that device at the same time.
    pub(crate) beside: Arc<[Stamp]>,
}

impl Record {
    fn conflicts(&self, other: &Record) -> bool {
        let (own, others) = (self.used(), other.used());
        own.start.max(others.start) < own.end.min(others.end)
            && (self.verb != Verb::Read || other.verb != Verb::Read)
            && !self.ordered(other)
    }

    /// Returns the bytes that were certainly used. Kernels of libraries read the whole word in which their data begins
    /// or ends, whatever lies beside it.
    fn used(&self) -> Range<u64> {
        let beside = if self.library.is_some() && self.verb == Verb::Read { WORD - 1 } else { 0 };
        self.start + beside..self.end.saturating_sub(beside)
    }

    fn ordered(&self, other: &Record) -> bool {
        let by_flags = self.library.zip(other.library).is_some_and(|(own, others)| own != others);
        by_flags || self.stamps().any(|stamp| stamp.ordered(&other.stamp)) || other.beside.iter().any(|stamp| stamp.ordered(&self.stamp))
    }

    /// Returns the stamps of all jobs that this access counts for.
    fn stamps(&self) -> impl Iterator<Item = &Stamp> {
        std::iter::once(&self.stamp).chain(&*self.beside)
    }

    fn before(&self, stamp: &Stamp) -> bool {
        self.stamps().any(|own| own.before(stamp))
    }

    /// Whether everything unordered with `self` is unordered with `later`, too.
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

/// Records what a job did or will do, and reports accesses that are not ordered with it. Memory that the driver does
/// not know belongs to the host and is not checked.
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

/// Forgets records that no longer matter now that the job of `record` is over. All earlier ones have been recorded by
/// then.
pub(crate) fn settle(memory: &mut Memory, record: &Record, host: &Clock, idle: bool) {
    let Some(allocation) = memory.at_mut(record.start) else { return };
    allocation.records.retain(|old| !old.replaced_by(record));
    if idle && allocation.records.len() > MANY {
        allocation.records.retain(|old| host.get(old.stamp.component) < old.stamp.epoch);
    }
}

/// Records that an allocation is freed, and reports the jobs that are not known to be over by then. A kernel of a
/// library on another device that is over is not reported: how its rank notified the owner of the memory cannot be
/// seen from here. One that still runs is found when it ends.
pub(crate) fn free(memory: &mut Memory, reports: &mut Reports, start: u64, freed: Freed) {
    let Some(allocation) = memory.at_mut(start) else { return };
    let owner = allocation.device;
    let told = |record: &Record| record.library.is_some_and(|device| device != owner);
    for record in allocation.records.iter().filter(|record| !record.before(&freed.stamp) && !told(record)) {
        reports.add(freed_in_use(allocation, &freed, record));
    }
    allocation.freed = Some(freed);
}
