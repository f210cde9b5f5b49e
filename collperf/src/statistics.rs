//! Summaries of times.

/// What is said about the times of single calls (or of samples of several calls).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    /// The standard deviation of the whole population.
    pub(crate) deviation: f64,
}

impl Spread {
    /// The summary of `times`; `None` of none. Percentiles are nearest-rank and the median is the upper one, as nccl-tests
    /// has them.
    pub(crate) fn of(times: &[f64]) -> Option<Self> {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let count = sorted.len();
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let variance = sorted.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count as f64;
        let percentile = |percent: usize| sorted[(count * percent).div_ceil(100).clamp(1, count) - 1];
        Some(Self { min, max, mean, p50: sorted[count / 2], p95: percentile(95), p99: percentile(99), deviation: variance.sqrt() })
    }

    /// The deviation in percent of the mean.
    pub(crate) fn variation_percent(&self) -> f64 {
        if self.mean > 0.0 { self.deviation / self.mean * 100.0 } else { 0.0 }
    }
}

/// How the ranks' times become one (`-a`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Average {
    Rank0,
    Mean,
    Min,
    Max,
}

impl Average {
    /// The one time that stands for all ranks'.
    pub(crate) fn of(self, times: &[f64]) -> f64 {
        match self {
            Average::Rank0 => times.first().copied().unwrap_or(0.0),
            Average::Mean => times.iter().sum::<f64>() / times.len().max(1) as f64,
            Average::Min => times.iter().copied().fold(f64::INFINITY, f64::min),
            Average::Max => times.iter().copied().fold(0.0, f64::max),
        }
    }
}

/// The largest of all ranks' times, for each call: `all` holds one rank's times after another's.
pub(crate) fn slowest(all: &[f64], calls: usize) -> Vec<f64> {
    let mut times = vec![0.0; calls];
    for rank in all.chunks_exact(calls.max(1)) {
        for (slowest, time) in times.iter_mut().zip(rank) {
            *slowest = f64::max(*slowest, *time);
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_exact() {
        let times: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let spread = Spread::of(&times).unwrap();
        assert_eq!((spread.min, spread.max, spread.mean), (1.0, 200.0, 100.5));
        assert_eq!((spread.p50, spread.p95, spread.p99), (101.0, 190.0, 198.0));
        assert!((spread.deviation - (39999.0_f64 / 12.0).sqrt()).abs() < 1e-9);
        assert!((spread.variation_percent() - spread.deviation / 1.005).abs() < 1e-9);
    }

    #[test]
    fn few_times_have_a_spread_too() {
        assert_eq!(Spread::of(&[]), None);
        let one = Spread::of(&[7.0]).unwrap();
        assert_eq!((one.p50, one.p95, one.p99, one.deviation), (7.0, 7.0, 7.0, 0.0));
        assert_eq!(Spread::of(&[3.0, 1.0]).unwrap().p50, 3.0);
        assert_eq!(Spread::of(&[0.0, 0.0]).unwrap().variation_percent(), 0.0);
    }

    #[test]
    fn ranks_are_averaged_as_asked() {
        let times = [4.0, 1.0, 7.0];
        let found = [Average::Rank0, Average::Mean, Average::Min, Average::Max].map(|average| average.of(&times));
        assert_eq!(found, [4.0, 4.0, 1.0, 7.0]);
    }

    #[test]
    fn the_slowest_rank_counts() {
        assert_eq!(slowest(&[1.0, 5.0, 2.0, 4.0, 3.0, 3.0], 2), [3.0, 5.0]);
        assert_eq!(slowest(&[], 0), [0.0; 0]);
    }
}
