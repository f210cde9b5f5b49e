//! The outcome of a replay: the times of its calls beside the recorded ones.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::recording::{Call, Recording};
use super::script::Script;
use crate::failure::Failure;

/// The value of `format`, and the newest version.
pub(crate) const FORMAT: &str = "collectives replay";
pub(crate) const VERSION: u32 = 1;

/// The file of a replay.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) start_time: String,
    /// What was replayed: `trace`, `flight record`.
    pub(crate) source: String,
    pub(crate) ranks: usize,
    pub(crate) transport: String,
    /// `keep`, `sleep` or `none`.
    pub(crate) gaps: String,
    pub(crate) repetitions: usize,
    /// What the record does not contain, and what the replay does in its place.
    pub(crate) not_recorded: Vec<String>,
    pub(crate) notes: Vec<String>,
    pub(crate) communicators: Vec<Members>,
    pub(crate) calls: Vec<Timed>,
}

/// A communicator of the record.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Members {
    pub(crate) name: String,
    pub(crate) world_ranks: Vec<usize>,
}

/// One call of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timed {
    pub(crate) rank: usize,
    /// Its number among the rank's calls.
    pub(crate) number: usize,
    pub(crate) communicator: usize,
    pub(crate) kind: String,
    pub(crate) op: String,
    pub(crate) dtype: String,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    pub(crate) root: Option<usize>,
    pub(crate) peer: Option<usize>,
    pub(crate) tag: Option<u64>,
    /// `None` if the record does not contain the time.
    pub(crate) recorded_us: Option<f64>,
    /// The median of all repetitions.
    pub(crate) replayed_us: f64,
}

impl Timed {
    /// Describes the call without its times.
    pub(crate) fn in_words(&self) -> String {
        let words = [&self.kind, &self.op, &self.dtype].into_iter().filter(|word| *word != "none").map(String::as_str);
        let mut text = words.collect::<Vec<_>>().join(" ");
        if let Some(peer) = self.peer {
            let _ = write!(text, " {} rank {peer}", if self.kind == "send" { "to" } else { "from" });
        }
        if let Some(root) = self.root {
            let _ = write!(text, ", root {root}");
        }
        let _ = write!(text, ", {} B", self.bytes);
        text
    }
}

/// Puts the times of a rank's steps beside those of its recorded calls.
pub(super) fn timed(rank: usize, calls: &[Call], script: &Script, times: &[u64], repetitions: usize) -> Result<Vec<Timed>, Failure> {
    let steps = script.steps.len();
    if times.len() != steps * repetitions || calls.len() != steps {
        return Err(Failure::internal(format!("rank {rank} timed {} calls instead of {steps} x {repetitions}", times.len())));
    }
    let one = |(number, (call, step)): (usize, (&Call, &super::script::Step))| {
        let shape = &script.shapes[step.shape];
        let bytes = super::buffers::bytes(script, shape, rank)?;
        let mut all: Vec<u64> = times.iter().skip(number).step_by(steps.max(1)).copied().collect();
        let is_message = call.kind.is_message();
        Ok(Timed {
            rank,
            number,
            communicator: call.group,
            kind: call.kind.name().to_owned(),
            op: call.op.clone().unwrap_or_else(|| "none".to_owned()),
            dtype: call.element.clone(),
            count: call.count,
            bytes: bytes.0.max(bytes.1) as u64,
            root: shape.kind.data().filter(|data| data.is_rooted()).map(|_| shape.root),
            peer: is_message.then_some(shape.peer),
            tag: is_message.then_some(shape.tag),
            recorded_us: call.duration_ns.filter(|_| call.start_ns.is_some()).map(|ns| ns as f64 / 1e3),
            replayed_us: median(&mut all) / 1e3,
        })
    };
    calls.iter().zip(&script.steps).enumerate().map(one).collect()
}

fn median(times: &mut [u64]) -> f64 {
    times.sort_unstable();
    let Some(last) = times.len().checked_sub(1) else { return 0.0 };
    f64::midpoint(times[last / 2] as f64, times[times.len() / 2] as f64)
}

/// The totals of the calls of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Total {
    calls: usize,
    bytes: f64,
    /// The recorded and replayed times of the calls with a recorded time, and the number of these calls.
    recorded_us: f64,
    both_us: f64,
    timed: usize,
    replayed_us: f64,
}

impl Total {
    fn add(&mut self, call: &Timed) {
        self.calls += 1;
        self.bytes += call.bytes as f64;
        self.replayed_us += call.replayed_us;
        if let Some(recorded) = call.recorded_us {
            self.recorded_us += recorded;
            self.both_us += call.replayed_us;
            self.timed += 1;
        }
    }

    fn row(&self, name: &str) -> String {
        let Self { calls, bytes, recorded_us, both_us, timed, replayed_us } = *self;
        let recorded = if timed > 0 { format!("{recorded_us:.1}") } else { "-".to_owned() };
        let shown = if timed > 0 { both_us } else { replayed_us };
        let ratio = if recorded_us > 0.0 { format!("{:.3}", both_us / recorded_us) } else { "-".to_owned() };
        format!("{name:<20} {calls:>9} {bytes:>14} {timed:>9} {recorded:>14} {shown:>14.1} {ratio:>8}\n")
    }
}

/// The names of the columns.
const HEADER: &str = "# call                    calls          bytes     timed  recorded (us)  replayed (us)    ratio\n";
/// The meaning of the columns.
const LEGEND: &str = "# calls and bytes: those of all ranks together. timed: the calls whose time is in the record; both times are sums over these calls, \
                      or, if there are none, over all\n";

impl Outcome {
    /// Returns the outcome as a table.
    pub(super) fn text(&self) -> String {
        let Self { ranks, source, transport, gaps, repetitions, .. } = self;
        let [ranks, groups] = [(*ranks, "rank"), (self.communicators.len(), "communicator")].map(|(count, what)| counted(count, what));
        let mut text = format!("# replay of a {source}: {ranks}, {groups}, transport {transport}, gaps: {gaps}");
        text += &if *repetitions > 1 { format!(", medians of {repetitions} repetitions\n") } else { "\n".to_owned() };
        text.extend(self.not_recorded.iter().map(|what| format!("# not in the record: {what}\n")));
        text.extend(self.notes.iter().map(|note| format!("# note: {}\n", note.replace('\n', "\n#       "))));
        text += &format!("#\n{LEGEND}#\n{HEADER}");
        let mut kinds: Vec<(&str, Total)> = Vec::new();
        let mut all = Total::default();
        for call in &self.calls {
            all.add(call);
            match kinds.iter_mut().find(|(kind, _)| *kind == call.kind) {
                Some((_, total)) => total.add(call),
                None => {
                    let mut total = Total::default();
                    total.add(call);
                    kinds.push((&call.kind, total));
                }
            }
        }
        text.extend(kinds.iter().map(|(kind, total)| total.row(kind)));
        text + &all.row("all")
    }

    /// Returns the calls as CSV.
    pub(super) fn csv(&self) -> String {
        let mut text = "rank,number,communicator,collective,op,dtype,count,bytes,root,peer,tag,recorded_us,replayed_us\n".to_owned();
        let or_empty = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
        for call in &self.calls {
            let [root, peer] = [call.root, call.peer].map(|rank| or_empty(rank.map(|rank| rank as u64)));
            let recorded = call.recorded_us.map(|time| format!("{time:.3}")).unwrap_or_default();
            let Timed { rank, number, communicator, kind, op, dtype, count, bytes, tag, replayed_us, .. } = call;
            let tag = or_empty(*tag);
            let _ = writeln!(
                text,
                "{rank},{number},{communicator},{kind},{op},{dtype},{count},{bytes},{root},{peer},{tag},{recorded},{replayed_us:.3}"
            );
        }
        text
    }
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns the communicators for the file.
pub(super) fn members(recording: &Recording) -> Vec<Members> {
    let one = |group: &super::recording::Group| Members { name: group.name.clone(), world_ranks: group.members.clone() };
    recording.groups.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::Kind;
    use crate::replay::shape::Shape;

    fn outcome(recorded: Option<u64>) -> Outcome {
        let call = Call {
            count: 4,
            element: "f32".to_owned(),
            op: Some("max".to_owned()),
            start_ns: Some(1),
            duration_ns: recorded,
            ..Call::new(0, Kind::named("all_reduce").unwrap())
        };
        let (shape, _) = Shape::of_collective(&[&call]).unwrap().remove(0);
        let step = super::super::script::Step::default();
        let script = Script { groups: vec![vec![0]].into(), shapes: vec![shape], steps: vec![step.clone(), step] };
        let calls = timed(0, &[call.clone(), call], &script, &[1000, 2000, 3000, 6000, 8000, 4000], 3).unwrap();
        Outcome {
            format: FORMAT.to_owned(),
            version: VERSION,
            start_time: String::new(),
            source: "trace".to_owned(),
            ranks: 1,
            transport: "auto".to_owned(),
            gaps: "keep".to_owned(),
            repetitions: 3,
            not_recorded: vec!["x".to_owned()],
            notes: vec!["a\nb".to_owned()],
            communicators: vec![],
            calls,
        }
    }

    #[test]
    fn times_are_medians_and_sums() {
        let both = outcome(Some(4000));
        assert_eq!(both.calls.iter().map(|call| call.replayed_us).collect::<Vec<_>>(), [3.0, 4.0]);
        let text = both.text();
        assert!(text.contains("# not in the record: x\n# note: a\n#       b\n"), "{text}");
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(row, ["all", "2", "32", "2", "8.0", "7.0", "0.875"]);
        let row: Vec<String> = outcome(None).text().lines().last().unwrap().split_whitespace().map(str::to_owned).collect();
        assert_eq!(row, ["all", "2", "32", "0", "-", "7.0", "-"]);
        assert!(both.csv().ends_with("\n0,1,0,all_reduce,max,f32,4,16,,,,4.000,4.000\n"), "{}", both.csv());
    }

    #[test]
    fn times_of_other_calls_are_refused() {
        let script = Script::default();
        assert!(timed(0, &[], &script, &[1], 1).is_err() && timed(0, &[], &script, &[], 1).unwrap().is_empty());
    }
}
