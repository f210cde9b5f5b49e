//! Sends and receives, matched in order between each pair of ranks.

#![expect(unsafe_code, reason = "device memory is read and written by its address")]

use crate::exchange::copy;
use crate::operation::{Operation, Verb};
use std::collections::{HashMap, HashSet, VecDeque};

struct Post {
    ticket: u64,
    operation: Operation,
}

#[derive(Default)]
struct Lane {
    sends: VecDeque<Post>,
    receives: VecDeque<Post>,
}

#[derive(Default)]
pub(crate) struct Mail {
    issued: u64,
    open: HashSet<u64>,
    /// The lanes, by sender and receiver.
    lanes: HashMap<(usize, usize), Lane>,
}

impl Mail {
    /// Posts one side of a transfer; the second side to come moves the bytes.
    ///
    /// # Errors
    /// If the two sides differ in size.
    pub(crate) fn post(&mut self, rank: usize, operation: &Operation) -> Result<u64, String> {
        self.issued += 1;
        let post = Post { ticket: self.issued, operation: *operation };
        let peer = operation.signature.root;
        let (pair, sends) = if operation.signature.verb == Verb::Send { ((rank, peer), true) } else { ((peer, rank), false) };
        let lane = self.lanes.entry(pair).or_default();
        let other = if sends { lane.receives.pop_front() } else { lane.sends.pop_front() };
        let Some(other) = other else {
            self.open.insert(self.issued);
            let queue = if sends { &mut lane.sends } else { &mut lane.receives };
            queue.push_back(post);
            return Ok(self.issued);
        };
        let (from, into) = if sends { (operation.input, other.operation.output) } else { (other.operation.input, operation.output) };
        if from.bytes != into.bytes {
            let (sent, received) = (from.bytes, into.bytes);
            return Err(format!("rank {} sends {sent} bytes to rank {}, which receives {received}", pair.0, pair.1));
        }
        // SAFETY: both sides were checked when the calls were made, and both ranks wait, under the lock that is held
        // now, until their tickets are closed or withdrawn.
        unsafe { copy(from, into) };
        self.open.remove(&other.ticket);
        Ok(post.ticket)
    }

    pub(crate) fn is_open(&self, ticket: u64) -> bool {
        self.open.contains(&ticket)
    }

    /// Withdraws transfers that are still open.
    pub(crate) fn withdraw(&mut self, tickets: &[u64]) {
        for lane in self.lanes.values_mut() {
            lane.sends.retain(|post| !tickets.contains(&post.ticket));
            lane.receives.retain(|post| !tickets.contains(&post.ticket));
        }
        self.open.retain(|ticket| !tickets.contains(ticket));
    }

    /// Describes the rank that waits for another rank.
    pub(crate) fn waiting_for(&self, rank: usize) -> Option<String> {
        self.lanes.iter().find_map(|(&(from, to), lane)| {
            let waits_to_send = to == rank && from != rank && !lane.sends.is_empty();
            let waits_to_receive = from == rank && to != rank && !lane.receives.is_empty();
            let peer = if from == rank { to } else { from };
            (waits_to_send || waits_to_receive).then(|| format!("rank {peer} waits for it in a send or receive"))
        })
    }
}
