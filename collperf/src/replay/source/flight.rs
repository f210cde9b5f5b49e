//! Flight records of this library.

use std::collections::{BTreeMap, HashSet};

use super::groups::Groups;
use crate::hang::{Backend, Entry, Record, State};
use crate::replay::recording::{Call, Kind, Origin, Recording};

/// Reads the record of one rank and communicator.
pub(super) fn parse(text: &[u8]) -> Result<Record, String> {
    let record: Record = serde_json::from_slice(text).map_err(|error| format!("not a readable flight record: {error}"))?;
    let mut record = record.checked()?;
    if record.world_ranks.is_empty() {
        record.world_ranks = (0..record.world_size).collect();
    }
    if record.world_ranks.len() != record.world_size {
        return Err(format!("the record lists the numbers of {} ranks, but has {}", record.world_ranks.len(), record.world_size));
    }
    Ok(record)
}

/// Makes the recording of a job from the records of all its ranks and communicators.
pub(super) fn merge(records: Vec<Record>) -> Result<Recording, String> {
    let mut by_rank: BTreeMap<usize, Vec<Record>> = BTreeMap::new();
    let (mut seen, mut highest) = (HashSet::new(), 0);
    for record in records {
        let rank = record.world_ranks[record.rank];
        if !seen.insert((record.pg_id.clone(), rank)) {
            return Err(format!("there are two records of rank {rank} in communicator {}: keep one of them", record.pg_name));
        }
        highest = record.world_ranks.iter().copied().max().unwrap_or(0).max(highest);
        by_rank.entry(rank).or_default().push(record);
    }
    // Checked before anything is as large as the number of ranks, which a file may give as any number.
    if by_rank.len() <= highest {
        let missing = (0..).find(|rank| !by_rank.contains_key(rank)).unwrap_or_default();
        return Err(format!("the job has ranks up to {highest}, but there is no flight record of rank {missing}"));
    }
    let mut groups = Groups::new(by_rank.len());
    let mut ranks = Vec::new();
    for (rank, records) in by_rank {
        ranks.push(calls(records, &mut groups).map_err(|reason| format!("rank {rank}: {reason}"))?);
    }
    Ok(Recording { origin: Origin::FlightRecord, groups: groups.into_list(), ranks, is_cut: true, notes: Vec::new() })
}

/// Returns the calls of one rank, from the records of all its communicators, in the order in which they began.
fn calls(records: Vec<Record>, groups: &mut Groups) -> Result<Vec<Call>, String> {
    let mut placed: Vec<Call> = Vec::new();
    for mut record in records {
        let stream = |entry: &Entry| (entry.backend == Backend::Device, entry.collective_seq_id.is_none());
        record.entries.sort_by_key(|entry| (stream(entry), entry.record_id));
        for entries in record.entries.chunk_by(|a, b| stream(a) == stream(b)) {
            let (id, name, members) = (&record.pg_id, &record.pg_name, record.world_ranks.clone());
            let group = match entries[0].backend {
                Backend::Host => groups.number(id, name, members)?,
                Backend::Device => groups.number_of_device(id, name, members)?,
            };
            for (start_ns, entry) in starts(entries).into_iter().zip(entries) {
                placed.push(Call { not_before_ns: start_ns, ..call(entry, group)? });
            }
        }
    }
    // Stable, so calls that began at unknown times keep their order in their communicator.
    placed.sort_by_key(|call| call.not_before_ns);
    Ok(placed)
}

/// Returns when each call of a stream began. If that is not known, it is the start of the call before it, or after it.
fn starts(entries: &[Entry]) -> Vec<u64> {
    let mut last = entries.iter().find_map(|entry| entry.time_created_ns).unwrap_or(0);
    let mut known = |entry: &Entry| {
        last = entry.time_created_ns.unwrap_or(last).max(last);
        last
    };
    entries.iter().map(&mut known).collect()
}

fn call(entry: &Entry, group: usize) -> Result<Call, String> {
    let name = &entry.profiling_name;
    let kind = Kind::named(name).ok_or_else(|| format!("{name:?} is not the name of a call"))?;
    let duration_ns = entry.time_created_ns.zip(entry.time_discovered_completed_ns).map(|(start, end)| end.saturating_sub(start));
    Ok(Call {
        sequence: entry.collective_seq_id,
        op: entry.op.clone(),
        element: entry.dtype.clone(),
        count: entry.count,
        root: entry.root,
        peer: entry.peer,
        tag: entry.tag.unwrap_or(0),
        start_ns: entry.time_created_ns,
        duration_ns,
        is_complete: entry.state == State::Completed || (entry.backend == Backend::Device && entry.state != State::Failed),
        ..Call::new(group, kind)
    })
}
