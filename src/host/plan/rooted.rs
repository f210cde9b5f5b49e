//! The collectives with a root: `broadcast`, `gather`, `scatter`. (`reduce` folds: it is in `reduce.rs`.)

use super::builder::{Blocks, Builder, Part, alone, is_carried};
use super::{Plan, Space};
use crate::call::algorithm::Algorithm;

/// Returns a plan for `broadcast` of `bytes` bytes: every rank gets the vector of `root`.
///
/// - `Binomial`: a tree of whole vectors. Scratch: the vector, if it has at most `CARRIED_BYTES` and there are more
///   than two ranks.
/// - `Chain`: from rank to rank in segments. No scratch.
pub(crate) fn broadcast(algorithm: Algorithm, n: usize, me: usize, root: usize, bytes: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(bytes);
    }
    match algorithm {
        // Between two ranks, the root is the only other rank: its vector need not wait for an agreement.
        _ if n == 2 => tree(n, me, root, bytes),
        Algorithm::Chain => chain(n, me, root, bytes, segment),
        _ if is_carried(n, bytes) => carried(n, me, root, bytes),
        _ => tree(n, me, root, bytes),
    }
}

/// Returns a plan in which the messages of an agreement carry the vector. These messages contain a tree: after the
/// round of distance d, 2d ranks, starting at the root, have heard from the root. The vector is copied to the
/// destination when every rank has been heard from.
fn carried(n: usize, me: usize, root: usize, bytes: usize) -> Plan {
    let place = (me + n - root) % n;
    let mut plan = Builder::new(2 * n.ilog2() as usize + 3);
    let nothing = Part::whole(0).of(Space::Scratch);
    let vector = if me == root { Part::whole(bytes).of(Space::Source) } else { plan.scratch(bytes, 1) };
    let mut heard = None;
    let mut distance = 1;
    while distance < n {
        let outgoing = if place < distance && place + distance < n { vector } else { nothing };
        let incoming = if (distance..2 * distance).contains(&place) { vector } else { nothing };
        plan.send((me + distance) % n, outgoing, &[heard]);
        heard = Some(plan.receive((me + n - distance) % n, incoming, &[heard]));
        distance *= 2;
    }
    if bytes > 0 {
        plan.copy(vector, Part::whole(bytes).of(Space::Destination), &[heard]);
    }
    plan.finish()
}

/// Returns a plan with the same tree after an agreement. The vector goes directly into the destinations.
fn tree(n: usize, me: usize, root: usize, bytes: usize) -> Plan {
    let place = (me + n - root) % n;
    let mut plan = Builder::agreed(n, me);
    let whole = Part::whole(bytes);
    let vector = whole.of(if me == root { Space::Source } else { Space::Destination });
    let (mut ready, mut distance) = (None, 1);
    if place > 0 {
        let parent = 1 << place.ilog2();
        ready = Some(plan.receive((me + n - parent) % n, vector, &[]));
        distance = 2 * parent;
    }
    while place + distance < n {
        plan.send((me + distance) % n, vector, &[ready]);
        distance *= 2;
    }
    if me == root {
        plan.copy(vector, whole.of(Space::Destination), &[]);
    }
    plan.finish()
}

/// Returns a plan in which every rank passes segments on to the next one as they arrive.
fn chain(n: usize, me: usize, root: usize, bytes: usize, segment: usize) -> Plan {
    let place = (me + n - root) % n;
    let mut plan = Builder::agreed(n, me);
    let whole = Part::whole(bytes);
    for piece in whole.cut(segment) {
        let vector = piece.of(if me == root { Space::Source } else { Space::Destination });
        let ready = (place > 0).then(|| plan.receive((me + n - 1) % n, vector, &[]));
        if place + 1 < n {
            plan.send((me + 1) % n, vector, &[ready]);
        }
    }
    if me == root && bytes > 0 {
        plan.copy(whole.of(Space::Source), whole.of(Space::Destination), &[]);
    }
    plan.finish()
}

/// Returns a plan for `gather`: every rank's block goes to `root`. A rank other than the root needs only the length of
/// its own block. No scratch. The steps are added to `plan`, which begins with an agreement unless the ranks have
/// agreed before.
pub(crate) fn gather(plan: Builder, n: usize, me: usize, root: usize, blocks: Blocks<'_>) -> Plan {
    star(plan, n, me, root, blocks, true)
}

/// Returns a plan for `scatter`: every rank's block comes from `root`. A rank other than the root needs only the length
/// of its own block. No scratch. The steps are added to `plan`, as for a gather.
pub(crate) fn scatter(plan: Builder, n: usize, me: usize, root: usize, blocks: Blocks<'_>) -> Plan {
    star(plan, n, me, root, blocks, false)
}

/// Returns a plan in which blocks go directly to the root, or come directly from it.
fn star(mut plan: Builder, n: usize, me: usize, root: usize, blocks: Blocks<'_>, is_gather: bool) -> Plan {
    let (of_one, of_all) = if is_gather { (Space::Source, Space::Destination) } else { (Space::Destination, Space::Source) };
    let own = Part::whole(blocks.len(me)).of(of_one);
    if n == 1 {
        return alone(own.len);
    }
    if me != root {
        match own.len {
            0 => None,
            _ if is_gather => Some(plan.send(root, own, &[])),
            _ => Some(plan.receive(root, own, &[])),
        };
        return plan.finish();
    }
    for (rank, block) in blocks.parts(n).into_iter().enumerate().filter(|(_, block)| block.len > 0) {
        let block = block.of(of_all);
        match (rank == me, is_gather) {
            (true, true) => plan.copy(own, block, &[]),
            (true, false) => plan.copy(block, own, &[]),
            (false, true) => plan.receive(rank, block, &[]),
            (false, false) => plan.send(rank, block, &[]),
        };
    }
    plan.finish()
}
