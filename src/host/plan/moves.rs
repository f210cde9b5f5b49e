//! Collectives that move bytes. Where the data's own way does not tell everyone of everyone, they agree first.

use super::draft::{Blocks, Draft, destination, segments, source};
use super::{Plan, Span};

/// A round of agreement, and nothing else.
pub(super) fn barrier(n: usize, me: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    draft.agree();
    draft.finish()
}

/// From the root down a binomial tree: log₂ n hops of everything.
pub(super) fn broadcast_tree(n: usize, me: usize, bytes: usize, root: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    let place = (me + n - root) % n;
    let (mut from, mut ready) = (source(0, bytes), agreed.clone());
    let mut distance = n.next_power_of_two();
    if place != 0 {
        let parent = place & (place - 1);
        from = destination(0, bytes);
        ready = vec![draft.receive((parent + root) % n, from, &agreed)];
        distance = place & place.wrapping_neg();
    } else {
        draft.copy(from, destination(0, bytes), &agreed);
    }
    while distance > 1 {
        distance /= 2;
        if place + distance < n {
            draft.send((place + distance + root) % n, from, &ready);
        }
    }
    draft.finish()
}

/// From the root along a chain, in segments: everything once, whatever the number of participants.
pub(super) fn broadcast_chain(n: usize, me: usize, bytes: usize, segment_bytes: usize, root: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    let place = (me + n - root) % n;
    let (next, previous) = (draft.at(1), draft.at(-1));
    if place == 0 {
        draft.copy(source(0, bytes), destination(0, bytes), &agreed);
    }
    for (start, len) in segments(bytes, segment_bytes, 1) {
        let (from, ready) = match place {
            0 => (source(start, len), agreed.clone()),
            _ => (destination(start, len), vec![draft.receive(previous, destination(start, len), &agreed)]),
        };
        if place + 1 < n {
            draft.send(next, from, &ready);
        }
    }
    draft.finish()
}

/// Every block to everyone at once, by way of scratch memory: one hop, which is also the agreement.
pub(super) fn all_gather_direct(n: usize, me: usize, lengths: &[usize]) -> Plan {
    let mut draft = Draft::new(n, me);
    let blocks = Blocks::of(lengths);
    let mut copies = Vec::new();
    let mut heard = Vec::new();
    for distance in 1..n {
        let (to, from) = (draft.at(distance as isize), draft.at(-(distance as isize)));
        draft.send(to, source(0, lengths[me]), &[]);
        let room = draft.scratch(lengths[from]);
        heard.push(draft.receive(from, room, &[]));
        copies.push((room, destination(blocks.offset(from), lengths[from])));
    }
    copies.push((source(0, lengths[me]), destination(blocks.offset(me), lengths[me])));
    for (from, into) in copies {
        draft.copy(from, into, &heard);
    }
    draft.finish()
}

/// Round a ring, in segments: everything but the own block once.
pub(super) fn all_gather_ring(n: usize, me: usize, lengths: &[usize], segment_bytes: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    let blocks = Blocks::of(lengths);
    let (next, previous) = (draft.at(1), draft.at(-1));
    draft.copy(source(0, lengths[me]), destination(blocks.offset(me), lengths[me]), &agreed);
    let cut = |block: usize| segments(lengths[block], segment_bytes, 1).collect::<Vec<_>>();
    let mut arrived: Vec<usize> = Vec::new();
    for turn in 0..n - 1 {
        let outgoing = draft.at(-(turn as isize));
        for (number, (start, len)) in cut(outgoing).into_iter().enumerate() {
            match turn {
                0 => draft.send(next, source(start, len), &agreed),
                _ => draft.send(next, destination(blocks.offset(outgoing) + start, len), &[arrived[number]]),
            };
        }
        let incoming = draft.at(-(turn as isize) - 1);
        let receives = cut(incoming)
            .into_iter()
            .map(|(start, len)| draft.receive(previous, destination(blocks.offset(incoming) + start, len), &agreed));
        arrived = receives.collect();
    }
    draft.finish()
}

/// Every block to the root. `lengths` are known to the root; `own` to each.
pub(super) fn gather(n: usize, me: usize, own: usize, lengths: Option<&[usize]>, root: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    match lengths {
        Some(lengths) if me == root => {
            let blocks = Blocks::of(lengths);
            draft.copy(source(0, own), destination(blocks.offset(me), own), &agreed);
            for distance in 1..n {
                let from = draft.at(-(distance as isize));
                draft.receive(from, destination(blocks.offset(from), lengths[from]), &agreed);
            }
        }
        _ => {
            draft.send(root, source(0, own), &agreed);
        }
    }
    draft.finish()
}

/// Each block from the root.
pub(super) fn scatter(n: usize, me: usize, own: usize, lengths: Option<&[usize]>, root: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    match lengths {
        Some(lengths) if me == root => {
            let blocks = Blocks::of(lengths);
            draft.copy(source(blocks.offset(me), own), destination(0, own), &agreed);
            for distance in 1..n {
                let to = draft.at(distance as isize);
                draft.send(to, source(blocks.offset(to), lengths[to]), &agreed);
            }
        }
        _ => {
            draft.receive(root, destination(0, own), &agreed);
        }
    }
    draft.finish()
}

/// Pair by pair. In place everything comes in by way of scratch memory, and no destination is written before all has been sent.
pub(super) fn all_to_all(n: usize, me: usize, sends: &[usize], receives: &[usize], in_place: bool) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    let (outgoing, incoming) = (Blocks::of(sends), Blocks::of(receives));
    let place = |block: usize| destination(incoming.offset(block), incoming.len(block));
    let mut before = agreed.clone();
    let mut copies: Vec<(Span, Span)> = Vec::new();
    for distance in 1..n {
        let (to, from) = (draft.at(distance as isize), draft.at(-(distance as isize)));
        before.push(draft.send(to, source(outgoing.offset(to), outgoing.len(to)), &agreed));
        if in_place {
            let room = draft.scratch(incoming.len(from));
            before.push(draft.receive(from, room, &agreed));
            copies.push((room, place(from)));
        } else {
            draft.receive(from, place(from), &agreed);
        }
    }
    if !in_place {
        draft.copy(source(outgoing.offset(me), outgoing.len(me)), place(me), &agreed);
    }
    for (from, into) in copies {
        draft.copy(from, into, &before);
    }
    draft.finish()
}
