//! How a vector is divided (blocks of the ranks, shares, segments), and how a plan is built step by step.

use super::{Action, Plan, Space, Span, Step};
use crate::base::tuning::plan::CARRIED_BYTES;

/// The lengths in bytes of the ranks' blocks. They are contiguous, in rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocks<'a> {
    /// All blocks have this length.
    Equal(usize),
    /// The block of rank r has the length at index r.
    Each(&'a [usize]),
    /// This rank's block has this length. The other blocks' lengths are unknown, because this rank is not the root of
    /// the gather or scatter.
    Own { rank: usize, len: usize },
}

impl Blocks<'_> {
    /// Returns the length of one rank's block.
    pub(super) fn len(self, rank: usize) -> usize {
        match self {
            Blocks::Equal(len) => len,
            Blocks::Each(lens) => lens.get(rank).copied().unwrap_or(0),
            Blocks::Own { rank: own, len } if rank == own => len,
            Blocks::Own { .. } => 0,
        }
    }

    /// Returns every rank's block.
    pub(super) fn parts(self, n: usize) -> Vec<Part> {
        let mut offset = 0_usize;
        (0..n)
            .map(|rank| {
                let part = Part { offset, len: self.len(rank) };
                offset = offset.saturating_add(part.len);
                part
            })
            .collect()
    }
}

/// A range of bytes, in any space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Part {
    /// Returns the range of a whole vector.
    pub(super) const fn whole(len: usize) -> Self {
        Self { offset: 0, len }
    }

    /// Returns this range in the given space.
    pub(super) const fn of(self, space: Space) -> Span {
        Span { space, offset: self.offset, len: self.len }
    }

    /// Returns piece number `index` of `pieces` nearly equal pieces, cut on element boundaries, the longer pieces
    /// first. The length must be a multiple of `element`.
    pub(super) fn piece(self, pieces: usize, index: usize, element: usize) -> Self {
        let elements = self.len / element;
        let (each, longer) = (elements / pieces, elements % pieces);
        let first = index * each + index.min(longer);
        let count = each + usize::from(index < longer);
        Self { offset: self.offset + first * element, len: count * element }
    }

    /// Returns all `pieces` nearly equal pieces.
    pub(super) fn pieces(self, pieces: usize, element: usize) -> Vec<Self> {
        (0..pieces).map(|index| self.piece(pieces, index, element)).collect()
    }

    /// Returns the number of pieces of about `segment` bytes into which this range is cut: at least one, each of at
    /// least one element. No piece is longer than `segment` rounded down to elements, or one element.
    pub(super) fn segments(self, segment: usize, element: usize) -> usize {
        (self.len / element).div_ceil((segment / element).max(1)).max(1)
    }

    /// Returns the pieces of about `segment` bytes in which a block is sent if it is not folded; none if it is empty.
    pub(super) fn cut(self, segment: usize) -> impl Iterator<Item = Self> {
        let pieces = self.len.div_ceil(segment.max(1));
        (0..pieces).map(move |index| self.piece(pieces, index, 1))
    }
}

/// The minimum alignment of scratch buffers, a cache line. They are also aligned to the largest power of two that
/// divides the element's size, which no type's alignment exceeds.
const LINE: usize = 64;

/// A plan under construction.
pub(crate) struct Builder {
    plan: Plan,
    /// A step that every later write to the destination comes after.
    gate: Option<usize>,
}

impl Builder {
    /// Creates an empty plan with room for `steps` steps.
    pub(super) fn new(steps: usize) -> Self {
        Self { plan: Plan { steps: Vec::with_capacity(steps), scratch_bytes: 0 }, gate: None }
    }

    /// Creates a plan that begins with an agreement of all ranks. Nothing is written to the destination before it is
    /// complete. Sends, and copies to scratch, proceed meanwhile.
    pub(super) fn agreed(n: usize, me: usize) -> Self {
        let mut builder = Self::new(0);
        builder.agree(n, me);
        builder
    }

    /// Adds an agreement: every rank hears, transitively, from every other. Later writes to the destination come after
    /// it. Each ordered pair of ranks is used at most once.
    ///
    /// A receive waits for the previous one, so a rank that sends in round k has heard everything of the rounds before
    /// k.
    pub(super) fn agree(&mut self, n: usize, me: usize) {
        let nothing = Part::whole(0).of(Space::Scratch);
        let mut distance = 1;
        while distance < n {
            let heard = self.gate;
            self.send((me + distance) % n, nothing, &[heard]);
            self.gate = Some(self.receive((me + n - distance) % n, nothing, &[heard]));
            distance *= 2;
        }
    }

    /// Reserves scratch memory, aligned for elements of this size.
    pub(super) fn scratch(&mut self, len: usize, element: usize) -> Span {
        let alignment = LINE.max(element & element.wrapping_neg());
        let offset = self.plan.scratch_bytes.next_multiple_of(alignment);
        self.plan.scratch_bytes = offset + len;
        Span { space: Space::Scratch, offset, len }
    }

    /// Adds a send; returns its index.
    pub(super) fn send(&mut self, to: usize, from: Span, after: &[Option<usize>]) -> usize {
        self.push(Action::Send { to, from }, after)
    }

    /// Adds a receive; returns its index.
    pub(super) fn receive(&mut self, from: usize, into: Span, after: &[Option<usize>]) -> usize {
        self.push(Action::Receive { from, into }, after)
    }

    /// Adds a fold; returns its index.
    pub(super) fn fold(&mut self, into: Span, inputs: Vec<Span>, last: bool, after: &[Option<usize>]) -> usize {
        self.push(Action::Fold { into, inputs, last }, after)
    }

    /// Adds a copy; returns its index.
    pub(super) fn copy(&mut self, from: Span, into: Span, after: &[Option<usize>]) -> usize {
        self.push(Action::Copy { from, into }, after)
    }

    /// Returns the finished plan.
    pub(super) fn finish(self) -> Plan {
        self.plan
    }

    /// Adds a step that does nothing and comes after all of these, so that many steps can come after all of them with
    /// one edge each. Returns its index.
    pub(super) fn join(&mut self, after: &[Option<usize>]) -> usize {
        let nothing = Part::whole(0).of(Space::Scratch);
        self.copy(nothing, nothing, after)
    }

    /// Adds a step that comes after the given ones and, if it writes to the destination, after the agreement.
    fn push(&mut self, action: Action, after: &[Option<usize>]) -> usize {
        let mut after: Vec<usize> = after.iter().flatten().copied().collect();
        let into = match &action {
            Action::Send { .. } => None,
            Action::Receive { into, .. } | Action::Fold { into, .. } | Action::Copy { into, .. } => Some(into.space),
        };
        if into == Some(Space::Destination) {
            after.extend(self.gate.filter(|gate| !after.contains(gate)));
        }
        self.plan.steps.push(Step { action, after });
        self.plan.steps.len() - 1
    }
}

/// Returns the plan of a single rank: a copy, if there is anything to copy.
pub(super) fn alone(len: usize) -> Plan {
    let mut builder = Builder::new(1);
    if len > 0 {
        builder.copy(Part::whole(len).of(Space::Source), Part::whole(len).of(Space::Destination), &[]);
    }
    builder.finish()
}

/// Returns a barrier by dissemination, in ceil(log2 n) rounds of empty messages: in round k, each rank sends to the
/// rank 2^k places on. If a plan's data flow does not ensure agreement, the plan starts with a barrier.
pub(crate) fn barrier(n: usize, me: usize) -> Plan {
    Builder::agreed(n, me).finish()
}

/// Whether an exchange of `bytes` bytes in total goes through scratch instead of waiting for an agreement. Between two
/// ranks, the first message of the data is the agreement.
pub(super) fn is_carried(n: usize, bytes: usize) -> bool {
    n > 2 && bytes <= CARRIED_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_even_whole_elements_and_leave_nothing_out() {
        for element in [1, 3, 12] {
            for count in [0, 1, 5, 16, 17] {
                for pieces in 1..7 {
                    let cut = Part { offset: 5, len: count * element }.pieces(pieces, element);
                    let mut offset = 5;
                    for piece in &cut {
                        assert_eq!((piece.offset, piece.len % element), (offset, 0));
                        assert!(piece.len.abs_diff(cut[0].len) <= element);
                        offset += piece.len;
                    }
                    assert_eq!(offset, 5 + count * element);
                }
            }
        }
    }

    #[test]
    fn no_piece_is_longer_than_its_segment() {
        for (len, segment, element) in [(0, 8, 4), (1000, 16, 4), (1004, 17, 4), (1200, 1, 12), (96, 0, 12), (7, usize::MAX, 1)] {
            let pieces = Part::whole(len).segments(segment, element);
            assert!(pieces >= 1);
            assert!(Part::whole(len).piece(pieces, 0, element).len <= segment.max(element), "{len} {segment} {element}");
        }
    }

    #[test]
    fn blocks_lie_side_by_side() {
        assert_eq!(Blocks::Equal(4).parts(2), [Part { offset: 0, len: 4 }, Part { offset: 4, len: 4 }]);
        assert_eq!(Blocks::Each(&[3, 0, 2]).parts(3)[2], Part { offset: 3, len: 2 });
    }
}
