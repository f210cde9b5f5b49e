//! Compares the ranks' counts before any data moves, in calls in which each rank knows only some of the counts
//! (`gather_v`, `scatter_v`, `all_to_all_v` and calls on lists).
//!
//! Each block has a number, which is a hash of its sender, receiver and length. Each rank adds the numbers of the
//! blocks that it sends, and subtracts those of the blocks that it expects. If the two ends of every transfer agree,
//! the sum over all ranks is 0. If not, it is 0 with a probability of only 2⁻¹²⁸. One all-reduce of 16 bytes thus
//! compares the counts of all ranks. This all-reduce also serves as the agreement on the call: it takes one step in
//! shared memory and, over links, the messages of an agreement, each with 16 bytes. If the sum is not 0, the ranks
//! exchange their counts, and all return the same error.
//!
//! Even counts that were chosen to make the sum 0 do no harm: the ends of a link compare counts again before accepting
//! bytes.

use super::HostBackend;
use super::job::Job;
use crate::base::deadline::Deadline;
use crate::base::random::Random;
use crate::call::{Call, Collective};
use crate::host::abort_reason::{AbortReason, Interrupted};

/// A rank's finding: 1 if two counts differ, else 0; the sender; the receiver; the bytes sent; the bytes expected.
type Finding = [u64; 5];

impl HostBackend {
    /// Returns once all ranks are known to make this call with counts that match. Otherwise, all of them return the
    /// same error.
    pub(super) fn compare_counts(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let (me, ranks) = (self.rank, self.peers.len());
        let mut sum = own_sum(me, (0..ranks).map(|peer| job.pair(me, peer)));
        self.sum_words(&mut sum, call, deadline)?;
        if sum == [0; 2] {
            return Ok(());
        }
        Err(self.find_difference(job, call, deadline)?.into())
    }

    /// Finds the first two ranks whose counts differ. Every rank finds the same two.
    #[cold]
    fn find_difference(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<AbortReason, Interrupted> {
        let (me, ranks) = (self.rank, self.peers.len());
        let mine: Vec<[u64; 2]> = (0..ranks).map(|peer| job.pair(me, peer)).collect();
        let mut theirs = vec![[0; 2]; ranks];
        self.exchange_words(Collective::AllToAll, mine.as_flattened(), theirs.as_flattened_mut(), call, deadline)?;
        let mut findings = vec![Finding::default(); ranks];
        self.exchange_words(Collective::AllGather, &finding(me, &mine, &theirs), findings.as_flattened_mut(), call, deadline)?;
        let element_bytes = job.element_bytes.max(1) as u64;
        let end = |rank: u64, bytes: u64| (rank as u32, Call { count: bytes / element_bytes, ..*call });
        Ok(match findings.iter().find(|found| found[0] != 0) {
            Some([_, from, to, sent, expected]) => AbortReason::Mismatch { first: end(*from, *sent), second: end(*to, *expected) },
            // Some rank has sent contradictory counts.
            None => AbortReason::Failed { rank: me as u32 },
        })
    }
}

/// Returns a rank's part of the sum, from the bytes that it sends to each rank and expects from it.
fn own_sum(me: usize, pairs: impl Iterator<Item = [u64; 2]>) -> [u64; 2] {
    let mut sum = [0_u64; 2];
    for (peer, [sent, expected]) in pairs.enumerate() {
        let (sent, expected) = (number(me, peer, sent), number(peer, me, expected));
        for (lane, total) in sum.iter_mut().enumerate() {
            *total = total.wrapping_add(sent[lane]).wrapping_sub(expected[lane]);
        }
    }
    sum
}

/// Returns the number that stands for a block of `bytes` bytes.
fn number(from: usize, to: usize, bytes: u64) -> [u64; 2] {
    let pair = Random((from as u64) << 32 | to as u64).next();
    let mut random = Random(pair ^ bytes);
    [random.next(), random.next()]
}

/// Returns the first of a rank's transfers whose two ends differ.
fn finding(me: usize, mine: &[[u64; 2]], theirs: &[[u64; 2]]) -> Finding {
    let found = mine.iter().zip(theirs).enumerate().find_map(|(peer, ([sent, expected], [peer_sends, peer_expects]))| {
        if sent != peer_expects {
            return Some([1, me as u64, peer as u64, *sent, *peer_expects]);
        }
        (peer_sends != expected).then_some([1, peer as u64, me as u64, *peer_sends, *expected])
    });
    found.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that each rank sends to each.
    fn matrix(ranks: usize, random: &mut Random) -> Vec<Vec<u64>> {
        let row = |random: &mut Random| (0..ranks).map(|_| [0, 1, 4096, random.next() >> 20][random.below(4)]).collect();
        (0..ranks).map(|_| row(random)).collect()
    }

    /// Returns the sum over all ranks, of what they send and what they expect.
    fn sum(sent: &[Vec<u64>], expected: &[Vec<u64>]) -> [u64; 2] {
        let parts = (0..sent.len()).map(|me| own_sum(me, (0..sent.len()).map(|peer| [sent[me][peer], expected[peer][me]])));
        parts.fold([0; 2], |sum, part| [sum[0].wrapping_add(part[0]), sum[1].wrapping_add(part[1])])
    }

    #[test]
    fn counts_that_fit_together_add_up_to_nothing_and_others_do_not() {
        let seed = 0x5eed_0035;
        let mut random = Random(seed);
        for round in 0..200 {
            let ranks = 2 + round % 7;
            let sent = matrix(ranks, &mut random);
            assert_eq!(sum(&sent, &sent), [0; 2], "seed {seed:#x}, round {round}");
            // One count; two that leave the totals of their rank unchanged; and the counts of two ranks swapped.
            let (from, to) = (random.below(ranks), random.below(ranks));
            let mut other = sent.clone();
            other[from][to] += 1;
            assert!(sum(&sent, &other).iter().all(|word| *word != 0), "seed {seed:#x}, round {round}");
            let next = (to + 1) % ranks;
            other[from][next] = other[from][next].wrapping_sub(1);
            assert!(sum(&sent, &other).iter().all(|word| *word != 0), "seed {seed:#x}, round {round}");
            let mut swapped = sent.clone();
            swapped[from].swap(to, next);
            let differs = swapped != sent;
            assert_eq!(sum(&sent, &swapped) != [0; 2], differs, "seed {seed:#x}, round {round}");
            let transposed: Vec<Vec<u64>> = (0..ranks).map(|from| (0..ranks).map(|to| sent[to][from]).collect()).collect();
            assert_eq!(sum(&sent, &transposed) != [0; 2], transposed != sent, "seed {seed:#x}, round {round}");
        }
    }

    #[test]
    fn both_ends_find_the_same_difference() {
        // Rank 0 sends 5 to rank 1, which expects 6.
        let (of_0, of_1) = ([[2, 2], [5, 7]], [[7, 6], [3, 3]]);
        let at_0 = finding(0, &of_0, &[[2, 2], of_1[0]]);
        let at_1 = finding(1, &of_1, &[of_0[1], [3, 3]]);
        assert_eq!((at_0, at_1), ([1, 0, 1, 5, 6], [1, 0, 1, 5, 6]));
        assert_eq!(finding(0, &of_0, &[[2, 2], [7, 5]]), Finding::default());
    }
}
