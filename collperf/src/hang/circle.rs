//! Processes that wait for each other in calls of several communicators, which they use in different orders.

use std::collections::{BTreeSet, VecDeque};

use super::file::{Entry, Record, State};
use super::group::{Group, awaits};

/// A process: its host and process id.
type Process<'a> = (&'a str, u32);

/// A call that waits, or waited until its deadline.
#[derive(Debug)]
struct Waiting<'a> {
    record: &'a Record,
    entry: &'a Entry,
    process: Process<'a>,
    awaited: BTreeSet<Process<'a>>,
}

impl<'a> Waiting<'a> {
    fn new(record: &'a Record, entry: &'a Entry) -> Option<Self> {
        let process = |rank: usize| record.ranks.get(rank).map(|peer| (&*peer.host_name, peer.pid));
        Some(Self { record, entry, process: process(record.rank)?, awaited: awaits(entry).filter_map(process).collect() })
    }

    /// Whether it cannot end until the process of another call, on another communicator, continues.
    fn waits_behind(&self, other: &Self) -> bool {
        self.record.pg_id != other.record.pg_id && self.process != other.process && self.awaited.contains(&other.process)
    }

    /// Returns the call, the same on all ranks.
    fn call(&self) -> (&'a str, String) {
        (&self.record.pg_id, self.entry.in_words())
    }

    fn in_words(&self) -> String {
        let Record { rank, ranks, pg_name, .. } = self.record;
        format!("{} waits in {} of communicator {pg_name}", ranks[*rank], self.entry.in_words())
    }
}

/// Describes the cycles of calls in which each waits for the process of the next. Of the cycles that differ only in their
/// ranks, one is described.
pub(super) fn all<'a>(groups: impl IntoIterator<Item = &'a Group>) -> Vec<String> {
    let records = groups.into_iter().flat_map(|group| group.records.values());
    let is_late = |entry: &&Entry| entry.state == State::Started || entry.is_stuck() && entry.error_kind.as_deref() == Some("timeout");
    let waiting = records.flat_map(|record| record.entries.iter().filter(is_late).filter_map(|entry| Waiting::new(record, entry)));
    let waiting: Vec<Waiting<'_>> = waiting.collect();
    let (mut circles, mut explained) = (Vec::new(), BTreeSet::new());
    for start in 0..waiting.len() {
        if !explained.contains(&waiting[start].call())
            && let Some(circle) = shortest(&waiting, start)
        {
            explained.extend(circle.iter().map(|at| waiting[*at].call()));
            circles.push(circle);
        }
    }
    circles.into_iter().map(|circle| in_words(circle.iter().map(|at| &waiting[*at]))).collect()
}

fn in_words<'a>(circle: impl Iterator<Item = &'a Waiting<'a>>) -> String {
    let calls: Vec<String> = circle.map(Waiting::in_words).collect();
    format!(
        "each rank waits for the next, and the last rank waits for the first: {}; use these communicators in the same order on all ranks\n",
        calls.join("; ")
    )
}

/// Returns the shortest cycle through a call.
fn shortest(waiting: &[Waiting<'_>], start: usize) -> Option<Vec<usize>> {
    let mut before = vec![None; waiting.len()];
    let mut reached = VecDeque::from([start]);
    while let Some(at) = reached.pop_front() {
        for next in (0..waiting.len()).filter(|next| waiting[at].waits_behind(&waiting[*next])) {
            if next == start {
                let mut circle: Vec<usize> = std::iter::successors(Some(at), |at| before[*at]).collect();
                circle.reverse();
                return Some(circle);
            }
            if before[next].is_none() {
                before[next] = Some(at);
                reached.push_back(next);
            }
        }
    }
    None
}
