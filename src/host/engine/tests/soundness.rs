//! Plans that are wrong, folds that panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::plans::{destination, plan, scratch, source, step};
use super::*;
use crate::host::plan::{Action, Step};

/// Runs steps that cannot be run on rank 0 of two, whose peer is told.
fn fails(steps: Vec<Step>, scratch_bytes: usize) {
    let mut ranks = Rank::all(sockets(2));
    let stop = ranks[0].run(&plan(steps, scratch_bytes), &call(1), memory(&[1; 4], 32, &mut [2; 4], 32));
    assert_eq!(stop, Err(AbortReason::Failed { rank: 0 }.into()));
    let theirs = ranks[1].run(&plans::exchange(1, 8), &call(1), memory(&[1; 4], 32, &mut [2; 4], 32));
    assert_eq!(theirs, Err(AbortReason::Failed { rank: 0 }.into()));
}

#[test]
fn a_plan_that_is_wrong_is_refused_and_the_peers_are_told() {
    fails(vec![step(Action::Send { to: 1, from: source(8, 32) }, &[])], 0);
    fails(vec![step(Action::Receive { from: 1, into: source(0, 8) }, &[])], 0);
    fails(vec![step(Action::Receive { from: 0, into: destination(0, 8) }, &[])], 0);
    fails(vec![step(Action::Receive { from: 2, into: destination(0, 8) }, &[])], 0);
    fails(vec![step(Action::Receive { from: 1, into: destination(0, 8) }, &[0])], 0);
    fails(vec![step(Action::Receive { from: 1, into: scratch(0, 8) }, &[])], 0);
    fails(vec![step(Action::Copy { from: source(0, 8), into: scratch(0, 8) }, &[])], usize::MAX);
}

#[test]
fn a_plan_of_nothing_and_one_for_a_single_rank_are_done_at_once() {
    let mut rank = Rank::all(sockets(1)).remove(0);
    let mut got = [0; 4];
    assert_eq!(rank.run(&Plan::default(), &call(1), memory(&[], 0, &mut [], 0)), Ok(()));
    let copy = step(Action::Copy { from: source(8, 16), into: destination(0, 16) }, &[]);
    assert_eq!(rank.run(&plan(vec![copy], 0), &call(2), memory(&[1, 2, 3, 4], 32, &mut got, 32)), Ok(()));
    assert_eq!(got, [2, 3, 0, 0]);
}

/// Panics as a user's own op may.
struct Panics;

impl Fold for Panics {
    fn element_bytes(&self) -> usize {
        8
    }

    fn is_commutative(&self) -> bool {
        false
    }

    unsafe fn fold(&self, _into: *mut u8, _inputs: &[*const u8], _bytes: usize, _last: bool) {
        std::panic::resume_unwind(Box::new(()));
    }
}

#[test]
fn after_a_fold_that_panicked_everyone_is_told() {
    let mut ranks = Rank::all(sockets(2));
    let fold = Action::Fold { into: destination(0, 8), inputs: vec![source(0, 8)], last: true };
    // More than a socket holds: the send stays half done.
    let count = 1 << 18;
    let (mine, mut got) = (vec![1; count], vec![0; count]);
    let long = step(Action::Send { to: 1, from: source(0, count * 8) }, &[]);
    let folding = plan(vec![long, step(Action::Receive { from: 1, into: destination(0, 8) }, &[]), step(fold, &[1])], 0);
    let both = plans::exchange(1, 8);
    let (first, second) = ranks.split_at_mut(1);
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| second[0].run(&both, &call(1), memory(&[1], 8, &mut [0], 8)));
        let run = AssertUnwindSafe(|| {
            first[0].run_with(Duration::from_secs(9), &folding, &call(1), memory(&mine, count * 8, &mut got, count * 8), &Panics)
        });
        assert!(catch_unwind(run).is_err() || theirs.is_finished());
        let again = first[0].run(&both, &call(2), memory(&[1], 8, &mut [0], 8));
        assert!(again.is_err());
        assert!(theirs.join().expect("the peer").is_err());
    });
}

#[test]
fn an_engine_may_move_to_another_thread() {
    fn moves<T: Send>(_: &T) {}
    moves(&Engine::new(0, 1, 1));
}
