//! Traces, as `COLLECTIVES_TRACE` and `collperf trace` write them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde::Deserialize;

use super::groups::Groups;
use crate::replay::recording::{Call, Kind, Origin, Recording};

/// The format that a trace names, and its newest supported version.
pub(super) const FORMAT: &str = "collectives trace";
const VERSION: u64 = 1;
/// The tracks of each communicator, and the one of device calls.
const TRACKS: u64 = 4;
const DEVICE_TRACK: u64 = 2;

#[derive(Debug, Deserialize)]
struct File {
    #[serde(rename = "otherData")]
    about: About,
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Debug, Deserialize)]
struct About {
    version: u64,
    base_time_ns: u64,
    #[serde(flatten)]
    process: Option<Process>,
    /// The ranks of a merged trace.
    processes: Option<Vec<Process>>,
}

/// One rank.
#[derive(Debug, Clone, Deserialize)]
struct Process {
    /// The process number of its events in a merged trace.
    pid: u64,
    rank: usize,
    world_size: usize,
    pg_id: String,
    dropped: u64,
    communicators: Option<Vec<Communicator>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Communicator {
    pg_name: String,
    world_ranks: Vec<usize>,
}

#[derive(Debug, Deserialize)]
struct Event {
    ph: String,
    name: String,
    pid: u64,
    tid: u64,
    ts: Option<f64>,
    dur: Option<f64>,
    id: Option<Id>,
    #[serde(default)]
    args: Arguments,
}

/// What connects the start of a background message with its end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
enum Id {
    Number(u64),
    Text(String),
}

#[derive(Debug, Default, Deserialize)]
struct Arguments {
    sequence: Option<u64>,
    count: Option<u64>,
    bytes: Option<u64>,
    root: Option<usize>,
    peer: Option<usize>,
    tag: Option<u64>,
    op: Option<String>,
    dtype: Option<String>,
    error: Option<String>,
    #[serde(default)]
    background: bool,
}

/// The trace of one rank.
pub(super) struct Trace {
    process: Process,
    base_ns: u64,
    events: Vec<Event>,
}

/// Reads a file: the trace of one rank, or a merged one.
pub(super) fn parse(text: &[u8]) -> Result<Vec<Trace>, String> {
    let File { about, events } = serde_json::from_slice(text).map_err(|error| format!("not a readable trace: {error}"))?;
    if about.version > VERSION {
        return Err(format!("the file's format has version {}, but this collperf reads versions up to {VERSION}", about.version));
    }
    let base_ns = about.base_time_ns;
    match (about.processes, about.process) {
        (Some(processes), _) => {
            let mut traces: Vec<Trace> = processes.into_iter().map(|process| Trace { process, base_ns, events: Vec::new() }).collect();
            let places: HashMap<u64, usize> = traces.iter().enumerate().map(|(place, trace)| (trace.process.pid, place)).collect();
            for event in events {
                if let Some(place) = places.get(&event.pid) {
                    traces[*place].events.push(event);
                }
            }
            Ok(traces)
        }
        (None, Some(process)) => Ok(vec![Trace { process, base_ns, events }]),
        (None, None) => Err("the file does not say whose calls these are: replay the files that the ranks wrote".to_owned()),
    }
}

/// Makes the recording of a job from the traces of all its ranks.
pub(super) fn merge(traces: Vec<Trace>) -> Result<Recording, String> {
    let first = traces.first().ok_or("there is no trace")?;
    let (job, world_size) = (first.process.pg_id.clone(), first.process.world_size);
    if let Some(other) = traces.iter().find(|trace| trace.process.pg_id != job) {
        let reason = "put the traces of each job into a folder of its own";
        return Err(format!("these are the traces of several jobs ({job}, {} …): {reason}", other.process.pg_id));
    }
    let mut places = HashMap::new();
    for (place, trace) in traces.iter().enumerate() {
        if places.insert(trace.process.rank, place).is_some() {
            return Err(format!("there are two traces of rank {}: keep one of them", trace.process.rank));
        }
    }
    // Checked before anything is as large as the number of ranks, which a file may give as any number.
    if places.len() != world_size || (0..places.len()).any(|rank| !places.contains_key(&rank)) {
        let missing = (0..).find(|rank| !places.contains_key(rank)).unwrap_or_default();
        return Err(format!(
            "the job has {world_size} ranks, but there are traces of {}: the trace of rank {missing} is missing",
            places.len()
        ));
    }
    let is_cut = traces.iter().any(|trace| trace.process.dropped > 0);
    let mut groups = Groups::new(world_size);
    let mut ranks = vec![Vec::new(); world_size];
    let began_ns = traces.iter().map(|trace| trace.base_ns).min().unwrap_or_default();
    let mut notes = Vec::new();
    for trace in traces {
        let rank = trace.process.rank;
        ranks[rank] = trace.calls(began_ns, &mut groups, &mut notes).map_err(|reason| format!("rank {rank}: {reason}"))?;
    }
    Ok(Recording { origin: Origin::Trace, groups: groups.into_list(), ranks, is_cut, notes })
}

impl Trace {
    /// Returns the rank's calls in the order in which they began.
    fn calls(self, began_ns: u64, groups: &mut Groups, notes: &mut Vec<String>) -> Result<Vec<Call>, String> {
        let Self { process, base_ns, events } = self;
        let communicators = process.communicators.ok_or("the trace does not list the communicators: record the job again")?;
        let mut known = Vec::new();
        let mut seen: HashMap<(String, Vec<usize>), usize> = HashMap::new();
        for Communicator { pg_name, world_ranks } in communicators {
            let occurrence = seen.entry((pg_name.clone(), world_ranks.clone())).or_default();
            known.push((format!("{pg_name} #{occurrence}"), pg_name, world_ranks));
            *occurrence += 1;
        }
        let shift_ns = base_ns.saturating_sub(began_ns);
        let at = |event: &Event| event.ts.and_then(nanoseconds).map(|at| at.saturating_add(shift_ns));
        let ends: HashMap<Id, u64> =
            events.iter().filter(|event| event.ph == "e").filter_map(|event| Some((event.id.clone()?, at(event)?))).collect();
        let (mut calls, mut unknown) = (Vec::new(), 0);
        let mut numbers: HashMap<(usize, bool), usize> = HashMap::new();
        for event in events.iter().filter(|event| ["X", "b", "i"].contains(&&*event.ph)) {
            let start_ns = at(event).ok_or_else(|| format!("{}: the call has no time from which it ran", event.name))?;
            let Some(kind) = Kind::named(&event.name) else {
                unknown += 1;
                continue;
            };
            let (place, track) = (event.tid.saturating_sub(1) / TRACKS, event.tid.saturating_sub(1) % TRACKS);
            let found = usize::try_from(place).ok().and_then(|place| Some((place, known.get(place)?)));
            let (place, (id, name, members)) =
                found.ok_or_else(|| format!("{}: track {} belongs to no communicator", event.name, event.tid))?;
            let group = match (numbers.entry((place, track == DEVICE_TRACK)), track) {
                (Entry::Occupied(number), _) => *number.get(),
                (Entry::Vacant(new), DEVICE_TRACK) => *new.insert(groups.number_of_device(id, name, members.clone())?),
                (Entry::Vacant(new), _) => *new.insert(groups.number(id, name, members.clone())?),
            };
            let duration_ns = match event.ph.as_str() {
                "X" => event.dur.and_then(nanoseconds),
                _ => event.id.as_ref().and_then(|id| ends.get(id)).map(|end| end.saturating_sub(start_ns)),
            };
            calls.push(event.call(group, kind, start_ns, duration_ns));
        }
        if unknown > 0 {
            notes.push(format!("rank {}: {unknown} calls of unknown kinds were left out", process.rank));
        }
        calls.sort_by_key(|call| call.start_ns);
        Ok(calls)
    }
}

impl Event {
    fn call(&self, group: usize, kind: Kind, start_ns: u64, duration_ns: Option<u64>) -> Call {
        let Arguments { sequence, count, bytes, root, peer, tag, op, dtype, error, background } = &self.args;
        Call {
            sequence: *sequence,
            op: op.clone(),
            element: dtype.clone().unwrap_or_else(|| "u8".to_owned()),
            count: count.unwrap_or(0),
            bytes: *bytes,
            root: *root,
            peer: *peer,
            tag: tag.unwrap_or(0),
            start_ns: Some(start_ns),
            duration_ns,
            is_complete: error.is_none(),
            is_background: *background,
            ..Call::new(group, kind)
        }
    }
}

/// Converts the format's microseconds; `None` for a number that is no time.
fn nanoseconds(us: f64) -> Option<u64> {
    let ns = (us * 1e3).round();
    (ns.is_finite() && (0.0..1e19).contains(&ns)).then_some(ns as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_members_of_a_communicator_are_read_once_for_all_its_calls() {
        // If each call compared the members, this would take 4e9 visits.
        let (size, count) = (100_000, 40_000);
        let process = Process {
            pid: 1,
            rank: 0,
            world_size: size,
            pg_id: "job".to_owned(),
            dropped: 0,
            communicators: Some(vec![Communicator { pg_name: "world".to_owned(), world_ranks: (0..size).collect() }]),
        };
        let event = |number: u64| Event {
            ph: "X".to_owned(),
            name: "barrier".to_owned(),
            pid: 1,
            // Every other call is one on devices.
            tid: 1 + number % 2 * DEVICE_TRACK,
            ts: Some(number as f64),
            dur: None,
            id: None,
            args: Arguments::default(),
        };
        let trace = Trace { process, base_ns: 0, events: (0..count).map(event).collect() };
        let mut groups = Groups::new(size);
        let calls = trace.calls(0, &mut groups, &mut Vec::new()).unwrap();
        let numbers: Vec<usize> = calls.iter().map(|call| call.group).collect();
        assert_eq!(numbers, (0..count as usize).map(|number| number % 2).collect::<Vec<_>>());
        assert_eq!(groups.into_list().len(), 2);
    }
}
