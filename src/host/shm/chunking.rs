//! Cuts the bytes of a call into steps, and chooses the area that carries a step. Both depend only on what the call's
//! fingerprint contains, so that all ranks choose the same.

use std::ops::Range;

use super::layout::{HEAD_BYTES, LINES_BYTES};
use crate::base::tuning::shm::{FOLDED_LINES_BYTES, LEAST_STEP_BYTES, SHARES_FROM_BYTES, SMALL_BLOCK_BYTES, STREAM_FROM_BYTES};
use crate::call::Collective;
use crate::call::algorithm::Algorithm;

/// The area of a rank that holds the payload of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Area {
    /// The rest of the header line.
    Head,
    /// The lines after the header line.
    Lines,
    /// The slot.
    Slot,
}

impl Area {
    /// Returns the smallest area for `bytes` bytes that are only moved.
    #[inline]
    pub(super) const fn for_move(bytes: usize) -> Self {
        if bytes <= HEAD_BYTES {
            Area::Head
        } else if bytes <= LINES_BYTES {
            Area::Lines
        } else {
            Area::Slot
        }
    }

    /// Returns the smallest area for `width` blocks of `bytes` bytes, of which each rank folds one in place. Heads are
    /// aligned to 8 bytes, lines to 64, slots to a page; an element's alignment divides its size.
    #[inline]
    pub(super) const fn for_fold(bytes: usize, width: usize, element_bytes: usize) -> Self {
        match Self::for_move(bytes.saturating_mul(width)) {
            Area::Head if !element_bytes.is_multiple_of(16) => Area::Head,
            Area::Head | Area::Lines if !element_bytes.is_multiple_of(128) && bytes <= FOLDED_LINES_BYTES => Area::Lines,
            _ => Area::Slot,
        }
    }

    /// Returns where it begins in a mailbox.
    #[inline]
    pub(super) const fn offset(self) -> usize {
        match self {
            Area::Head => 64 - HEAD_BYTES,
            Area::Lines | Area::Slot => 64,
        }
    }
}

/// The bytes that go into one step of a large call, by collective; the same on every rank. Small steps let one rank
/// copy in while others copy out, and keep their bytes in the nearest caches. If ranks share processors, each step
/// waits until every rank has had a turn on a processor, which costs more than small steps save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepSizes {
    is_crowded: bool,
    /// One rank's bytes to all ranks: an upper bound.
    broadcast: usize,
    /// A block of each rank: an upper bound.
    gather: usize,
    /// Blocks for all ranks.
    pub(super) scatter: usize,
    /// A vector of each rank, folded whole.
    pub(super) fold: usize,
    /// Blocks for all ranks, folded.
    pub(super) reduce_scatter: usize,
}

impl StepSizes {
    /// Returns the sizes for slots of this size. They come from measurements with 2 and 4 ranks on 2 processors.
    pub(super) fn new(slot_bytes: usize, is_crowded: bool) -> Self {
        let most = |bytes: usize| bytes.min(slot_bytes);
        if is_crowded {
            let whole = slot_bytes;
            return Self { is_crowded, broadcast: most(512 << 10), gather: whole, scatter: whole, fold: whole, reduce_scatter: whole };
        }
        Self {
            is_crowded,
            broadcast: most(64 << 10),
            gather: most(256 << 10),
            scatter: slot_bytes,
            fold: most(256 << 10),
            reduce_scatter: most(512 << 10),
        }
    }

    /// Returns the step size for a broadcast of `bytes` bytes. It gives about four steps if that leaves enough for
    /// each, so that copying in and out overlap.
    pub(super) fn broadcast(&self, bytes: usize) -> usize {
        if self.is_crowded { self.broadcast } else { (bytes / 4).clamp(LEAST_STEP_BYTES, self.broadcast) }
    }

    /// Returns the step size for blocks of `block_bytes` bytes.
    pub(super) fn gather(&self, block_bytes: usize) -> usize {
        if block_bytes <= SMALL_BLOCK_BYTES && !self.is_crowded { LEAST_STEP_BYTES } else { self.gather }
    }

    /// Returns the algorithm of a call on `bytes` in total, on ordinary memory; `None` for calls that go over links.
    pub(super) fn way(&self, kind: Collective, ranks: usize, bytes: usize, element_bytes: usize) -> Option<Algorithm> {
        let block = bytes / ranks;
        let area = match kind {
            Collective::Barrier => return Some(Algorithm::Flags),
            Collective::AllReduce if Area::for_fold(bytes, 1, element_bytes) == Area::Slot && in_shares(bytes) => {
                return Some(Algorithm::Shares);
            }
            Collective::Reduce if in_shares(bytes) => return Some(Algorithm::Shares),
            Collective::AllReduce | Collective::Reduce => Chunking::folds(bytes, 1, element_bytes, self.fold).area,
            Collective::ReduceScatter | Collective::ReduceScatterV => {
                Chunking::folds(block, ranks, element_bytes, self.reduce_scatter).area
            }
            Collective::Broadcast => Chunking::moves(bytes, 1, self.broadcast(bytes)).area,
            Collective::AllGather | Collective::AllGatherV | Collective::Gather => Chunking::moves(block, 1, self.gather(block)).area,
            Collective::AllToAll | Collective::Scatter => Chunking::moves(block, ranks, self.scatter).area,
            Collective::GatherV | Collective::ScatterV | Collective::AllToAllV => return None,
        };
        Some(match area {
            Area::Head | Area::Lines => Algorithm::Mailboxes,
            Area::Slot => Algorithm::Slots,
        })
    }
}

/// Pieces of one block, or of several blocks side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunking {
    /// The area that holds the pieces of a step.
    pub(super) area: Area,
    /// The bytes of a block.
    bytes: usize,
    /// The bytes of a block in one step; the last piece may be shorter.
    pub(super) piece: usize,
    /// Number of blocks that one step carries.
    pub(super) width: usize,
    /// Number of pieces of a block: at least one, which is empty if the block is.
    count: usize,
}

impl Chunking {
    /// Cuts `width` blocks of `bytes` each that are only moved. Every step carries a piece of each block.
    #[inline]
    pub(super) fn moves(bytes: usize, width: usize, step_bytes: usize) -> Self {
        let area = Area::for_move(bytes.saturating_mul(width));
        if area != Area::Slot {
            return Self { area, bytes, piece: bytes, width, count: 1 };
        }
        Self::pieces_of(bytes, width, ((step_bytes / width) & !63).max(1), 64)
    }

    /// Cuts `width` blocks of up to `bytes` each that are folded. Cuts only between elements; a step carries a piece of
    /// as many blocks as fit.
    #[inline]
    pub(super) fn folds(bytes: usize, width: usize, element_bytes: usize, step_bytes: usize) -> Self {
        let area = Area::for_fold(bytes, width, element_bytes);
        if area != Area::Slot {
            return Self { area, bytes, piece: bytes, width, count: 1 };
        }
        let grain = grain(element_bytes);
        let element = element_bytes.max(1);
        let room = step_bytes / width;
        let most = if room >= grain { room / grain * grain } else { (room / element * element).max(element) };
        let chunking = Self::pieces_of(bytes, width, most, grain);
        Self { width: width.min(step_bytes / chunking.piece.max(1)).max(1), ..chunking }
    }

    /// Cuts a block into pieces that are as even as possible and no longer than `most`. They consist of whole grains if
    /// `most` does.
    fn pieces_of(bytes: usize, width: usize, most: usize, grain: usize) -> Self {
        let piece = bytes.div_ceil(bytes.div_ceil(most).max(1)).next_multiple_of(grain).min(most).max(1);
        Self { area: Area::Slot, bytes, piece, width, count: bytes.div_ceil(piece).max(1) }
    }

    /// Returns the bytes of a payload.
    #[inline]
    pub(super) fn step_bytes(&self) -> usize {
        self.piece * self.width
    }

    /// Returns the pieces in order, as ranges of a block.
    #[inline]
    pub(super) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).map(move |index| index * self.piece..self.bytes.min(index * self.piece + self.piece))
    }
}

/// Returns the unit to cut at: whole cache lines, if whole elements fill them.
fn grain(element_bytes: usize) -> usize {
    match element_bytes {
        1 | 2 | 4 | 8 | 16 | 32 => 64,
        other => other.max(1),
    }
}

/// Whether a result of `bytes` bytes is written with stores that bypass the cache.
#[inline]
pub(super) const fn streams(bytes: usize) -> bool {
    bytes >= STREAM_FROM_BYTES
}

/// Whether ranks fold shares of a call rather than all of it.
#[inline]
pub(super) const fn in_shares(bytes: usize) -> bool {
    bytes >= SHARES_FROM_BYTES
}

/// The part of a piece that each rank folds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shares {
    bytes: usize,
    each: usize,
}

impl Shares {
    /// Splits `bytes`, between elements, into nearly equal parts, one for each rank; the last may be empty.
    pub(super) fn new(bytes: usize, ranks: usize, element_bytes: usize) -> Self {
        Self { bytes, each: bytes.div_ceil(ranks).next_multiple_of(grain(element_bytes)) }
    }

    /// Returns the part of one rank.
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
                let chunking = Chunking::moves(bytes, width, SLOT);
                assert_covers(chunking.pieces(), bytes);
                let longest = chunking.pieces().map(|range| range.len()).max().unwrap();
                let room = [24, 4096, SLOT][chunking.area as usize];
                assert!(longest * width <= room, "{width} blocks of {bytes}: {chunking:?}");
            }
        }
    }

    #[test]
    fn folded_pieces_are_whole_elements() {
        for width in [1, 2, 13, 1024] {
            for element in [1, 3, 4, 8, 16, 24, 100, 128, 5000, 64 << 10] {
                for count in [0, 1, 2, 7, 100, 3000] {
                    let chunking = Chunking::folds(element * count, width, element, SLOT);
                    assert_covers(chunking.pieces(), element * count);
                    assert!(chunking.pieces().all(|range| range.len() % element == 0), "{count} of {element}: {chunking:?}");
                    let longest = chunking.pieces().map(|range| range.len()).max().unwrap();
                    assert!(longest * chunking.width <= [24, 4096, SLOT][chunking.area as usize], "{count} of {element}: {chunking:?}");
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
        assert_eq!(Chunking::folds(0, 3, 0, SLOT).pieces().collect::<Vec<_>>().len(), 1);
        assert!(Shares::new(0, 3, 0).of(1).is_empty());
    }

    #[test]
    fn areas_are_large_and_aligned_enough() {
        assert_eq!([0, 24, 25, 4096, 4097].map(Area::for_move), [Area::Head, Area::Head, Area::Lines, Area::Lines, Area::Slot]);
        for (bytes, element_bytes, area) in [
            (24, 8, Area::Head),
            (16, 16, Area::Lines),
            (24, 24, Area::Head),
            (192, 192, Area::Lines),
            (256, 256, Area::Slot),
            (2048, 4, Area::Lines),
            (2052, 4, Area::Slot),
        ] {
            assert_eq!(Area::for_fold(bytes, 1, element_bytes), area, "{bytes} B of {element_bytes} B");
        }
        assert_eq!([2, 3].map(|width| Area::for_fold(2048, width, 4)), [Area::Lines, Area::Slot]);
    }
}
