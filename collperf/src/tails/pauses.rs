//! The pauses of the machine: intervals in which a rank that could compute did not, because the system, another
//! program or a virtual machine's host used its core.
//!
//! A loop only reads the clock. A gap between two readings is a pause.

use std::time::{Duration, Instant};

use collectives::{Communicator, ReduceOp};

use super::Histogram;

/// How long each rank watches the clock.
const WATCHED: Duration = Duration::from_millis(200);
/// The shortest gap that counts as a pause. A reading of the clock takes 20 to 60 ns.
const SHORTEST: Duration = Duration::from_micros(1);
/// The limits between lengths of pauses, in powers of two of a microsecond.
const LENGTHS: usize = 24;

/// How often the cores of all ranks pause, and for how long.
#[derive(Debug, Clone)]
pub(crate) struct Pauses {
    /// For each power of two: pauses per second of at least this length and less than twice as much, over all ranks.
    rates: [f64; LENGTHS],
}

impl Pauses {
    /// Watches the clock on all ranks at the same time, and adds up what they see. Every rank calls it.
    pub(crate) fn observe(comm: &Communicator) -> collectives::Result<Self> {
        comm.barrier()?;
        let mut seen = watch(WATCHED);
        comm.all_reduce(&mut seen[..], ReduceOp::Sum)?;
        Ok(Self::new(seen, WATCHED))
    }

    fn new(seen: [u64; LENGTHS], time: Duration) -> Self {
        Self { rates: seen.map(|count| count as f64 / time.as_secs_f64()) }
    }

    /// Returns pauses with these counts for these powers of two.
    #[cfg(test)]
    pub(super) fn example(counts: &[(usize, u64)], time: Duration) -> Self {
        let mut seen = [0; LENGTHS];
        counts.iter().for_each(|(power, count)| seen[*power] = *count);
        Self::new(seen, time)
    }

    /// Returns each length in microseconds that occurred, and how many such pauses are expected in a time.
    pub(crate) fn expected_in(&self, time: Duration) -> impl Iterator<Item = (f64, f64)> {
        let seconds = time.as_secs_f64();
        let occurred = self.rates.into_iter().enumerate().filter(|(_, rate)| *rate > 0.0);
        // The geometric middle of a power of two.
        occurred.map(move |(power, rate)| (2.0_f64.powi(power as i32) * std::f64::consts::SQRT_2, rate * seconds))
    }

    /// Describes them: how many per second, and the longest.
    pub(crate) fn told(&self) -> String {
        let rate: f64 = self.rates.iter().sum();
        let longest = self.rates.iter().rposition(|rate| *rate > 0.0);
        longest.map_or_else(
            || "pauses of the machine: none of more than 1 us".to_owned(),
            |power| format!("pauses of the machine: {rate:.0} per second over all ranks, the longest up to {} us", 2_u64 << power),
        )
    }
}

/// Reads the clock for some time, and counts the gaps by length.
fn watch(time: Duration) -> [u64; LENGTHS] {
    let mut seen = [0; LENGTHS];
    let began = Instant::now();
    let mut last = began;
    while last - began < time {
        let now = Instant::now();
        if now - last >= SHORTEST {
            seen[length(now - last)] += 1;
        }
        last = now;
    }
    seen
}

/// Returns the power of two of a gap's microseconds.
fn length(gap: Duration) -> usize {
    let microseconds = u64::try_from(gap.as_micros()).unwrap_or(u64::MAX).max(1);
    (microseconds.ilog2() as usize).min(LENGTHS - 1)
}

/// Returns the pauses that are expected among calls: the time in microseconds that a usual call takes with such a pause,
/// and their number.
pub(super) fn expected(pauses: &Pauses, calls: &Histogram) -> Vec<(f64, f64)> {
    let usual = calls.percentile_us(50.0);
    let time = Duration::from_secs_f64((calls.mean_us() * calls.count() as f64 / 1e6).clamp(0.0, 1e9));
    pauses.expected_in(time).map(|(length, count)| (usual + length, count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_powers_of_two() {
        for (microseconds, power) in [(1, 0), (2, 1), (3, 1), (4, 2), (1023, 9), (1024, 10), (u64::MAX / 2000, LENGTHS - 1)] {
            assert_eq!(length(Duration::from_micros(microseconds)), power, "{microseconds}");
        }
        assert_eq!(length(Duration::from_nanos(1100)), 0);
    }

    #[test]
    fn a_time_has_the_pauses_of_its_length() {
        let mut seen = [0; LENGTHS];
        (seen[0], seen[12]) = (20, 2);
        let pauses = Pauses::new(seen, Duration::from_millis(200));
        let found: Vec<(f64, f64)> = pauses.expected_in(Duration::from_secs(2)).collect();
        assert!(found.len() == 2 && (found[0].0 - 1.414).abs() < 0.001 && (found[1].0 - 5792.6).abs() < 0.1, "{found:?}");
        assert_eq!((found[0].1, found[1].1), (200.0, 20.0));
        assert_eq!(pauses.told(), "pauses of the machine: 110 per second over all ranks, the longest up to 8192 us");
        assert!(Pauses::new([0; LENGTHS], WATCHED).told().ends_with("none of more than 1 us"));
    }

    #[test]
    fn a_pause_makes_a_call_longer() {
        let mut seen = [0; LENGTHS];
        seen[10] = 1;
        let pauses = Pauses::new(seen, Duration::from_secs(1));
        let calls = Histogram::of_microseconds(&[1.0; 1000]);
        let one = expected(&pauses, &calls);
        assert!(one.len() == 1 && (one[0].0 - 1449.15).abs() < 0.1 && (one[0].1 - 0.001).abs() < 1e-6, "{one:?}");
        assert!(expected(&pauses, &Histogram::default()).iter().all(|(_, count)| *count == 0.0));
    }

    #[test]
    fn watching_ends() {
        let began = Instant::now();
        let seen = watch(Duration::from_millis(2));
        assert!(began.elapsed() >= Duration::from_millis(2) && seen.iter().sum::<u64>() < 2001);
    }
}
