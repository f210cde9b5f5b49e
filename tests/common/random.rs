//! Random numbers that can be repeated from a seed.

#[path = "../../src/base/random.rs"]
mod generator;

pub(crate) use generator::Random;

impl Random {
    /// Returns a generator and its seed, which the caller prints. The seed is `COLLECTIVES_TEST_SEED` (decimal) if set,
    /// else new.
    pub(crate) fn new() -> (Self, u64) {
        let given = std::env::var("COLLECTIVES_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        let seed = given.unwrap_or_else(now);
        (Self(seed), seed)
    }
}
