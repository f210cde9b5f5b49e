//! What the answers of all ranks say together: the ranks of each communicator, and what is wrong.

use std::collections::BTreeMap;

use serde::Serialize;

use super::document::{Document, Process};
use super::process::State;
use crate::hang::{self, Backend, Entry, Group, Peer, Record, State as CallState};

/// A call that has waited for less than this is not held up. Ranks are asked one after another, and a job that runs is
/// always in some call.
const PATIENCE: f64 = 1.0;

/// All communicators.
#[derive(Debug, Serialize)]
pub(super) struct View {
    /// Ranks that wait for each other in calls of several communicators.
    pub(super) cycles: Vec<String>,
    pub(super) communicators: Vec<Communicator>,
}

/// One communicator.
#[derive(Debug, Serialize)]
pub(super) struct Communicator {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) wiring: String,
    /// Whether a call has waited for long, or has failed.
    pub(super) is_held_up: bool,
    /// What is wrong, worst first.
    pub(super) findings: Vec<String>,
    pub(super) ranks: Vec<Rank>,
}

/// One rank of a communicator.
#[derive(Debug, Serialize)]
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) host_name: String,
    pub(super) pid: u32,
    pub(super) process: State,
    /// The call that has not ended, or else the last one; `None` if there is none, or no answer.
    pub(super) call: Option<Call>,
    /// Why there is no answer.
    pub(super) silent: Option<String>,
}

/// The call in which a rank is.
#[derive(Debug, Serialize)]
pub(super) struct Call {
    pub(super) text: String,
    pub(super) backend: &'static str,
    /// `waits`, `queued`, `ended` or `failed`.
    pub(super) state: &'static str,
    /// The time since the call began.
    pub(super) seconds: Option<f64>,
    pub(super) waiting_for: Vec<usize>,
}

/// A process: its host and its number there, as its ranks know them.
type Key = (String, u32);

impl View {
    /// Joins the answers.
    pub(super) fn new(document: &Document) -> Self {
        let records: Vec<Record> = document.processes.iter().flat_map(Process::records).collect();
        let known = Known::new(document);
        let mut groups = Group::all(records);
        for group in &mut groups {
            group.silent = known.silent(group);
        }
        let cycles = hang::circles(groups.iter().filter(|group| group.is_held_up(PATIENCE)));
        let communicators = groups.iter().map(|group| Communicator::new(group, &groups, &known)).collect();
        Self { cycles, communicators }
    }
}

/// What is known of processes.
struct Known {
    states: BTreeMap<Key, State>,
    silences: BTreeMap<Key, String>,
    hosts: Vec<String>,
}

impl Known {
    fn new(document: &Document) -> Self {
        let (mut states, mut silences) = (BTreeMap::new(), BTreeMap::new());
        for absent in &document.absent {
            let key = (absent.host_name.clone(), absent.pid);
            let reason = absent.state.silence().unwrap_or(
                "no socket: the status socket or the flight recorder is off, or the process belongs to another user or network namespace",
            );
            states.insert(key.clone(), absent.state);
            silences.insert(key, reason.to_owned());
        }
        for process in &document.processes {
            let status = process.status.as_ref();
            let own =
                status.and_then(|status| Some((status["host_name"].as_str()?.to_owned(), u32::try_from(status["pid"].as_u64()?).ok()?)));
            let key = own.unwrap_or_else(|| (process.host_name.clone(), process.pid));
            states.insert(key.clone(), process.state);
            let waits = if process.state == State::Uninterruptible {
                "; its process is in a wait that no signal ends, often for storage"
            } else {
                ""
            };
            silences.insert(key, process.error.as_ref().map_or_else(|| "no record".to_owned(), |error| format!("{error}{waits}")));
        }
        Self { states, silences, hosts: document.hosts.clone() }
    }

    fn state(&self, peer: &Peer) -> State {
        self.states.get(&(peer.host_name.clone(), peer.pid)).copied().unwrap_or(State::Unknown)
    }

    /// Returns the ranks of a communicator without a record, and why.
    fn silent(&self, group: &Group) -> BTreeMap<usize, String> {
        let Some(any) = group.any() else { return BTreeMap::new() };
        let reason = |peer: &Peer| match self.silences.get(&(peer.host_name.clone(), peer.pid)) {
            Some(reason) => reason.clone(),
            None if self.hosts.contains(&peer.host_name) => "not found on its host".to_owned(),
            None => format!("not asked: run collperf ps on host {} too, or use --hosts", peer.host_name),
        };
        let absent = any.ranks.iter().filter(|peer| !group.records.contains_key(&peer.rank));
        absent.map(|peer| (peer.rank, reason(peer))).collect()
    }
}

impl Communicator {
    fn new(group: &Group, all: &[Group], known: &Known) -> Self {
        let is_held_up = group.is_held_up(PATIENCE);
        let findings = if is_held_up { group.findings(all) } else { group.absent() };
        let (name, id, wiring, peers) = group
            .any()
            .map_or_else(Default::default, |any| (any.pg_name.clone(), any.pg_id.clone(), any.wiring.clone(), any.ranks.clone()));
        let rank = |peer: Peer| Rank {
            process: known.state(&peer),
            call: group.records.get(&peer.rank).and_then(Call::now),
            silent: group.silent.get(&peer.rank).cloned(),
            rank: peer.rank,
            host_name: peer.host_name,
            pid: peer.pid,
        };
        let findings = findings.iter().map(|finding| finding.in_words(group)).collect();
        Self { name, id, wiring, is_held_up, findings, ranks: peers.into_iter().map(rank).collect() }
    }
}

impl Call {
    /// Returns the call in which a rank is: a collective before a device call, a message and a queued call; if none is
    /// under way, the last collective.
    fn now(record: &Record) -> Option<Self> {
        let entries = &record.entries;
        let is_collective = |entry: &&Entry| entry.collective_seq_id.is_some();
        let host = || entries.iter().filter(|entry| entry.backend == Backend::Host);
        let device = || entries.iter().filter(|entry| entry.backend == Backend::Device);
        let under_way = host().filter(is_collective).find(|entry| entry.state == CallState::Started);
        // What follows an ended device call, or is not followed by one.
        let on_device = || device().rev().take_while(|entry| entry.is_open()).last();
        let message = || host().find(|entry| !is_collective(entry) && entry.is_open());
        let queued = || host().find(|entry| entry.is_open());
        let last = || entries.iter().max_by_key(|entry| (entry.time_created_ns, entry.collective_seq_id));
        let entry = under_way.or_else(on_device).or_else(message).or_else(queued).or_else(last)?;
        Some(Self::of(record, entry))
    }

    fn of(record: &Record, entry: &Entry) -> Self {
        let state = match entry.state {
            CallState::Scheduled => "queued",
            CallState::Started => "waits",
            CallState::Completed => "ended",
            CallState::Failed => "failed",
        };
        let backend = if entry.backend == Backend::Device { "device" } else { "host" };
        let peer = entry.peer.filter(|_| entry.collective_seq_id.is_none() && entry.is_open());
        let waiting_for = entry.waiting_for.iter().copied().chain(peer).collect();
        Self { text: entry.in_words(), backend, state, seconds: record.seconds_in(entry), waiting_for }
    }
}
