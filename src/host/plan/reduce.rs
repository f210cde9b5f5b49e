//! Reduce-scatter and reduce.

use super::Plan;
use super::draft::{Blocks, Draft, destination, part, segments, source};

/// Round a ring, in segments: (n−1)/n of the bytes. Block `r` ends on participant `r`; partial results live in scratch memory.
pub(super) fn scatter_ring(n: usize, me: usize, lengths: &[usize], element_bytes: usize, segment_bytes: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    ring_into(&mut draft, lengths, element_bytes, segment_bytes, &[], |start, len| destination(start, len));
    draft.finish()
}

/// The ring of a reduce-scatter, whose result goes where `result` says. Returns the steps that finish its segments.
fn ring_into(
    draft: &mut Draft,
    lengths: &[usize],
    element_bytes: usize,
    segment_bytes: usize,
    before: &[usize],
    result: impl Fn(usize, usize) -> super::Span,
) -> Vec<(usize, usize, usize)> {
    let n = draft.n;
    let blocks = Blocks::of(lengths);
    let (next, previous) = (draft.at(1), draft.at(-1));
    let slots = [draft.scratch(blocks.longest()), draft.scratch(blocks.longest())];
    let cut = |block: usize| segments(blocks.len(block), segment_bytes, element_bytes).collect::<Vec<_>>();
    let mut folded: Vec<usize> = Vec::new();
    let mut sent: Vec<Vec<usize>> = Vec::new();
    for turn in 0..n - 1 {
        let outgoing = draft.at(-(turn as isize) - 1);
        let sends = cut(outgoing).into_iter().enumerate().map(|(number, (start, len))| match turn {
            0 => draft.send(next, source(blocks.offset(outgoing) + start, len), before),
            _ => draft.send(next, part(slots[(turn - 1) % 2], start, len), &[folded[number]]),
        });
        let sends: Vec<usize> = sends.collect();
        sent.push(sends);
        let incoming = draft.at(-(turn as isize) - 2);
        let slot = slots[turn % 2];
        let free: &[usize] = if turn >= 2 { &sent[turn - 1] } else { &[] };
        let last = turn == n - 2;
        let folds = cut(incoming).into_iter().map(|(start, len)| {
            let theirs = part(slot, start, len);
            let ours = source(blocks.offset(incoming) + start, len);
            let received = draft.receive(previous, theirs, free);
            let into = if last { result(start, len) } else { theirs };
            draft.fold(into, vec![theirs, ours], last, &[received])
        });
        folded = folds.collect();
    }
    let own = draft.me;
    cut(own).into_iter().zip(folded).map(|((start, len), step)| (start, len, step)).collect()
}

/// Everyone's contribution to one's own block, folded in rank order at once.
pub(super) fn scatter_direct(n: usize, me: usize, lengths: &[usize]) -> Plan {
    let mut draft = Draft::new(n, me);
    let own = lengths[me];
    direct_into(&mut draft, lengths, &[], destination(0, own));
    draft.finish()
}

/// The exchange and the fold of a direct reduce-scatter; returns the folding step.
fn direct_into(draft: &mut Draft, lengths: &[usize], before: &[usize], result: super::Span) -> usize {
    let (n, me) = (draft.n, draft.me);
    let blocks = Blocks::of(lengths);
    let mut inputs = vec![source(blocks.offset(me), blocks.len(me)); n];
    let mut after = Vec::new();
    for distance in 1..n {
        let (to, from) = (draft.at(distance as isize), draft.at(-(distance as isize)));
        draft.send(to, source(blocks.offset(to), blocks.len(to)), before);
        inputs[from] = draft.scratch(blocks.len(me));
        after.push(draft.receive(from, inputs[from], &[]));
    }
    draft.fold(result, inputs, true, &after)
}

/// A binomial tree over participants 0 to n−1, which keeps their order, and a hop from 0 to the root. Everyone agrees first, so
/// that those who only send hear of a disagreement too.
pub(super) fn binomial(n: usize, me: usize, bytes: usize, root: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    let (mut current, mut ready) = (source(0, bytes), agreed.clone());
    let mut distance = 1;
    while distance < n {
        if me & distance != 0 {
            draft.send(me - distance, current, &ready);
            break;
        }
        if me + distance < n {
            let theirs = draft.scratch(bytes);
            let received = draft.receive(me + distance, theirs, &agreed);
            let last = me == 0 && distance * 2 >= n;
            let into = if last && root == 0 { destination(0, bytes) } else { draft.scratch(bytes) };
            let mut after = vec![received];
            after.extend(&ready);
            ready = vec![draft.fold(into, vec![current, theirs], last, &after)];
            current = into;
        }
        distance *= 2;
    }
    if root != 0 && me == 0 {
        draft.send(root, current, &ready);
    }
    if root != 0 && me == root {
        // Its own contribution may be the same memory: it must have been read.
        let mut after = agreed;
        after.extend(0..draft.steps());
        draft.receive(0, destination(0, bytes), &after);
    }
    draft.finish()
}

/// A reduce-scatter by ring or, in rank order, directly; then every share to the root.
pub(super) fn scatter_gather(n: usize, me: usize, bytes: usize, element_bytes: usize, segment_bytes: Option<usize>, root: usize) -> Plan {
    let mut draft = Draft::new(n, me);
    let agreed = draft.agree();
    let blocks = Blocks::cut(bytes, element_bytes, n);
    let lengths: Vec<usize> = (0..n).map(|block| blocks.len(block)).collect();
    let share = draft.scratch(lengths[me]);
    let done: Vec<(usize, usize, usize)> = match segment_bytes {
        Some(segment_bytes) => ring_into(&mut draft, &lengths, element_bytes, segment_bytes, &agreed, |start, len| part(share, start, len)),
        None => vec![(0, lengths[me], direct_into(&mut draft, &lengths, &agreed, share))],
    };
    let segment_bytes = segment_bytes.unwrap_or(usize::MAX);
    if me != root {
        for (start, len, step) in done {
            draft.send(root, part(share, start, len), &[step]);
        }
        return draft.finish();
    }
    // The source may be the same memory: all of it must have been read.
    let all: Vec<usize> = (0..draft.steps()).collect();
    draft.copy(share, destination(blocks.offset(me), lengths[me]), &all);
    for distance in 1..n {
        let from = draft.at(-(distance as isize));
        for (start, len) in segments(lengths[from], segment_bytes, element_bytes) {
            draft.receive(from, destination(blocks.offset(from) + start, len), &all);
        }
    }
    draft.finish()
}
