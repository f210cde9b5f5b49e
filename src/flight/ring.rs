//! A ring of records that one thread writes and any thread reads, even during a write.
//!
//! Each slot is a sequence lock of relaxed atomics. Its version is odd while the slot is being written. Afterwards, the
//! version is twice the record's number, plus two. A reader that finds the same even version before and after reading
//! has one complete record. No store is a read-modify-write, and on x86-64 the fences only restrict the compiler.

use crate::base::sync::{AtomicU64, Ordering, fence};

/// The state of a call, as stored in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Stage {
    Started = 1,
    Finished,
    Failed,
    /// Queued on a device, which runs the call later.
    Queued,
}

/// The bits of a slot's stage word that hold the stage. For a device call, the other bits hold the tracker and a part
/// of the record's number.
const STAGE_BITS: u32 = 8;

/// Returns the stage word of a call queued on a tracker. No other record in the same slot has the same word within
/// four billion calls.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices queue"))]
fn queued(id: u64, tracker: u8) -> u64 {
    Stage::Queued as u64 | u64::from(tracker) << STAGE_BITS | (id & 0xffff_ffff) << 32
}

/// One record, in its own cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot {
    version: AtomicU64,
    what: [AtomicU64; 4],
    started: AtomicU64,
    /// Stored before the stage that marks the end; 0 if the clock was not read.
    finished: AtomicU64,
    stage: AtomicU64,
}

/// A record as read from a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Raw {
    /// The record's number in its ring.
    pub(super) id: u64,
    /// Words that only the owner of the ring interprets.
    pub(super) what: [u64; 4],
    /// The start, in ticks.
    pub(super) started: u64,
    pub(super) finished: u64,
    pub(super) stage: Stage,
}

impl Raw {
    /// Whether the call has not ended.
    pub(super) fn is_under_way(&self) -> bool {
        matches!(self.stage, Stage::Started | Stage::Queued)
    }
}

/// The last records of one writer. A second concurrent writer would corrupt records, but nothing else.
#[derive(Debug)]
pub(super) struct Ring {
    slots: Box<[Slot]>,
    /// The number of records begun.
    begun: AtomicU64,
    /// No record before this number is still queued on a device.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices queue"))]
    first_queued: AtomicU64,
}

impl Ring {
    /// Creates a ring for `capacity` records, rounded up to a power of two.
    pub(super) fn new(capacity: usize) -> Self {
        let slots = (0..capacity.max(1).next_power_of_two()).map(|_| Slot::default()).collect();
        Self { slots, begun: AtomicU64::new(0), first_queued: AtomicU64::new(0) }
    }

    #[inline]
    fn slot(&self, id: u64) -> &Slot {
        &self.slots[id as usize & (self.slots.len() - 1)]
    }

    /// Begins a record in place of the oldest one and returns its number.
    #[inline]
    pub(super) fn begin(&self, what: [u64; 4], started: u64, stage: Stage) -> u64 {
        self.write(self.begun.load(Ordering::Relaxed), what, started, stage as u64)
    }

    /// Begins a record of a call that is queued on a tracker of a device.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices queue"))]
    pub(super) fn begin_queued(&self, what: [u64; 4], started: u64, tracker: u8) -> u64 {
        let id = self.begun.load(Ordering::Relaxed);
        self.write(id, what, started, queued(id, tracker))
    }

    #[inline]
    fn write(&self, id: u64, what: [u64; 4], started: u64, stage: u64) -> u64 {
        let slot = self.slot(id);
        slot.version.store(2 * id + 1, Ordering::Relaxed);
        // Pairs with the reader's fence: a reader that sees one of the words below also sees the odd version.
        fence(Ordering::Release);
        for (kept, word) in slot.what.iter().zip(what) {
            kept.store(word, Ordering::Relaxed);
        }
        slot.started.store(started, Ordering::Relaxed);
        slot.finished.store(0, Ordering::Relaxed);
        slot.stage.store(stage, Ordering::Relaxed);
        slot.version.store(2 * id + 2, Ordering::Release);
        self.begun.store(id + 1, Ordering::Release);
        id
    }

    /// Stores the outcome of a record's call, and the time if the clock was read. Does nothing if the record has been
    /// overwritten.
    #[inline]
    pub(super) fn end(&self, id: u64, stage: Stage, finished: u64) {
        let slot = self.slot(id);
        if slot.version.load(Ordering::Relaxed) == 2 * id + 2 {
            slot.finished.store(finished, Ordering::Relaxed);
            slot.stage.store(stage as u64, Ordering::Release);
        }
    }

    /// Ends the records before number `end` that are queued on this tracker, or on any tracker if none is given, and
    /// returns the first of them. Any thread may call this, even while records are begun.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices queue"))]
    pub(super) fn end_queued(&self, tracker: Option<u8>, end: u64, stage: Stage, finished: u64) -> Option<u64> {
        let begun = self.begun();
        let oldest = begun.saturating_sub(self.slots.len() as u64).max(self.first_queued.load(Ordering::Relaxed));
        let (mut first, mut still_queued) = (None, None);
        for id in oldest..end.min(begun) {
            let slot = self.slot(id);
            let word = slot.stage.load(Ordering::Relaxed);
            let is_queued = word == queued(id, (word >> STAGE_BITS) as u8);
            if !is_queued || tracker.is_some_and(|tracker| word != queued(id, tracker)) {
                still_queued = still_queued.or(is_queued.then_some(id));
                continue;
            }
            // Fails if the slot is overwritten meanwhile. The time may then be stored in the next record in the slot.
            // That record is queued, so it has no time yet.
            if slot.stage.compare_exchange(word, stage as u64, Ordering::Release, Ordering::Relaxed).is_ok() {
                slot.finished.store(finished, Ordering::Relaxed);
                first.get_or_insert(id);
            }
        }
        self.first_queued.fetch_max(still_queued.unwrap_or(end.min(begun)), Ordering::Relaxed);
        first
    }

    /// Returns the number of records begun.
    #[inline]
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// Returns the stored records, oldest first, without the records that are overwritten meanwhile.
    pub(super) fn read(&self) -> Vec<Raw> {
        self.read_last(u64::MAX)
    }

    /// Returns the last `most` records.
    pub(super) fn read_last(&self, most: u64) -> Vec<Raw> {
        let begun = self.begun();
        let oldest = begun.saturating_sub(most.min(self.slots.len() as u64));
        (oldest..begun).filter_map(|id| self.read_one(id)).collect()
    }

    fn read_one(&self, id: u64) -> Option<Raw> {
        let slot = self.slot(id);
        let version = slot.version.load(Ordering::Acquire);
        let what = std::array::from_fn(|word| slot.what[word].load(Ordering::Relaxed));
        let stage = slot.stage.load(Ordering::Acquire) & ((1 << STAGE_BITS) - 1);
        let (started, finished) = (slot.started.load(Ordering::Relaxed), slot.finished.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = version == 2 * id + 2 && slot.version.load(Ordering::Relaxed) == version;
        let stage = [Stage::Started, Stage::Finished, Stage::Failed, Stage::Queued].into_iter().find(|known| *known as u64 == stage)?;
        is_whole.then_some(Raw { id, what, started, finished, stage })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn the_last_records_are_kept_in_order() {
        let ring = Ring::new(3);
        assert!(ring.read().is_empty());
        for number in 0..10 {
            let id = ring.begin([number; 4], number, Stage::Started);
            ring.end(id, Stage::Finished, number + 100);
        }
        ring.end(2, Stage::Failed, 0);
        let read = ring.read();
        assert_eq!(read.iter().map(|raw| raw.id).collect::<Vec<_>>(), [6, 7, 8, 9], "three are rounded up to four");
        assert!(read.iter().all(|raw| raw.stage == Stage::Finished && raw.finished == raw.id + 100), "an end that comes too late is lost");
    }

    #[test]
    fn what_is_queued_ends_by_lanes() {
        let ring = Ring::new(8);
        for tracker in [0, 1, 0, 1, 0] {
            ring.begin_queued([u64::from(tracker); 4], 5, tracker);
        }
        ring.end(0, Stage::Failed, 6);
        assert_eq!(ring.end_queued(Some(0), 4, Stage::Finished, 9), Some(2), "the first one has ended");
        let stages = || ring.read().iter().map(|raw| raw.stage).collect::<Vec<_>>();
        use Stage::{Failed, Finished, Queued};
        assert_eq!(stages(), [Failed, Queued, Finished, Queued, Queued]);
        assert_eq!(ring.end_queued(None, u64::MAX, Stage::Failed, 9), Some(1));
        assert_eq!(stages(), [Failed, Failed, Finished, Failed, Failed]);
        assert_eq!(ring.end_queued(None, u64::MAX, Stage::Finished, 9), None);
    }

    #[test]
    fn readers_get_whole_records_while_they_are_written() {
        let (ring, done) = (Ring::new(4), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut seen = 0;
                while !done.load(Ordering::Relaxed) {
                    for raw in ring.read() {
                        assert_eq!((raw.what, raw.started), ([raw.id; 4], raw.id));
                        assert!(raw.stage == Stage::Started || raw.finished == raw.id, "{raw:?}");
                        seen += 1;
                    }
                    std::thread::yield_now();
                }
                seen
            });
            for number in 0..if cfg!(miri) { 500 } else { 1_000_000 } {
                let id = ring.begin([number; 4], number, Stage::Started);
                ring.end(id, Stage::Finished, number);
            }
            done.store(true, Ordering::Relaxed);
            let _seen: usize = reader.join().unwrap();
        });
        assert_eq!(ring.read().len(), 4);
    }
}

#[cfg(all(test, loom))]
mod models {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib flight::ring`.

    use super::*;
    use loom::sync::Arc;

    /// The reader is the thread that begins later. Each of its loads may return any stored value that is not ruled
    /// out, and loom tries them all. The other way round loom would try a single order, because a writer loads its
    /// own words before it stores them.
    #[test]
    fn no_reader_gets_parts_of_two_records() {
        let whole = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = std::sync::Arc::clone(&whole);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(1);
        builder.check(move || {
            let ring = Arc::new(Ring::new(1));
            let (reader, count) = (Arc::clone(&ring), std::sync::Arc::clone(&count));
            let reader = loom::thread::spawn(move || {
                for raw in reader.read() {
                    assert_eq!((raw.what, raw.started), ([raw.id + 3; 4], raw.id + 5));
                    assert!(raw.stage == Stage::Started || raw.finished == raw.id + 7);
                    count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
            for number in 0..2 {
                let id = ring.begin([number + 3; 4], number + 5, Stage::Started);
                ring.end(id, Stage::Finished, number + 7);
            }
            reader.join().unwrap();
        });
        assert!(whole.load(std::sync::atomic::Ordering::Relaxed) > 0, "no record was ever read");
    }
}
