//! All-to-all: every rank has a block for every rank.
//!
//! In round k, rank r is paired with rank (k - r) mod n, and they exchange their blocks: every pair meets once, and no
//! rank has two partners in one round. A few rounds are in progress at once.
//!
//! Small equal blocks are all sent at once, into scratch: every rank hears from every other, so the blocks are copied
//! to the destination without a separate agreement. Unequal blocks are sent after the ranks have compared their
//! lengths, which is also the agreement.

use super::builder::{Blocks, Builder, Part, alone, is_carried};
use super::{Plan, Space, Span};
use crate::base::tuning::plan::EXCHANGES_IN_FLIGHT as IN_FLIGHT;

/// Returns a plan for `all_to_all` of equally long blocks.
///
/// Scratch: the received bytes if blocks are small; otherwise `IN_FLIGHT` segments if `in_place` (source and
/// destination are the same memory), and none if not.
pub(crate) fn all_to_all(n: usize, me: usize, block: usize, in_place: bool, segment: usize) -> Plan {
    if n == 1 {
        return alone(block);
    }
    let blocks = Blocks::Equal(block).parts(n);
    if is_carried(n, block.saturating_mul(n)) {
        return carried(me, partners(n, me), &blocks);
    }
    let mut plan = Builder::agreed(n, me);
    if in_place {
        swap(&mut plan, partners(n, me), &blocks, segment);
    } else {
        // Cut in the same way as a partner that exchanges in place.
        exchange(&mut plan, me, &blocks, &blocks, segment);
    }
    plan.finish()
}

/// Returns a plan for `all_to_all_v` between ranks that have compared their counts: `sends` are this rank's blocks for
/// the others, `receives` are theirs for this rank. No scratch.
pub(crate) fn all_to_all_v(n: usize, me: usize, sends: Blocks<'_>, receives: Blocks<'_>) -> Plan {
    if n == 1 {
        return alone(sends.len(me));
    }
    let mut plan = Builder::new(2 * n);
    exchange(&mut plan, me, &sends.parts(n), &receives.parts(n), usize::MAX);
    plan.finish()
}

/// Returns a rank's partners, in order.
fn partners(n: usize, me: usize) -> impl Iterator<Item = usize> {
    (0..n).map(move |round| (round + n - me) % n).filter(move |partner| *partner != me)
}

/// Sends blocks directly from the source and receives them directly into the destination, a few at a time.
fn exchange(plan: &mut Builder, me: usize, sends: &[Part], receives: &[Part], segment: usize) {
    let (mut sent, mut received) = ([None; IN_FLIGHT], [None; IN_FLIGHT]);
    for (turn, partner) in partners(sends.len(), me).enumerate() {
        let flight = turn % IN_FLIGHT;
        let (before_sends, before_receives) = (sent[flight], received[flight]);
        for part in sends[partner].cut(segment) {
            sent[flight] = Some(plan.send(partner, part.of(Space::Source), &[before_sends]));
        }
        for part in receives[partner].cut(segment) {
            received[flight] = Some(plan.receive(partner, part.of(Space::Destination), &[before_receives]));
        }
    }
    if sends[me].len > 0 {
        plan.copy(sends[me].of(Space::Source), receives[me].of(Space::Destination), &[]);
    }
}

/// Returns a plan that exchanges everything at once. The received blocks are copied from scratch when every rank has
/// been heard from and everything has been sent (in place, a copy overwrites what is sent).
fn carried(me: usize, partners: impl Iterator<Item = usize>, blocks: &[Part]) -> Plan {
    let mut plan = Builder::new(4 * blocks.len());
    let (mut moved, mut arrived) = (Vec::with_capacity(2 * blocks.len()), Vec::with_capacity(blocks.len()));
    for partner in partners {
        moved.push(Some(plan.send(partner, blocks[partner].of(Space::Source), &[])));
        let aside = plan.scratch(blocks[partner].len, 1);
        moved.push(Some(plan.receive(partner, aside, &[])));
        arrived.push((aside, blocks[partner]));
    }
    let all = Some(plan.join(&moved));
    for (aside, block) in arrived.into_iter().filter(|(_, block)| block.len > 0) {
        plan.copy(aside, block.of(Space::Destination), &[all]);
    }
    if blocks[me].len > 0 {
        plan.copy(blocks[me].of(Space::Source), blocks[me].of(Space::Destination), &[all]);
    }
    plan.finish()
}

/// Exchanges blocks with each partner in turn: a segment is copied to scratch, and is sent while the partner's is
/// received.
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
