//! Random numbers that a seed brings back.

#[path = "../../src/base/random.rs"]
mod generator;

pub(crate) use generator::Random;

impl Random {
    /// A generator, and the seed that the caller prints: that of the environment (`COLLECTIVES_TEST_SEED`, decimal), else a new one.
    pub(crate) fn new() -> (Self, u64) {
        let given = std::env::var("COLLECTIVES_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or_else(now);
        (Self(seed), seed)
    }
}
