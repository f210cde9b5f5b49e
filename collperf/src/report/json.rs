//! Results as nccl-tests' JSON, version 3: the same fields, without the environment, which may contain secrets.

use serde::Serialize;

use crate::arguments::IS_ONE_RANK;
use crate::facts::RunFacts;
use crate::row::{Half, Row};
use crate::settings::{Blocking, Settings};
use crate::sizes::Step;
use crate::statistics::Spread;

/// The whole file.
#[derive(Serialize)]
pub(super) struct Document<'a> {
    version: u32,
    start_time: &'a str,
    args: Vec<String>,
    /// 0 if NCCL is not used.
    nccl_version: u32,
    library: &'static str,
    config: Config<'a>,
    results: Vec<ResultRow<'a>>,
    out_of_bounds: OutOfBounds,
    average_bus_bandwidth: AverageBandwidth,
    errors: &'a [String],
    end_time: String,
}

#[derive(Serialize)]
struct Config<'a> {
    nthreads: usize,
    ngpus: usize,
    minimum_bytes: usize,
    maximum_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_factor: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_bytes: Option<usize>,
    warmup_iters: usize,
    iterations: usize,
    aggregated_iterations: usize,
    validation: usize,
    graph: usize,
    blocking_collectives: &'static str,
    per_iter_timing: &'static str,
    per_iter_skip: usize,
    parallel_init: &'static str,
    backend: &'static str,
    transport: &'static str,
    ranks: usize,
    kernel: &'a str,
    /// The kind of binding on rank 0's host.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound_to: Option<&'a str>,
    /// On rank 0's host before the run: cores that other processes kept busy, and cores that ranks may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    busy_cores: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<usize>,
    /// The reasons why the figures are less reliable.
    notes: Vec<String>,
    encrypted: &'static str,
    devices: Vec<Device<'a>>,
}

#[derive(Serialize)]
struct Device<'a> {
    rank: usize,
    group: u32,
    pid: u32,
    hostname: &'a str,
    device: usize,
    device_hex: &'a str,
    device_info: &'a str,
    /// The processors that the rank may run on.
    #[serde(skip_serializing_if = "Option::is_none")]
    processors: Option<&'a str>,
}

#[derive(Serialize)]
struct ResultRow<'a> {
    size: usize,
    count: usize,
    #[serde(rename = "type")]
    type_name: &'static str,
    redop: &'static str,
    root: String,
    out_of_place: Option<HalfRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out_of_place_per_iter: Option<PerIteration<'a>>,
    in_place: Option<HalfRow>,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_place_per_iter: Option<PerIteration<'a>>,
    actual_iterations: u64,
    experiment_name: &'static str,
}

#[derive(Serialize)]
struct HalfRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_time: Option<f64>,
    alg_bw: f64,
    bus_bw: f64,
    nwrong: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_time: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_ratio: Option<f64>,
}

#[derive(Serialize)]
struct PerIteration<'a> {
    skipped_iterations: usize,
    min_us: f64,
    max_us: f64,
    avg_us: f64,
    p50_us: f64,
    p95_us: f64,
    p99_us: f64,
    p999_us: f64,
    stdev_us: f64,
    cv_pct: f64,
    times_us: &'a [f64],
}

#[derive(Serialize)]
struct OutOfBounds {
    count: usize,
    okay: &'static str,
}

#[derive(Serialize)]
struct AverageBandwidth {
    bandwidth: f64,
    okay: &'static str,
}

/// Totals of the rows.
pub(super) struct Totals {
    pub(super) failed_checks: usize,
    pub(super) mean_busbw: f64,
    /// Whether the required bandwidth was reached, if there is one.
    pub(super) reached: Option<bool>,
}

impl<'a> Document<'a> {
    pub(super) fn new(
        settings: &Settings,
        facts: &'a RunFacts,
        start_time: &'a str,
        rows: &'a [Row],
        totals: &Totals,
        errors: &'a [String],
    ) -> Self {
        let okay = totals.reached.map_or("unchecked", word);
        Self {
            version: 3,
            start_time,
            args: std::env::args_os().filter(|word| word != IS_ONE_RANK).map(|word| word.to_string_lossy().into_owned()).collect(),
            nccl_version: facts.on.library(),
            library: concat!("collectives ", env!("CARGO_PKG_VERSION")),
            config: Config::new(settings, facts),
            results: rows.iter().map(|row| ResultRow::new(row, settings)).collect(),
            out_of_bounds: OutOfBounds { count: totals.failed_checks, okay: word(totals.failed_checks == 0) },
            average_bus_bandwidth: AverageBandwidth { bandwidth: totals.mean_busbw, okay },
            errors,
            end_time: crate::machine::now(),
        }
    }

    /// Returns the file's text.
    pub(super) fn text(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

impl<'a> Config<'a> {
    fn new(settings: &Settings, facts: &'a RunFacts) -> Self {
        let (step_factor, step_bytes) = match settings.step {
            Some(Step::Factor(factor)) => (Some(factor), None),
            Some(Step::Bytes(bytes)) => (None, Some(bytes)),
            None => (None, None),
        };
        let devices = facts.ranks.iter().map(|rank| Device {
            rank: rank.peer.rank,
            group: rank.group,
            pid: rank.peer.pid,
            hostname: &rank.peer.host,
            device: rank.gpu.as_ref().map_or(rank.local_rank, |gpu| gpu.ordinal),
            device_hex: rank.gpu.as_ref().map_or("host", |gpu| &gpu.bus),
            device_info: rank.gpu.as_ref().map_or(&rank.processor, |gpu| &gpu.name),
            processors: facts.bound.as_ref().and_then(|bound| bound.processors.get(rank.peer.rank)).map(String::as_str),
        });
        Self {
            nthreads: settings.threads.unwrap_or(1),
            ngpus: super::heading::gpus_of_thread(settings, facts),
            minimum_bytes: settings.sizes.iter().copied().min().unwrap_or(0),
            maximum_bytes: settings.sizes.iter().copied().max().unwrap_or(0),
            step_factor,
            step_bytes,
            warmup_iters: settings.warmup,
            iterations: settings.iterations,
            aggregated_iterations: settings.aggregated,
            validation: settings.check,
            graph: settings.device.graph,
            blocking_collectives: word(settings.blocking != Blocking::No),
            per_iter_timing: word(settings.columns.per_iteration),
            per_iter_skip: settings.skip,
            parallel_init: word(settings.parallel_init),
            backend: facts.on.name(),
            transport: facts.on.links(settings),
            ranks: facts.ranks.len(),
            kernel: &facts.machine.kernel,
            bound_to: facts.bound.as_ref().map(|bound| bound.to.as_str()),
            busy_cores: facts.machine.load.map(|load| load.busy),
            cores: facts.machine.load.map(|load| load.cores),
            notes: facts.notes().into_iter().filter(|note| note.is_warning).map(|note| note.text).collect(),
            encrypted: word(facts.is_encrypted),
            devices: devices.collect(),
        }
    }
}

impl<'a> ResultRow<'a> {
    fn new(row: &'a Row, settings: &Settings) -> Self {
        let half = |half| HalfRow::new(half, settings.device.issue_time);
        let per_iteration = |half| PerIteration::new(half, settings.skip);
        Self {
            size: row.bytes,
            count: row.count,
            type_name: row.type_name(),
            redop: row.op_name(),
            root: row.root.map_or("-1".to_owned(), |root| root.to_string()),
            out_of_place: row.out_of_place.as_ref().map(half),
            out_of_place_per_iter: row.out_of_place.as_ref().and_then(per_iteration),
            in_place: row.in_place.as_ref().map(half),
            in_place_per_iter: row.in_place.as_ref().and_then(per_iteration),
            actual_iterations: row.iterations,
            experiment_name: row.collective.name(),
        }
    }
}

impl HalfRow {
    fn new(half: &Half, is_issue_time: bool) -> Self {
        let (time, cpu_time) = if is_issue_time { (None, Some(half.time_us)) } else { (Some(half.time_us), None) };
        Self {
            time,
            cpu_time,
            alg_bw: half.algbw,
            bus_bw: half.busbw,
            nwrong: half.wrong,
            algorithm: half.prediction.map(|prediction| prediction.algorithm.name()),
            predicted_time: half.prediction.map(|prediction| prediction.time_us),
            predicted_ratio: half.ratio(),
        }
    }
}

impl<'a> PerIteration<'a> {
    fn new(half: &'a Half, skipped_iterations: usize) -> Option<Self> {
        let spread: &Spread = half.spread.as_ref()?;
        Some(Self {
            skipped_iterations,
            min_us: spread.min,
            max_us: spread.max,
            avg_us: spread.mean,
            p50_us: spread.p50,
            p95_us: spread.p95,
            p99_us: spread.p99,
            p999_us: spread.p999,
            stdev_us: spread.deviation,
            cv_pct: spread.variation_percent(),
            times_us: &half.samples,
        })
    }
}

/// Returns a truth value as a word, as this format requires.
fn word(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use collectives::{DType, ReduceOp};
    use serde_json::Value;

    use super::*;
    use crate::arguments::Arguments;
    use crate::collective::Collective;
    use crate::facts::Bound;

    #[test]
    fn fields_are_those_of_version_3() {
        let settings =
            Settings::new(&Arguments::parse_from(["collperf", "all_reduce", "-J", "x.json"]), &crate::environment::Environment::default())
                .unwrap();
        let mut facts = RunFacts::example(2);
        facts.machine.load = Some(crate::machine::Load { busy: 1.25, cores: 2 });
        facts.bound = Some(Bound { to: "core".to_owned(), why_none: None, processors: vec!["0".to_owned(), "1,3".to_owned()] });
        let half = Half {
            samples: vec![1.0, 2.0],
            spread: Spread::of(&[1.0, 2.0]),
            wrong: Some(3),
            ..Half::new(Collective::AllReduce, 2, 8, 2.0)
        };
        let row = Row {
            collective: Collective::AllReduce,
            op: Some(ReduceOp::Max),
            dtype: Some(DType::F16),
            root: None,
            ranks: 2,
            count: 4,
            bytes: 8,
            iterations: 20,
            out_of_place: Some(half),
            in_place: None,
        };
        let totals = Totals { failed_checks: 1, mean_busbw: 0.5, reached: None };
        let rows = [row];
        let text = serde_json::to_string(&Document::new(&settings, &facts, "now", &rows, &totals, &[])).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["version"], 3);
        assert!(json.get("env").is_none());
        let result = &json["results"][0];
        assert_eq!((&result["type"], &result["redop"], &result["root"]), (&"half".into(), &"max".into(), &"-1".into()));
        assert_eq!(result["out_of_place"]["nwrong"], 3);
        assert_eq!(result["out_of_place_per_iter"]["p95_us"], 2.0);
        assert!(result["in_place"].is_null() && result.get("in_place_per_iter").is_none());
        assert_eq!((&json["out_of_bounds"]["okay"], &json["average_bus_bandwidth"]["okay"]), (&"false".into(), &"unchecked".into()));
        assert_eq!((&json["config"]["step_factor"], json["config"].get("step_bytes")), (&2.into(), None));
        assert_eq!((&json["config"]["busy_cores"], &json["config"]["cores"]), (&1.25.into(), &2.into()));
        assert_eq!(json["config"]["notes"][0], "other programs keep 1.2 of 2 cores busy, so times will be too high");
        assert_eq!(json["config"]["encrypted"], "false");
        assert_eq!(json["config"]["devices"][1]["device_hex"], "host");
        assert_eq!((&json["config"]["bound_to"], &json["config"]["devices"][1]["processors"]), (&"core".into(), &"1,3".into()));
    }
}
