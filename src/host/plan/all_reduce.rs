//! All-reduce.

use super::Plan;
use super::draft::{Blocks, Draft, destination, part, segments, source};

/// Recursive doubling: log₂ n exchanges of everything. A surplus over a power of two is folded into neighbours first, so operands
/// stay in rank order, and every rank folds the same operands in the same order.
pub(super) fn doubling(n: usize, me: usize, bytes: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let core = 1 << n.ilog2();
    let surplus = n - core;
    let real = |place: usize| if place < surplus { 2 * place } else { place + surplus };
    let paired = me < 2 * surplus;
    if paired && me % 2 == 1 {
        let sent = draft.send(me - 1, source(0, bytes), &[]);
        draft.receive(me - 1, destination(0, bytes), &[sent]);
        return draft.finish();
    }
    let place = if paired { me / 2 } else { me - surplus };
    let (mut current, mut ready) = (source(0, bytes), Vec::new());
    let mut read_source = Vec::new();
    if paired {
        let (theirs, sum) = (draft.scratch(bytes), draft.scratch(bytes));
        let received = draft.receive(me + 1, theirs, &[]);
        ready = vec![draft.fold(sum, vec![current, theirs], false, &[received])];
        current = sum;
    }
    let mut distance = 1;
    while distance < core {
        let partner = place ^ distance;
        let last = distance * 2 == core;
        let theirs = draft.scratch(bytes);
        let sent = draft.send(real(partner), current, &ready);
        let received = draft.receive(real(partner), theirs, &[]);
        read_source.push(sent);
        let into = if last { destination(0, bytes) } else { draft.scratch(bytes) };
        let inputs = if place < partner { vec![current, theirs] } else { vec![theirs, current] };
        let mut after = vec![received];
        after.extend(&ready);
        if last {
            after.extend(&read_source);
        }
        ready = vec![draft.fold(into, inputs, last, &after)];
        current = into;
        distance *= 2;
    }
    if paired {
        draft.send(me + 1, destination(0, bytes), &ready);
    }
    draft.finish()
}

/// Reduce-scatter and all-gather round a ring, in segments: 2(n−1)/n of the bytes. Partial results live in scratch memory of two
/// blocks, so the destination is written only when a block has been round.
pub(super) fn ring(n: usize, me: usize, bytes: usize, element_bytes: usize, segment_bytes: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let blocks = Blocks::cut(bytes, element_bytes, n);
    let (next, previous) = (draft.at(1), draft.at(-1));
    let slots = [draft.scratch(blocks.longest()), draft.scratch(blocks.longest())];
    let cut = |block: usize| segments(blocks.len(block), segment_bytes, element_bytes).collect::<Vec<_>>();
    // By block and segment: the step that read the source there last, and the step that finished the destination there.
    let mut read = vec![Vec::new(); n];
    let mut folded: Vec<usize> = Vec::new();
    let mut sent: Vec<Vec<usize>> = Vec::new();
    for turn in 0..n - 1 {
        let outgoing = draft.at(-(turn as isize));
        let sends: Vec<usize> = cut(outgoing)
            .into_iter()
            .enumerate()
            .map(|(number, (start, len))| match turn {
                0 => draft.send(next, source(blocks.offset(outgoing) + start, len), &[]),
                _ => draft.send(next, part(slots[(turn - 1) % 2], start, len), &[folded[number]]),
            })
            .collect();
        if turn == 0 {
            read[outgoing] = sends.clone();
        }
        sent.push(sends);
        let incoming = draft.at(-(turn as isize) - 1);
        let slot = slots[turn % 2];
        // The slot is free once everything that was sent from it two turns ago has gone.
        let free: &[usize] = if turn >= 2 { &sent[turn - 1] } else { &[] };
        let last = turn == n - 2;
        folded = cut(incoming)
            .into_iter()
            .map(|(start, len)| {
                let theirs = part(slot, start, len);
                let ours = source(blocks.offset(incoming) + start, len);
                let received = draft.receive(previous, theirs, free);
                let into = if last { destination(blocks.offset(incoming) + start, len) } else { theirs };
                draft.fold(into, vec![theirs, ours], last, &[received])
            })
            .collect();
        read[incoming] = folded.clone();
    }
    let mut finished = folded;
    for turn in 0..n - 1 {
        let outgoing = draft.at(1 - turn as isize);
        for ((start, len), done) in cut(outgoing).into_iter().zip(&finished) {
            draft.send(next, destination(blocks.offset(outgoing) + start, len), &[*done]);
        }
        let incoming = draft.at(-(turn as isize));
        finished = cut(incoming)
            .into_iter()
            .zip(&read[incoming])
            .map(|((start, len), read)| draft.receive(previous, destination(blocks.offset(incoming) + start, len), &[*read]))
            .collect();
    }
    draft.finish()
}

/// Everyone's contribution to one's own share, folded in rank order at once, then all shares to all.
pub(super) fn direct(n: usize, me: usize, bytes: usize, element_bytes: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let blocks = Blocks::cut(bytes, element_bytes, n);
    let own = (blocks.offset(me), blocks.len(me));
    let mut sent = vec![None; n];
    let mut inputs = vec![source(own.0, own.1); n];
    let mut received = Vec::new();
    for distance in 1..n {
        let (to, from) = (draft.at(distance as isize), draft.at(-(distance as isize)));
        sent[to] = Some(draft.send(to, source(blocks.offset(to), blocks.len(to)), &[]));
        inputs[from] = draft.scratch(own.1);
        received.push(draft.receive(from, inputs[from], &[]));
    }
    let result = destination(own.0, own.1);
    let folded = draft.fold(result, inputs, true, &received);
    for distance in 1..n {
        let (to, from) = (draft.at(distance as isize), draft.at(-(distance as isize)));
        draft.send(to, result, &[folded]);
        let read: Vec<usize> = sent[from].into_iter().collect();
        draft.receive(from, destination(blocks.offset(from), blocks.len(from)), &read);
    }
    draft.finish()
}
