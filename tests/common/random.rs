//! Random numbers that a seed brings back.

/// SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(u64);

impl Random {
    /// A generator, and the seed that the caller prints: that of the environment (`COLLECTIVES_TEST_SEED`, decimal), else a new one.
    pub fn new() -> (Self, u64) {
        let given = std::env::var("COLLECTIVES_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or_else(now);
        (Self(seed), seed)
    }

    /// The generator of this seed.
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number less than `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
