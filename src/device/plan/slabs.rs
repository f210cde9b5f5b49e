//! The bytes that each rank folds, slab by slab. This is pure arithmetic.

use crate::base::tuning::device_folds::{LEAST_SLAB_BYTES, SLABS};
use crate::call::BlockLayout;

/// The alignment of slabs and blocks, if possible: a device reads 16 bytes at once.
pub(super) const ALIGNMENT: usize = 16;

/// A range of the vector that all ranks contribute to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// The division of the vector among the ranks.
#[derive(Debug, Clone)]
enum Shape {
    /// The whole vector, divided over all ranks. Every slab except the last contains `chunk` bytes for each rank.
    Vector { bytes: usize },
    /// One block for each rank. A slab contains `chunk` bytes of each block.
    Blocks { blocks: Vec<Region>, longest: usize },
}

/// The slabs of one fold, which are the same on every rank.
#[derive(Debug, Clone)]
pub(super) struct Slabs {
    shape: Shape,
    ranks: usize,
    /// The largest number of bytes that one rank folds in a slab.
    chunk: usize,
    unit: usize,
}

/// Returns the smallest number of bytes that is a multiple of both the element and the device's word.
pub(super) fn unit(element_bytes: usize) -> usize {
    let (mut a, mut b) = (element_bytes, ALIGNMENT);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    element_bytes / a * ALIGNMENT
}

impl Slabs {
    /// Divides a vector so that every rank folds an equal share. A rank has room for `scratch` bytes in a slab, a
    /// multiple of the unit of its elements.
    pub(super) fn of_vector(bytes: usize, element_bytes: usize, ranks: usize, scratch: usize) -> Self {
        let unit = unit(element_bytes);
        let target = (bytes / SLABS).max(LEAST_SLAB_BYTES);
        let share = if bytes <= target { bytes.div_ceil(ranks).next_multiple_of(unit) } else { (target / ranks).max(unit) / unit * unit };
        Self { shape: Shape::Vector { bytes }, ranks, chunk: share.min(scratch), unit }
    }

    /// Divides a vector of blocks, one for each rank to fold.
    pub(super) fn of_blocks(layout: &BlockLayout, element_bytes: usize, ranks: usize, scratch: usize) -> Self {
        let unit = unit(element_bytes);
        let region = |rank| {
            let (offset, bytes) = layout.block(rank);
            Region { offset, bytes }
        };
        let blocks: Vec<_> = (0..ranks).map(region).collect();
        let longest = blocks.iter().map(|block| block.bytes).max().unwrap_or(0);
        let target = (longest / SLABS).max(LEAST_SLAB_BYTES / ranks).max(unit);
        let share = if longest <= target { longest.next_multiple_of(unit) } else { target / unit * unit };
        Self { shape: Shape::Blocks { blocks, longest }, ranks, chunk: share.min(scratch), unit }
    }

    /// Returns the most bytes that one rank folds in a slab; a multiple of the unit.
    pub(super) fn chunk(&self) -> usize {
        self.chunk
    }

    /// Returns the number of slabs.
    pub(super) fn count(&self) -> usize {
        match &self.shape {
            _ if self.chunk == 0 => 0,
            Shape::Vector { bytes } => bytes.div_ceil(self.chunk * self.ranks),
            Shape::Blocks { longest, .. } => longest.div_ceil(self.chunk),
        }
    }

    /// Returns the region that a rank folds in a slab. Regions of one slab of a vector are adjacent, in rank order.
    pub(super) fn region(&self, slab: usize, rank: usize) -> Region {
        match &self.shape {
            Shape::Vector { bytes } => {
                let start = slab * self.chunk * self.ranks;
                let length = (bytes - start).min(self.chunk * self.ranks);
                // The last slab is divided as evenly as whole units allow.
                let share = length.div_ceil(self.ranks).next_multiple_of(self.unit).min(self.chunk);
                let (from, to) = ((rank * share).min(length), ((rank + 1) * share).min(length));
                Region { offset: start + from, bytes: to - from }
            }
            Shape::Blocks { blocks, .. } => {
                let Region { offset, bytes } = blocks[rank];
                let from = (slab * self.chunk).min(bytes);
                Region { offset: offset + from, bytes: self.chunk.min(bytes - from) }
            }
        }
    }

    /// Whether all ranks fold the same number of bytes in a slab.
    pub(super) fn is_even(&self, slab: usize) -> bool {
        // In a vector, shares never grow with the rank.
        let (first, last) = (self.region(slab, 0).bytes, self.region(slab, self.ranks - 1).bytes);
        matches!(self.shape, Shape::Vector { .. }) && first == last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    /// Returns some vector: its bytes, element size, ranks and room.
    fn some_vector(random: &mut Random) -> (usize, usize, usize, usize) {
        let element = [1, 2, 4, 8, 12, 3, 24][random.below(7)];
        let ranks = 2 + random.below(9);
        let elements = [random.below(40), random.below(5000), random.below(20_000_000)][random.below(3)];
        (elements * element, element, ranks, unit(element) * (1 + random.below(100_000)))
    }

    #[test]
    fn every_byte_of_a_vector_is_folded_by_one_rank_in_whole_elements() {
        let seed = 20;
        let mut random = Random(seed);
        for round in 0..2000 {
            let (bytes, element, ranks, scratch) = some_vector(&mut random);
            let what = format!("round {round} of seed {seed}: {bytes} B of {element} B each, {ranks} ranks, room for {scratch} B");
            let slabs = Slabs::of_vector(bytes, element, ranks, scratch);
            assert!(slabs.chunk() <= scratch && slabs.chunk().is_multiple_of(unit(element)), "{what}");
            let mut end = 0;
            for slab in 0..slabs.count() {
                let regions: Vec<_> = (0..ranks).map(|rank| slabs.region(slab, rank)).collect();
                for region in &regions {
                    assert_eq!(region.offset, end, "{what}");
                    assert!(region.bytes <= slabs.chunk() && region.bytes.is_multiple_of(element), "{what}");
                    assert!(region.bytes == 0 || region.offset.is_multiple_of(ALIGNMENT), "{what}");
                    end += region.bytes;
                }
                assert_eq!(slabs.is_even(slab), regions.iter().all(|region| region.bytes == regions[0].bytes), "{what}");
                assert!(slab + 1 == slabs.count() || slabs.is_even(slab), "{what}");
            }
            assert_eq!(end, bytes, "{what}");
        }
    }

    #[test]
    fn every_block_is_folded_by_its_rank() {
        let seed = 21;
        let mut random = Random(seed);
        for round in 0..1000 {
            let (_, element, ranks, scratch) = some_vector(&mut random);
            let lengths: Vec<_> = (0..ranks).map(|_| random.below(3) * random.below(1_000_000) * element).collect();
            let what = format!("round {round} of seed {seed}: {lengths:?} of {element} B each, room for {scratch} B");
            let layout = BlockLayout::Blocks(lengths.clone());
            let slabs = Slabs::of_blocks(&layout, element, ranks, scratch);
            assert!(slabs.chunk() <= scratch, "{what}");
            for (rank, length) in lengths.iter().enumerate() {
                let mut end = layout.block(rank).0;
                for slab in 0..slabs.count() {
                    let region = slabs.region(slab, rank);
                    assert!(region.bytes == 0 || region.offset == end, "{what}");
                    assert!(region.bytes <= slabs.chunk() && region.bytes.is_multiple_of(element), "{what}");
                    end += region.bytes;
                }
                assert_eq!(end, layout.block(rank).0 + length, "{what}");
            }
        }
    }

    #[test]
    fn an_all_reduce_puts_no_more_on_the_wire_than_a_ring() {
        let seed = 22;
        let mut random = Random(seed);
        for round in 0..1000 {
            let (bytes, element, ranks, scratch) = some_vector(&mut random);
            let slabs = Slabs::of_vector(bytes, element, ranks, scratch);
            let regions = (0..slabs.count()).flat_map(|slab| (0..ranks).map(move |rank| (slab, rank)));
            // Every region comes from all others once, and goes to all others once.
            let wire: usize = regions.map(|(slab, rank)| 2 * (ranks - 1) * slabs.region(slab, rank).bytes).sum();
            assert!(wire <= 2 * (ranks - 1) * bytes, "round {round} of seed {seed}");
        }
    }

    #[test]
    fn large_vectors_have_slabs_enough_to_overlap() {
        for ranks in [2, 3, 8] {
            let slabs = Slabs::of_vector(64 << 20, 4, ranks, 1 << 30);
            assert!((SLABS..=SLABS + 1).contains(&slabs.count()), "{ranks} ranks: {}", slabs.count());
            assert_eq!(Slabs::of_vector(1 << 20, 4, ranks, 1 << 30).count(), 1);
        }
    }
}
