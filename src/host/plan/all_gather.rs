//! All-gather: every rank gets the block of every rank.

use super::builder::{Blocks, Builder, Part, alone, is_carried};
use super::{Plan, Space, Span};
use crate::call::algorithm::Algorithm;

/// Returns a plan for `all_gather` with these blocks.
///
/// - `Doubling`: through scratch, which is as long as the result.
/// - `Ring`: every block travels half the ring in each direction. No scratch.
/// - `Direct`: every block goes straight to every rank. Scratch: the result, if it has at most `CARRIED_BYTES` and
///   there are more than two ranks.
pub(crate) fn all_gather(algorithm: Algorithm, n: usize, me: usize, blocks: Blocks<'_>, segment: usize) -> Plan {
    if n == 1 {
        return alone(blocks.len(me));
    }
    let blocks = blocks.parts(n);
    match algorithm {
        Algorithm::Ring => Ring::plan(n, me, &blocks, segment),
        Algorithm::Direct if is_carried(n, total(&blocks)) => carried(n, me, &blocks),
        Algorithm::Direct => direct(n, me, &blocks),
        _ => doubling(n, me, &blocks),
    }
}

/// Returns this rank's own block, as the caller contributes it.
fn contribution(block: Part) -> Span {
    Part::whole(block.len).of(Space::Source)
}

/// Copies this rank's block to its place in the destination.
fn copy_own(plan: &mut Builder, block: Part, after: Option<usize>) {
    if block.len > 0 {
        plan.copy(contribution(block), block.of(Space::Destination), &[after]);
    }
}

/// Returns a plan by doubling. Before the round of distance d, a rank has its own block and those of the d - 1 ranks
/// before it. It sends them to the rank d places further on. Scratch holds the blocks in the order of ranks from `me +
/// 1` round to `me`, so each message is contiguous. At the end every rank has heard from every other, and the blocks
/// are copied to the destination.
fn doubling(n: usize, me: usize, blocks: &[Part]) -> Plan {
    let mut plan = Builder::new(2 * n.ilog2() as usize + 6);
    let lens = (1..=n).map(|distance| blocks[(me + distance) % n].len);
    let starts: Vec<usize> = std::iter::once(0)
        .chain(lens.scan(0, |end, len| {
            *end += len;
            Some(*end)
        }))
        .collect();
    let scratch = plan.scratch(starts[n], 1);
    // Adjacent blocks in scratch: `count` of them, the last one being `back` ranks before `me`.
    let run = |back: usize, count: usize| {
        let (start, end) = (starts[n - back - count], starts[n - back]);
        Span { offset: scratch.offset + start, len: end - start, ..scratch }
    };
    let kept = (blocks[me].len > 0).then(|| plan.copy(contribution(blocks[me]), run(0, 1), &[]));
    let (mut heard, mut distance) = (None, 1);
    while distance < n {
        let count = distance.min(n - distance);
        let outgoing = if distance == 1 { contribution(blocks[me]) } else { run(0, count) };
        plan.send((me + distance) % n, outgoing, &[heard, kept.filter(|_| distance > 1)]);
        heard = Some(plan.receive((me + n - distance) % n, run(distance, count), &[heard]));
        distance *= 2;
    }
    // In scratch, higher ranks' blocks come first, then lower ranks', then this rank's.
    for (first, back, count) in [(me + 1, me + 1, n - 1 - me), (0, 1, me)] {
        let from = run(back, count);
        if from.len > 0 {
            plan.copy(from, Span { space: Space::Destination, offset: blocks[first].offset, len: from.len }, &[heard]);
        }
    }
    copy_own(&mut plan, blocks[me], heard);
    plan.finish()
}

/// Returns the total length of all blocks.
fn total(blocks: &[Part]) -> usize {
    blocks.last().map_or(0, |last| last.offset.saturating_add(last.len))
}

/// Returns a plan in which every rank sends its block to every other, into scratch. When all blocks have arrived, every
/// rank has heard from every other.
fn carried(n: usize, me: usize, blocks: &[Part]) -> Plan {
    let mut plan = Builder::new(2 * n + 2);
    let aside = plan.scratch(total(blocks), 1);
    let within = |part: Part| Span { offset: aside.offset + part.offset, len: part.len, ..aside };
    let mut arrived = Vec::with_capacity(n);
    for distance in 1..n {
        plan.send((me + distance) % n, contribution(blocks[me]), &[]);
        let from = (me + n - distance) % n;
        arrived.push(Some(plan.receive(from, within(blocks[from]), &[])));
    }
    let all = Some(plan.join(&arrived));
    let (before, after) = (blocks[me].offset, blocks[me].offset + blocks[me].len);
    for part in [Part { offset: 0, len: before }, Part { offset: after, len: total(blocks) - after }] {
        if part.len > 0 {
            plan.copy(within(part), part.of(Space::Destination), &[all]);
        }
    }
    copy_own(&mut plan, blocks[me], all);
    plan.finish()
}

/// Returns a plan in which every rank sends its block to every other, after an agreement, directly into the
/// destinations.
fn direct(n: usize, me: usize, blocks: &[Part]) -> Plan {
    let mut plan = Builder::agreed(n, me);
    for distance in 1..n {
        if blocks[me].len > 0 {
            plan.send((me + distance) % n, contribution(blocks[me]), &[]);
        }
        let from = (me + n - distance) % n;
        if blocks[from].len > 0 {
            plan.receive(from, blocks[from].of(Space::Destination), &[]);
        }
    }
    copy_own(&mut plan, blocks[me], None);
    plan.finish()
}

/// One direction around the ring.
struct Ring<'a> {
    n: usize,
    me: usize,
    blocks: &'a [Part],
    segment: usize,
    forward: bool,
    hops: usize,
    /// The receives of the segments that are sent in the next hop.
    received: Vec<usize>,
}

impl<'a> Ring<'a> {
    /// Returns a plan in which blocks travel n / 2 hops forward and the rest backward, so that each arrives once.
    fn plan(n: usize, me: usize, blocks: &'a [Part], segment: usize) -> Plan {
        let mut plan = Builder::agreed(n, me);
        let direction = |forward, hops| Self { n, me, blocks, segment, forward, hops, received: Vec::new() };
        let mut directions = [direction(true, n / 2), direction(false, (n - 1) / 2)];
        for hop in 0..n / 2 {
            for direction in &mut directions {
                direction.hop(&mut plan, hop);
            }
        }
        copy_own(&mut plan, blocks[me], None);
        plan.finish()
    }

    /// Returns the rank that is `places` places before this one in this direction.
    fn before(&self, places: usize) -> usize {
        if self.forward { (self.me + self.n - places) % self.n } else { (self.me + places) % self.n }
    }

    /// Sends what arrived in the previous hop, and receives the next block.
    fn hop(&mut self, plan: &mut Builder, hop: usize) {
        if hop >= self.hops {
            return;
        }
        let (next, previous) = (self.before(self.n - 1), self.before(1));
        let segments = |rank: usize| self.blocks[rank].cut(self.segment).collect::<Vec<_>>();
        let (incoming, outgoing) = (segments(self.before(hop + 1)), segments(self.before(hop)));
        let mut received = Vec::with_capacity(incoming.len());
        for index in 0..incoming.len().max(outgoing.len()) {
            if let Some(part) = outgoing.get(index) {
                let from = match hop {
                    0 => Part { offset: part.offset - self.blocks[self.me].offset, len: part.len }.of(Space::Source),
                    _ => part.of(Space::Destination),
                };
                plan.send(next, from, &[self.received.get(index).copied()]);
            }
            if let Some(part) = incoming.get(index) {
                received.push(plan.receive(previous, part.of(Space::Destination), &[]));
            }
        }
        self.received = received;
    }
}
