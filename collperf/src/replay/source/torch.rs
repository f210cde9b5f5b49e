//! PyTorch's flight records: the pickles and the JSON that its flight recorder dumps.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeMap, HashMap};

use collectives::{Collective, DType};
use serde::Deserialize;

use super::groups::Groups;
use super::pickle;
use crate::replay::recording::{Call, Counts, Kind, Origin, Recording};

/// The supported major version of the format.
const MAJOR: &str = "2.";
/// The most dimensions and tensors of a call that are read.
const MOST_TENSORS: usize = 1 << 16;

/// A file. Names are as in the file.
#[derive(Debug, Deserialize)]
struct Dump {
    version: String,
    rank: Option<usize>,
    pg_config: BTreeMap<String, GroupConfig>,
    #[serde(default)]
    entries: Vec<Entry>,
}

/// The states of entries, and the entry that follows calls which NCCL makes together. Only that entry is timed.
const SCHEDULED: &str = "scheduled";
const COMPLETED: &str = "completed";
const COALESCED: &str = "coalesced";

#[derive(Debug, Deserialize)]
struct GroupConfig {
    name: String,
    #[serde(default)]
    desc: String,
    /// The members, as text: `[0, 1]`.
    ranks: String,
}

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(default)]
    record_id: u64,
    process_group: (String, String),
    collective_seq_id: Option<u64>,
    profiling_name: String,
    time_created_ns: Option<u64>,
    duration_ms: Option<f64>,
    input_sizes: Vec<Vec<u64>>,
    #[serde(default)]
    input_dtypes: Vec<String>,
    output_sizes: Vec<Vec<u64>>,
    #[serde(default)]
    output_dtypes: Vec<String>,
    state: String,
    time_discovered_started_ns: Option<u64>,
    time_discovered_completed_ns: Option<u64>,
    #[serde(default)]
    is_p2p: bool,
}

/// The record of one rank.
pub(super) struct Dumped {
    rank: usize,
    dump: Dump,
}

/// Reads a file. `named` is the number that the file's name ends with. It is the rank if the file does not contain one.
pub(super) fn parse(text: &[u8], named: Option<usize>) -> Result<Dumped, String> {
    let is_pickle = pickle::is_pickle(text);
    let read = if is_pickle { serde_json::from_value::<Dump>(pickle::parse(text)?) } else { serde_json::from_slice(text) };
    let dump: Dump = read.map_err(|error| format!("not a readable PyTorch flight record: {error}"))?;
    if !dump.version.starts_with(MAJOR) {
        return Err(format!("PyTorch's format has version {:?}, but this collperf reads versions {MAJOR}x", dump.version));
    }
    Ok(Dumped { rank: rank(dump.rank, named)?, dump })
}

/// Returns the rank that a file contains, or else the one in its name. Fails if the two differ.
fn rank(contained: Option<usize>, named: Option<usize>) -> Result<usize, String> {
    match (contained, named) {
        (Some(rank), Some(named)) if rank != named => {
            Err(format!("the file is of rank {rank}, but its name ends with {named}: rename it, as in nccl_trace_rank_{rank}"))
        }
        (Some(rank), _) | (None, Some(rank)) => Ok(rank),
        (None, None) => Err("the name of PyTorch's file must end with the rank, as in nccl_trace_rank_0".to_owned()),
    }
}

/// Makes the recording of a job from the records of all its ranks.
pub(super) fn merge(dumps: Vec<Dumped>) -> Result<Recording, String> {
    let mut by_rank = BTreeMap::new();
    for Dumped { rank, dump } in dumps {
        if by_rank.insert(rank, dump).is_some() {
            return Err(format!("there are two records of rank {rank}: keep one of them"));
        }
    }
    let mut highest = 0;
    for dump in by_rank.values() {
        for config in dump.pg_config.values() {
            highest = members(&config.ranks)?.into_iter().max().unwrap_or(0).max(highest);
        }
    }
    // Checked before anything is as large as the number of ranks, which a file may give as any number.
    if by_rank.len() <= highest {
        let missing = (0..).find(|rank| !by_rank.contains_key(rank)).unwrap_or_default();
        return Err(format!("the job has ranks up to {highest}, but there is no flight record of rank {missing}"));
    }
    if let Some(rank) = by_rank.keys().find(|rank| **rank > highest) {
        return Err(format!("there is a record of rank {rank}, but the process groups have ranks up to {highest} only"));
    }
    let mut groups = Groups::new(by_rank.len());
    let (mut ranks, mut left_out) = (Vec::new(), BTreeMap::new());
    for (rank, dump) in by_rank {
        ranks.push(dump.calls(rank, &mut groups, &mut left_out).map_err(|reason| format!("rank {rank}: {reason}"))?);
    }
    let notes =
        left_out.iter().map(|(name, count)| format!("{count} entries {name} were left out: they are no calls that move data")).collect();
    Ok(Recording { origin: Origin::PyTorch, groups: groups.into_list(), ranks, is_cut: true, notes })
}

/// Reads a list of ranks, such as `[0, 1]`.
fn members(text: &str) -> Result<Vec<usize>, String> {
    serde_json::from_str(text).map_err(|_| format!("{text:?} is no list of ranks"))
}

impl Dump {
    fn calls(mut self, rank: usize, groups: &mut Groups, left_out: &mut BTreeMap<String, u64>) -> Result<Vec<Call>, String> {
        self.entries.sort_by_key(|entry| entry.record_id);
        let (known, mut found) = (Known::new(self.pg_config.values())?, HashMap::new());
        let mut calls: Vec<Call> = Vec::new();
        // The calls of each group since its last `coalesced` entry that PyTorch gave no state of their own.
        let mut coalesced: HashMap<&(String, String), Vec<usize>> = HashMap::new();
        for entry in &self.entries {
            let role: &mut Role = match found.entry(&entry.process_group) {
                MapEntry::Occupied(role) => role.into_mut(),
                MapEntry::Vacant(new) => new.insert(known.role(&entry.process_group, rank)?),
            };
            let words = entry.profiling_name.split_once(':').map_or(&*entry.profiling_name, |(_, words)| words);
            if words == COALESCED {
                let parts = coalesced.remove(&entry.process_group).unwrap_or_default();
                parts.into_iter().for_each(|part| entry.ends(&mut calls[part]));
                continue;
            }
            let Some(call) = entry.call(words, role.me, role.members.len())? else {
                *left_out.entry(words.chars().take(40).collect()).or_default() += 1;
                continue;
            };
            // Numbered at the first call that moves data.
            let group = match role.group {
                Some(group) => group,
                None => *role.group.insert(role.number(&entry.process_group, groups)?),
            };
            if entry.state == SCHEDULED {
                coalesced.entry(&entry.process_group).or_default().push(calls.len());
            }
            calls.push(Call { group, ..call });
        }
        Ok(calls)
    }
}

/// The process groups of a file, by name and description, and by name alone.
struct Known {
    exact: HashMap<(String, String), Vec<usize>>,
    by_name: HashMap<String, (String, String)>,
}

/// A rank's part in a process group.
struct Role<'a> {
    members: &'a [usize],
    me: usize,
    /// The number of the group, once it is known.
    group: Option<usize>,
}

impl Known {
    fn new<'a>(configs: impl Iterator<Item = &'a GroupConfig>) -> Result<Self, String> {
        let mut known = Self { exact: HashMap::new(), by_name: HashMap::new() };
        for config in configs {
            let id = (config.name.clone(), config.desc.clone());
            known.by_name.insert(config.name.clone(), id.clone());
            known.exact.insert(id, members(&config.ranks)?);
        }
        Ok(known)
    }

    fn role(&self, group: &(String, String), rank: usize) -> Result<Role<'_>, String> {
        let (name, desc) = group;
        let by_name = || self.exact.get(self.by_name.get(name)?);
        let members = self.exact.get(group).or_else(by_name);
        let members = members.ok_or_else(|| format!("process group {name} ({desc}) is not in pg_config: its ranks cannot be known"))?;
        let me = members.iter().position(|member| *member == rank);
        let me = me.ok_or_else(|| format!("process group {name} ({desc}) has a call of this rank, but not the rank"))?;
        Ok(Role { members, me, group: None })
    }
}

impl Role<'_> {
    fn number(&self, (name, desc): &(String, String), groups: &mut Groups) -> Result<usize, String> {
        let shown = if desc.is_empty() || desc == "undefined" { name.clone() } else { format!("{name} ({desc})") };
        groups.number(&format!("{name} {desc}"), &shown, self.members.to_vec())
    }
}

/// The tensors of a call.
struct Tensors {
    /// The elements of each input and output.
    inputs: Vec<u64>,
    outputs: Vec<u64>,
}

impl Tensors {
    fn new(entry: &Entry, factor: u64) -> Result<Self, String> {
        let elements = |sizes: &[Vec<u64>]| -> Result<Vec<u64>, String> {
            if sizes.len() > MOST_TENSORS {
                return Err(format!("{}: {} tensors are too many", entry.profiling_name, sizes.len()));
            }
            let one = |sizes: &Vec<u64>| sizes.iter().try_fold(factor, |product, size| product.checked_mul(*size));
            sizes
                .iter()
                .map(|sizes| one(sizes).ok_or_else(|| format!("{}: the sizes {sizes:?} are too large", entry.profiling_name)))
                .collect()
        };
        Ok(Self { inputs: elements(&entry.input_sizes)?, outputs: elements(&entry.output_sizes)? })
    }

    /// Returns the bytes of the larger list.
    fn bytes(&self, element: &str) -> u64 {
        let size = element.parse().map_or(1, |dtype: DType| dtype.size_bytes() as u64);
        Self::total(&self.inputs).max(Self::total(&self.outputs)).saturating_mul(size)
    }

    /// Returns the elements of all tensors of a list together.
    fn total(list: &[u64]) -> u64 {
        list.iter().fold(0, |total, count| total.saturating_add(*count))
    }
}

impl Entry {
    /// Ends a part of the coalesced calls that this entry stands for: they all run until its end.
    fn ends(&self, call: &mut Call) {
        let (start_ns, duration_ns) = self.times();
        call.is_complete = self.state == COMPLETED;
        call.is_background = true;
        let end_ns = start_ns.zip(duration_ns).map(|(start, duration)| start.saturating_add(duration));
        call.duration_ns = end_ns.zip(call.start_ns).map(|(end, start)| end.saturating_sub(start)).or(duration_ns);
    }

    /// Returns the call of an entry of rank `me` in a group of `size` ranks; `None` if the entry stands for no call.
    fn call(&self, words: &str, me: usize, size: usize) -> Result<Option<Call>, String> {
        let (name, ends) = words.split_once(' ').unwrap_or((words, ""));
        let (element, factor) = self.element();
        let tensors = Tensors::new(self, factor)?;
        let (start_ns, duration_ns) = self.times();
        let call = Call {
            sequence: self.collective_seq_id.filter(|_| !self.is_p2p),
            element,
            start_ns,
            duration_ns,
            is_complete: self.state == COMPLETED,
            ..Call::new(0, Kind::SEND)
        };
        if let "send" | "recv" = name {
            let kind = if name == "send" { Kind::SEND } else { Kind::RECV };
            let peer = ends.rsplit_once(['>', '-']).and_then(|(_, peer)| peer.parse().ok());
            let peer = peer.ok_or_else(|| format!("{:?} does not name the other rank", self.profiling_name))?;
            let count = Tensors::total(&tensors.inputs).max(Tensors::total(&tensors.outputs));
            return Ok(Some(Call { kind, peer: Some(peer), count, sequence: None, ..call }));
        }
        Ok(shape(name, &tensors, size).map(|(kind, count, counts)| {
            let op = kind.data().filter(|data| data.reduces()).map(|_| "sum".to_owned());
            // Only the root of a gather has outputs, and only the root of a scatter has inputs.
            let is_root = match kind.data() {
                Some(Collective::Gather) => !tensors.outputs.is_empty(),
                Some(Collective::Scatter) => !tensors.inputs.is_empty(),
                _ => false,
            };
            Call { kind, count, counts, op, root: is_root.then_some(me), bytes: Some(tensors.bytes(&call.element)), ..call }
        }))
    }

    /// Returns the name of the element type, and how many of them form one element of PyTorch.
    fn element(&self) -> (String, u64) {
        let name = self.input_dtypes.first().or_else(|| self.output_dtypes.first()).map_or("Byte", String::as_str);
        let (name, factor) = match name {
            "Float" => ("f32", 1),
            "Double" => ("f64", 1),
            "Half" => ("f16", 1),
            "BFloat16" => ("bf16", 1),
            "Float8_e4m3fn" => ("f8e4m3", 1),
            "Float8_e5m2" => ("f8e5m2", 1),
            "Char" => ("i8", 1),
            "Short" => ("i16", 1),
            "Int" => ("i32", 1),
            "Long" => ("i64", 1),
            "UInt16" => ("u16", 1),
            "UInt32" => ("u32", 1),
            "UInt64" => ("u64", 1),
            "Bool" => ("bool", 1),
            "ComplexHalf" => ("f16", 2),
            "ComplexFloat" => ("f32", 2),
            "ComplexDouble" => ("f64", 2),
            _ => ("u8", 1),
        };
        (name.to_owned(), factor)
    }

    /// Returns the start of the call, and its duration. The JSON has 0 for times that are not known.
    fn times(&self) -> (Option<u64>, Option<u64>) {
        let created = self.time_created_ns.filter(|at| *at > 0);
        let [started, completed] = [self.time_discovered_started_ns, self.time_discovered_completed_ns].map(|at| at.filter(|at| *at > 0));
        let measured = self.duration_ms.filter(|ms| ms.is_finite() && (0.0..1e12).contains(ms)).map(|ms| (ms * 1e6) as u64);
        let seen = completed.zip(started.max(created)).map(|(end, start)| end.saturating_sub(start));
        (created, measured.or(seen))
    }
}

/// Returns the kind of a call by PyTorch's name for it, with its count or its counts; `None` for other entries.
fn shape(name: &str, tensors: &Tensors, size: usize) -> Option<(Kind, u64, Option<Counts>)> {
    let Tensors { inputs, outputs } = tensors;
    let (sent, received) = (Tensors::total(inputs), Tensors::total(outputs));
    let kind = Kind::collective;
    let several = |collective| if inputs.len().max(outputs.len()) > 1 { kind(collective).many() } else { Some(kind(collective)) };
    let differ = |list: &[u64]| list.len() == size && list.iter().any(|count| *count != list[0]);
    let whole = sent.max(received);
    let name = name.to_ascii_lowercase();
    Some(match name.trim_start_matches('_') {
        "all_reduce_barrier" | "barrier" => (kind(Collective::Barrier), 0, None),
        "all_reduce" | "allreduce" | "all_reduce_sparse" => (kind(Collective::AllReduce), whole, None),
        "allreduce_coalesced" => (several(Collective::AllReduce)?, whole, None),
        "broadcast" | "broadcast_oop" => (kind(Collective::Broadcast), whole, None),
        "reduce" | "reduce_oop" => (kind(Collective::Reduce), whole, None),
        "all_gather" | "allgather" if differ(outputs) => (kind(Collective::AllGatherV), received, Some(Counts::Blocks(outputs.clone()))),
        "all_gather_v" => (kind(Collective::AllGatherV), received, Some(Counts::Blocks(outputs.clone())).filter(|_| outputs.len() == size)),
        "all_gather" | "allgather" | "all_gather_base" | "all_gather_single" => (kind(Collective::AllGather), sent, None),
        "all_gather_into_tensor_coalesced" | "allgather_coalesced" => (several(Collective::AllGather)?, sent, None),
        "reduce_scatter" if differ(inputs) => (kind(Collective::ReduceScatterV), sent, Some(Counts::Blocks(inputs.clone()))),
        "reduce_scatter_v" => {
            (kind(Collective::ReduceScatterV), sent, Some(Counts::Blocks(inputs.clone())).filter(|_| inputs.len() == size))
        }
        "reduce_scatter" | "reduce_scatter_base" | "reduce_scatter_single" => (kind(Collective::ReduceScatter), received, None),
        "reduce_scatter_tensor_coalesced" | "reduce_scatter_coalesced" => (several(Collective::ReduceScatter)?, received, None),
        "gather" => (kind(Collective::Gather), sent, None),
        "scatter" => (kind(Collective::Scatter), received, None),
        "all_to_all" if inputs.len() == size && outputs.len() == size => {
            let counts = Counts::Pairs { send: inputs.clone(), receive: outputs.clone() };
            (kind(Collective::AllToAllV), 0, Some(counts))
        }
        "all_to_all" | "all_to_all_single" | "alltoall_base" if sent == received && sent.is_multiple_of(size as u64) => {
            (kind(Collective::AllToAll), sent / size as u64, None)
        }
        "all_to_all" | "all_to_all_single" | "alltoall_base" | "all_to_all_v_single" => (kind(Collective::AllToAllV), 0, None),
        _ => return None,
    })
}
