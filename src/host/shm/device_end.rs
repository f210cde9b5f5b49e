//! A word that the ranks of one host share, in which a rank records why it has given up on its device. It is separate
//! from the end of the host backend, which stays in use after a device has failed.
//!
//! A rank writes the word before its kernels are cut off, and reads the word after its device has completed a call.
//! Data that a rank sends after its kernels were cut off is invalid, but its neighbours may take that data for a
//! result. Any rank that could have done so finds the reason in the word.

use std::fmt;
use std::sync::Arc;

use super::region::Region;
use crate::base::sync::{Ordering, fence};
use crate::host::abort_reason::AbortReason;

/// The word, and the memory that it lies in.
#[derive(Clone)]
pub(crate) struct DeviceEnd(Arc<Region>);

impl DeviceEnd {
    pub(super) fn new(region: Arc<Region>) -> Self {
        Self(region)
    }

    /// Records why this rank gives up, unless a rank already has. Every rank sees this record before anything that this
    /// thread does next.
    pub(crate) fn post(&self, abort_reason: AbortReason) {
        let word = self.0.control().device_end();
        let _ = word.compare_exchange(0, to_word(abort_reason), Ordering::SeqCst, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Returns why a rank has given up, if it recorded that before something that this thread has seen.
    pub(crate) fn read(&self) -> Option<AbortReason> {
        fence(Ordering::SeqCst);
        from_word(self.0.control().device_end().load(Ordering::SeqCst))
    }
}

impl fmt::Debug for DeviceEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("DeviceEnd").field(&self.read()).finish()
    }
}

/// Encodes a reason in one word: its kind in the upper bits, two ranks in the lower ones. A reason that holds anything
/// else becomes a failure of its first rank, except a silence, which loses its seconds.
fn to_word(abort_reason: AbortReason) -> u64 {
    let (kind, first, second) = match abort_reason {
        AbortReason::Lost { rank, by } => (1, rank, by),
        AbortReason::Left { rank } => (2, rank, 0),
        AbortReason::TimedOut { waiting, missing } => (3, waiting, missing),
        AbortReason::Aborted { by } => (4, by, 0),
        AbortReason::Failed { rank } | AbortReason::Garbled { rank, .. } => (5, rank, 0),
        AbortReason::Silent { rank, by, .. } => (6, rank, by),
        AbortReason::Mismatch { first: (rank, _), .. } => (5, rank, 0),
    };
    kind << (2 * RANK_BITS) | (u64::from(first) & RANK) << RANK_BITS | u64::from(second) & RANK
}

/// Decodes [`to_word`]. Returns `None` for any other word.
fn from_word(word: u64) -> Option<AbortReason> {
    let (first, second) = ((word >> RANK_BITS & RANK) as u32, (word & RANK) as u32);
    match word >> (2 * RANK_BITS) {
        1 => Some(AbortReason::Lost { rank: first, by: second }),
        2 => Some(AbortReason::Left { rank: first }),
        3 => Some(AbortReason::TimedOut { waiting: first, missing: second }),
        4 => Some(AbortReason::Aborted { by: first }),
        5 => Some(AbortReason::Failed { rank: first }),
        6 => Some(AbortReason::Silent { rank: first, by: second, seconds: 0 }),
        _ => None,
    }
}

/// The number of bits of a rank: two ranks fit beside a kind.
const RANK_BITS: u32 = 28;
const RANK: u64 = (1 << RANK_BITS) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_survive_in_a_word() {
        let last = RANK as u32;
        for abort_reason in [
            AbortReason::Lost { rank: 0, by: last },
            AbortReason::Left { rank: last },
            AbortReason::TimedOut { waiting: last, missing: 0 },
            AbortReason::TimedOut { waiting: 1, missing: last },
            AbortReason::Aborted { by: 3 },
            AbortReason::Failed { rank: 4 },
            AbortReason::Silent { rank: 5, by: last, seconds: 0 },
        ] {
            assert_eq!(from_word(to_word(abort_reason)), Some(abort_reason));
        }
        assert_eq!(from_word(to_word(AbortReason::Garbled { rank: 9, header: u64::MAX })), Some(AbortReason::Failed { rank: 9 }));
        assert_eq!([from_word(0), from_word(7 << 56), from_word(u64::MAX)], [None; 3]);
    }

    #[test]
    fn the_first_rank_to_give_up_is_named() {
        let regions = super::super::region::tests::regions(3);
        let ends: Vec<_> = regions.into_iter().map(|region| DeviceEnd::new(Arc::new(region))).collect();
        assert_eq!(ends[2].read(), None);
        ends[1].post(AbortReason::Aborted { by: 1 });
        ends[0].post(AbortReason::Failed { rank: 0 });
        assert_eq!(ends[2].read(), Some(AbortReason::Aborted { by: 1 }));
    }
}
