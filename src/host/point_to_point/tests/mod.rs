//! The engine as a whole, over links in memory and over sockets.

/// xorshift64*, seeded.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Less than `bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound
    }
}
