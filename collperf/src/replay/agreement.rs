//! Checks that the ranks of a record made the same calls in the same order, before any of them is replayed.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::recording::{Call, Counts, Group, Origin, Recording};

/// The calls of a communicator, by the rank in it: the places of the calls in the rank's list.
type Places = Vec<Vec<usize>>;

/// Removes the calls that cannot be replayed, and describes them in the recording's notes. Fails if ranks made
/// different calls.
pub(super) fn check(recording: &mut Recording) -> Result<(), String> {
    let mut dropped: Vec<HashSet<usize>> = vec![HashSet::new(); recording.ranks.len()];
    let mut notes = Vec::new();
    for (group, collectives) in recording.groups.iter().zip(collectives(recording)?) {
        let collectives = aligned(recording, group, collectives, &mut dropped, &mut notes)?;
        compare(recording, group, &collectives)?;
        drop_failed(recording, group, &collectives, &mut dropped, &mut notes);
    }
    learn_roots(recording, &dropped);
    super::messages::pair(recording, &mut dropped, &mut notes);
    for (calls, dropped) in recording.ranks.iter_mut().zip(&dropped) {
        let mut place = 0;
        calls.retain(|_| {
            place += 1;
            !dropped.contains(&(place - 1))
        });
    }
    recording.notes.extend(notes);
    if recording.origin == Origin::FlightRecord {
        put_in_one_order(recording);
    }
    Ok(())
}

/// Refuses a call with a root or a peer that the communicator does not have.
fn check_rank(group: &Group, call: &Call) -> Result<(), String> {
    let size = group.members.len();
    match call.root.max(call.peer).filter(|rank| *rank >= size) {
        None => Ok(()),
        Some(rank) => Err(format!("{} of communicator {} names rank {rank}, but the communicator has {size} ranks", call.kind, group.name)),
    }
}

/// Returns the places of the collectives of each communicator. Reads each call once.
fn collectives(recording: &Recording) -> Result<Vec<Places>, String> {
    let mut places: Vec<Places> = recording.groups.iter().map(|group| vec![Vec::new(); group.members.len()]).collect();
    for ((rank, calls), memberships) in recording.ranks.iter().enumerate().zip(recording.memberships()) {
        for (place, call) in calls.iter().enumerate() {
            let Some(me) = memberships.get(&call.group) else { continue };
            check_rank(&recording.groups[call.group], call).map_err(|reason| format!("rank {rank}: {reason}"))?;
            if !call.kind.is_message() {
                places[call.group][*me].push(place);
            }
        }
    }
    Ok(places)
}

/// Leaves out calls that only some ranks have: the oldest ones, which others have overwritten, and the last ones.
fn aligned(
    recording: &Recording,
    group: &Group,
    mut places: Places,
    dropped: &mut [HashSet<usize>],
    notes: &mut Vec<String>,
) -> Result<Places, String> {
    let sequence = |rank: usize, place: usize| recording.ranks[group.members[rank]][place].sequence;
    if recording.is_cut {
        let firsts: Option<Vec<u64>> =
            places.iter().enumerate().map(|(rank, places)| places.first().map_or(Some(0), |place| sequence(rank, *place))).collect();
        let is_even = places.iter().all(|list| list.len() == places[0].len());
        let Some(firsts) = firsts else {
            let reason = "the calls of its ranks cannot be brought in line, because the record lost some of them and does not number them";
            return if is_even { Ok(places) } else { Err(format!("communicator {}: {reason}", group.name)) };
        };
        let first = firsts.iter().copied().max().unwrap_or(0);
        let mut count = 0;
        for (rank, list) in places.iter_mut().enumerate() {
            let kept = list.iter().position(|place| sequence(rank, *place).is_none_or(|number| number >= first)).unwrap_or(list.len());
            count += drop_calls(&mut dropped[group.members[rank]], list.drain(..kept));
        }
        note(notes, group, count, "not all ranks recorded them any more");
    }
    let common = places.iter().map(Vec::len).min().unwrap_or(0);
    let longer = places.iter_mut().enumerate().filter(|(_, list)| list.len() > common);
    let count: usize = longer.map(|(rank, list)| drop_calls(&mut dropped[group.members[rank]], list.drain(common..))).sum();
    note(notes, group, count, "not all ranks had made them when the record was written");
    Ok(places)
}

fn drop_calls(dropped: &mut HashSet<usize>, places: impl Iterator<Item = usize>) -> usize {
    places.map(|place| usize::from(dropped.insert(place))).sum()
}

fn note(notes: &mut Vec<String>, group: &Group, count: usize, reason: &str) {
    if count > 0 {
        notes.push(format!("communicator {}: {count} calls of single ranks were left out, because {reason}", group.name));
    }
}

/// Fails at the first call in which ranks differ.
fn compare(recording: &Recording, group: &Group, places: &Places) -> Result<(), String> {
    let calls = |number: usize| places.iter().zip(&group.members).map(move |(list, member)| &recording.ranks[*member][list[number]]);
    for number in 0..places.first().map_or(0, Vec::len) {
        let Some(first) = calls(number).next() else { continue };
        if calls(number).all(|call| agrees(first, call)) {
            continue;
        }
        let mut said: Vec<(String, Vec<usize>)> = Vec::new();
        for (rank, call) in calls(number).enumerate() {
            let words = numbered(call);
            match said.iter_mut().find(|(known, _)| *known == words) {
                Some((_, ranks)) => ranks.push(rank),
                None => said.push((words, vec![rank])),
            }
        }
        let said: Vec<String> = said.iter().map(|(words, ranks)| format!("{} called {words}", crate::hang::list(ranks))).collect();
        return Err(format!(
            "starting at collective {number} of the record of communicator {}, the calls of its ranks differ: {}. A replay would hang, so \
             nothing was replayed; correct the program, and record it again",
            group.name,
            said.join("; ")
        ));
    }
    Ok(())
}

fn numbered(call: &Call) -> String {
    call.sequence.map_or_else(|| call.in_words(), |number| format!("{} number {number}", call.in_words()))
}

/// Whether two ranks made the same call.
fn agrees(one: &Call, other: &Call) -> bool {
    let roots = one.root.zip(other.root).is_none_or(|(one, other)| one == other);
    let lists = match (&one.counts, &other.counts) {
        (Some(Counts::Blocks(one)), Some(Counts::Blocks(other))) => one == other,
        _ => true,
    };
    let sequences = one.sequence.zip(other.sequence).is_none_or(|(one, other)| one == other);
    (one.kind, &one.op, &one.element, one.count) == (other.kind, &other.op, &other.element, other.count) && roots && lists && sequences
}

/// Leaves out the calls that failed or did not end on a rank.
fn drop_failed(recording: &Recording, group: &Group, places: &Places, dropped: &mut [HashSet<usize>], notes: &mut Vec<String>) {
    let mut count = 0;
    for number in 0..places.first().map_or(0, Vec::len) {
        let here = || places.iter().zip(&group.members).map(move |(list, member)| (*member, list[number]));
        if here().any(|(member, place)| !recording.ranks[member][place].is_complete) {
            count += 1;
            for (member, place) in here() {
                dropped[member].insert(place);
            }
        }
    }
    if count > 0 {
        notes.push(format!("communicator {}: {count} collectives were left out, because they failed or did not end", group.name));
    }
}

/// Puts the collectives of all communicators in one order, which all ranks share. If calls have no times, a rank's record
/// does not show the order of its calls on different communicators.
fn put_in_one_order(recording: &mut Recording) {
    let mut times: Vec<Vec<u64>> = vec![Vec::new(); recording.groups.len()];
    for calls in &recording.ranks {
        let mut numbers = vec![0; recording.groups.len()];
        for call in calls.iter().filter(|call| !call.kind.is_message()) {
            let (list, number) = (&mut times[call.group], &mut numbers[call.group]);
            match list.get_mut(*number) {
                Some(time) => *time = call.not_before_ns.max(*time),
                None => list.push(call.not_before_ns),
            }
            *number += 1;
        }
    }
    for list in &mut times {
        let mut last = 0;
        list.iter_mut().for_each(|time| {
            last = last.max(*time);
            *time = last;
        });
    }
    for calls in &mut recording.ranks {
        let mut numbers = vec![0; times.len()];
        for call in calls.iter_mut().filter(|call| !call.kind.is_message()) {
            call.not_before_ns = times[call.group][numbers[call.group]];
            numbers[call.group] += 1;
        }
        // Stable, so the calls of a communicator keep their order.
        calls.sort_by_key(|call| (call.not_before_ns, call.group));
    }
}

/// Gives every rank's call the root that one of the ranks recorded; rank 0 if none did.
fn learn_roots(recording: &mut Recording, dropped: &[HashSet<usize>]) {
    let mut roots: HashMap<(usize, usize), usize> = HashMap::new();
    let mut visit = |recording: &mut Recording, is_learning: bool| {
        for (calls, dropped) in recording.ranks.iter_mut().zip(dropped) {
            let mut numbers: BTreeMap<usize, usize> = BTreeMap::new();
            let kept = calls.iter_mut().enumerate().filter(|(place, call)| !dropped.contains(place) && !call.kind.is_message());
            for (_, call) in kept {
                let number = numbers.entry(call.group).or_default();
                let key = (call.group, *number);
                *number += 1;
                if !call.kind.data().is_some_and(|data| data.is_rooted()) {
                    continue;
                }
                match call.root {
                    Some(root) if is_learning => {
                        roots.insert(key, root);
                    }
                    None if !is_learning => call.root = Some(roots.get(&key).copied().unwrap_or(0)),
                    _ => {}
                }
            }
        }
    };
    visit(recording, true);
    visit(recording, false);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::Kind;

    #[test]
    fn each_call_is_read_once_however_many_communicators_there_are() {
        // If every communicator visited every call, this would take 6e10 visits.
        let (count, calls) = (200_000, 300_000);
        let group = |number: usize| Group { name: number.to_string(), members: vec![0] };
        let call = |number: usize| Call::new(number % count, Kind::named("barrier").unwrap());
        let mut recording = Recording {
            origin: Origin::Trace,
            groups: (0..count).map(group).collect(),
            ranks: vec![(0..calls).map(call).collect()],
            is_cut: false,
            notes: Vec::new(),
        };
        check(&mut recording).unwrap();
        assert_eq!((recording.ranks[0].len(), recording.notes.len()), (calls, 0));
    }
}
