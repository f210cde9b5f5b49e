//! Pairs the two ends of each message of a record.

use std::collections::{BTreeMap, HashSet, VecDeque};

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
    for (member, calls) in recording.ranks.iter().enumerate() {
        for (place, call) in calls.iter().enumerate().filter(|(_, call)| call.kind.is_message()) {
            let Some(me) = recording.groups[call.group].members.iter().position(|rank| *rank == member) else { continue };
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
    let mut named = 0;
    for (group, me, place, tag) in open {
        let member = recording.groups[group].members[me];
        let count = recording.ranks[member][place].count;
        // The send that would come next, of the size that was received; the earliest of them.
        let fits = |(channel, ends): (&Channel, &Ends)| {
            let place = *ends.sends.get(ends.receives.len())?;
            let send = &recording.ranks[recording.groups[group].members[channel.1]][place];
            let is_fit = channel.0 == group && channel.2 == me && channel.3 == tag;
            is_fit.then_some((send.count != count, send.start_ns, channel.1))
        };
        match channels.iter().filter_map(fits).min() {
            Some((_, _, sender)) => {
                channels.entry((group, sender, me, tag)).or_default().receives.push_back(place);
                recording.ranks[member][place].peer = Some(sender);
                named += 1;
            }
            None => {
                dropped[member].insert(place);
            }
        }
    }
    named
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
