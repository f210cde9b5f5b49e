//! A histogram of times with a fixed number of buckets, so that a run of any length needs the same memory.
//!
//! Times are whole nanoseconds. Below 256 ns, each nanosecond has its own bucket. Above, each power of two has 128
//! buckets, so a time is known to better than one part in 128.

/// The bits of a time that select a bucket: seven of a power of two, and its leading one.
const KEPT_BITS: u32 = 8;
/// Times that have their own bucket.
const EXACT: u64 = 1 << KEPT_BITS;
/// Buckets of each power of two above.
const OF_A_POWER: usize = 1 << (KEPT_BITS - 1);
/// All buckets.
const BUCKETS: usize = EXACT as usize + (64 - KEPT_BITS as usize) * OF_A_POWER;

/// How often each time occurred.
#[derive(Debug, Clone)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    count: u64,
    /// The sum of all times, for the mean.
    sum: u128,
    least: u64,
    most: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], count: 0, sum: 0, least: u64::MAX, most: 0 }
    }
}

impl Histogram {
    /// Adds a time in nanoseconds.
    pub(crate) fn add(&mut self, nanoseconds: u64) {
        self.counts[bucket(nanoseconds)] += 1;
        self.count += 1;
        self.sum += u128::from(nanoseconds);
        self.least = self.least.min(nanoseconds);
        self.most = self.most.max(nanoseconds);
    }

    /// Returns the histogram of times in microseconds.
    pub(crate) fn of_microseconds(times: &[f64]) -> Self {
        let mut histogram = Self::default();
        times.iter().for_each(|time| histogram.add((time * 1e3).round() as u64));
        histogram
    }

    /// Returns how many times were added.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean in microseconds, 0 if there are no times.
    pub(crate) fn mean_us(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 / 1e3 }
    }

    /// Returns the smallest and the largest time in microseconds; `None` if there are no times.
    pub(crate) fn ends_us(&self) -> Option<(f64, f64)> {
        (self.count > 0).then_some((self.least as f64 / 1e3, self.most as f64 / 1e3))
    }

    /// Returns the nearest-rank percentile in microseconds; 0 if there are no times.
    pub(crate) fn percentile_us(&self, percent: f64) -> f64 {
        let rank = ((self.count as f64 * percent / 100.0).ceil() as u64).clamp(1, self.count.max(1));
        let mut below = 0;
        for (place, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return middle(place).clamp(self.least as f64, self.most as f64) / 1e3;
            }
        }
        0.0
    }

    /// Returns the buckets that are not empty: a time in microseconds and its count, ascending.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (f64, u64)> {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(place, count)| (middle(place).clamp(self.least as f64, self.most as f64) / 1e3, *count))
    }
}

/// Returns the number of a time's bucket.
fn bucket(time: u64) -> usize {
    if time < EXACT {
        return time as usize;
    }
    let power = 63 - time.leading_zeros();
    let within = (time >> (power + 1 - KEPT_BITS)) as usize - OF_A_POWER;
    EXACT as usize + (power - KEPT_BITS) as usize * OF_A_POWER + within
}

/// Returns the time in the middle of a bucket.
fn middle(place: usize) -> f64 {
    if place < EXACT as usize {
        return place as f64;
    }
    let above = place - EXACT as usize;
    let shift = (above / OF_A_POWER) as i32 + 1;
    let first = (OF_A_POWER + above % OF_A_POWER) as f64;
    (first + 0.5) * 2.0_f64.powi(shift) - 0.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn every_time_has_a_bucket_that_is_near_it() {
        let mut random = Random(20_261_128);
        let powers = (0..64).flat_map(|power| [1_u64 << power, (1 << power) - 1, (1_u64 << power).saturating_add(1)]);
        let random = (0..10_000).map(|_| random.next() >> random.below(64));
        for time in powers.chain(random).chain([0, u64::MAX]) {
            let found = middle(bucket(time));
            assert!((found - time as f64).abs() <= time as f64 / 256.0 + 0.5, "{time}: {found}");
        }
        assert_eq!((bucket(0), bucket(255), bucket(256), bucket(257), bucket(258)), (0, 255, 256, 256, 257));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn buckets_ascend() {
        assert!((1..BUCKETS).all(|place| middle(place - 1) < middle(place)));
        let times = (0..20_000_u64).chain((1..40).map(|step| step << 20));
        assert!(times.clone().zip(times.skip(1)).all(|(one, next)| bucket(one) <= bucket(next)));
    }

    #[test]
    fn percentiles_are_those_of_sorted_times() {
        let mut random = Random(7);
        for count in [1, 2, 3, 99, 100, 1000, 12_345] {
            let mut times: Vec<f64> = (0..count).map(|_| (random.next() >> (20 + random.below(40))) as f64 / 1e3).collect();
            let histogram = Histogram::of_microseconds(&times);
            times.sort_by(f64::total_cmp);
            for percent in [0.0, 1.0, 50.0, 95.0, 99.0, 99.9, 100.0] {
                let rank = ((count as f64 * percent / 100.0).ceil() as usize).clamp(1, count);
                let (found, right) = (histogram.percentile_us(percent), times[rank - 1]);
                assert!((found - right).abs() <= right / 128.0 + 0.001, "p{percent} of {count}: {found} is not {right}");
            }
            let (least, most) = histogram.ends_us().unwrap();
            assert!((least - times[0]).abs() < 1e-9 && (most - times[count - 1]).abs() <= most * 1e-12, "{least} {most}");
            let mean = times.iter().sum::<f64>() / count as f64;
            assert!((histogram.mean_us() - mean).abs() < mean * 1e-6 + 1e-9);
            assert_eq!(histogram.entries().map(|(_, count)| count).sum::<u64>(), count as u64);
        }
    }

    #[test]
    fn no_times_have_no_figures() {
        let none = Histogram::default();
        assert_eq!((none.count(), none.mean_us(), none.percentile_us(99.0), none.ends_us()), (0, 0.0, 0.0, None));
        assert_eq!(none.entries().count(), 0);
    }

    #[test]
    fn the_tail_is_found() {
        let mut histogram = Histogram::default();
        (0..9990).for_each(|_| histogram.add(200));
        (0..10).for_each(|_| histogram.add(1_000_000));
        assert_eq!((histogram.percentile_us(50.0), histogram.percentile_us(99.9)), (0.2, 0.2));
        assert!((histogram.percentile_us(99.91) - 1000.0).abs() < 8.0);
        assert_eq!(histogram.ends_us(), Some((0.2, 1000.0)));
    }
}
