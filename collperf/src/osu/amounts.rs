//! The sizes of messages, and how many iterations each size gets, as in OSU's benchmarks.

use crate::sizes;

/// Messages above this size are large, and get fewer iterations.
const LARGE: usize = 8 << 10;
/// The largest size that is accepted.
const MOST_BYTES: usize = 1 << 30;

/// The smallest and the largest size, as `-m` gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    least: Option<usize>,
    most: Option<usize>,
}

impl Range {
    /// Reads `MAX`, `MIN:` or `MIN:MAX`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let size = |text: &str| match sizes::parse(text)? {
            size if size > MOST_BYTES => Err(format!("size {text:?}: at most 1G is possible")),
            size => Ok(size),
        };
        let (least, most) = match text.split_once(':') {
            None => (None, Some(size(text)?)),
            Some((least, "")) => (Some(size(least)?), None),
            Some((least, most)) => (Some(size(least)?), Some(size(most)?)),
        };
        match (least, most) {
            (Some(least), Some(most)) if least > most => Err(format!("{text:?}: the smallest size is above the largest")),
            _ => Ok(Self { least, most }),
        }
    }

    /// Returns the sizes from the smallest to the largest, each twice as large as the one before. The arguments are the
    /// defaults of the benchmark.
    pub(super) fn sizes(range: Option<Self>, least: usize, most: usize) -> Result<Vec<usize>, String> {
        let given = range.unwrap_or(Self { least: None, most: None });
        let first = given.least.unwrap_or(least.min(given.most.unwrap_or(least)));
        let last = given.most.unwrap_or(most.max(first));
        sizes::sweep(first, last, sizes::Step::Factor(2))
    }
}

/// Numbers of iterations: untimed, then timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Amount {
    pub(super) warmup: u32,
    pub(super) iterations: u32,
}

/// The amounts of a benchmark for small and for large messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Amounts {
    pub(super) small: Amount,
    pub(super) large: Amount,
}

/// The defaults of OSU's `osu_latency`.
pub(super) const OF_LATENCY: Amounts =
    Amounts { small: Amount { warmup: 100, iterations: 10_000 }, large: Amount { warmup: 10, iterations: 1000 } };
/// The defaults of OSU's benchmarks of bandwidth.
pub(super) const OF_BANDWIDTH: Amounts =
    Amounts { small: Amount { warmup: 10, iterations: 100 }, large: Amount { warmup: 2, iterations: 20 } };
/// The defaults of OSU's benchmarks of collectives.
pub(super) const OF_COLLECTIVES: Amounts =
    Amounts { small: Amount { warmup: 100, iterations: 1000 }, large: Amount { warmup: 10, iterations: 100 } };

impl Amounts {
    /// Returns the amount for a size; `-x` and `-i` replace the defaults.
    pub(super) fn of(&self, bytes: usize, warmup: Option<u32>, iterations: Option<u32>) -> Amount {
        let usual = if bytes > LARGE { self.large } else { self.small };
        Amount { warmup: warmup.unwrap_or(usual.warmup), iterations: iterations.unwrap_or(usual.iterations) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(text: &str) -> Result<Vec<usize>, String> {
        Range::sizes(Some(Range::parse(text)?), 1, 16)
    }

    #[test]
    fn ranges_are_read_as_osu_reads_them() {
        assert_eq!(sizes("4:16"), Ok(vec![4, 8, 16]));
        assert_eq!(sizes("8"), Ok(vec![1, 2, 4, 8]));
        assert_eq!(sizes("8:"), Ok(vec![8, 16]));
        assert_eq!(sizes("1K:"), Ok(vec![1024]));
        assert_eq!(sizes("0:2"), Ok(vec![0, 1, 2]));
        assert_eq!(sizes("0"), Ok(vec![0]));
        assert_eq!(sizes("3:20"), Ok(vec![3, 6, 12]));
        assert_eq!(Range::sizes(None, 1, 4), Ok(vec![1, 2, 4]));
        for text in ["", ":", ":8", "8:4", "a", "1:b", "1:2:3", "-1:4", "2G", "1:2G", "99999999999999999999"] {
            assert!(sizes(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn large_messages_get_fewer_iterations() {
        let of = |bytes, warmup, iterations| OF_LATENCY.of(bytes, warmup, iterations);
        assert_eq!(of(8192, None, None), OF_LATENCY.small);
        assert_eq!(of(8193, None, None), OF_LATENCY.large);
        assert_eq!(of(1 << 20, Some(0), None), Amount { warmup: 0, iterations: 1000 });
        assert_eq!(of(1, None, Some(7)), Amount { warmup: 100, iterations: 7 });
    }
}
