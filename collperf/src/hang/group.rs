//! The records of one communicator, side by side.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::file::{Backend, Entry, Peer, Record, State};
use super::finding::{Finding, list};

/// One communicator.
#[derive(Debug)]
pub(crate) struct Group {
    /// The records by rank.
    pub(crate) records: BTreeMap<usize, Record>,
    /// The ranks whose processes did not answer, and why.
    pub(crate) silent: BTreeMap<usize, String>,
}

/// One rank's collectives of one backend, by number.
type Calls<'a> = BTreeMap<u64, &'a Entry>;

impl Group {
    /// Groups records by communicator. Of two records of the same rank the later one counts.
    pub(crate) fn all(records: Vec<Record>) -> Vec<Self> {
        let mut groups: BTreeMap<(String, String), BTreeMap<usize, Record>> = BTreeMap::new();
        for record in records {
            let group = groups.entry((record.pg_name.clone(), record.pg_id.clone())).or_default();
            let known = group.get(&record.rank).is_some_and(|known| known.time_written_ns > record.time_written_ns);
            if !known {
                group.insert(record.rank, record);
            }
        }
        groups.into_values().map(|records| Self { records, silent: BTreeMap::new() }).collect()
    }

    /// Returns any of the records, to read what all have in common.
    pub(crate) fn any(&self) -> Option<&Record> {
        self.records.values().next()
    }

    fn peer(&self, rank: usize) -> Option<&Peer> {
        self.any()?.ranks.get(rank)
    }

    /// Returns a rank with its host and process.
    pub(super) fn name(&self, rank: usize) -> String {
        self.peer(rank).map_or_else(|| format!("rank {rank}"), Peer::to_string)
    }

    /// Describes this communicator in a paragraph. `all` has every communicator, to tell what else the ranks were
    /// doing.
    pub(super) fn explain(&self, all: &[Group]) -> String {
        let Some(any) = self.any() else { return String::new() };
        let mut text = format!("communicator {} ({}): {} ranks; {}\n", any.pg_name, any.pg_id, any.world_size, any.wiring);
        if let Some((first, last)) = self.compared() {
            let _ = writeln!(text, "  compared: collectives {first} to {last}, which all records contain");
        }
        for finding in self.findings(all) {
            let _ = writeln!(text, "  {}", finding.in_words(self));
        }
        text
    }

    /// Returns what is wrong, worst first.
    pub(crate) fn findings(&self, all: &[Group]) -> Vec<Finding> {
        let mut findings = self.absent();
        for backend in [Backend::Host, Backend::Device] {
            let calls = self.calls(backend);
            findings.extend(Self::divergence(backend, &calls));
            findings.extend(self.behind(backend, &calls, all));
        }
        findings.extend(self.all_waiting());
        findings.extend(self.on_device());
        findings.extend(self.messages());
        findings.extend(self.ended_early());
        if findings.is_empty() {
            findings.push(Finding::Nothing {
                last: self.calls(Backend::Host).values().filter_map(|calls| calls.keys().next_back()).max().copied(),
            });
        }
        findings
    }

    /// Whether a call has failed, or has waited for at least this time.
    pub(crate) fn is_held_up(&self, seconds: f64) -> bool {
        let is_late = |record: &Record, entry: &Entry| match entry.state {
            State::Failed => true,
            State::Completed => false,
            // A call that is queued on the host follows one that has begun.
            State::Scheduled if entry.backend == Backend::Host => false,
            State::Scheduled | State::Started => record.seconds_in(entry).is_some_and(|waited| waited >= seconds),
        };
        self.records.values().any(|record| record.entries.iter().any(|entry| is_late(record, entry)))
    }

    /// Returns every rank's collectives of a backend.
    fn calls(&self, backend: Backend) -> BTreeMap<usize, Calls<'_>> {
        let of_one = |record: &'_ Record| -> Vec<(u64, usize)> {
            let entries = record.entries.iter().enumerate().filter(|(_, entry)| entry.backend == backend);
            entries.filter_map(|(at, entry)| Some((entry.collective_seq_id?, at))).collect()
        };
        let calls = |record| of_one(record).into_iter().map(|(number, at)| (number, &record.entries[at])).collect();
        self.records.iter().map(|(rank, record)| (*rank, calls(record))).collect()
    }

    /// Returns the first and last host collective that every record holds; ring buffers that have wrapped begin at
    /// different ones.
    fn compared(&self) -> Option<(u64, u64)> {
        let calls = self.calls(Backend::Host);
        let first = calls.values().filter_map(|calls| calls.keys().next()).max()?;
        let last = calls.values().filter_map(|calls| calls.keys().next_back()).min()?;
        (first <= last).then_some((*first, *last))
    }

    /// Finds the ranks without a record: those that others have lost, and the rest.
    pub(crate) fn absent(&self) -> Vec<Finding> {
        let world_size = self.any().map_or(0, |any| any.world_size);
        let (silent, absent): (Vec<usize>, Vec<usize>) =
            (0..world_size).filter(|rank| !self.records.contains_key(rank)).partition(|rank| self.silent.contains_key(rank));
        let (died, unknown): (Vec<usize>, Vec<usize>) = absent.into_iter().partition(|rank| !self.lost(*rank).is_empty());
        let mut findings: Vec<Finding> =
            died.into_iter().map(|rank| Finding::Died { rank, witnesses: self.lost(rank), call: self.last_words(rank) }).collect();
        let mut reasons: BTreeMap<&String, Vec<usize>> = BTreeMap::new();
        silent.iter().for_each(|rank| reasons.entry(&self.silent[rank]).or_default().push(*rank));
        findings.extend(reasons.into_iter().map(|(reason, ranks)| {
            let waiters = self.waiters(&ranks);
            Finding::Silent { ranks, reason: reason.clone(), waiters }
        }));
        if !unknown.is_empty() {
            findings.push(Finding::NoRecord { waiters: self.waiters(&unknown), ranks: unknown });
        }
        findings
    }

    /// Returns the ranks that wait, or have waited, for one of these.
    fn waiters(&self, ranks: &[usize]) -> Vec<usize> {
        let waits =
            |record: &Record| record.entries.iter().any(|entry| entry.is_stuck() && awaits(entry).any(|rank| ranks.contains(&rank)));
        self.records.iter().filter(|(_, record)| waits(record)).map(|(rank, _)| *rank).collect()
    }

    /// Returns the ranks that have lost this rank.
    fn lost(&self, rank: usize) -> Vec<usize> {
        let says = |entry: &Entry| entry.error_kind.as_deref() == Some("peer_lost") && entry.error_ranks.contains(&rank);
        self.records.iter().filter(|(_, record)| record.entries.iter().any(says)).map(|(rank, _)| *rank).collect()
    }

    /// Returns an error that another rank recorded when it lost this rank.
    fn last_words(&self, rank: usize) -> Option<String> {
        let says = |entry: &&Entry| entry.error_kind.as_deref() == Some("peer_lost") && entry.error_ranks.contains(&rank);
        self.records.values().flat_map(|record| &record.entries).find(says).and_then(|entry| entry.error.clone())
    }

    /// Finds the first number with which ranks have made different calls.
    fn divergence(backend: Backend, calls: &BTreeMap<usize, Calls<'_>>) -> Option<Finding> {
        let numbers: std::collections::BTreeSet<u64> = calls.values().flat_map(|calls| calls.keys().copied()).collect();
        numbers.into_iter().find_map(|number| {
            let mut versions: BTreeMap<String, Vec<usize>> = BTreeMap::new();
            for (rank, calls) in calls {
                // Queued calls are numbered by counting, which may be off by one while the call before them is not
                // recorded.
                if let Some(entry) = calls.get(&number).filter(|entry| backend == Backend::Device || entry.state != State::Scheduled) {
                    versions.entry(entry.call()).or_default().push(*rank);
                }
            }
            let mut versions: Vec<_> = versions.into_iter().collect();
            versions.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks[0]));
            (versions.len() > 1).then_some(Finding::Diverged { backend, number, versions })
        })
    }

    /// Finds the ranks that have not reached a call in which others are stuck.
    fn behind(&self, backend: Backend, calls: &BTreeMap<usize, Calls<'_>>, all: &[Group]) -> Vec<Finding> {
        let is_made = |entry: &Entry| backend == Backend::Device || entry.state != State::Scheduled;
        let reached = |calls: &Calls<'_>| calls.iter().rev().find(|(_, entry)| is_made(entry)).map(|(number, _)| *number);
        let Some(front) = calls.values().filter_map(reached).max() else { return Vec::new() };
        let there: Vec<(usize, &Entry)> =
            calls.iter().filter(|(_, calls)| reached(calls) == Some(front)).map(|(rank, calls)| (*rank, calls[&front])).collect();
        // A collective that has ended on one rank has been entered on all: the others' records are merely older. For
        // device calls, records show when they end, not when they begin.
        let is_open = |entry: &Entry| entry.is_stuck() || backend == Backend::Device && entry.state != State::Completed;
        if !there.iter().any(|(_, entry)| is_open(entry)) {
            return Vec::new();
        }
        let call = format!("{} number {front}", there[0].1.call());
        let waiting: Vec<usize> = there.iter().map(|(rank, _)| *rank).collect();
        let seconds = there.iter().filter_map(|(rank, entry)| self.records[rank].seconds_in(entry)).fold(0.0, f64::max);
        let late = calls.iter().filter(|(_, calls)| reached(calls) < Some(front));
        late.map(|(rank, calls)| {
            let last = calls.iter().rev().find(|(_, entry)| is_made(entry));
            let last = last.map(|(number, entry)| (format!("{} number {number}", entry.call()), entry.state));
            let has_scheduled = calls.get(&front).is_some_and(|entry| !is_made(entry));
            let elsewhere = self.elsewhere(*rank, all);
            let (call, waiting) = (call.clone(), waiting.clone());
            Finding::Behind { backend, rank: *rank, call, waiting, seconds, last, has_scheduled, elsewhere }
        })
        .collect()
    }

    /// Returns what the process of a rank is stuck in on another communicator.
    fn elsewhere(&self, rank: usize, all: &[Group]) -> Option<String> {
        let here = self.any()?;
        let me = self.peer(rank)?;
        let others = all.iter().filter(|group| group.any().is_some_and(|any| any.pg_id != here.pg_id));
        let records = others
            .flat_map(|group| group.records.values())
            .filter(|record| record.ranks.get(record.rank).is_some_and(|peer| (&peer.host_name, peer.pid) == (&me.host_name, me.pid)));
        let stuck = records.flat_map(|record| record.entries.iter().map(move |entry| (record, entry)));
        stuck
            .rev()
            .find(|(_, entry)| entry.is_stuck())
            .map(|(record, entry)| format!("{} of communicator {} ({})", entry.in_words(), record.pg_name, record.pg_id))
    }

    /// Finds which ranks wait for which, if all are in the same call and none is behind.
    fn all_waiting(&self) -> Option<Finding> {
        let calls = self.calls(Backend::Host);
        let last: Vec<(usize, u64, &Entry)> = calls
            .iter()
            .filter_map(|(rank, calls)| {
                let (number, entry) = calls.iter().rev().find(|(_, entry)| entry.state != State::Scheduled)?;
                Some((*rank, *number, *entry))
            })
            .collect();
        let (_, number, first) = last.first()?;
        let is_one = last.len() == self.any()?.world_size && last.iter().all(|(_, other, _)| other == number);
        let stuck: Vec<_> = last.iter().filter(|(_, _, entry)| entry.is_stuck()).collect();
        if !is_one || stuck.is_empty() || last.iter().any(|(_, _, entry)| entry.call() != first.call()) {
            return None;
        }
        let awaited = stuck.iter().map(|(rank, _, entry)| (*rank, awaits(entry).collect())).collect();
        Some(Finding::AllWaiting { call: format!("{} number {number}", first.call()), awaited })
    }

    /// Finds the first device call that all ranks have queued and that has not ended. A call that an ended call follows on
    /// the same rank does not count: the recorder cannot follow every stream.
    fn on_device(&self) -> Option<Finding> {
        let calls = self.calls(Backend::Device);
        let first_open = |calls: &Calls<'_>| {
            let open = calls.iter().rev().take_while(|(_, entry)| entry.is_open()).last();
            open.map(|(number, _)| *number)
        };
        let open: BTreeMap<usize, u64> = calls.iter().filter_map(|(rank, calls)| Some((*rank, first_open(calls)?))).collect();
        let number = *open.values().min()?;
        let has_reached = |calls: &Calls<'_>| calls.keys().next_back().is_some_and(|last| *last >= number);
        if calls.len() < self.any()?.world_size || !calls.values().all(has_reached) {
            return None;
        }
        let ranks: Vec<usize> = open.iter().filter(|(_, first)| **first == number).map(|(rank, _)| *rank).collect();
        let seconds = ranks.iter().filter_map(|rank| self.records[rank].seconds_in(calls[rank][&number])).fold(0.0, f64::max);
        Some(Finding::OnDevice { call: format!("{} number {number}", calls[&ranks[0]][&number].call()), ranks, seconds })
    }

    /// Finds messages that wait for their other end.
    fn messages(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (rank, record) in &self.records {
            for entry in record.entries.iter().filter(|entry| entry.collective_seq_id.is_none() && entry.is_stuck()) {
                let answer = entry.peer.and_then(|peer| self.records.get(&peer)).map(|record| {
                    let is_other_end = |other: &&Entry| {
                        let is_towards = other.peer.is_none_or(|peer| peer == *rank) && other.collective_seq_id.is_none();
                        is_towards && other.profiling_name != entry.profiling_name && other.tag == entry.tag && other.is_stuck()
                    };
                    record.entries.iter().any(|other| is_other_end(&other))
                });
                findings.push(Finding::Message { rank: *rank, message: entry.message(), peer: entry.peer, answer });
            }
        }
        findings
    }

    /// Finds ranks that others have lost although they left a record: they ended in an orderly way.
    fn ended_early(&self) -> Vec<Finding> {
        let lost = self.records.iter().filter(|(rank, _)| !self.lost(**rank).is_empty());
        lost.map(|(rank, record)| Finding::EndedEarly { rank: *rank, witnesses: self.lost(*rank), reason: record.reason.clone() }).collect()
    }

    /// Names ranks, with host and process if they are few.
    pub(super) fn names(&self, ranks: &[usize]) -> String {
        const FEW: usize = 4;
        match ranks.len() {
            0..=FEW => ranks.iter().map(|rank| self.name(*rank)).collect::<Vec<_>>().join(", "),
            _ => list(ranks),
        }
    }
}

/// Returns the ranks that a call waits for, or that were missing.
pub(super) fn awaits(entry: &Entry) -> impl Iterator<Item = usize> {
    let message = entry.peer.filter(|_| entry.collective_seq_id.is_none());
    let mut ranks: Vec<usize> = entry.waiting_for.iter().chain(&entry.error_ranks).copied().chain(message).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks.into_iter()
}
