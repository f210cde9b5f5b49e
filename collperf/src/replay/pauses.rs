//! The gaps between the calls of a replay: how long they are together, and the longest one that a replay keeps.

use std::time::Duration;

use super::script::{Script, Step};

/// The longest gap that is replayed. A file can give any time, and other ranks wait while a rank pauses.
const LONGEST: Duration = Duration::from_secs(60);

/// Shortens gaps above the limit, and returns a note about them.
pub(super) fn shorten(scripts: &mut [Script]) -> Option<String> {
    let limit = LONGEST.as_nanos() as u64;
    let long = |step: &&mut Step| step.gap_ns > limit;
    let (mut count, mut longest) = (0_u64, 0);
    for step in scripts.iter_mut().flat_map(|script| &mut script.steps).filter(long) {
        longest = step.gap_ns.max(longest);
        step.gap_ns = limit;
        count += 1;
    }
    let (limit, longest) = (LONGEST.as_secs(), Duration::from_nanos(longest));
    (count > 0).then(|| format!("{count} gaps of more than {limit} s were shortened to {limit} s; the longest one took {longest:.1?}"))
}

/// Returns the line that says how long the gaps of a replay take, before any of them begins.
pub(super) fn announced(scripts: &[Script], repetitions: usize) -> String {
    let seconds = scripts.iter().map(total).max().unwrap_or_default().as_secs_f64() * repetitions as f64;
    format!("# expected: the gaps of a rank take up to {seconds:.1} s, in addition to its calls\n")
}

/// Returns the time of all gaps of a rank.
fn total(script: &Script) -> Duration {
    let gaps = script.steps.iter().map(|step| Duration::from_nanos(step.gap_ns));
    gaps.fold(Duration::ZERO, Duration::saturating_add)
}

impl Script {
    /// Returns the longest gap, in nanoseconds, for which another rank may have to wait for this one.
    pub(super) fn longest_gap_ns(&self) -> u64 {
        self.steps.iter().map(|step| step.gap_ns).max().unwrap_or(0).min(LONGEST.as_nanos() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(gaps: &[u64]) -> Script {
        Script { steps: gaps.iter().map(|gap_ns| Step { gap_ns: *gap_ns, ..Step::default() }).collect(), ..Script::default() }
    }

    #[test]
    fn gaps_above_a_minute_are_shortened_and_counted() {
        let minute = 60_000_000_000;
        let mut scripts = [script(&[0, minute]), script(&[u64::MAX, 5, minute + 1]), script(&[])];
        let note = shorten(&mut scripts).unwrap();
        assert!(note.contains("2 gaps of more than 60 s were shortened to 60 s; the longest one took 18446744073.7s"), "{note}");
        assert_eq!(scripts, [script(&[0, minute]), script(&[minute, 5, minute]), script(&[])]);
        assert_eq!(shorten(&mut scripts), None);
        assert!(announced(&scripts, 3).contains(" up to 360.0 s"), "{}", announced(&scripts, 3));
        assert!(announced(&[], 1).contains(" up to 0.0 s"));
    }

    #[test]
    fn a_gap_extends_the_timeout_by_at_most_a_minute() {
        assert_eq!([script(&[]), script(&[7, 9]), script(&[u64::MAX])].map(|script| script.longest_gap_ns()), [0, 9, 60_000_000_000]);
    }
}
