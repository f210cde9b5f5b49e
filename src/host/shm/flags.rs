//! The step protocol: how ranks that share memory know what they may read and what they may overwrite.
//!
//! Every collective is a sequence of steps, numbered from 1 over the life of a group and the same on every rank. In
//! step `s` a rank writes its own area of parity `s % 2`, sets its flag of that parity to `s`, waits until all other
//! flags of that parity have reached `s`, and reads the others' areas of that parity.
//!
//! Two areas suffice because every rank waits for every other in every step. A rank writes its area for step `s + 2`
//! only after it has seen every flag at `s + 1`. A rank sets its flag to `s + 1` only after it has read all that it
//! needs of step `s`. So no rank still reads what step `s` left there. For the same reason, a flag that is awaited at
//! `s` is never beyond `s`.
//!
//! The flag is stored with release order after the area was written, and loaded with acquire order before an area is
//! read. The chain "read, then set this rank's flag" and "see that flag, then write" orders the reads before the
//! overwriting as well. On x86 both are plain moves; no fence is needed anywhere.

use crate::base::sync::{AtomicU64, Ordering};

/// The number of the last step for which its owner has published an area.
#[repr(transparent)]
pub(super) struct Flag(AtomicU64);

impl Flag {
    /// Creates the flag of an owner that has published no step yet.
    #[cfg(test)]
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Publishes that the owner's area holds what `step` needs.
    #[inline]
    pub(super) fn publish(&self, step: u64) {
        self.0.store(step, Ordering::Release);
    }

    /// Whether the owner has published `step`; from then on its area may be read.
    #[inline]
    pub(super) fn has_reached(&self, step: u64) -> bool {
        self.0.load(Ordering::Acquire) >= step
    }
}

/// Returns which of the two areas belongs to `step`.
#[inline]
pub(super) const fn parity(step: u64) -> usize {
    (step & 1) as usize
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_reached_from_its_step_on() {
        let flag = Flag::new();
        assert!(!flag.has_reached(1));
        flag.publish(1);
        assert!(flag.has_reached(1) && !flag.has_reached(2));
        assert_eq!([0, 1, 2, 3].map(parity), [0, 1, 0, 1]);
    }
}

#[cfg(all(test, loom))]
#[expect(unsafe_code, reason = "the model's slots are cells, as the real ones are raw memory")]
mod model {
    //! Run with `COLLECTIVES_LOOM=1 cargo test --lib shm::flags`.

    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    /// The model's counterpart of the region.
    struct Shared {
        flags: Vec<[Flag; 2]>,
        slots: Vec<[UnsafeCell<u64>; 2]>,
    }

    // SAFETY: the cells are guarded by the flags; loom reports any access that is not.
    unsafe impl Sync for Shared {}
    // SAFETY: its contents may be sent.
    unsafe impl Send for Shared {}

    impl Shared {
        fn new(ranks: usize) -> Self {
            Self {
                flags: (0..ranks).map(|_| [Flag::new(), Flag::new()]).collect(),
                slots: (0..ranks).map(|_| [UnsafeCell::new(0), UnsafeCell::new(0)]).collect(),
            }
        }
    }

    fn value(rank: usize, step: u64) -> u64 {
        step * 10 + rank as u64
    }

    /// How often a rank looks at a flag before it gives up. Without a limit, ranks that wait in turns make an endless
    /// execution; giving up early only leaves the rest of that one execution unchecked.
    const LOOKS: u32 = 2;

    /// Runs one rank's part; `slot` is the rule that picks the slot. Returns whether it reached the end.
    fn take_part(shared: &Shared, me: usize, steps: u64, slot: fn(u64) -> usize) -> bool {
        for step in 1..=steps {
            // SAFETY: the protocol under test; loom checks the accesses.
            shared.slots[me][slot(step)].with_mut(|cell| unsafe { *cell = value(me, step) });
            shared.flags[me][slot(step)].publish(step);
            for peer in (0..shared.flags.len()).filter(|peer| *peer != me) {
                let mut looks = 0;
                while !shared.flags[peer][slot(step)].has_reached(step) {
                    looks += 1;
                    if looks == LOOKS {
                        return false;
                    }
                    loom::thread::yield_now();
                }
                // SAFETY: the flag shows that its owner has written it; loom checks that.
                shared.slots[peer][slot(step)].with(|cell| assert_eq!(unsafe { *cell }, value(peer, step)));
            }
        }
        true
    }

    fn check(ranks: usize, steps: u64, preemptions: Option<usize>, slot: fn(u64) -> usize) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = preemptions;
        let finished = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = std::sync::Arc::clone(&finished);
        builder.check(move || {
            let shared = Arc::new(Shared::new(ranks));
            let threads: Vec<_> = (1..ranks)
                .map(|me| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || take_part(&shared, me, steps, slot))
                })
                .collect();
            let mut all = take_part(&shared, 0, steps, slot);
            for thread in threads {
                all &= thread.join().expect("a rank of the model failed");
            }
            count.fetch_add(all.into(), std::sync::atomic::Ordering::Relaxed);
        });
        assert!(finished.load(std::sync::atomic::Ordering::Relaxed) > 0, "no execution got to the end");
    }

    #[test]
    fn two_ranks_never_meet_in_a_slot() {
        check(2, 3, None, parity);
    }

    #[test]
    fn three_ranks_never_meet_in_a_slot() {
        check(3, 3, Some(1), parity);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn one_slot_is_too_few() {
        check(2, 3, None, |_| 0);
    }
}
