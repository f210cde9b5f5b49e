//! Writes and reads trace files. Not in `mod.rs`, since not every package that includes that has `serde_json`.

use std::collections::BTreeMap;
use std::path::Path;

use collectives::{Config, ReduceOp};
use serde_json::Value;

use crate::common::ranks::{Wiring, threads_with};

/// Makes every kind of call on three ranks, with traces in `folder`:
/// - three sums of 1, 2 and 3 elements
/// - a split of ranks 0 and 1 from 2, and broadcasts in the halves
/// - messages around a ring
pub(crate) fn write_three(folder: &Path) {
    let mut config = Config::default();
    config.trace_dir = Some(folder.to_owned());
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
            let work = comm.start_send(vec![comm.rank() as u64], next).unwrap();
            comm.recv(&mut [0u64], last).unwrap();
            work.wait().unwrap();
        },
    );
}

pub(crate) fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Converts the format's microseconds to nanoseconds.
fn nanoseconds(value: &Value) -> i64 {
    (value.as_f64().unwrap() * 1e3).round() as i64
}

/// The calls of each lane, by process and thread: start, duration, name and arguments.
pub(crate) type Lanes = BTreeMap<(u64, u64), Vec<(i64, i64, String, Value)>>;

/// Returns the lanes of a trace. Checks that each call lies after or inside of the one before it in its lane.
pub(crate) fn lanes(trace: &Value) -> Lanes {
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

/// Returns the names of processes or lanes.
pub(crate) fn names(trace: &Value, what: &str) -> Vec<String> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    events.filter(|event| event["name"] == what).map(|event| event["args"]["name"].as_str().unwrap().to_owned()).collect()
}
