//! Everyone has a block for everyone.
//!
//! In round k, rank r meets rank (k - r) mod n, and they exchange their blocks: every pair meets once, and no rank has two
//! partners in one round. A few rounds are under way at once.

use super::blocks::Part;
use super::builder::{Builder, alone};
use super::{Blocks, Plan, Space};

/// How many exchanges are under way at once.
pub(super) const IN_FLIGHT: usize = 4;

/// A plan for `all_to_all`: `sends` are this rank's blocks for the others, `receives` theirs for it.
///
/// `in_place`: source and destination are the same memory; then `sends` and `receives` must be equal, blocks are cut into
/// segments, and scratch is `IN_FLIGHT` segments, else none.
pub(crate) fn all_to_all(n: usize, me: usize, sends: Blocks<'_>, receives: Blocks<'_>, in_place: bool, segment: usize) -> Plan {
    if n == 1 {
        return alone(sends.len(me));
    }
    let (sends, receives) = (sends.parts(n), receives.parts(n));
    let partners = (0..n).map(|round| (round + n - me) % n).filter(|partner| *partner != me);
    let mut plan = Builder::agreed(n, me);
    if in_place {
        swap(&mut plan, partners, &sends, segment);
        return plan.finish();
    }
    let (mut sent, mut received) = ([None; IN_FLIGHT], [None; IN_FLIGHT]);
    for (turn, partner) in partners.enumerate() {
        let (outgoing, incoming) = (sends[partner], receives[partner]);
        let flight = turn % IN_FLIGHT;
        if outgoing.len > 0 {
            sent[flight] = Some(plan.send(partner, outgoing.of(Space::Source), &[sent[flight]]));
        }
        if incoming.len > 0 {
            received[flight] = Some(plan.receive(partner, incoming.of(Space::Destination), &[received[flight]]));
        }
    }
    if sends[me].len > 0 {
        plan.copy(sends[me].of(Space::Source), receives[me].of(Space::Destination), &[]);
    }
    plan.finish()
}

/// Exchanges blocks with each partner in turn: a segment is copied aside, and goes out while the partner's comes in.
fn swap(plan: &mut Builder, partners: impl Iterator<Item = usize>, blocks: &[Part], segment: usize) {
    let segment = segment.max(1);
    let largest = blocks.iter().map(|block| block.len).max().unwrap_or(0);
    let mut asides = [None; IN_FLIGHT];
    let mut turn = 0;
    for partner in partners {
        let block = blocks[partner];
        let pieces = if block.len == 0 { 0 } else { block.segments(segment, 1) };
        for part in (0..pieces).map(|index| block.piece(pieces, index, 1)) {
            let (aside, free) = *asides[turn % IN_FLIGHT].get_or_insert_with(|| (plan.scratch(largest.min(segment), 1), None));
            let aside = super::Span { len: part.len, ..aside };
            let kept = plan.copy(part.of(Space::Source), aside, &[free]);
            let sent = plan.send(partner, aside, &[Some(kept)]);
            plan.receive(partner, part.of(Space::Destination), &[Some(kept)]);
            asides[turn % IN_FLIGHT] = Some((aside, Some(sent)));
            turn += 1;
        }
    }
}
