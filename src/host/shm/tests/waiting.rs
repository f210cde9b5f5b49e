//! Tests of how ranks wait, as the program has chosen.

use super::*;
use crate::config::Waiting;
use crate::meeting::{Meeting, wait_until};

/// Runs a barrier with this limit.
fn barrier(rank: &mut Rank, limit: Duration) -> Result<(), AbortReason> {
    rank.deadline = Deadline::after(limit);
    rank.make(Collective::Barrier, |group, context| group.barrier(context)).map_err(|stop| stop.abort_reason)
}

#[test]
fn a_rank_that_sleeps_at_once_is_woken_by_the_last_publish() {
    let calls = if cfg!(miri) { 5 } else { 100 };
    let wakes = on_threads(2, |mut rank| {
        rank.group.set_waiting(Waiting::Sleep);
        let before = rank.group.region.control().wakes();
        for _ in 0..calls {
            if rank.index == 1 {
                wait_until("rank 0 sleeps", || rank.group.region.control().sleepers() > 0);
            }
            barrier(&mut rank, PATIENCE).unwrap();
        }
        rank.group.region.control().wakes().wrapping_sub(before)
    });
    // Rank 0 may have been awake for a moment between two sleeps, but not in every call.
    assert!(wakes[1] > 0, "{wakes:?}");
}

#[test]
fn ranks_that_never_sleep_look_at_deadlines_and_at_what_ends_the_group() {
    let has_timed_out = Meeting::new(2);
    on_threads(2, |mut rank| {
        rank.group.set_waiting(Waiting::Spin);
        if rank.index == 0 {
            let late = barrier(&mut rank, Duration::from_millis(20)).unwrap_err();
            assert_eq!(late, AbortReason::TimedOut { waiting: 0, missing: 1 });
            has_timed_out.meet();
            assert_eq!(barrier(&mut rank, PATIENCE), Err(AbortReason::Aborted { by: 1 }));
            assert_eq!(rank.group.region.control().sleepers(), 0);
        } else {
            has_timed_out.meet();
            rank.group.propagate(&AbortReason::Aborted { by: 1 });
            wait_until("rank 0 has left", || rank.group.region.member(0).has_departed());
        }
    });
}

#[test]
fn the_others_look_for_a_sleeper_until_it_has_not_slept_for_long() {
    let has_looked = Meeting::new(2);
    on_threads(2, |mut rank| {
        let publishes = crate::base::tuning::waiting::LIGHT_FOR;
        // The other rank does not wait meanwhile: it would sleep.
        if rank.index == 0 {
            assert!(rank.group.region.sleeps_lightly(), "the others did not know");
            assert!(!rank.group.region.sleeps_lightly(), "they know now");
            (1..publishes).for_each(|_| rank.group.region.fade());
            assert!(rank.group.region.control().has_light_sleepers());
            rank.group.region.fade();
            assert!(!rank.group.region.control().has_light_sleepers());
            rank.group.region.fade();
            assert!(!rank.group.region.control().has_light_sleepers());
        }
        has_looked.meet();
        barrier(&mut rank, PATIENCE).unwrap();
    });
}
