//! The metrics as text: OpenMetrics at a port, the older format of Prometheus in files, which the node exporter reads.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use super::counters::{Count, RESULTS};

/// A communicator for which metrics are kept.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    pub(crate) communicator: String,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// A description of how the communicator's ranks are connected.
    pub(crate) wiring: String,
}

/// One communicator at this moment.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) group: Group,
    /// The counts by backend and kind.
    pub(super) counts: BTreeMap<(&'static str, &'static str), Count>,
    /// How long the oldest call that has not ended has taken; `None` if the communicator is gone.
    pub(super) waiting: Option<Duration>,
}

/// How the text is written.
#[derive(Debug, Clone, Copy)]
pub(super) enum Format {
    OpenMetrics,
    /// The older format. The node exporter refuses samples that differ in nothing but their file, so each names its
    /// process.
    Prometheus {
        pid: u32,
    },
}

/// One metric: its name, type, unit if it has one, and description.
struct Family(&'static str, &'static str, Option<&'static str>, &'static str);

const CALLS: Family = Family("collectives_calls", "counter", None, "Calls that have ended, by outcome.");
const BYTES: Family =
    Family("collectives_bytes", "counter", Some("bytes"), "Bytes of each call's larger buffer, for calls without an error.");
const SECONDS: Family = Family("collectives_call_seconds", "counter", Some("seconds"), "Time in calls; on devices, time to queue them.");
const WAITING: Family =
    Family("collectives_waiting_seconds", "gauge", Some("seconds"), "Time since the start of the oldest call that has not ended.");
const COMMUNICATOR: Family = Family("collectives_communicator", "info", None, "The size and the links of a communicator.");

/// The samples of one communicator: their other labels, and their values.
type Samples = Vec<(String, String)>;

/// Returns the text.
pub(super) fn to_text(snapshots: &[Snapshot], format: Format) -> String {
    let mut text = String::new();
    CALLS.add_to(&mut text, format, snapshots, calls);
    BYTES.add_to(&mut text, format, snapshots, |snapshot| {
        snapshot.counts.iter().map(|((backend, kind), count)| (of_call(backend, kind), count.bytes.to_string())).collect()
    });
    SECONDS.add_to(&mut text, format, snapshots, |snapshot| {
        let seconds = |count: &Count| Duration::from_nanos(count.nanoseconds).as_secs_f64().to_string();
        snapshot.counts.iter().map(|((backend, kind), count)| (of_call(backend, kind), seconds(count))).collect()
    });
    WAITING.add_to(&mut text, format, snapshots, |snapshot| {
        snapshot.waiting.iter().map(|waiting| (String::new(), waiting.as_secs_f64().to_string())).collect()
    });
    COMMUNICATOR.add_to(&mut text, format, snapshots, |snapshot| {
        let Group { world_size, wiring, .. } = &snapshot.group;
        vec![(format!(",{}", labels(&[("world_size", &world_size.to_string()), ("wiring", wiring)])), "1".to_owned())]
    });
    match format {
        Format::OpenMetrics => text + "# EOF\n",
        Format::Prometheus { .. } => text,
    }
}

impl Family {
    /// Writes the metric with the samples of all communicators.
    fn add_to(&self, text: &mut String, format: Format, snapshots: &[Snapshot], samples: impl Fn(&Snapshot) -> Samples) {
        let Self(name, kind, unit, help) = self;
        let suffix = match *kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        match format {
            Format::OpenMetrics => {
                let _ = writeln!(text, "# TYPE {name} {kind}");
                if let Some(unit) = unit {
                    let _ = writeln!(text, "# UNIT {name} {unit}");
                }
                let _ = writeln!(text, "# HELP {name} {help}");
            }
            // The older format names samples, not metrics, and has no type for facts.
            Format::Prometheus { .. } => {
                let kind = if *kind == "info" { "gauge" } else { kind };
                let _ = writeln!(text, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}");
            }
        }
        let process = match format {
            Format::OpenMetrics => String::new(),
            Format::Prometheus { pid } => format!(",pid=\"{pid}\""),
        };
        for snapshot in snapshots {
            let own = labels(&[("communicator", &snapshot.group.communicator), ("rank", &snapshot.group.rank.to_string())]);
            for (more, value) in samples(snapshot) {
                let _ = writeln!(text, "{name}{suffix}{{{own}{process}{more}}} {value}");
            }
        }
    }
}

/// Returns the numbers of calls by backend, kind and outcome.
fn calls(snapshot: &Snapshot) -> Samples {
    let mut samples = Samples::new();
    for ((backend, kind), count) in &snapshot.counts {
        let called = RESULTS.iter().zip(count.calls).filter(|(_, calls)| *calls > 0);
        samples.extend(called.map(|(result, calls)| (of_call(backend, kind) + &format!(",result=\"{result}\""), calls.to_string())));
    }
    samples
}

/// Returns the labels of a call, which follow others.
fn of_call(backend: &str, kind: &str) -> String {
    format!(",{}", labels(&[("backend", backend), ("kind", kind)]))
}

/// Returns labels as text.
fn labels(labels: &[(&str, &str)]) -> String {
    let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_openmetrics() {
        let count = Count { calls: [3, 1, 0, 0, 0, 0, 0, 0], bytes: 96, nanoseconds: 1_500_000_000 };
        let group = Group { communicator: "a \"b\"\\\n".to_owned(), rank: 2, world_size: 4, wiring: "shared memory".to_owned() };
        let snapshot =
            Snapshot { group, counts: BTreeMap::from([(("host", "all_reduce"), count)]), waiting: Some(Duration::from_millis(2500)) };
        let own = r#"communicator="a \"b\"\\\n",rank="2""#;
        let expected = format!(
            "# TYPE collectives_calls counter\n# HELP collectives_calls Calls that have ended, by outcome.\n\
             collectives_calls_total{{{own},backend=\"host\",kind=\"all_reduce\",result=\"ok\"}} 3\n\
             collectives_calls_total{{{own},backend=\"host\",kind=\"all_reduce\",result=\"timeout\"}} 1\n\
             # TYPE collectives_bytes counter\n# UNIT collectives_bytes bytes\n\
             # HELP collectives_bytes Bytes of each call's larger buffer, for calls without an error.\n\
             collectives_bytes_total{{{own},backend=\"host\",kind=\"all_reduce\"}} 96\n\
             # TYPE collectives_call_seconds counter\n# UNIT collectives_call_seconds seconds\n\
             # HELP collectives_call_seconds Time in calls; on devices, time to queue them.\n\
             collectives_call_seconds_total{{{own},backend=\"host\",kind=\"all_reduce\"}} 1.5\n\
             # TYPE collectives_waiting_seconds gauge\n# UNIT collectives_waiting_seconds seconds\n\
             # HELP collectives_waiting_seconds Time since the start of the oldest call that has not ended.\n\
             collectives_waiting_seconds{{{own}}} 2.5\n\
             # TYPE collectives_communicator info\n# HELP collectives_communicator The size and the links of a communicator.\n\
             collectives_communicator_info{{{own},world_size=\"4\",wiring=\"shared memory\"}} 1\n# EOF\n"
        );
        assert_eq!(to_text(&[snapshot], Format::OpenMetrics), expected);
    }

    #[test]
    fn files_have_the_format_that_the_node_exporter_reads() {
        let count = Count { calls: [3, 0, 0, 0, 0, 0, 0, 0], bytes: 96, nanoseconds: 0 };
        let group = Group { communicator: "world".to_owned(), rank: 2, world_size: 4, wiring: "tcp".to_owned() };
        let snapshot = Snapshot { group, counts: BTreeMap::from([(("host", "all_reduce"), count)]), waiting: None };
        let text = to_text(&[snapshot], Format::Prometheus { pid: 17 });
        let own = r#"communicator="world",rank="2",pid="17""#;
        for line in [
            "# TYPE collectives_calls_total counter".to_owned(),
            format!("collectives_calls_total{{{own},backend=\"host\",kind=\"all_reduce\",result=\"ok\"}} 3"),
            "# TYPE collectives_waiting_seconds gauge".to_owned(),
            "# TYPE collectives_communicator_info gauge".to_owned(),
            format!("collectives_communicator_info{{{own},world_size=\"4\",wiring=\"tcp\"}} 1"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        let known =
            |line: &&str| ["# HELP collectives_", "# TYPE collectives_", "collectives_"].iter().any(|begin| line.starts_with(begin));
        assert!(text.lines().all(|line| known(&line)), "{text}");
    }
}
