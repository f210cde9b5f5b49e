//! Everyone gets the root's vector.

use super::blocks::Part;
use super::builder::{Builder, alone};
use super::{Algorithm, Plan, Space};

/// Up to so many bytes, the vector travels within the agreement, through scratch.
pub(super) const CARRIED_BYTES: usize = 64 << 10;

/// A plan for `broadcast` of `bytes` bytes from `root`.
///
/// - `Binomial`: a tree of whole vectors. Scratch: the vector, if it has at most `CARRIED_BYTES` and there are more than two ranks.
/// - `Chain`: from rank to rank in segments. No scratch.
pub(crate) fn broadcast(algorithm: Algorithm, n: usize, me: usize, root: usize, bytes: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(bytes);
    }
    match algorithm {
        // The root is everyone else: its vector need not wait, aside or at all.
        _ if n == 2 => tree(n, me, root, bytes),
        Algorithm::Chain => chain(n, me, root, bytes, segment),
        _ if bytes <= CARRIED_BYTES => carried(n, me, root, bytes),
        _ => tree(n, me, root, bytes),
    }
}

/// The agreement's messages contain a tree: after the round of distance d, the 2d ranks from the root on have what it had at
/// first. So the vector goes with them, and is copied to the destination when everyone has been heard.
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

/// The same tree after an agreement, straight into destinations.
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

/// Every rank passes segments on to the next one as they come.
fn chain(n: usize, me: usize, root: usize, bytes: usize, segment: usize) -> Plan {
    let place = (me + n - root) % n;
    let mut plan = Builder::agreed(n, me);
    let whole = Part::whole(bytes);
    let pieces = if bytes == 0 { 0 } else { whole.segments(segment, 1) };
    for piece in (0..pieces).map(|index| whole.piece(pieces, index, 1)) {
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
