//! A histogram as lines of text: one line for each power of two, with the pauses of the machine beside the calls.

use std::fmt;

use super::pauses::expected;
use super::{Histogram, Pauses};

/// The length of the longest bar.
const LONGEST_BAR: f64 = 40.0;
/// A line is marked if pauses explain at least this part of its calls.
const EXPLAINED: f64 = 0.5;

/// A histogram of calls, to be printed as comment lines.
pub(crate) struct Chart<'a> {
    pub(crate) calls: &'a Histogram,
    pub(crate) pauses: &'a Pauses,
    /// Times are shown divided by this number: two for half a round trip.
    pub(crate) parts: f64,
}

/// One power of two: its lower end is 2^`power` microseconds.
#[derive(Debug, PartialEq)]
struct Line {
    power: i32,
    calls: u64,
    pauses: f64,
}

impl Chart<'_> {
    fn lines(&self) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for (time, count) in self.calls.entries() {
            let power = power_of(time / self.parts);
            match lines.last_mut().filter(|line| line.power == power) {
                Some(line) => line.calls += count,
                None => lines.push(Line { power, calls: count, pauses: 0.0 }),
            }
        }
        for (time, count) in expected(self.pauses, self.calls) {
            if let Some(line) = lines.iter_mut().find(|line| line.power == power_of(time / self.parts)) {
                line.pauses += count;
            }
        }
        lines
    }
}

/// Returns the power of two at or below a time.
fn power_of(time_us: f64) -> i32 {
    time_us.max(0.001).log2().floor() as i32
}

impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((_, most)) = self.calls.ends_us().map(|(least, most)| (least, most / self.parts)) else { return Ok(()) };
        let [p50, p99, p999] = [50.0, 99.0, 99.9].map(|percent| self.calls.percentile_us(percent) / self.parts);
        writeln!(f, "#   p50 {p50:.2} us, p99 {p99:.2} us, p99.9 {p999:.2} us, largest {most:.2} us")?;
        writeln!(f, "#   {:>12} {:>12} {:>10} {:>10}", "from (us)", "to (us)", "calls", "pauses")?;
        let usual = power_of(p50);
        for Line { power, calls, pauses } in self.lines() {
            let from = 2.0_f64.powi(power);
            // Logarithmic, so that a few calls of millions are visible.
            let bar = "*".repeat((LONGEST_BAR * (calls as f64 + 1.0).ln() / (self.calls.count() as f64 + 1.0).ln()).ceil() as usize);
            let is_explained = power > usual && pauses >= EXPLAINED * calls as f64;
            let mark = if is_explained { "  <- pauses of the machine" } else { "" };
            writeln!(f, "#   {from:>12.3} {:>12.3} {calls:>10} {pauses:>10.1}  {bar}{mark}", 2.0 * from)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn text(calls: &Histogram, seen: &[(usize, u64)]) -> String {
        let pauses = Pauses::example(seen, Duration::from_secs(1));
        Chart { calls, pauses: &pauses, parts: 1.0 }.to_string()
    }

    #[test]
    fn lines_are_powers_of_two_and_count_every_call() {
        let mut times = vec![1.5; 900];
        times.extend([0.7; 99]);
        times.push(5000.0);
        let text = text(&Histogram::of_microseconds(&times), &[]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[0].starts_with("#   p50 1.50 us, p99 1.50 us, p99.9 1.50 us, largest 5000.00 us"), "{text}");
        let numbers = |line: &str| line[1..].split_whitespace().take(4).map(|word| word.parse::<f64>().unwrap()).collect::<Vec<_>>();
        assert_eq!(numbers(lines[2]), [0.5, 1.0, 99.0, 0.0]);
        assert_eq!(numbers(lines[3]), [1.0, 2.0, 900.0, 0.0]);
        assert_eq!(numbers(lines[4]), [4096.0, 8192.0, 1.0, 0.0]);
        assert!(lines[2..].iter().all(|line| line.contains('*')), "{text}");
    }

    #[test]
    fn round_trips_are_shown_as_halves() {
        let calls = Histogram::of_microseconds(&[3.0; 10]);
        let pauses = Pauses::example(&[], Duration::from_secs(1));
        let text = Chart { calls: &calls, pauses: &pauses, parts: 2.0 }.to_string();
        assert!(
            text.starts_with("#   p50 1.50 us, p99 1.50 us, p99.9 1.50 us, largest 1.50 us")
                && text.contains("       1.000        2.000         10"),
            "{text}"
        );
    }

    #[test]
    fn calls_that_pauses_explain_are_marked() {
        let mut times = vec![100.0; 9999];
        times.push(5000.0);
        let calls = Histogram::of_microseconds(&times);
        // The calls take about a second, in which there is one such pause.
        assert_eq!(text(&calls, &[(12, 1)]).matches("<- pauses of the machine").count(), 1);
        assert_eq!(text(&calls, &[(11, 1)]).matches("<- pauses").count(), 0, "other lengths explain nothing");
        assert_eq!(text(&calls, &[(0, 100_000)]).matches("<- pauses").count(), 0, "short ones are part of the usual time");
        assert_eq!(text(&Histogram::default(), &[(3, 5)]), "");
    }
}
