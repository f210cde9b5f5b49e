//! Processes that wait for each other in calls of several communicators, which they use in different orders.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

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
}

impl<'a> Waiting<'a> {
    fn new(record: &'a Record, entry: &'a Entry) -> Option<Self> {
        Some(Self { record, entry, process: process(record, record.rank)? })
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

/// Returns the process of a rank of a record's communicator.
fn process(record: &Record, rank: usize) -> Option<Process<'_>> {
    record.ranks.get(rank).map(|peer| (&*peer.host_name, peer.pid))
}

/// Describes the cycles of calls in which each waits for the process of the next. Of the cycles that differ only in their
/// ranks, one is described.
pub(super) fn all<'a>(groups: impl IntoIterator<Item = &'a Group>) -> Vec<String> {
    let records = groups.into_iter().flat_map(|group| group.records.values());
    let is_late = |entry: &&Entry| entry.state == State::Started || entry.is_stuck() && entry.error_kind.as_deref() == Some("timeout");
    let waiting = records.flat_map(|record| record.entries.iter().filter(is_late).filter_map(|entry| Waiting::new(record, entry)));
    let waiting: Vec<Waiting<'_>> = waiting.collect();
    let behind = behind(&waiting);
    let is_in_cycle = cycles(&behind);
    let (mut circles, mut explained) = (Vec::new(), BTreeSet::new());
    for start in (0..waiting.len()).filter(|start| is_in_cycle[*start]) {
        if !explained.contains(&waiting[start].call())
            && let Some(circle) = shortest(&behind, start)
        {
            explained.extend(circle.iter().map(|at| waiting[*at].call()));
            circles.push(circle);
        }
    }
    circles.into_iter().map(|circle| in_words(circle.iter().map(|at| &waiting[*at]))).collect()
}

/// Returns, for each call, the calls behind which it waits: it cannot end until the process of such a call, on another
/// communicator, continues.
fn behind(waiting: &[Waiting<'_>]) -> Vec<Vec<usize>> {
    let mut calls: HashMap<Process<'_>, Vec<usize>> = HashMap::new();
    for (at, call) in waiting.iter().enumerate() {
        calls.entry(call.process).or_default().push(at);
    }
    let of = |call: &Waiting<'_>| {
        let awaited: HashSet<Process<'_>> = awaits(call.entry).filter_map(|rank| process(call.record, rank)).collect();
        let others = awaited.iter().filter(|process| **process != call.process).filter_map(|process| calls.get(process)).flatten();
        let mut others: Vec<usize> = others.copied().filter(|other| waiting[*other].record.pg_id != call.record.pg_id).collect();
        others.sort_unstable();
        others
    };
    waiting.iter().map(of).collect()
}

/// Returns which calls are in a cycle or between two. A hang without cycles needs no search, however many ranks it has.
fn cycles(behind: &[Vec<usize>]) -> Vec<bool> {
    let mut before = vec![Vec::new(); behind.len()];
    for (at, others) in behind.iter().enumerate() {
        others.iter().for_each(|other| before[*other].push(at));
    }
    let mut is_left = vec![true; behind.len()];
    for (next, back) in [(behind, &*before), (&*before, behind)] {
        let mut counts: Vec<usize> = next.iter().map(|others| others.iter().filter(|other| is_left[**other]).count()).collect();
        let mut ends: Vec<usize> = (0..next.len()).filter(|at| is_left[*at] && counts[*at] == 0).collect();
        while let Some(end) = ends.pop() {
            is_left[end] = false;
            for &other in back[end].iter().filter(|other| is_left[**other]) {
                counts[other] -= 1;
                if counts[other] == 0 {
                    ends.push(other);
                }
            }
        }
    }
    is_left
}

fn in_words<'a>(circle: impl Iterator<Item = &'a Waiting<'a>>) -> String {
    let calls: Vec<String> = circle.map(Waiting::in_words).collect();
    format!(
        "each rank waits for the next, and the last rank waits for the first: {}; use these communicators in the same order on all ranks\n",
        calls.join("; ")
    )
}

/// Returns the shortest cycle through a call.
fn shortest(behind: &[Vec<usize>], start: usize) -> Option<Vec<usize>> {
    let mut before = vec![None; behind.len()];
    let mut reached = VecDeque::from([start]);
    while let Some(at) = reached.pop_front() {
        for &next in &behind[at] {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_outside_of_cycles_are_not_searched() {
        // 0 -> 1 -> 2 -> 1, 2 -> 3, and 4 waits for nothing.
        let behind = [vec![1], vec![2], vec![1, 3], vec![], vec![]];
        assert_eq!(cycles(&behind), [false, true, true, false, false]);
        assert_eq!(shortest(&behind, 1), Some(vec![1, 2]));
        assert_eq!(shortest(&behind, 3), None);
    }

    #[test]
    fn many_calls_in_a_row_are_no_cycle() {
        let row: Vec<Vec<usize>> = (0..10_000).map(|at| if at < 9_999 { vec![at + 1] } else { Vec::new() }).collect();
        assert!(cycles(&row).iter().all(|is_in_cycle| !is_in_cycle));
    }
}
