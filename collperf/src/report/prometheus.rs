//! Results as a file for Prometheus (the node exporter's textfile collector).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::facts::RunFacts;
use crate::row::{Half, Row};
use crate::settings::Settings;

/// A metric's name, description and value.
type Metric = (&'static str, &'static str, fn(&Half) -> Option<f64>);

const METRICS: [Metric; 4] = [
    ("time_seconds", "Time of one call", |half| Some(half.time_us / 1e6)),
    ("algbw_bytes_per_second", "Bytes of a call divided by its time", |half| Some(half.algbw * 1e9)),
    ("busbw_bytes_per_second", "Bytes per second that each link carries", |half| Some(half.busbw * 1e9)),
    ("wrong_elements", "Wrong elements over all ranks", |half| half.wrong.map(|wrong| wrong as f64)),
];

/// Returns all metrics; `succeeded` is whether the run was completed with every check correct.
pub(super) fn text(settings: &Settings, facts: &RunFacts, rows: &[Row], succeeded: bool) -> String {
    let mut text = String::new();
    for (name, what, value) in METRICS {
        let name = if settings.device.issue_time && name == "time_seconds" { "issue_time_seconds" } else { name };
        let _ = writeln!(text, "# HELP collperf_{name} {what}\n# TYPE collperf_{name} gauge");
        // The last of several cycles counts: a series has only one value.
        let mut series = BTreeMap::new();
        for row in rows {
            for (half, in_place) in row.halves() {
                series.extend(value(half).map(|value| (labels(settings, facts, row, in_place), value)));
            }
        }
        text.extend(series.iter().map(|(labels, value)| format!("collperf_{name}{{{labels}}} {value}\n")));
    }
    let ended = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let busy = facts.machine.load.map(|load| load.busy);
    for (name, what, value) in [
        ("ranks", "Ranks of the run", Some(facts.ranks.len() as f64)),
        ("busy_cores", "Cores of rank 0's host that other programs kept busy before the run", busy),
        ("success", "Whether the run completed with correct elements and enough bandwidth", Some(f64::from(u8::from(succeeded)))),
        ("end_timestamp_seconds", "When the run ended", Some(ended as f64)),
    ] {
        let Some(value) = value else { continue };
        let _ = writeln!(text, "# HELP collperf_{name} {what}\n# TYPE collperf_{name} gauge\ncollperf_{name} {value}");
    }
    text
}

fn labels(settings: &Settings, facts: &RunFacts, row: &Row, in_place: bool) -> String {
    let root = row.root.map_or(String::new(), |root| root.to_string());
    // All of these are this program's own words, which need no escaping.
    format!(
        "collective=\"{}\",op=\"{}\",type=\"{}\",bytes=\"{}\",root=\"{root}\",in_place=\"{in_place}\",ranks=\"{}\",backend=\"{}\",transport=\"{}\"",
        row.collective,
        row.op_name(),
        row.type_name(),
        row.bytes,
        row.ranks,
        facts.on.name(),
        facts.on.links(settings),
    )
}
