//! Goes through the scripts of all ranks without making a call, to find those that would wait for each other forever.
//! Sends that wait only because their program's library kept the data elsewhere are made in the background.

use std::collections::{BTreeSet, HashMap};

use collectives::Collective;

use super::recording::{Kind, Recording};
use super::script::Script;
use super::shape::Shape;

/// The end of a message that a rank has begun, in place of its rank: a rank may send to itself.
const SENT: usize = 0;
const RECEIVED: usize = 1;

/// The smallest message whose blocking send may wait for its receive. The library keeps smaller ones, and up to four
/// times as much.
const MAY_WAIT: usize = 64 << 10;

/// A call that ranks meet in: a collective by its communicator and number, or a message by its ends, tag and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Meeting {
    Collective { group: usize, number: usize },
    Message { group: usize, from: usize, to: usize, tag: u64, number: usize },
}

/// One rank: its next step, and the meetings of its calls so far.
struct Progress {
    step: usize,
    meetings: Vec<Meeting>,
    /// How many calls there were of each kind of meeting. Sends and receives are counted apart.
    numbers: HashMap<(Meeting, bool), usize>,
    /// Whether the call of the step has begun.
    has_begun: bool,
}

/// All ranks of a record.
struct Walk<'a> {
    recording: &'a Recording,
    scripts: &'a mut [Script],
    /// The rank of each rank of the job in each of its communicators.
    memberships: Vec<HashMap<usize, usize>>,
    /// The ranks that have begun their part of a collective, by their ranks in the communicator, and the ends of a message
    /// that have begun.
    begun: HashMap<Meeting, BTreeSet<usize>>,
    ranks: Vec<Progress>,
}

/// Fails if calls wait for each other, and names them. Returns a note if sends were moved into the background.
pub(super) fn arrange(recording: &Recording, scripts: &mut [Script]) -> Result<Option<String>, String> {
    let mut moved = 0;
    let count = scripts.len();
    let progress = || Progress { step: 0, meetings: Vec::new(), numbers: HashMap::new(), has_begun: false };
    let ranks = scripts.iter().map(|_| progress()).collect();
    let mut walk = Walk { recording, scripts, memberships: recording.memberships(), begun: HashMap::new(), ranks };
    loop {
        let mut has_moved = false;
        for rank in 0..count {
            while walk.advance(rank) {
                has_moved = true;
            }
        }
        let waiting: Vec<usize> = (0..count).filter(|rank| walk.ranks[*rank].step < walk.scripts[*rank].steps.len()).collect();
        if waiting.is_empty() {
            return Ok(note(moved));
        }
        if has_moved {
            continue;
        }
        match waiting.iter().filter(|rank| walk.frees(**rank)).count() {
            0 => return Err(walk.stuck(&waiting)),
            freed => moved += freed,
        }
    }
}

fn note(moved: usize) -> Option<String> {
    (moved > 0).then(|| {
        format!("{moved} blocking sends run in the background, because their ranks would wait for each other: the recorded library kept the data")
    })
}

impl Walk<'_> {
    /// Takes a rank one step further; returns whether it could.
    fn advance(&mut self, rank: usize) -> bool {
        let Some(step) = self.scripts[rank].steps.get(self.ranks[rank].step) else { return false };
        let shape = &self.scripts[rank].shapes[step.shape];
        let mut moved = false;
        if !self.ranks[rank].has_begun {
            if !step.after.iter().all(|earlier| self.is_over(rank, *earlier)) {
                return false;
            }
            let me = self.me(rank, shape);
            let meeting = self.ranks[rank].meet(shape, me);
            let part = match shape.kind {
                Kind::SEND => SENT,
                Kind::RECV => RECEIVED,
                _ => me,
            };
            self.begun.entry(meeting).or_default().insert(part);
            self.ranks[rank].has_begun = true;
            moved = true;
        }
        if step.is_background || self.is_over(rank, self.ranks[rank].step) {
            self.ranks[rank].step += 1;
            self.ranks[rank].has_begun = false;
            moved = true;
        }
        moved
    }

    /// Moves the call of a rank into the background if it is a send; returns whether it is.
    fn frees(&mut self, rank: usize) -> bool {
        let Progress { step, has_begun, .. } = self.ranks[rank];
        let Script { shapes, steps, .. } = &mut self.scripts[rank];
        let is_send = has_begun && shapes[steps[step].shape].kind == Kind::SEND;
        steps[step].is_background |= is_send;
        is_send
    }

    fn me(&self, rank: usize, shape: &Shape) -> usize {
        self.memberships[rank].get(&shape.group).copied().unwrap_or_default()
    }

    /// Whether the other ranks have come so far that a rank's call ends. A small send, and a root that only sends, may
    /// end earlier than the others begin.
    fn is_over(&self, rank: usize, step: usize) -> bool {
        let shape = &self.scripts[rank].shapes[self.scripts[rank].steps[step].shape];
        let (me, size) = (self.me(rank, shape), self.recording.groups[shape.group].members.len());
        let Some(begun) = self.ranks[rank].meetings.get(step).and_then(|meeting| self.begun.get(meeting)) else { return false };
        use Collective::{Broadcast, Gather, GatherV, Reduce, Scatter, ScatterV};
        match shape.kind.data() {
            None if shape.kind == Kind::SEND => {
                shape.bytes(me, size).is_none_or(|(bytes, _)| bytes < MAY_WAIT) || begun.contains(&RECEIVED)
            }
            None => begun.contains(&SENT),
            Some(Broadcast | Scatter | ScatterV) => me == shape.root || begun.contains(&shape.root),
            Some(Reduce | Gather | GatherV) => me != shape.root || begun.len() == size,
            Some(_) => begun.len() == size,
        }
    }

    /// Describes the calls that wait for each other.
    fn stuck(&self, waiting: &[usize]) -> String {
        let named = |rank: &usize| {
            let (script, number) = (&self.scripts[*rank], self.ranks[*rank].step);
            let shape = &script.shapes[script.steps[number].shape];
            let group = &self.recording.groups[shape.group].name;
            let end = if shape.kind.is_message() { format!(" (rank {}, tag {})", shape.peer, shape.tag) } else { String::new() };
            format!("rank {rank} in its call {number}, {}{end} of communicator {group}", shape.kind)
        };
        let calls: Vec<String> = waiting.iter().take(8).map(named).collect();
        format!(
            "the recorded calls wait for each other: {}. A replay would hang, so nothing was replayed; the record does not hold the order of \
             these calls, or they failed",
            calls.join("; ")
        )
    }
}

impl Progress {
    /// Numbers a call among those with the same communicator, or with the same ends and tag.
    fn meet(&mut self, shape: &Shape, me: usize) -> Meeting {
        let group = shape.group;
        let (from, to) = if shape.kind == Kind::SEND { (me, shape.peer) } else { (shape.peer, me) };
        let numbered = |number: usize| match shape.kind.is_message() {
            true => Meeting::Message { group, from, to, tag: shape.tag, number },
            false => Meeting::Collective { group, number },
        };
        let next = self.numbers.entry((numbered(0), shape.kind == Kind::SEND)).or_default();
        let meeting = numbered(*next);
        *next += 1;
        self.meetings.push(meeting);
        meeting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::recording::{Call, Group, Origin};
    use crate::replay::script;

    /// Checks the calls of one rank that sends messages to itself.
    fn checked(calls: Vec<Call>) -> Result<(), String> {
        let groups = vec![Group { name: "world".to_owned(), members: vec![0] }];
        let recording = Recording { origin: Origin::Trace, groups, ranks: vec![calls], is_cut: false, notes: Vec::new() };
        arrange(&recording, &mut script::write(&recording).unwrap().0).map(drop)
    }

    #[test]
    fn large_sends_that_wait_for_each_other_are_made_in_the_background() {
        for (count, moved) in [(MAY_WAIT as u64 - 1, 0), (MAY_WAIT as u64, 2)] {
            let message = |kind: Kind, peer: usize| Call { peer: Some(peer), count, ..Call::new(0, kind) };
            let ranks = [1, 0].map(|peer| vec![message(Kind::SEND, peer), message(Kind::RECV, peer)]);
            let groups = vec![Group { name: "world".to_owned(), members: vec![0, 1] }];
            let recording = Recording { origin: Origin::Trace, groups, ranks: ranks.into(), is_cut: false, notes: Vec::new() };
            let mut scripts = script::write(&recording).unwrap().0;
            let note = arrange(&recording, &mut scripts).unwrap();
            assert_eq!(note.map(|note| note.split(' ').next().unwrap().parse()), (moved > 0).then_some(Ok(moved)), "{count}");
            assert!(scripts.iter().all(|script| script.steps[0].is_background == (moved > 0) && !script.steps[1].is_background));
        }
    }

    #[test]
    fn a_message_to_the_own_rank_must_be_sent_before_a_blocking_receive() {
        let message = |kind: Kind, is_background: bool| Call { peer: Some(0), is_background, ..Call::new(0, kind) };
        let (send, recv, started) = (message(Kind::SEND, false), message(Kind::RECV, false), message(Kind::RECV, true));
        assert_eq!(checked(vec![send.clone(), recv.clone(), send.clone(), send.clone(), recv.clone(), recv.clone()]), Ok(()));
        assert_eq!(checked(vec![started.clone(), send.clone(), started, send.clone()]), Ok(()));
        for calls in [vec![recv.clone(), send.clone()], vec![send.clone(), recv.clone(), recv.clone(), send]] {
            let error = checked(calls).unwrap_err();
            assert!(error.contains("recv (rank 0, tag 0) of communicator world"), "{error}");
        }
        assert!(checked(vec![recv]).is_err());
    }
}
