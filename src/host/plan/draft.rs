//! Writes a plan down, step by step.

use super::{Action, Plan, Space, Span, Step};

/// A plan being written, for participant `me` of `n`.
pub(super) struct Draft {
    pub(super) n: usize,
    pub(super) me: usize,
    plan: Plan,
}

impl Draft {
    pub(super) fn new(n: usize, me: usize) -> Self {
        Self { n, me, plan: Plan::default() }
    }

    /// The participant at a distance, going round.
    pub(super) fn at(&self, distance: isize) -> usize {
        (self.me as isize + distance).rem_euclid(self.n as isize) as usize
    }

    fn push(&mut self, action: Action, after: &[usize]) -> usize {
        self.plan.steps.push(Step { action, after: after.to_vec() });
        self.plan.steps.len() - 1
    }

    pub(super) fn send(&mut self, to: usize, from: Span, after: &[usize]) -> usize {
        self.push(Action::Send { to, from }, after)
    }

    pub(super) fn receive(&mut self, from: usize, into: Span, after: &[usize]) -> usize {
        self.push(Action::Receive { from, into }, after)
    }

    pub(super) fn fold(&mut self, into: Span, inputs: Vec<Span>, last: bool, after: &[usize]) -> usize {
        self.push(Action::Fold { into, inputs, last }, after)
    }

    pub(super) fn copy(&mut self, from: Span, into: Span, after: &[usize]) -> usize {
        self.push(Action::Copy { from, into }, after)
    }

    /// Takes a piece of scratch memory, aligned to a cache line.
    pub(super) fn scratch(&mut self, len: usize) -> Span {
        let offset = self.plan.scratch_bytes;
        self.plan.scratch_bytes += len.next_multiple_of(64);
        Span { space: Space::Scratch, offset, len }
    }

    /// A dissemination round: when the steps it returns are done, this participant has heard from all, directly or through others.
    pub(super) fn agree(&mut self) -> Vec<usize> {
        let nothing = Span { space: Space::Scratch, offset: 0, len: 0 };
        let mut heard: Vec<usize> = Vec::new();
        let mut distance = 1;
        while distance < self.n {
            self.send(self.at(distance as isize), nothing, &heard);
            heard = vec![self.receive(self.at(-(distance as isize)), nothing, &heard)];
            distance *= 2;
        }
        heard
    }

    /// How many steps there are so far.
    pub(super) fn steps(&self) -> usize {
        self.plan.steps.len()
    }

    pub(super) fn finish(self) -> Plan {
        self.plan
    }
}

/// Part of the source.
pub(super) fn source(offset: usize, len: usize) -> Span {
    Span { space: Space::Source, offset, len }
}

/// Part of the destination.
pub(super) fn destination(offset: usize, len: usize) -> Span {
    Span { space: Space::Destination, offset, len }
}

/// A part of a span.
pub(super) fn part(span: Span, start: usize, len: usize) -> Span {
    Span { offset: span.offset + start, len, ..span }
}

/// Offsets and lengths of blocks side by side.
#[derive(Debug, Clone)]
pub(super) struct Blocks(Vec<(usize, usize)>);

impl Blocks {
    /// Blocks of these lengths.
    pub(super) fn of(lengths: &[usize]) -> Self {
        let mut offset = 0;
        Self(
            lengths
                .iter()
                .map(|len| {
                    let start = offset;
                    offset += len;
                    (start, *len)
                })
                .collect(),
        )
    }

    /// `bytes` cut into `n` blocks of whole elements, as equal as can be.
    pub(super) fn cut(bytes: usize, element_bytes: usize, n: usize) -> Self {
        let count = bytes / element_bytes;
        let lengths: Vec<usize> = (0..n).map(|block| (count / n + usize::from(block < count % n)) * element_bytes).collect();
        Self::of(&lengths)
    }

    pub(super) fn offset(&self, block: usize) -> usize {
        self.0[block].0
    }

    pub(super) fn len(&self, block: usize) -> usize {
        self.0[block].1
    }

    pub(super) fn longest(&self) -> usize {
        self.0.iter().map(|block| block.1).max().unwrap_or(0)
    }
}

/// Segments of `len` bytes: start and length of each, whole elements, at least one (which may be empty).
pub(super) fn segments(len: usize, segment_bytes: usize, element_bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let size = (segment_bytes / element_bytes * element_bytes).max(element_bytes);
    let count = len.div_ceil(size).max(1);
    (0..count).map(move |number| (number * size, size.min(len - number * size)))
}
