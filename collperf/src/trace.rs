//! Merges traces of ranks into one file: those in a folder, or those of the run that was measured.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use collectives::Communicator;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::input_file;
use crate::output_file::OutputFile;
use crate::report::answer;

/// The format that a rank's trace names, and its newest supported version.
const FORMAT: &str = "collectives trace";
const VERSION: u64 = 1;

/// Merges the traces in a folder, which ranks have written, into one file.
///
/// Ranks write traces to the folder that COLLECTIVES_TRACE names. Perfetto (ui.perfetto.dev) and chrome://tracing open
/// the file.
#[derive(Debug, Clone, Parser)]
#[command(name = "collperf trace", bin_name = "collperf trace", max_term_width = 110)]
pub(crate) struct Arguments {
    /// The folder of the ranks' files
    folder: PathBuf,
    /// The file to write
    #[arg(short = 'o', long = "output", value_name = "FILE", default_value = "trace.json")]
    output: PathBuf,
}

/// Reads the files of a folder, and writes one trace.
pub(crate) fn run(arguments: &Arguments) -> Result<u8, Failure> {
    let output = OutputFile::new(&arguments.output)?;
    let paths = traces_in(&arguments.folder)?;
    output.is_none_of(paths.iter().map(|path| &**path))?;
    let (traces, skipped) = read_all(paths);
    let skipped: String = skipped.iter().map(|(path, reason)| format!("skipped {}: {reason}\n", path.display())).collect();
    if traces.is_empty() {
        return Err(Failure::internal(format!("{skipped}{}: no traces in this folder", arguments.folder.display())));
    }
    let count = traces.len();
    output.write(&merged(traces).to_string())?;
    answer(&format!("{skipped}{}: {count} rank{}\n", output.told(), if count == 1 { "" } else { "s" }))?;
    Ok(0)
}

/// Collects every rank's times on rank 0, which writes them. Every rank calls it; rank 0 gets the file.
pub(crate) fn collect(comm: &Communicator, path: &Path) -> Result<Option<OutputFile>, Failure> {
    let mine = comm.trace_json().into_bytes();
    let mut lengths = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&(mine.len() as u64), &mut lengths)?;
    if comm.rank() != 0 {
        comm.send(&mine, 0)?;
        return Ok(None);
    }
    let mut traces = vec![parse(&mine).map_err(Failure::internal)?];
    for (rank, length) in lengths.iter().enumerate().skip(1) {
        let mut theirs = vec![0_u8; *length as usize];
        comm.recv(&mut theirs, rank)?;
        traces.push(parse(&theirs).map_err(Failure::internal)?);
    }
    write(path, traces).map(Some)
}

/// A file that is not a trace, and why.
type Skipped = (PathBuf, String);

/// Returns the files of a folder that should be traces.
fn traces_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |error| Failure::io(format!("reading {}", folder.display()), &error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_trace = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("trace-"));
        if is_trace && path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn read_all(paths: Vec<PathBuf>) -> (Vec<Value>, Vec<Skipped>) {
    let (mut traces, mut skipped) = (Vec::new(), Vec::new());
    for path in paths {
        match input_file::read(&path).map_err(|error| error.to_string()).and_then(|text| parse(&text)) {
            Ok(trace) => traces.push(trace),
            Err(reason) => skipped.push((path, reason)),
        }
    }
    (traces, skipped)
}

/// Reads one rank's trace, or returns why it is not one.
fn parse(text: &[u8]) -> Result<Value, String> {
    let trace: Value = serde_json::from_slice(text).map_err(|error| format!("not JSON: {error}"))?;
    let about = &trace["otherData"];
    match about["version"].as_u64() {
        _ if about["format"] != FORMAT => Err(format!("this is not a file of the format {FORMAT:?}")),
        Some(version) if version <= VERSION => {
            let is_whole = about["base_time_ns"].is_u64() && about["rank"].is_u64() && trace["traceEvents"].is_array();
            if is_whole { Ok(trace) } else { Err("the file lacks its base time, its rank or its events".to_owned()) }
        }
        Some(version) => Err(format!("the file's format has version {version}, but this collperf reads versions up to {VERSION}")),
        None => Err("the file does not name the version of its format".to_owned()),
    }
}

/// Writes the events of all traces to a file, with times relative to the beginning of the earliest trace.
fn write(path: &Path, traces: Vec<Value>) -> Result<OutputFile, Failure> {
    let file = OutputFile::new(path)?;
    file.write(&merged(traces).to_string())?;
    Ok(file)
}

/// Merges traces. Jobs that ran one after another have the same ranks, so each job gets its own process numbers.
fn merged(traces: Vec<Value>) -> Value {
    let base = |trace: &Value| trace["otherData"]["base_time_ns"].as_u64().unwrap_or_default();
    let first = traces.iter().map(base).min().unwrap_or_default();
    let mut jobs: Vec<(String, u64)> = Vec::new();
    let (mut events, mut processes, mut dropped, mut above) = (Vec::new(), Vec::new(), 0, 0);
    for mut trace in traces {
        let about = &trace["otherData"];
        let id = about["pg_id"].as_str().unwrap_or_default().to_owned();
        let shift = (base(&trace) - first) as f64 / 1e3;
        dropped += about["dropped"].as_u64().unwrap_or_default();
        let ranks = about["world_size"].as_u64().unwrap_or(1).max(about["rank"].as_u64().unwrap_or_default() + 1);
        let from = match jobs.iter().find(|(job, _)| *job == id) {
            Some((_, from)) => *from,
            None => {
                jobs.push((id, above));
                above += ranks;
                above - ranks
            }
        };
        processes.push(described(&trace["otherData"], from));
        let Value::Array(theirs) = trace["traceEvents"].take() else { continue };
        events.extend(theirs.into_iter().map(|event| moved(event, shift, from)));
    }
    // Viewers do not need an order, but readers and tests do; names come first.
    events.sort_by(|a, b| a["ts"].as_f64().unwrap_or(-1.0).total_cmp(&b["ts"].as_f64().unwrap_or(-1.0)));
    json!({
        "displayTimeUnit": "ns",
        "otherData": {"format": FORMAT, "version": VERSION, "base_time_ns": first, "dropped": dropped, "jobs": jobs.len(), "processes": processes},
        "traceEvents": events,
    })
}

/// Returns the parts of a rank's description that a merged trace keeps, with the rank's process number in it.
fn described(about: &Value, from: u64) -> Value {
    let rank = about["rank"].as_u64().unwrap_or_default();
    json!({
        "pid": from.saturating_add(rank),
        "rank": rank,
        "world_size": about["world_size"],
        "pg_id": about["pg_id"],
        "dropped": about["dropped"],
        "communicators": about["communicators"],
    })
}

/// Moves an event by `shift` microseconds, and its process number by `from`.
fn moved(mut event: Value, shift: f64, from: u64) -> Value {
    if let Some(at) = event["ts"].as_f64() {
        // Rounded to nanoseconds, the original resolution.
        event["ts"] = json!(((at + shift) * 1e3).round() / 1e3);
    }
    if let Some(process) = event["pid"].as_u64() {
        event["pid"] = json!(process + from);
        if let Some(id) = event["id"].as_u64() {
            event["id"] = json!(format!("{}.{id}", process + from));
        }
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(job: &str, rank: u64, base: u64, times: &[f64]) -> Value {
        let events: Vec<Value> =
            times.iter().map(|at| json!({"ph": "X", "name": "barrier", "pid": rank, "tid": 1, "ts": at, "dur": 1.0})).collect();
        let about =
            json!({"format": FORMAT, "version": 1, "base_time_ns": base, "rank": rank, "world_size": 2, "pg_id": job, "dropped": 3});
        json!({"otherData": about, "traceEvents": events})
    }

    #[test]
    fn clocks_are_put_in_line_and_jobs_apart() {
        let traces = vec![
            trace("a", 1, 1_700_000_000_000_002_500, &[1.0, 7.125]),
            trace("a", 0, 1_700_000_000_000_000_000, &[2.0]),
            trace("b", 1, 1_700_000_000_000_001_000, &[0.0]),
        ];
        let all = merged(traces);
        let events = all["traceEvents"].as_array().unwrap();
        let seen: Vec<_> = events.iter().map(|event| (event["ts"].as_f64().unwrap(), event["pid"].as_u64().unwrap())).collect();
        assert_eq!(seen, [(1.0, 3), (2.0, 0), (3.5, 1), (9.625, 1)]);
        assert_eq!((&all["otherData"]["dropped"], &all["otherData"]["jobs"]), (&json!(9), &json!(2)));
    }

    #[test]
    fn what_is_no_trace_is_said_to_be_none() {
        for (text, reason) in [
            ("{", "not JSON"),
            ("[]", "not a file of the format"),
            (r#"{"otherData": {"format": "collectives trace", "version": 2}}"#, "has version 2"),
            (r#"{"otherData": {"format": "collectives trace", "version": 1}}"#, "the file lacks its base time"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
