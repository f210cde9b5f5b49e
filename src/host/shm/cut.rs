//! How the bytes of a call are cut into steps: the same on every rank, from what the call's fingerprint says.

use std::ops::Range;

use super::lane::Area;

/// The least bytes of one step where a call takes several: below this a step costs more than its bytes.
const LEAST_CHUNK_BYTES: usize = 16 << 10;
/// From how many bytes on, with more than two ranks, each rank folds a share and passes the result on. Below, every rank folds
/// everything: one step instead of two.
const SHARES_FROM_BYTES: usize = 16 << 10;

/// Pieces of one block, or of several blocks side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Where the pieces of a step lie.
    pub(super) area: Area,
    /// The bytes of a block.
    bytes: usize,
    /// The bytes of it in one step; the last piece may be shorter.
    pub(super) piece: usize,
    /// How many blocks one step carries.
    pub(super) width: usize,
}

/// The bytes of one step: a quarter of the call, so that copying in overlaps with copying out, but no more than a slot.
fn chunk_bytes(bytes: usize, slot_bytes: usize) -> usize {
    (bytes / 4).clamp(LEAST_CHUNK_BYTES, slot_bytes)
}

impl Cut {
    /// For `width` blocks of `bytes` each that are only moved, all in every step.
    pub(super) fn moves(bytes: usize, width: usize, slot_bytes: usize) -> Self {
        let total = bytes.saturating_mul(width);
        let area = Area::for_move(total);
        let piece = match area {
            Area::Slot => ((chunk_bytes(total, slot_bytes) / width) & !63).max(1),
            _ => bytes,
        };
        Self { area, bytes, piece, width }
    }

    /// For `width` blocks of up to `bytes` each that are folded: cut between elements, and as many blocks a step as fit.
    pub(super) fn folds(bytes: usize, width: usize, element_bytes: usize, slot_bytes: usize) -> Self {
        let total = bytes.saturating_mul(width);
        let area = Area::for_fold(total, element_bytes);
        if area != Area::Slot {
            return Self { area, bytes, piece: bytes, width };
        }
        let grain = grain(element_bytes);
        let element = element_bytes.max(1);
        let room = chunk_bytes(total, slot_bytes) / width;
        let piece = if room >= grain { room / grain * grain } else { (room / element * element).max(element) };
        Self { area, bytes, piece, width: width.min(slot_bytes / piece).max(1) }
    }

    /// The pieces in order, as ranges of a block: at least one, which is empty where the block is.
    pub(super) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        let piece = self.piece.max(1);
        let count = self.bytes.div_ceil(piece).max(1);
        (0..count).map(move |index| index * piece..self.bytes.min(index * piece + piece))
    }
}

/// What to cut at: whole cache lines, where whole elements fill them.
fn grain(element_bytes: usize) -> usize {
    match element_bytes {
        1 | 2 | 4 | 8 | 16 | 32 => 64,
        other => other.max(1),
    }
}

/// Whether ranks fold shares of a call rather than everything.
#[inline]
pub(super) fn in_shares(bytes: usize, ranks: usize) -> bool {
    ranks > 2 && bytes >= SHARES_FROM_BYTES
}

/// Who folds which part of a piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shares {
    bytes: usize,
    each: usize,
}

impl Shares {
    /// Splits `bytes` between elements, into as many nearly equal parts as there are ranks; the last may be empty.
    pub(super) fn new(bytes: usize, ranks: usize, element_bytes: usize) -> Self {
        Self { bytes, each: bytes.div_ceil(ranks).next_multiple_of(grain(element_bytes)) }
    }

    /// The part of one rank.
    pub(super) fn of(self, rank: usize) -> Range<usize> {
        let start = self.bytes.min(self.each * rank);
        start..self.bytes.min(start + self.each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: usize = 128 << 10;

    /// Asserts that ranges lie side by side and cover `bytes`.
    fn assert_covers(ranges: impl Iterator<Item = Range<usize>>, bytes: usize) {
        let end = ranges.fold(0, |end, range| {
            assert!(range.start == end && range.end >= end);
            range.end
        });
        assert_eq!(end, bytes);
    }

    #[test]
    fn moved_pieces_cover_the_block_and_fit_the_area() {
        for width in [1, 2, 3, 8, 13, 1024] {
            for bytes in [0, 1, 24, 25, 4096, 4097, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 7] {
                let cut = Cut::moves(bytes, width, SLOT);
                assert_covers(cut.pieces(), bytes);
                let longest = cut.pieces().map(|range| range.len()).max().unwrap();
                let room = [24, 4096, SLOT][cut.area as usize];
                assert!(longest * width <= room, "{width} blocks of {bytes}: {cut:?}");
            }
        }
    }

    #[test]
    fn folded_pieces_are_whole_elements() {
        for width in [1, 2, 13, 1024] {
            for element in [1, 3, 4, 8, 16, 24, 100, 128, 5000, 64 << 10] {
                for count in [0, 1, 2, 7, 100, 3000] {
                    let cut = Cut::folds(element * count, width, element, SLOT);
                    assert_covers(cut.pieces(), element * count);
                    assert!(cut.pieces().all(|range| range.len() % element == 0), "{count} of {element}: {cut:?}");
                    let longest = cut.pieces().map(|range| range.len()).max().unwrap();
                    assert!(longest * cut.width <= [24, 4096, SLOT][cut.area as usize], "{count} of {element}: {cut:?}");
                }
            }
        }
    }

    #[test]
    fn shares_cover_the_piece_in_whole_elements() {
        for ranks in [1, 2, 3, 8, 13] {
            for (element, count) in [(1, 0), (1, 1), (4, 5), (24, 1000), (3, 7), (64 << 10, 2), (8, 16384)] {
                let shares = Shares::new(element * count, ranks, element);
                assert_covers((0..ranks).map(|rank| shares.of(rank)), element * count);
                assert!((0..ranks).all(|rank| shares.of(rank).len().is_multiple_of(element)));
            }
        }
    }

    #[test]
    fn an_empty_element_divides_nothing() {
        assert_eq!(Cut::folds(0, 3, 0, SLOT).pieces().collect::<Vec<_>>().len(), 1);
        assert!(Shares::new(0, 3, 0).of(1).is_empty());
    }
}
