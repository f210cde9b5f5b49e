//! Collectives that have begun: each rank's n-th collective matches every other rank's n-th.

#![expect(unsafe_code, reason = "device memory is read and written by its address")]

use crate::exchange::perform;
use crate::operation::Operation;
use std::collections::HashMap;

struct Round {
    brought: Vec<Option<Operation>>,
    finished: bool,
    left: usize,
}

pub(crate) struct Rounds {
    /// The number of collectives that each rank has begun.
    begun: Vec<u64>,
    open: HashMap<u64, Round>,
}

impl Rounds {
    pub(crate) fn new(size: usize) -> Rounds {
        Rounds { begun: vec![0; size], open: HashMap::new() }
    }

    /// Adds a rank's part to its next collective and returns the number of that; the last rank to arrive does the
    /// work.
    ///
    /// # Errors
    /// The ranks' disagreement.
    pub(crate) fn arrive(&mut self, rank: usize, operation: &Operation) -> Result<u64, String> {
        let size = self.begun.len();
        let number = self.begun[rank];
        self.begun[rank] += 1;
        let round = self.open.entry(number).or_insert_with(|| Round { brought: vec![None; size], finished: false, left: 0 });
        let first = round.brought.iter().enumerate().find_map(|(peer, brought)| brought.map(|brought| (peer, brought)));
        if let Some((peer, first)) = first
            && first.signature != operation.signature
        {
            let (theirs, ours) = (first.signature, operation.signature);
            return Err(format!("collective {number}: rank {peer} runs {theirs}, rank {rank} runs {ours}"));
        }
        round.brought[rank] = Some(*operation);
        if let Some(operations) = round.brought.iter().copied().collect::<Option<Vec<_>>>().filter(|_| !round.finished) {
            // SAFETY: each rank's regions were checked when the call was made, and each rank waits, under the lock
            // that is held now, until the round is finished or it has withdrawn its part.
            unsafe { perform(&operations) };
            round.finished = true;
        }
        Ok(number)
    }

    /// Returns whether a round is finished; if so, the rank has left it.
    pub(crate) fn leave_finished(&mut self, number: u64) -> bool {
        let size = self.begun.len();
        let Some(round) = self.open.get_mut(&number).filter(|round| round.finished) else { return false };
        round.left += 1;
        if round.left == size {
            self.open.remove(&number);
        }
        true
    }

    /// Withdraws a rank's part from a round that is not finished.
    pub(crate) fn withdraw(&mut self, number: u64, rank: usize) {
        if let Some(round) = self.open.get_mut(&number) {
            round.brought[rank] = None;
        }
    }

    /// Finishes a round without the work, as a kernel does that goes on without waiting once it is aborted, and so
    /// releases the others.
    pub(crate) fn finish_without_work(&mut self, number: u64) {
        if let Some(round) = self.open.get_mut(&number) {
            round.finished = true;
        }
    }

    /// Describes the rank that waits for another rank.
    pub(crate) fn waiting_for(&self, rank: usize) -> Option<String> {
        let unfinished = self.open.values().filter(|round| !round.finished && round.brought[rank].is_none());
        let mut waiting = unfinished.flat_map(|round| round.brought.iter().enumerate());
        waiting.find_map(|(peer, brought)| brought.map(|operation| format!("rank {peer} waits for it in {}", operation.signature)))
    }
}
