//! Everyone has a block for everyone.
//!
//! In round k, rank r meets rank (k - r) mod n, and they exchange their blocks: every pair meets once, and no rank has two
//! partners in one round. A few rounds are under way at once.
//!
//! Small equal blocks all go at once, into scratch: everyone hears everyone, so they are copied without an agreement. (Of unequal blocks no
//! rank knows how long those of others are.)

use super::builder::{Blocks, Builder, Part, alone, is_carried};
use super::{Plan, Space, Span};
use crate::tuning::plan::EXCHANGES_IN_FLIGHT as IN_FLIGHT;

/// A plan for `all_to_all`: `sends` are this rank's blocks for the others, `receives` theirs for it.
///
/// Scratch: what is received, where blocks are small; else none. `in_place` (source and destination are the same memory, `sends` and
/// `receives` are equal): `IN_FLIGHT` segments.
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
    // Only the two ends of a transfer know its length. Whoever expects another length finds that out in the agreement, where that goes over
    // the same link. It must not have sent before, since the other end might accept that.
    let checked = plan.agreement().filter(|_| is_variable);
    // Equal blocks are cut as a partner cuts them that exchanges in place.
    let segment = if is_variable { usize::MAX } else { segment };
    let (mut sent, mut received) = ([None; IN_FLIGHT], [None; IN_FLIGHT]);
    for (turn, partner) in partners.enumerate() {
        let (outgoing, incoming) = (sends[partner], receives[partner]);
        let flight = turn % IN_FLIGHT;
        let (before_sends, before_receives) = (sent[flight], received[flight]);
        for part in outgoing.cut(segment) {
            sent[flight] = Some(plan.send(partner, part.of(Space::Source), &[before_sends, checked]));
        }
        for part in incoming.cut(segment) {
            received[flight] = Some(plan.receive(partner, part.of(Space::Destination), &[before_receives]));
        }
    }
    if sends[me].len > 0 {
        plan.copy(sends[me].of(Space::Source), receives[me].of(Space::Destination), &[]);
    }
    plan.finish()
}

/// Everything at once. What came is copied from scratch when everyone has been heard and everything has been sent (in place, a copy
/// overwrites what is sent).
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

/// Exchanges blocks with each partner in turn: a segment is copied aside, and goes out while the partner's comes in.
fn swap(plan: &mut Builder, partners: impl Iterator<Item = usize>, blocks: &[Part], segment: usize) {
    let segment = segment.max(1);
    let largest = blocks.iter().map(|block| block.len).max().unwrap_or(0);
    let mut asides = [None; IN_FLIGHT];
    let mut turn = 0;
    for partner in partners {
        for part in blocks[partner].cut(segment) {
            let (aside, free) = *asides[turn % IN_FLIGHT].get_or_insert_with(|| (plan.scratch(largest.min(segment), 1), None));
            let aside = Span { len: part.len, ..aside };
            let kept = plan.copy(part.of(Space::Source), aside, &[free]);
            let sent = plan.send(partner, aside, &[Some(kept)]);
            plan.receive(partner, part.of(Space::Destination), &[Some(kept)]);
            asides[turn % IN_FLIGHT] = Some((aside, Some(sent)));
            turn += 1;
        }
    }
}
