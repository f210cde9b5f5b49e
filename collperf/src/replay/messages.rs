//! Pairs the two ends of each message of a record.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::recording::{Call, Kind, Recording};

/// The messages with the same ends and tag: communicator, sender, receiver, tag. Ranks are those in the communicator.
type Channel = (usize, usize, usize, u64);

/// The places of the sends and of the receives of a channel, in the lists of their ranks.
#[derive(Default)]
struct Ends {
    sends: VecDeque<usize>,
    receives: VecDeque<usize>,
}

/// Names the sender of each receive from any rank, and leaves out messages of which only one end is in the record.
pub(super) fn pair(recording: &mut Recording, dropped: &mut [HashSet<usize>], notes: &mut Vec<String>) {
    let mut channels: BTreeMap<Channel, Ends> = BTreeMap::new();
    let mut open: Vec<(usize, usize, usize, u64)> = Vec::new();
    let mut failed = 0;
    for ((member, calls), memberships) in recording.ranks.iter().enumerate().zip(recording.memberships()) {
        for (place, call) in calls.iter().enumerate().filter(|(_, call)| call.kind.is_message()) {
            let Some(me) = memberships.get(&call.group).copied() else { continue };
            if !call.is_complete {
                failed += usize::from(dropped[member].insert(place));
                continue;
            }
            match call.peer {
                Some(peer) if call.kind == Kind::SEND => {
                    channels.entry((call.group, me, peer, call.tag)).or_default().sends.push_back(place);
                }
                Some(peer) => channels.entry((call.group, peer, me, call.tag)).or_default().receives.push_back(place),
                None => open.push((call.group, me, place, call.tag)),
            }
        }
    }
    if failed > 0 {
        notes.push(format!("{failed} ends of messages were left out, because they failed or did not end"));
    }
    let named = name_senders(recording, &mut channels, open, dropped);
    if named > 0 {
        notes.push(format!("{named} receives from any rank are replayed as receives from one sender, chosen by tag, size and order"));
    }
    let single: usize = channels.iter_mut().map(|(channel, ends)| even(recording, channel, ends, dropped)).sum();
    if single > 0 {
        notes.push(format!("{single} ends of messages were left out, because the other end is not in the record"));
    }
    follow_sizes(recording, &channels);
}

/// Gives each receive from any rank one of the sends that no other receive waits for; returns how many.
fn name_senders(
    recording: &mut Recording,
    channels: &mut BTreeMap<Channel, Ends>,
    open: Vec<(usize, usize, usize, u64)>,
    dropped: &mut [HashSet<usize>],
) -> usize {
    let mut waiting: HashMap<(usize, usize, u64), Waiting> =
        open.iter().map(|(group, me, _, tag)| ((*group, *me, *tag), Waiting::default())).collect();
    for (channel, ends) in channels.iter() {
        if let Some(waiting) = waiting.get_mut(&(channel.0, channel.2, channel.3)) {
            waiting.add(recording, channel, ends);
        }
    }
    let mut named = 0;
    for (group, me, place, tag) in open {
        let member = recording.groups[group].members[me];
        let count = recording.ranks[member][place].count;
        let Some(waiting) = waiting.get_mut(&(group, me, tag)) else { continue };
        let Some(sender) = waiting.take(count) else {
            dropped[member].insert(place);
            continue;
        };
        let channel = (group, sender, me, tag);
        let ends = channels.entry(channel).or_default();
        ends.receives.push_back(place);
        waiting.add(recording, &channel, ends);
        recording.ranks[member][place].peer = Some(sender);
        named += 1;
    }
    named
}

/// For each sender, the next send that no receive waits for, among those with one receiver and tag: its count, its start
/// and its sender.
#[derive(Default)]
struct Waiting {
    by_count: BTreeSet<(u64, Option<u64>, usize)>,
    by_start: BTreeSet<(Option<u64>, usize, u64)>,
}

impl Waiting {
    /// Adds the next send of a channel, if there is one.
    fn add(&mut self, recording: &Recording, channel: &Channel, ends: &Ends) {
        let sender = channel.1;
        let Some(place) = ends.sends.get(ends.receives.len()) else { return };
        let send = &recording.ranks[recording.groups[channel.0].members[sender]][*place];
        self.by_count.insert((send.count, send.start_ns, sender));
        self.by_start.insert((send.start_ns, sender, send.count));
    }

    /// Removes the earliest send of this count, or else the earliest one, and returns its sender.
    fn take(&mut self, count: u64) -> Option<usize> {
        let fitting = self.by_count.range((count, None, 0)..=(count, Some(u64::MAX), usize::MAX)).next();
        let (start, sender, count) =
            fitting.map(|(count, start, sender)| (*start, *sender, *count)).or_else(|| self.by_start.first().copied())?;
        self.by_count.remove(&(count, start, sender));
        self.by_start.remove(&(start, sender, count));
        Some(sender)
    }
}

/// Leaves out the ends that have no other end: the oldest, if the record may have lost those, else the newest.
fn even(recording: &Recording, channel: &Channel, ends: &mut Ends, dropped: &mut [HashSet<usize>]) -> usize {
    let members = &recording.groups[channel.0].members;
    let common = ends.sends.len().min(ends.receives.len());
    let mut count = 0;
    for (places, member) in [(&mut ends.sends, members[channel.1]), (&mut ends.receives, members[channel.2])] {
        while places.len() > common {
            let place = if recording.is_cut { places.pop_front() } else { places.pop_back() };
            count += place.map_or(0, |place| usize::from(dropped[member].insert(place)));
        }
    }
    count
}

/// Makes each receive as large as its send: a record holds the size of the receive's buffer, which may be larger.
fn follow_sizes(recording: &mut Recording, channels: &BTreeMap<Channel, Ends>) {
    for ((group, sender, receiver, _), ends) in channels {
        let members = &recording.groups[*group].members;
        let (from, to) = (members[*sender], members[*receiver]);
        for (send, receive) in ends.sends.iter().zip(&ends.receives) {
            let Call { count, element, .. } = recording.ranks[from][*send].clone();
            let call = &mut recording.ranks[to][*receive];
            (call.count, call.element) = (count, element);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::{Group, Origin};

    fn recording(ranks: Vec<Vec<Call>>) -> Recording {
        let groups = vec![Group { name: "world".to_owned(), members: (0..ranks.len()).collect() }];
        Recording { origin: Origin::Trace, groups, ranks, is_cut: false, notes: Vec::new() }
    }

    fn paired(ranks: Vec<Vec<Call>>) -> Recording {
        let mut recording = recording(ranks);
        let mut dropped = vec![HashSet::new(); recording.ranks.len()];
        pair(&mut recording, &mut dropped, &mut Vec::new());
        assert!(dropped.iter().all(HashSet::is_empty));
        recording
    }

    #[test]
    fn many_receives_from_any_rank_find_their_senders() {
        // If every receive visited every channel, this would take 1e10 visits.
        let many = 100_000;
        let receives = (0..many).map(|tag| Call { tag, ..Call::new(0, Kind::RECV) }).collect();
        let sends = (0..many).map(|tag| Call { tag, peer: Some(0), ..Call::new(0, Kind::SEND) }).collect();
        assert!(paired(vec![receives, sends]).ranks[0].iter().all(|call| call.peer == Some(1)));
    }

    #[test]
    fn many_senders_with_one_tag_are_taken_by_size_and_then_by_time() {
        // 1.6e9 visits, if every receive visited every sender.
        let many = 40_000;
        let send = |rank: usize| Call { peer: Some(0), count: rank as u64, start_ns: Some(rank as u64), ..Call::new(0, Kind::SEND) };
        // From the last sender to the first one by size, and then two of sizes that no rank sent.
        let receive = |count: usize| Call { count: count as u64, ..Call::new(0, Kind::RECV) };
        let receives = (3..many).rev().map(receive).chain([receive(many), receive(many)]).collect();
        let ranks = std::iter::once(receives).chain((1..many).map(|rank| vec![send(rank)])).collect();
        let peers: Vec<usize> = paired(ranks).ranks[0].iter().map(|call| call.peer.unwrap()).collect();
        assert_eq!(peers, (3..many).rev().chain([1, 2]).collect::<Vec<_>>());
    }
}
