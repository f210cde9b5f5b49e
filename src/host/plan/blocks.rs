//! How a vector is cut: blocks of the ranks, shares, segments.

use super::{Space, Span};

/// The lengths in bytes of the ranks' blocks, which lie side by side in rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blocks<'a> {
    /// Every rank's block has this length.
    Equal(usize),
    /// Rank r's block has the length at r.
    Each(&'a [usize]),
    /// This rank's block has this length, and the others' are not known here: in a gather or scatter to or from another rank.
    Own { rank: usize, len: usize },
}

impl Blocks<'_> {
    /// The length of one rank's block.
    pub(super) fn len(self, rank: usize) -> usize {
        match self {
            Blocks::Equal(len) => len,
            Blocks::Each(lens) => lens.get(rank).copied().unwrap_or(0),
            Blocks::Own { rank: own, len } => {
                if rank == own {
                    len
                } else {
                    0
                }
            }
        }
    }

    /// Every rank's block.
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

/// A range of bytes in a space still to be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Part {
    /// A whole vector.
    pub(super) const fn whole(len: usize) -> Self {
        Self { offset: 0, len }
    }

    /// This range of that space.
    pub(super) const fn of(self, space: Space) -> Span {
        Span { space, offset: self.offset, len: self.len }
    }

    /// The `index`-th of `pieces` nearly equal pieces, cut on element boundaries, the longer ones first. The length is a
    /// multiple of `element`.
    pub(super) fn piece(self, pieces: usize, index: usize, element: usize) -> Self {
        let elements = self.len / element;
        let (each, longer) = (elements / pieces, elements % pieces);
        let first = index * each + index.min(longer);
        let count = each + usize::from(index < longer);
        Self { offset: self.offset + first * element, len: count * element }
    }

    /// All `pieces` nearly equal pieces.
    pub(super) fn pieces(self, pieces: usize, element: usize) -> Vec<Self> {
        (0..pieces).map(|index| self.piece(pieces, index, element)).collect()
    }

    /// Into how many pieces of about `segment` bytes this is cut: at least one, each at least one element. Pieces are no
    /// longer than `segment` rounded down to elements, or one element.
    pub(super) fn segments(self, segment: usize, element: usize) -> usize {
        (self.len / element).div_ceil((segment / element).max(1)).max(1)
    }
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
