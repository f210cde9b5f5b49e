//! Everyone has a block for everyone.
//!
//! In round k, rank r meets rank (k - r) mod n, and they exchange their blocks: every pair meets once, and no rank has two
//! partners in one round. A few rounds are under way at once.
//!
//! Small blocks all go at once, into scratch: everyone hears everyone, so nothing else is needed before they are copied.

use super::blocks::Part;
use super::builder::{Builder, alone};
use super::{Blocks, Plan, Space};

/// How many exchanges are under way at once.
pub(super) const IN_FLIGHT: usize = 4;

/// Up to so many bytes in all, equal blocks go through scratch. (How long unequal ones of others are, no rank knows.)
pub(super) const CARRIED_BYTES: usize = 64 << 10;

/// A plan for `all_to_all`: `sends` are this rank's blocks for the others, `receives` theirs for it.
///
/// Scratch: what is received, where that is carried. Else none, but `in_place` (source and destination are the same memory, and
/// `sends` and `receives` equal) `IN_FLIGHT` segments.
pub(crate) fn all_to_all(n: usize, me: usize, sends: Blocks<'_>, receives: Blocks<'_>, in_place: bool, segment: usize) -> Plan {
    if n == 1 {
        return alone(sends.len(me));
    }
    let is_carried = matches!(sends, Blocks::Equal(block) if is_carried(n, block.saturating_mul(n)));
    let is_variable = matches!(sends, Blocks::Each(_));
    let (sends, receives) = (sends.parts(n), receives.parts(n));
    let partners = (0..n).map(|round| (round + n - me) % n).filter(|partner| *partner != me);
    if is_carried {
        return carried(me, partners, &sends, &receives);
    }
    let mut plan = Builder::agreed(n, me);
    if in_place {
        swap(&mut plan, partners, &sends, segment);
        return plan.finish();
    }
    // Only the two ends of a transfer know its length. Where their agreement goes over the same link, who expects another one finds out
    // in it, and must not have sent what the other end would be content with.
    let checked = plan.agreement().filter(|_| is_variable);
    let (mut sent, mut received) = ([None; IN_FLIGHT], [None; IN_FLIGHT]);
    for (turn, partner) in partners.enumerate() {
        let (outgoing, incoming) = (sends[partner], receives[partner]);
        let flight = turn % IN_FLIGHT;
        // As a partner that does it in place cuts them.
        let pieces = |block: Part| if is_variable { usize::from(block.len > 0) } else { pieces(block, segment) };
        let (before_sends, before_receives) = (sent[flight], received[flight]);
        for part in (0..pieces(outgoing)).map(|index| outgoing.piece(pieces(outgoing), index, 1)) {
            sent[flight] = Some(plan.send(partner, part.of(Space::Source), &[before_sends, checked]));
        }
        for part in (0..pieces(incoming)).map(|index| incoming.piece(pieces(incoming), index, 1)) {
            received[flight] = Some(plan.receive(partner, part.of(Space::Destination), &[before_receives]));
        }
    }
    if sends[me].len > 0 {
        plan.copy(sends[me].of(Space::Source), receives[me].of(Space::Destination), &[]);
    }
    plan.finish()
}

/// Whether equal blocks go through scratch, of `bytes` bytes in all.
pub(super) fn is_carried(n: usize, bytes: usize) -> bool {
    n > 2 && bytes <= CARRIED_BYTES
}

/// Everything at once; what came is copied from scratch when everyone has been heard and, in place, has been sent to.
fn carried(me: usize, partners: impl Iterator<Item = usize>, sends: &[Part], receives: &[Part]) -> Plan {
    let mut plan = Builder::new(4 * sends.len());
    let (mut moved, mut arrived) = (Vec::with_capacity(2 * sends.len()), Vec::with_capacity(sends.len()));
    for partner in partners {
        moved.push(Some(plan.send(partner, sends[partner].of(Space::Source), &[])));
        let aside = plan.scratch(receives[partner].len, 1);
        moved.push(Some(plan.receive(partner, aside, &[])));
        arrived.push((aside, receives[partner]));
    }
    let all = Some(plan.join(&moved));
    for (aside, block) in arrived.into_iter().filter(|(_, block)| block.len > 0) {
        plan.copy(aside, block.of(Space::Destination), &[all]);
    }
    if sends[me].len > 0 {
        plan.copy(sends[me].of(Space::Source), receives[me].of(Space::Destination), &[all]);
    }
    plan.finish()
}

/// How many messages an equal block takes: the same in place and not, since ranks may differ in that.
fn pieces(block: Part, segment: usize) -> usize {
    if block.len == 0 { 0 } else { block.segments(segment.max(1), 1) }
}

/// Exchanges blocks with each partner in turn: a segment is copied aside, and goes out while the partner's comes in.
fn swap(plan: &mut Builder, partners: impl Iterator<Item = usize>, blocks: &[Part], segment: usize) {
    let segment = segment.max(1);
    let largest = blocks.iter().map(|block| block.len).max().unwrap_or(0);
    let mut asides = [None; IN_FLIGHT];
    let mut turn = 0;
    for partner in partners {
        let block = blocks[partner];
        let pieces = pieces(block, segment);
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
