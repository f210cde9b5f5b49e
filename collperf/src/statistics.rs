//! Summaries of times.

/// A summary of the times of single calls (or of samples of several calls).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    /// The standard deviation of the whole population.
    pub(crate) deviation: f64,
}

impl Spread {
    /// Returns the summary of `times`; `None` if there are none. Percentiles are nearest-rank and the median is the
    /// upper one, as in nccl-tests.
    pub(crate) fn of(times: &[f64]) -> Option<Self> {
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let count = sorted.len();
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let variance = sorted.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count as f64;
        let percentile = |thousandths: usize| sorted[(count * thousandths).div_ceil(1000).clamp(1, count) - 1];
        let [p95, p99, p999] = [950, 990, 999].map(percentile);
        Some(Self { min, max, mean, p50: sorted[count / 2], p95, p99, p999, deviation: variance.sqrt() })
    }

    /// Returns the deviation in percent of the mean.
    pub(crate) fn variation_percent(&self) -> f64 {
        if self.mean > 0.0 { self.deviation / self.mean * 100.0 } else { 0.0 }
    }
}

/// How the ranks' times are combined into one (`-a`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Average {
    Rank0,
    Mean,
    Min,
    Max,
}

impl Average {
    /// Returns the one time that represents all ranks' times.
    pub(crate) fn of(self, times: &[f64]) -> f64 {
        match self {
            Average::Rank0 => times.first().copied().unwrap_or(0.0),
            Average::Mean => times.iter().sum::<f64>() / times.len().max(1) as f64,
            Average::Min => times.iter().copied().fold(f64::INFINITY, f64::min),
            Average::Max => times.iter().copied().fold(0.0, f64::max),
        }
    }
}

/// Returns the largest of all ranks' times, for each call: `all` holds one rank's times after another's.
pub(crate) fn slowest(all: &[f64], calls: usize) -> Vec<f64> {
    let mut times = vec![0.0; calls];
    for rank in all.chunks_exact(calls.max(1)) {
        for (slowest, time) in times.iter_mut().zip(rank) {
            *slowest = f64::max(*slowest, *time);
        }
    }
    times
}

/// The largest accepted probability that a run names a rank although all differences are due to chance.
const SIGNIFICANCE: f64 = 0.01;

/// Whether `hits` are most of the looks: at least three of four.
pub(crate) fn are_most(hits: usize, looks: usize) -> bool {
    looks > 0 && 4 * hits >= 3 * looks
}

/// Whether `hits` hits in `tries` tries are more than chance explains, for any one of `suspects` suspects. By chance, a
/// try is a hit with probability `chance`. This is a binomial test with Bonferroni's correction.
pub(crate) fn is_evidence(tries: usize, hits: usize, chance: f64, suspects: usize) -> bool {
    binomial_tail(tries, hits, chance) * suspects as f64 <= SIGNIFICANCE
}

/// Returns which suspects stand out in most looks, and in more looks than chance explains. `marks` has, for each
/// suspect, whether it stands out in each look. The probability of standing out by chance is estimated from all
/// suspects, including the tested one. So if all suspects stand out occasionally, none is named.
pub(crate) fn standing_out(marks: &[Vec<bool>]) -> Vec<bool> {
    let hits: Vec<usize> = marks.iter().map(|looks| looks.iter().filter(|mark| **mark).count()).collect();
    let looks = marks.iter().map(Vec::len).sum::<usize>();
    let chance = (hits.iter().sum::<usize>() + 1) as f64 / (looks + 2) as f64;
    let stands_out =
        |(looks, hits): (&Vec<bool>, &usize)| are_most(*hits, looks.len()) && is_evidence(looks.len(), *hits, chance, marks.len());
    marks.iter().zip(&hits).map(stands_out).collect()
}

/// Returns the probability of at least `hits` hits in `tries` tries.
fn binomial_tail(tries: usize, hits: usize, chance: f64) -> f64 {
    if hits == 0 || chance >= 1.0 {
        return 1.0;
    }
    let exactly = |hits: usize| {
        let ways: f64 = (1..=hits).map(|number| (((tries - hits + number) as f64) / number as f64).ln()).sum();
        (ways + hits as f64 * chance.ln() + (tries - hits) as f64 * (-chance).ln_1p()).exp()
    };
    (hits..=tries).map(exactly).sum::<f64>().min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn tails_are_those_of_coins_that_are_thrown() {
        // Every outcome of a number of throws, counted.
        for tries in 1..12_u32 {
            for hits in 0..=tries {
                let count = (0..1_u32 << tries).filter(|outcome| outcome.count_ones() >= hits).count();
                let expected = count as f64 / f64::from(1_u32 << tries);
                assert!((binomial_tail(tries as usize, hits as usize, 0.5) - expected).abs() < 1e-9, "{hits} of {tries}");
            }
        }
        assert!((binomial_tail(3, 2, 0.1) - 0.028).abs() < 1e-12 && (binomial_tail(3, 3, 0.1) - 0.001).abs() < 1e-12);
        assert!(binomial_tail(1000, 1000, 0.5) < 1e-300 && binomial_tail(1000, 400, 0.5) > 0.999);
    }

    #[test]
    fn chance_makes_nobody_stand_out() {
        let seed = 20_261_126;
        let mut random = Random(seed);
        for suspects in [2, 3, 5, 12, 60] {
            for chance in [2, 20, 50, 80] {
                let runs = 2000;
                let mut draw = || (0..8).map(|_| random.below(100) < chance).collect::<Vec<_>>();
                let named = (0..runs).filter(|_| standing_out(&(0..suspects).map(|_| draw()).collect::<Vec<_>>()).contains(&true)).count();
                // One percent, and as much again for random deviations.
                assert!(named <= runs / 50, "seed {seed}: {named} of {runs} with {suspects} suspects at {chance} %");
            }
        }
        let mut marks = vec![vec![false; 8]; 12];
        marks[3] = vec![true; 8];
        marks[5][2] = true;
        assert_eq!(standing_out(&marks).iter().position(|named| *named), Some(3));
        assert_eq!(standing_out(&[vec![], vec![]]), [false, false]);
        assert_eq!(standing_out(&[vec![true; 8], vec![false; 8]]), [true, false]);
    }

    #[test]
    fn a_spread_is_exact() {
        let times: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let spread = Spread::of(&times).unwrap();
        assert_eq!((spread.min, spread.max, spread.mean), (1.0, 200.0, 100.5));
        assert_eq!((spread.p50, spread.p95, spread.p99, spread.p999), (101.0, 190.0, 198.0, 200.0));
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
