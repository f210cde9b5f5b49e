//! The bytes of an allocation that a launch used: a bit for each.

use std::ops::Range;

/// The most ranges into which the used bytes of an allocation are divided.
const MOST_RANGES: usize = 64;

/// A set of bytes by their offsets.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bytes {
    /// Allocated at the first byte. Fresh pages are zeros that take no memory until they are touched.
    words: Vec<u64>,
    /// The first and the last word that is not zero; there is none if the first is above the last.
    first: usize,
    last: usize,
}

impl Bytes {
    /// Adds up to 64 bytes from `offset` on, of an allocation of `size` bytes.
    #[inline(always)]
    pub(crate) fn add(&mut self, offset: u64, count: u32, size: u64) {
        let (word, bit) = ((offset / 64) as usize, offset % 64);
        if self.words.is_empty() {
            self.begin(size);
        }
        let ones = u64::MAX >> (64 - count);
        self.words[word] |= ones << bit;
        (self.first, self.last) = (self.first.min(word), self.last.max(word));
        if bit + u64::from(count) > 64 {
            self.words[word + 1] |= ones >> (64 - bit);
            self.last = self.last.max(word + 1);
        }
    }

    #[cold]
    fn begin(&mut self, size: u64) {
        self.words = vec![0; (size / 64 + 2) as usize];
        (self.first, self.last) = (usize::MAX, 0);
    }

    /// Returns the bytes as sorted ranges of offsets; if there are too many ranges, near ones are joined.
    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        if self.words.is_empty() {
            return ranges;
        }
        let mut gap = 0;
        for (word, &bits) in (self.first..).zip(&self.words[self.first..=self.last]) {
            let (mut left, start) = (bits, 64 * word as u64);
            while left != 0 {
                let from = left.trailing_zeros();
                let to = from + (left >> from).trailing_ones();
                push(&mut ranges, start + u64::from(from)..start + u64::from(to), gap);
                left = if to == 64 { 0 } else { left >> to << to };
            }
            while ranges.len() > MOST_RANGES {
                gap = (2 * gap).max(8);
                ranges = ranges.into_iter().fold(Vec::new(), |mut fewer, range| {
                    push(&mut fewer, range, gap);
                    fewer
                });
            }
        }
        ranges
    }
}

/// Adds a range after the others, or extends the last one if the gap is no larger than `gap`.
fn push(ranges: &mut Vec<Range<u64>>, next: Range<u64>, gap: u64) {
    match ranges.last_mut() {
        Some(last) if next.start - last.end <= gap => last.end = next.end,
        _ => ranges.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(accesses: &[(u64, u32)]) -> Vec<Range<u64>> {
        let mut bytes = Bytes::default();
        accesses.iter().for_each(|&(offset, count)| bytes.add(offset, count, 10_000));
        bytes.ranges()
    }

    #[test]
    fn bytes_are_told_apart() {
        assert_eq!(ranges(&[]), []);
        assert_eq!(ranges(&[(0, 64)]), std::slice::from_ref(&(0..64)));
        assert_eq!(ranges(&[(63, 1), (64, 64), (9_999, 1)]), [63..128, 9_999..10_000]);
        assert_eq!(ranges(&[(60, 8), (68, 4), (8, 8), (0, 4)]), [0..4, 8..16, 60..72]);
        assert_eq!(ranges(&[(33, 64), (200, 2), (33, 1)]), [33..97, 200..202]);
    }

    #[test]
    fn a_set_agrees_with_one_that_is_plain() {
        let mut random = 7_u64;
        for _ in 0..200 {
            let (mut bytes, mut plain) = (Bytes::default(), vec![false; 1000]);
            for _ in 0..30 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let (offset, count) = ((random >> 33) % 930, 1 + (random >> 20) as u32 % 64);
                bytes.add(offset, count, 1000);
                plain[offset as usize..][..count as usize].fill(true);
            }
            let found: Vec<bool> = (0..1000).map(|byte| bytes.ranges().iter().any(|range| range.contains(&byte))).collect();
            assert_eq!(found, plain);
        }
    }

    #[test]
    fn many_pieces_become_few_ranges_that_hold_them_all() {
        let pieces: Vec<(u64, u32)> = (0..400).map(|piece| (20 * piece, 4)).chain([(9_000, 8)]).collect();
        let ranges = ranges(&pieces);
        assert!(ranges.len() <= MOST_RANGES && ranges.iter().all(|range| range.start < range.end));
        assert!(
            pieces
                .iter()
                .all(|&(offset, count)| ranges.iter().any(|range| range.start <= offset && offset + u64::from(count) <= range.end))
        );
        assert_eq!(ranges.last(), Some(&(9_000..9_008)), "what is far off stays apart");
    }
}
