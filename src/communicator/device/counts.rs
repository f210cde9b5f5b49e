//! Comparing the lengths that only two ranks know of each other: what one sends, and what the other has room for.
//!
//! Ranks of a `gather_v`, `scatter_v` or `all_to_all_v` agree on the call and not on its lengths ([`compare`](super::compare)). Each tells
//! every other what it sends to it and expects of it, and then all hear of the first difference: so either all queue the call, or none.

use crate::call::{BlockLayout, Kind};
use crate::communicator::Communicator;
use crate::device::Job;
use crate::error::{Error, Result};

/// What goes from this rank to another, and what it expects from there, in bytes.
type Pair = [u64; 2];

/// What a rank has found: whether anything differs, whose it is, in which job, and the two lengths.
type Finding = [u64; 5];

/// Whether a job's lengths are known to pairs of ranks only.
pub(super) fn is_pairwise(job: &Job) -> bool {
    matches!(job.call.kind, Kind::GatherV | Kind::ScatterV | Kind::AllToAllV)
}

/// What a job of this rank sends to `peer`, and expects from it.
fn pair(job: &Job, me: usize, peer: usize) -> Pair {
    let is_root = |rank: usize| job.call.root == Some(rank as u32);
    let bytes = match (job.call.kind, &job.layout) {
        (_, BlockLayout::Pairs { send, receive }) => [send[peer], receive[peer]],
        (Kind::GatherV, BlockLayout::Blocks(blocks)) if peer != me => [0, blocks[peer]],
        (Kind::ScatterV, BlockLayout::Blocks(blocks)) if peer != me => [blocks[peer], 0],
        (Kind::GatherV, BlockLayout::Own(own)) if is_root(peer) => [*own, 0],
        (Kind::ScatterV, BlockLayout::Own(own)) if is_root(peer) => [0, *own],
        // To itself a rank sends what it was checked to expect.
        _ => [0, 0],
    };
    bytes.map(|bytes| bytes as u64)
}

impl Communicator {
    /// Compares the lengths of jobs on which the ranks have agreed. Nothing has been queued yet, so a difference harms nothing.
    pub(super) fn compare_pairs<'a>(&self, jobs: impl Iterator<Item = &'a Job> + Clone) -> Result<()> {
        let jobs = jobs.filter(|job| is_pairwise(job));
        let (me, size) = (self.rank(), self.world_size());
        let mine: Vec<Pair> = (0..size).flat_map(|peer| jobs.clone().map(move |job| pair(job, me, peer))).collect();
        if mine.is_empty() {
            return Ok(());
        }
        let mut theirs = vec![Pair::default(); mine.len()];
        self.exchange_said(&mine[..], &mut theirs[..])?;
        let each = mine.len() / size;
        let differs = |at: &usize| mine[*at][0] != theirs[*at][1] || mine[*at][1] != theirs[*at][0];
        let found = (0..mine.len()).find(differs).map_or(Finding::default(), |at| {
            // Of the two directions the one that differs: what is sent, and what is expected.
            let is_mine = mine[at][0] != theirs[at][1];
            let [sent, expected] = if is_mine { [mine[at][0], theirs[at][1]] } else { [theirs[at][0], mine[at][1]] };
            [if is_mine { 1 } else { 2 }, (at / each) as u64, (at % each) as u64, sent, expected]
        });
        let mut findings = vec![Finding::default(); size];
        self.gather_said(&[found], &mut findings[..])?;
        match findings.iter().position(|found| found[0] != 0) {
            None => Ok(()),
            Some(rank) => Err(self.pair_mismatch(rank, findings[rank], jobs)),
        }
    }

    /// The error of a finding of `rank`'s.
    fn pair_mismatch<'a>(
        &self,
        rank: usize,
        [direction, peer, job, sent, expected]: Finding,
        mut jobs: impl Iterator<Item = &'a Job>,
    ) -> Error {
        let peer = usize::try_from(peer).unwrap_or(usize::MAX).min(self.world_size() - 1);
        let (from, to) = if direction == 1 { (rank, peer) } else { (peer, rank) };
        let name = usize::try_from(job).ok().and_then(|at| jobs.nth(at)).map_or("a call", |job| job.call.kind.name());
        Error::Mismatch {
            first: self.peers()[from].clone(),
            first_call: format!("{name} that sends {sent} B to rank {to}"),
            second: self.peers()[to].clone(),
            second_call: format!("{name} that expects {expected} B from rank {from}"),
        }
    }
}
