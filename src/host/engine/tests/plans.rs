//! Small hand-written plans, plans that are wrong, and folds that panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::host::plan::{Space, Span, Step};

pub(super) fn span(space: Space, offset: usize, len: usize) -> Span {
    Span { space, offset, len }
}

pub(super) fn source(offset: usize, len: usize) -> Span {
    span(Space::Source, offset, len)
}

pub(super) fn destination(offset: usize, len: usize) -> Span {
    span(Space::Destination, offset, len)
}

pub(super) fn scratch(offset: usize, len: usize) -> Span {
    span(Space::Scratch, offset, len)
}

pub(super) fn step(action: Action, after: &[usize]) -> Step {
    Step { action, after: after.to_vec() }
}

pub(super) fn plan(steps: Vec<Step>, scratch_bytes: usize) -> Plan {
    Plan { steps, scratch_bytes }
}

/// Returns a plan in which two ranks swap `len` bytes.
pub(super) fn exchange(rank: usize, len: usize) -> Plan {
    let send = Action::Send { to: 1 - rank, from: source(0, len) };
    plan(vec![step(send, &[]), step(Action::Receive { from: 1 - rank, into: destination(0, len) }, &[])], 0)
}

/// Returns a plan in which every rank sends rank `to` a part of `lens[from][to]` bytes. The parts are contiguous on
/// both sides.
pub(super) fn all_to_all(rank: usize, lens: &[Vec<usize>]) -> Plan {
    let (mut steps, mut sent, mut received) = (vec![], 0, 0);
    for (peer, theirs) in lens.iter().enumerate() {
        let (out, back) = (lens[rank][peer], theirs[rank]);
        if peer == rank {
            steps.push(step(Action::Copy { from: source(sent, out), into: destination(received, out) }, &[]));
        } else {
            steps.push(step(Action::Send { to: peer, from: source(sent, out) }, &[]));
            steps.push(step(Action::Receive { from: peer, into: destination(received, back) }, &[]));
        }
        (sent, received) = (sent + out, received + back);
    }
    plan(steps, 0)
}

/// Returns a plan that no rank finishes before all have begun, in rounds of doubling distance.
pub(super) fn barrier(rank: usize, size: usize) -> Plan {
    let (mut steps, mut distance) = (vec![], 1);
    while distance < size {
        let after: Vec<usize> = steps.len().checked_sub(1).into_iter().collect();
        steps.push(step(Action::Send { to: (rank + distance) % size, from: source(0, 0) }, &after));
        steps.push(step(Action::Receive { from: (rank + size - distance) % size, into: destination(0, 0) }, &after));
        distance *= 2;
    }
    plan(steps, 0)
}

/// Returns a plan of a ring reduce-scatter, then a ring all-gather, in `size` blocks of `block` bytes.
pub(super) fn ring(rank: usize, size: usize, block: usize) -> Plan {
    let (right, left) = ((rank + 1) % size, (rank + size - 1) % size);
    let part = |index: usize| ((rank + size * 2 - index) % size) * block;
    let mut steps = vec![step(Action::Copy { from: source(0, size * block), into: destination(0, size * block) }, &[])];
    let mut before = 0;
    for round in 0..size - 1 {
        let (mine, theirs) = (destination(part(round), block), destination(part(round + 1), block));
        let incoming = scratch(round * block, block);
        steps.push(step(Action::Send { to: right, from: mine }, &[before]));
        steps.push(step(Action::Receive { from: left, into: incoming }, &[]));
        let receive = steps.len() - 1;
        steps.push(step(Action::Fold { into: theirs, inputs: vec![incoming, theirs], last: round == size - 2 }, &[before, receive]));
        before = steps.len() - 1;
    }
    for round in 0..size - 1 {
        let (mine, theirs) = (destination(part(round + size - 1), block), destination(part(round + size), block));
        steps.push(step(Action::Send { to: right, from: mine }, &[before]));
        steps.push(step(Action::Receive { from: left, into: theirs }, &[before]));
        before = steps.len() - 1;
    }
    plan(steps, size * block)
}

/// Checks that rank 0 of two fails to run the steps, and that its peer is notified.
fn fails(steps: Vec<Step>, scratch_bytes: usize) {
    let mut ranks = Rank::all(sockets(2));
    let stop = ranks[0].run(&plan(steps, scratch_bytes), &call(1), memory(&[1; 4], 32, &mut [2; 4], 32));
    assert_eq!(stop, Err(AbortReason::Failed { rank: 0 }.into()));
    let theirs = ranks[1].run(&exchange(1, 8), &call(1), memory(&[1; 4], 32, &mut [2; 4], 32));
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

/// A fold that panics, as a user-defined op may.
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
    // This is more than a socket holds, so the send stays half done.
    let count = 1 << 18;
    let (mine, mut got) = (vec![1; count], vec![0; count]);
    let long = step(Action::Send { to: 1, from: source(0, count * 8) }, &[]);
    let folding = plan(vec![long, step(Action::Receive { from: 1, into: destination(0, 8) }, &[]), step(fold, &[1])], 0);
    let both = exchange(1, 8);
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
    moves(&Engine::new(0, 1, false));
}
