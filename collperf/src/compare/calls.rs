//! Compares two replays call by call.

use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;

use crate::failure::Failure;
use crate::input_file;
use crate::replay::{FORMAT, Outcome, Timed, VERSION};

/// The most single calls that are listed.
const LISTED: usize = 10;

/// The part of a file that shows its format.
#[derive(Deserialize)]
struct Sign {
    format: Option<String>,
}

/// Two replays of the same calls.
#[derive(Debug)]
pub(super) struct Comparison {
    names: [String; 2],
    replays: [Outcome; 2],
    /// The calls of one kind, with their number and total times.
    kinds: Vec<(String, usize, [f64; 2])>,
}

impl Comparison {
    /// Reads two files; `None` if neither is a replay.
    pub(super) fn read(a: &Path, b: &Path) -> Result<Option<Self>, Failure> {
        let text = |path: &Path| input_file::read(path).map_err(|error| Failure::io(format!("reading {}", path.display()), &error));
        let texts = [text(a)?, text(b)?];
        let are_replays = texts.each_ref().map(|text| is_replay(text));
        let names = [a, b].map(|path| path.display().to_string());
        match are_replays {
            [false, false] => return Ok(None),
            [true, true] => {}
            [is_first, _] => {
                let (replay, other) = if is_first { (&names[0], &names[1]) } else { (&names[1], &names[0]) };
                return Err(Failure::internal(format!("{replay} is a replay, but {other} is not: give two replays, or two results")));
            }
        }
        let [one, other] =
            [0, 1].map(|place| parse(&texts[place]).map_err(|reason| Failure::internal(format!("{}: {reason}", names[place]))));
        Self::new(names, [one?, other?]).map(Some).map_err(Failure::internal)
    }

    /// Fails if the replays do not have the same calls.
    fn new(names: [String; 2], replays: [Outcome; 2]) -> Result<Self, String> {
        let [a, b] = &replays;
        let without_times = |call: &Timed| Timed { recorded_us: None, replayed_us: 0.0, ..call.clone() };
        let differing = a.calls.iter().zip(&b.calls).find(|(one, other)| without_times(one) != without_times(other));
        if let Some((one, other)) = differing {
            let which = format!("call {} of rank {}", one.number, one.rank);
            return Err(format!(
                "the replays are of different jobs: {which} is {} in {}, but {} in {}",
                one.in_words(),
                names[0],
                other.in_words(),
                names[1]
            ));
        }
        if a.calls.len() != b.calls.len() {
            let (one, other) = (a.calls.len(), b.calls.len());
            return Err(format!("the replays are of different jobs: {} has {one} calls, and {} has {other}", names[0], names[1]));
        }
        let mut kinds: Vec<(String, usize, [f64; 2])> = Vec::new();
        for (one, other) in a.calls.iter().zip(&b.calls) {
            let place = kinds.iter().position(|(kind, ..)| *kind == one.kind).unwrap_or(kinds.len());
            if place == kinds.len() {
                kinds.push((one.kind.clone(), 0, [0.0; 2]));
            }
            let (_, count, times) = &mut kinds[place];
            *count += 1;
            *times = [times[0] + one.replayed_us, times[1] + other.replayed_us];
        }
        Ok(Self { names, replays, kinds })
    }

    /// Whether the calls of a kind took more than `threshold` percent longer.
    pub(super) fn is_slower(&self, threshold: f64) -> bool {
        self.kinds.iter().any(|(.., [a, b])| *b > a * (1.0 + threshold / 100.0))
    }

    /// Returns the comparison as text.
    pub(super) fn text(&self, threshold: Option<f64>) -> String {
        let mut text = String::new();
        for (whose, name, replay) in [("A", &self.names[0], &self.replays[0]), ("B", &self.names[1], &self.replays[1])] {
            let Outcome { source, ranks, transport, gaps, start_time, .. } = replay;
            let _ = writeln!(
                text,
                "# {whose}: {name}: replay of a {source}, {ranks} ranks, transport {transport}, gaps: {gaps} ({start_time})"
            );
        }
        text += "#\n# Times are sums over the calls of all ranks. If \"B/A\" is above 1, B is slower\n";
        text += "#\n# call                    calls         A (us)         B (us)      B/A\n";
        let total = self
            .kinds
            .iter()
            .fold((0, [0.0; 2]), |(calls, sum), (_, count, times)| (calls + count, [sum[0] + times[0], sum[1] + times[1]]));
        for (kind, count, [a, b]) in
            self.kinds.iter().map(|(kind, count, times)| (&**kind, *count, *times)).chain([("all", total.0, total.1)])
        {
            let mark =
                threshold.filter(|threshold| b > a * (1.0 + threshold / 100.0)).map(|over| format!("  over {over} %")).unwrap_or_default();
            let _ = writeln!(text, "{kind:<20} {count:>9} {a:>14.1} {b:>14.1} {}{mark}", ratio(a, b));
        }
        text + &self.single_calls()
    }

    /// Lists the single calls whose times differ most.
    fn single_calls(&self) -> String {
        let [a, b] = &self.replays;
        let mut pairs: Vec<(&Timed, &Timed)> = a.calls.iter().zip(&b.calls).collect();
        let difference = |(one, other): &(&Timed, &Timed)| (other.replayed_us - one.replayed_us).abs();
        pairs.sort_by(|one, other| difference(other).total_cmp(&difference(one)));
        let mut text = "#\n# The calls whose times differ most:\n#  rank    call         A (us)         B (us)      B/A\n".to_owned();
        for (one, other) in pairs.into_iter().take(LISTED) {
            let (a, b) = (one.replayed_us, other.replayed_us);
            let _ = writeln!(text, "{:>7} {:>7} {a:>14.1} {b:>14.1} {}  {}", one.rank, one.number, ratio(a, b), one.in_words());
        }
        text
    }
}

fn ratio(a: f64, b: f64) -> String {
    if a > 0.0 { format!("{:>8.3}", b / a) } else { format!("{:>8}", "-") }
}

fn is_replay(text: &[u8]) -> bool {
    serde_json::from_slice::<Sign>(text).is_ok_and(|sign| sign.format.as_deref() == Some(FORMAT))
}

fn parse(text: &[u8]) -> Result<Outcome, String> {
    let replay: Outcome = serde_json::from_slice(text).map_err(|error| format!("not a readable replay: {error}"))?;
    match replay.version {
        version if version > VERSION => {
            Err(format!("the file's format has version {version}, but this collperf reads versions up to {VERSION}"))
        }
        _ => Ok(replay),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(times: &[(&str, f64)]) -> Outcome {
        let call = |(number, (kind, time)): (usize, &(&str, f64))| {
            let call = serde_json::json!({
                "rank": 0, "number": number, "communicator": 0, "kind": kind, "op": "none", "dtype": "u8", "count": 4, "bytes": 4,
                "root": null, "peer": null, "tag": null, "recorded_us": null, "replayed_us": time
            });
            serde_json::from_value(call).unwrap()
        };
        let mut outcome: Outcome = serde_json::from_value(serde_json::json!({
            "format": FORMAT, "version": 1, "start_time": "", "source": "trace", "ranks": 1, "transport": "auto", "gaps": "keep",
            "repetitions": 1, "not_recorded": [], "notes": [], "communicators": [], "calls": []
        }))
        .unwrap();
        outcome.calls = times.iter().enumerate().map(call).collect();
        outcome
    }

    fn compared(a: &[(&str, f64)], b: &[(&str, f64)]) -> Result<Comparison, String> {
        Comparison::new(["a".to_owned(), "b".to_owned()], [replay(a), replay(b)])
    }

    #[test]
    fn sums_and_single_calls_are_compared() {
        let both = compared(
            &[("barrier", 1.0), ("all_gather", 8.0), ("barrier", 1.0)],
            &[("barrier", 1.5), ("all_gather", 4.0), ("barrier", 1.5)],
        )
        .unwrap();
        assert!(both.is_slower(49.0) && !both.is_slower(50.0));
        let text = both.text(Some(40.0));
        let row = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(row("barrier"), ["barrier", "2", "2.0", "3.0", "1.500", "over", "40", "%"]);
        assert_eq!(row("all "), ["all", "3", "10.0", "7.0", "0.700"]);
        let first = text.lines().skip_while(|line| !line.contains("differ most")).nth(2).unwrap();
        assert!(first.contains("all_gather u8, 4 B"), "{text}");
    }

    #[test]
    fn other_calls_are_named() {
        let error = compared(&[("barrier", 1.0), ("barrier", 1.0)], &[("barrier", 1.0), ("all_gather", 1.0)]).unwrap_err();
        assert!(error.contains("call 1 of rank 0 is barrier u8, 4 B in a, but all_gather u8, 4 B in b"), "{error}");
        assert!(compared(&[("barrier", 1.0)], &[]).unwrap_err().contains("a has 1 calls, and b has 0"));
    }
}
