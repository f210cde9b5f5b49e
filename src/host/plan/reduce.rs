//! The collectives that fold: `all_reduce`, `reduce`, `reduce_scatter`.

use super::builder::{Blocks, Builder, Part, alone};
use super::direct::direct;
use super::ring::{Sink, ring};
use super::{Plan, Space, Span};
use crate::base::tuning::plan::{FLAT_BYTES, STAR_BYTES};
use crate::call::algorithm::Algorithm;

/// Returns a plan for `all_reduce` of `bytes` bytes: every rank gets the fold of all ranks' vectors.
///
/// - `Doubling`: operands in rank order, grouped in the same way on every rank. Scratch: up to twice the vector.
/// - `Ring`: operands in the ring's order. Scratch: ten segments.
/// - `Direct`: one fold of all operands in rank order. Scratch: `2 * (n - 1)` segments, or up to `FLAT_BYTES`.
pub(crate) fn all_reduce(algorithm: Algorithm, n: usize, me: usize, bytes: usize, element: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(bytes);
    }
    // Zero-sized elements count as one byte, so that nothing divides by zero.
    let element = element.max(1);
    let shares = || Part::whole(bytes).pieces(n, element);
    match algorithm {
        Algorithm::Ring => ring(n, me, &shares(), element, segment, Sink::Everyone),
        Algorithm::Direct if is_flat(n, bytes, element) => flat(n, me, bytes, element),
        Algorithm::Direct => direct(n, me, &shares(), element, segment, Sink::Everyone),
        _ => Doubling::plan(n, me, bytes, element),
    }
}

/// Whether `direct` sends whole vectors.
pub(super) fn is_flat(n: usize, bytes: usize, element: usize) -> bool {
    bytes.saturating_mul(n - 1) <= FLAT_BYTES || bytes / element < n
}

/// Returns a plan in which every rank sends its whole vector to every other, and folds them all.
fn flat(n: usize, me: usize, bytes: usize, element: usize) -> Plan {
    let mut plan = Builder::new(2 * n);
    let own = Part::whole(bytes).of(Space::Source);
    let mut inputs = vec![own; n];
    let mut after = Vec::with_capacity(2 * n);
    for distance in 1..n {
        // In place, the fold overwrites what is being sent.
        after.push(Some(plan.send((me + distance) % n, own, &[])));
        let from = (me + n - distance) % n;
        inputs[from] = plan.scratch(bytes, element);
        after.push(Some(plan.receive(from, inputs[from], &[])));
    }
    plan.fold(Part::whole(bytes).of(Space::Destination), inputs, true, &after);
    plan.finish()
}

/// The state of recursive doubling while its plan is built.
struct Doubling {
    plan: Builder,
    buffers: [Span; 2],
    bytes: usize,
    /// The number of folds in total, and so far.
    folds: usize,
    folded: usize,
    /// The fold of a group of neighbours in rank order, and the step that computed it.
    partial: Span,
    ready: Option<usize>,
    /// The send of this rank's contribution, and the sends of the buffers' contents.
    source_sent: Option<usize>,
    buffer_sent: [Option<usize>; 2],
}

impl Doubling {
    /// Returns a plan by recursive doubling: at distances 1, 2, 4 … ranks exchange the folds of their groups. The lower
    /// group is always the left operand, so all ranks fold the same operands in the same order. If n is not a power of
    /// two, the lowest ranks first form adjacent pairs, and the even rank acts for both.
    fn plan(n: usize, me: usize, bytes: usize, element: usize) -> Plan {
        let power = 1 << n.ilog2();
        let pairs = n - power;
        let paired = me < 2 * pairs;
        if paired && me % 2 == 1 {
            return Self::represented(me, bytes);
        }
        let (number, rank) = if paired { (me / 2, me) } else { (me - pairs, me) };
        let actor = |number: usize| if number < pairs { 2 * number } else { number + pairs };
        let mut doubling = Self::new(bytes, element, n.ilog2() as usize + usize::from(paired));
        if paired {
            doubling.fold(rank + 1, true);
        }
        let mut distance = 1;
        while distance < power {
            let other = number ^ distance;
            doubling.send(actor(other));
            doubling.fold(actor(other), number < other);
            distance *= 2;
        }
        if paired {
            doubling.send(rank + 1);
        }
        doubling.plan.finish()
    }

    /// Returns the plan of a rank for which its lower neighbour acts.
    fn represented(me: usize, bytes: usize) -> Plan {
        let mut plan = Builder::new(2);
        let sent = plan.send(me - 1, Part::whole(bytes).of(Space::Source), &[]);
        plan.receive(me - 1, Part::whole(bytes).of(Space::Destination), &[Some(sent)]);
        plan.finish()
    }

    fn new(bytes: usize, element: usize, folds: usize) -> Self {
        let mut plan = Builder::new(3 * folds + 1);
        let first = plan.scratch(bytes, element);
        let second = if folds > 1 { plan.scratch(bytes, element) } else { first };
        let partial = Part::whole(bytes).of(Space::Source);
        let (ready, source_sent, buffer_sent) = (None, None, [None; 2]);
        Self { plan, buffers: [first, second], bytes, folds, folded: 0, partial, ready, source_sent, buffer_sent }
    }

    /// Sends the partial result.
    fn send(&mut self, to: usize) {
        let sent = Some(self.plan.send(to, self.partial, &[self.ready]));
        match self.folded {
            0 => self.source_sent = sent,
            folded => self.buffer_sent[(folded - 1) % 2] = sent,
        }
    }

    /// Receives another group's partial result, and folds it with that of this rank's group.
    fn fold(&mut self, from: usize, own_is_left: bool) {
        let (buffer, reused) = (self.buffers[self.folded % 2], self.folded >= 2);
        // The previous content of this buffer was sent, and then read by the latest fold.
        let after = [self.ready.filter(|_| reused), self.buffer_sent[self.folded % 2]];
        let received = self.plan.receive(from, buffer, &after);
        self.folded += 1;
        let last = self.folded == self.folds;
        let into = if last { Part::whole(self.bytes).of(Space::Destination) } else { buffer };
        let inputs = if own_is_left { vec![self.partial, buffer] } else { vec![buffer, self.partial] };
        // In place, the last fold overwrites what was sent first.
        let after = [Some(received), self.ready, self.source_sent.filter(|_| last)];
        self.ready = Some(self.plan.fold(into, inputs, last, &after));
        self.partial = into;
    }
}

/// Returns a plan for `reduce` of `bytes` bytes to `root`, which gets the fold of all ranks' vectors. The other ranks'
/// destinations are not touched.
///
/// - `Binomial`: operands in rank order. Scratch: up to twice the vector.
/// - `ScatterGather`: operands in the ring's order. Scratch: ten segments.
/// - `Direct`: one fold of all operands in rank order. Scratch: `2 * (n - 1)` segments.
pub(crate) fn reduce(algorithm: Algorithm, n: usize, me: usize, root: usize, bytes: usize, element: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(bytes);
    }
    // Zero-sized elements count as one byte, so that nothing divides by zero.
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

/// Whether `direct` sends whole vectors to the root.
pub(super) fn is_star(n: usize, bytes: usize, element: usize) -> bool {
    bytes <= STAR_BYTES || bytes / element < n
}

/// Returns the rank that holds the fold of the aligned block of `size` ranks from `start`. If the block contains the
/// root, the root holds the fold, so that the result arrives there directly and in rank order.
fn holder(start: usize, size: usize, root: usize) -> usize {
    if (start..start + size).contains(&root) { root } else { start }
}

/// Returns a plan in which aligned blocks of 1, 2, 4 … ranks are merged. The lower block is the left operand.
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
            // The previous content of this buffer was read by the latest fold.
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

/// Returns a plan for `reduce_scatter` with these blocks: every rank gets its own block of the fold of all ranks'
/// vectors.
///
/// - `Ring`: operands in the ring's order. Scratch: ten segments.
/// - `Direct`: one fold of all operands in rank order. Scratch: `2 * (n - 1)` segments.
pub(crate) fn reduce_scatter(algorithm: Algorithm, n: usize, me: usize, blocks: Blocks<'_>, element: usize, segment: usize) -> Plan {
    if n == 1 {
        return alone(blocks.len(me));
    }
    // Zero-sized elements count as one byte, so that nothing divides by zero.
    let element = element.max(1);
    let shares = blocks.parts(n);
    match algorithm {
        Algorithm::Direct => direct(n, me, &shares, element, segment, Sink::Own),
        _ => ring(n, me, &shares, element, segment, Sink::Own),
    }
}
