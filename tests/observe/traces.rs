//! Trace files, of programs and of collperf.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use collectives::{Communicator, Config, ReduceOp};
use serde_json::Value;

use crate::common::ranks::{Wiring, threads_with};

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Nanoseconds, of the format's microseconds.
fn nanoseconds(value: &Value) -> i64 {
    (value.as_f64().unwrap() * 1e3).round() as i64
}

/// The calls of each lane, by process and thread: when they began, how long they took, and which they were.
type Lanes = BTreeMap<(u64, u64), Vec<(i64, i64, String, Value)>>;

/// The lanes of a trace, where every call fits in its lane: apart from the one before, or inside of it.
fn lanes(trace: &Value) -> Lanes {
    let mut lanes = Lanes::new();
    for event in trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X") {
        let key = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let name = event["name"].as_str().unwrap().to_owned();
        lanes.entry(key).or_default().push((nanoseconds(&event["ts"]), nanoseconds(&event["dur"]), name, event["args"].clone()));
    }
    for (key, lane) in &mut lanes {
        lane.sort_by_key(|(start, duration, ..)| (*start, -duration));
        let mut open: Vec<i64> = Vec::new();
        for (start, duration, name, _) in lane.iter() {
            open.retain(|end| end > start);
            assert!(*duration >= 0 && open.last().is_none_or(|end| start + duration <= *end), "{name} in {key:?} overlaps");
            open.push(start + duration);
        }
    }
    lanes
}

/// What processes and lanes are called.
fn names(trace: &Value, what: &str) -> Vec<String> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    events.filter(|event| event["name"] == what).map(|event| event["args"]["name"].as_str().unwrap().to_owned()).collect()
}

fn collperf(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_collperf")).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn every_rank_writes_its_calls_in_the_end_and_collperf_puts_them_together() {
    let folder = tempfile::tempdir().unwrap();
    let traces = folder.path().join("traces");
    let mut config = Config::default();
    config.trace_dir = Some(traces.clone());
    threads_with(
        3,
        |rank| Wiring::Shm.builder_with(rank, config.clone()),
        |comm| {
            for count in 1..4 {
                comm.all_reduce(&mut vec![1.0f32; count], ReduceOp::Sum).unwrap();
            }
            let half = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
            half.broadcast(&mut [1u8], 0).unwrap();
            let (next, last) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let work = comm.isend(vec![comm.rank() as u64], next).unwrap();
            comm.recv(&mut [0u64], last).unwrap();
            work.wait().unwrap();
        },
    );
    let written = files(&traces);
    assert_eq!(written.len(), 3);
    for (rank, file) in written.iter().enumerate() {
        let trace = read(file);
        assert_eq!((&trace["otherData"]["rank"], &trace["otherData"]["world_size"]), (&rank.into(), &3.into()));
        let lanes = lanes(&trace);
        let collectives = &lanes[&(rank as u64, 1)];
        let sums: Vec<_> = collectives.iter().filter(|call| call.2 == "all_reduce").map(|call| call.3["count"].clone()).collect();
        assert_eq!(sums, [1, 2, 3]);
        let sequences: Vec<_> = collectives.iter().map(|call| call.3["sequence"].as_u64().unwrap()).collect();
        assert!(sequences.is_sorted() && sequences[0] == 0, "{sequences:?}");
        let threads = names(&trace, "thread_name");
        let of_child = format!("world/0 from rank {}: collectives", rank / 2 * 2);
        assert_eq!(threads, ["world: collectives", "world: messages", "world: background", &of_child]);
        let background = |phase: &str| trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == phase).count();
        assert_eq!((background("b"), background("e")), (1, 1));
    }
    let merged = folder.path().join("all.json");
    let (code, said, complaint) = collperf(&["trace", &traces.display().to_string(), "-o", &merged.display().to_string()]);
    assert_eq!((code, said), (Some(0), format!("{}: 3 ranks\n", merged.display())), "{complaint}");
    let trace = read(&merged);
    assert_eq!(names(&trace, "process_name").len(), 3);
    let lanes = lanes(&trace);
    // Nobody leaves a sum before the last one has come.
    for number in 0..3 {
        let of_rank = |rank: u64| lanes[&(rank, 1)].iter().filter(|call| call.2 == "all_reduce").nth(number).unwrap();
        let sums: Vec<_> = (0..3).map(of_rank).collect();
        let (last, first) = (sums.iter().map(|sum| sum.0).max().unwrap(), sums.iter().map(|sum| sum.0 + sum.1).min().unwrap());
        // Each clock was read twice, one after the other, in its thread.
        assert!(last <= first + 1_000_000_000, "{sums:?}");
    }
}

#[test]
fn a_trace_is_written_with_the_last_communicator_and_settings_taken_from_it_begin_another() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.trace_dir = Some(folder.path().to_owned());
    let job = |config: &Config| {
        let builder = |rank| Wiring::Shm.builder_with(rank, config.clone());
        threads_with(2, builder, |comm| {
            comm.barrier().unwrap();
            (comm.config().clone(), comm.abort_handle(), comm.isend(vec![1u8], comm.rank()).unwrap())
        })
    };
    let kept = job(&config);
    let first: Vec<_> = files(folder.path()).iter().map(|file| (file.clone(), std::fs::read(file).unwrap())).collect();
    assert_eq!(first.len(), 2);
    drop(job(&kept[0].0));
    assert_eq!(files(folder.path()).len(), 4);
    drop(kept);
    assert!(first.iter().all(|(file, text)| std::fs::read(file).unwrap() == *text), "the first job's files are as they were");
}

#[test]
fn without_being_asked_beforehand_a_trace_has_what_the_flight_recorder_has() {
    let folder = tempfile::tempdir().unwrap();
    Communicator::run_local(2, |comm| {
        comm.all_reduce(&mut vec![1.0f32; 1 << 16], ReduceOp::Sum)?;
        let trace = read(&comm.write_trace(folder.path())?);
        let lanes = lanes(&trace);
        assert!(lanes[&(comm.rank() as u64, 1)].iter().any(|call| call.2 == "all_reduce" && call.3["count"] == 1 << 16));
        comm.barrier()
    })
    .unwrap();
    assert_eq!(files(folder.path()).len(), 2);
}

#[test]
fn collperf_traces_what_it_measures() {
    let folder = tempfile::tempdir().unwrap();
    for kind in ["process", "thread"] {
        let file = folder.path().join(kind);
        let path = file.display().to_string();
        let flags =
            ["broadcast", "-g", "2", "--plane", "host", "--sizes", "64,4096", "-n", "5", "-c", "0", "--ranks", kind, "--trace", &path];
        let (code, _, complaint) = collperf(&flags);
        assert_eq!(code, Some(0), "{complaint}");
        let trace = read(&file);
        assert_eq!(names(&trace, "process_name").len(), 2);
        let lanes = lanes(&trace);
        for rank in 0..2 {
            let of_size = |bytes: u64| lanes[&(rank, 1)].iter().filter(|call| call.2 == "broadcast" && call.3["bytes"] == bytes).count();
            assert!(of_size(64) >= 10 && of_size(4096) >= 10, "timed in place and out of place");
        }
    }
}

#[test]
fn a_folder_without_traces_is_an_error_in_words() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("trace-x.json"), "{").unwrap();
    let (code, _, complaint) = collperf(&["trace", &folder.path().display().to_string()]);
    assert_eq!(code, Some(1));
    assert!(complaint.contains("not JSON") && complaint.contains("no traces there"), "{complaint}");
    let (code, _, complaint) = collperf(&["trace", &folder.path().join("none").display().to_string()]);
    assert!(code == Some(1) && complaint.contains("reading"), "{complaint}");
}
