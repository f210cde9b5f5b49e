//! Reproducible pseudo-random numbers: SplitMix64 (Steele, Lea, Flood 2014).

pub(crate) struct Random(u64);

impl Random {
    /// Begins with a seed; seeds that differ in few bits give unrelated numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Returns a number less than `end`, which is not zero.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Returns true in `of_256` of 256 cases.
    pub(crate) fn chance(&mut self, of_256: u64) -> bool {
        self.next() >> 56 < of_256
    }
}
