//! Small plans, written out by hand.

use crate::host::plan::{Action, Plan, Space, Span, Step};

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

/// Two ranks swap `len` bytes.
pub(super) fn exchange(rank: usize, len: usize) -> Plan {
    let send = Action::Send { to: 1 - rank, from: source(0, len) };
    plan(vec![step(send, &[]), step(Action::Receive { from: 1 - rank, into: destination(0, len) }, &[])], 0)
}

/// Everyone sends rank `to` a part of `lens[from][to]` bytes; parts lie one behind the other on both sides.
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

/// Nobody leaves before all have entered, in rounds of doubling distance.
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

/// Ring reduce-scatter, then ring all-gather, in `size` blocks of `block` bytes.
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
