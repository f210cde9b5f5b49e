//! The counters of one communicator, which all threads add to without a lock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::call::{CallKind, Collective};
use crate::flight::Backend;
use crate::observe::CallReport;

/// The outcomes of calls, as [`CallReport::result`] returns them. The last one stands for all others.
pub(super) const RESULTS: [&str; 8] = ["ok", "timeout", "peer_lost", "mismatch", "aborted", "poisoned", "unsupported", "error"];

/// The numbers of kinds: collectives, collectives on several buffers, and the rest.
const COLLECTIVES: usize = Collective::ALL.len();
const KINDS: usize = 2 * COLLECTIVES + 3;

/// The counters of one kind on one backend.
#[derive(Debug, Default)]
struct Slot {
    calls: [AtomicU64; RESULTS.len()],
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

/// What was counted of one kind on one backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// The calls by outcome, in the order of [`RESULTS`].
    pub(super) calls: [u64; RESULTS.len()],
    /// The bytes of calls without an error.
    pub(super) bytes: u64,
    pub(super) nanoseconds: u64,
}

/// The counters of a communicator, by backend and kind.
#[derive(Debug)]
pub(super) struct Counters {
    slots: [Vec<Slot>; 2],
}

impl Default for Counters {
    fn default() -> Self {
        let slots = || (0..KINDS).map(|_| Slot::default()).collect();
        Self { slots: [slots(), slots()] }
    }
}

/// Returns the place of a kind.
fn index(kind: CallKind) -> usize {
    match kind {
        CallKind::Collective(collective) => collective as usize - 1,
        CallKind::Many(collective) => COLLECTIVES + collective as usize - 1,
        CallKind::AllGatherList => 2 * COLLECTIVES,
        CallKind::Send => 2 * COLLECTIVES + 1,
        CallKind::Recv => 2 * COLLECTIVES + 2,
    }
}

/// Returns all kinds in the order of their places.
fn kinds() -> impl Iterator<Item = CallKind> {
    let collectives = Collective::ALL.into_iter().map(CallKind::Collective).chain(Collective::ALL.into_iter().map(CallKind::Many));
    collectives.chain([CallKind::AllGatherList, CallKind::Send, CallKind::Recv])
}

impl Counters {
    /// Counts a call that has ended.
    pub(super) fn count(&self, call: &CallReport<'_>) {
        let Some(slot) = self.slots[usize::from(call.backend == Backend::Device)].get(index(call.kind)) else { return };
        let result = call.result();
        let place = RESULTS.iter().position(|known| *known == result).unwrap_or(RESULTS.len() - 1);
        slot.calls[place].fetch_add(1, Ordering::Relaxed);
        if call.error.is_none() {
            slot.bytes.fetch_add(call.bytes, Ordering::Relaxed);
        }
        slot.nanoseconds.fetch_add(u64::try_from(call.elapsed.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the counts of the kinds that were called, by backend and name.
    pub(super) fn read(&self) -> BTreeMap<(&'static str, &'static str), Count> {
        let mut counts: BTreeMap<_, Count> = BTreeMap::new();
        for (backend, slots) in ["host", "device"].into_iter().zip(&self.slots) {
            for (kind, slot) in kinds().zip(slots) {
                let calls = std::array::from_fn(|place| slot.calls[place].load(Ordering::Relaxed));
                if calls == [0; RESULTS.len()] {
                    continue;
                }
                // Two kinds may have the same name.
                let count = counts.entry((backend, kind.name())).or_default();
                count.calls.iter_mut().zip(calls).for_each(|(sum, calls)| *sum += calls);
                count.bytes += slot.bytes.load(Ordering::Relaxed);
                count.nanoseconds += slot.nanoseconds.load(Ordering::Relaxed);
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_place() {
        for (place, kind) in kinds().enumerate() {
            assert_eq!(index(kind), place, "{kind:?}");
        }
        assert_eq!(kinds().count(), KINDS);
    }
}
