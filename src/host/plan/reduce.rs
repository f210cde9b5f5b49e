//! The root gets the fold of everyone's vector; the others' destinations are not touched.

use super::blocks::Part;
use super::builder::{Builder, alone};
use super::direct::direct;
use super::ring::{Sink, ring};
use super::{Algorithm, Plan, Space};

/// Up to so many bytes, `direct` brings whole vectors to the root instead of shares to everyone.
pub(super) const STAR_BYTES: usize = 8 << 10;

/// A plan for `reduce` of `bytes` bytes to `root`.
///
/// - `Binomial`: operands in rank order. Scratch: up to twice the vector.
/// - `ScatterGather`: operands in the ring's order. Scratch: ten segments.
/// - `Direct`: one fold of all operands in rank order. Scratch: `2 * (n - 1)` segments.
pub(crate) fn reduce(algorithm: Algorithm, n: usize, me: usize, root: usize, bytes: usize, element: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(bytes);
    }
    // Elements without bytes cut nothing.
    let element = element.max(1);
    let shares = || Part::whole(bytes).pieces(n, element);
    match algorithm {
        Algorithm::ScatterGather => ring(n, me, &shares(), element, segment, Sink::Root(root)),
        Algorithm::Direct if is_star(n, bytes, element) => {
            let at_root = |rank| Part { offset: if rank <= root { 0 } else { bytes }, len: if rank == root { bytes } else { 0 } };
            let shares: Vec<Part> = (0..n).map(at_root).collect();
            direct(n, me, &shares, element, segment, Sink::Root(root))
        }
        Algorithm::Direct => direct(n, me, &shares(), element, segment, Sink::Root(root)),
        _ => binomial(n, me, root, bytes, element),
    }
}

/// Whether `direct` brings whole vectors to the root.
pub(super) fn is_star(n: usize, bytes: usize, element: usize) -> bool {
    bytes <= STAR_BYTES || bytes / element < n
}

/// The rank that holds the fold of the aligned block of `size` ranks from `start` on: the root where it is one of them, so
/// that the result ends there without a detour and in rank order.
fn holder(start: usize, size: usize, root: usize) -> usize {
    if (start..start + size).contains(&root) { root } else { start }
}

/// Aligned blocks of 1, 2, 4 … ranks become one, the lower block being the left operand.
fn binomial(n: usize, me: usize, root: usize, bytes: usize, element: usize) -> Plan {
    let whole = Part::whole(bytes);
    let mut plan = Builder::new(2 * n.ilog2() as usize + 2);
    let mut buffers = [None; 2];
    let (mut partial, mut ready, mut folds) = (whole.of(Space::Source), None, 0);
    let mut size = 1;
    while size < n {
        let block = me & !(size - 1);
        let sibling = block ^ size;
        if sibling < n {
            let other = holder(sibling, size, root);
            if holder(block.min(sibling), 2 * size, root) != me {
                plan.send(other, partial, &[ready]);
                break;
            }
            let buffer = *buffers[folds % 2].get_or_insert_with(|| plan.scratch(bytes, element));
            // What lay in this buffer was read by the latest fold.
            let received = plan.receive(other, buffer, &[ready.filter(|_| folds >= 2)]);
            let last = 2 * size >= n;
            let into = if last { whole.of(Space::Destination) } else { buffer };
            let inputs = if block < sibling { vec![partial, buffer] } else { vec![buffer, partial] };
            ready = Some(plan.fold(into, inputs, last, &[Some(received), ready]));
            (partial, folds) = (into, folds + 1);
        }
        size *= 2;
    }
    plan.finish()
}
