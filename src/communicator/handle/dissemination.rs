//! How far a tagged barrier has come on one rank, and what it knows of the others. Pure.
//!
//! In each round a rank tells the one that is some distance ahead that it has come, and hears the same from the one as far behind. The distance
//! doubles. What it hears speaks for all that its sender has heard of, so after log₂ n rounds it has heard of everyone.
//!
//! A rank hears from another one in one round only. So messages need no number: those of one source and tag arrive in order, and each barrier
//! takes one. A barrier whose deadline passed is not over. What it has sent will count, and what it has not heard will come; so the next one
//! under the tag goes on where it stood. Of several threads the k-th to leave a tag has heard of k entries of every rank.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::base::event;

/// How far one barrier has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::communicator) struct Standing {
    /// How far away the ranks of this round are.
    pub(in crate::communicator) distance: usize,
    /// Whether the rank ahead was told in this round.
    pub(in crate::communicator) has_told: bool,
    /// A rank that cannot come any more.
    pub(in crate::communicator) lost: Option<u32>,
}

/// In place of a rank that is lost.
const NOBODY: u32 = u32::MAX;

impl Standing {
    /// A barrier that begins.
    const BEGIN: Self = Self { distance: 1, has_told: false, lost: None };

    /// What the rank ahead is told: who is lost.
    pub(in crate::communicator) fn told(&self) -> [u8; 4] {
        self.lost.unwrap_or(NOBODY).to_le_bytes()
    }

    /// What the rank behind has told: this round is over.
    pub(in crate::communicator) fn hear(&mut self, told: [u8; 4]) {
        let lost = Some(u32::from_le_bytes(told)).filter(|lost| *lost != NOBODY);
        *self = Self { distance: self.distance * 2, has_told: false, lost: self.lost.or(lost) };
    }

    /// The rank behind is lost: this round is over.
    pub(in crate::communicator) fn lose(&mut self, rank: usize) {
        self.hear((rank as u32).to_le_bytes());
    }

    /// Of `world_size` ranks those that `rank` has heard of, with itself, and those that the message is to speak for which it waits for.
    pub(in crate::communicator) fn known(&self, rank: usize, world_size: usize) -> (Vec<usize>, Vec<usize>) {
        let behind = |most: usize| (0..most.min(world_size)).map(move |distance| (rank + world_size - distance) % world_size);
        let mut heard: Vec<usize> = behind(self.distance).collect();
        let mut awaited: Vec<usize> = behind(2 * self.distance).skip(self.distance).collect();
        heard.sort_unstable();
        awaited.sort_unstable();
        (heard, awaited)
    }
}

/// The barriers of a rank whose deadline has passed, by tag.
#[derive(Debug, Default)]
pub(in crate::communicator) struct Unfinished(Mutex<BTreeMap<u32, Vec<Standing>>>);

impl Unfinished {
    /// One to go on with, or a new one.
    pub(in crate::communicator) fn take(&self, tag: u32) -> Standing {
        let mut standings = event::lock(&self.0);
        let Some(of_tag) = standings.get_mut(&tag) else { return Standing::BEGIN };
        let standing = of_tag.pop();
        if of_tag.is_empty() {
            standings.remove(&tag);
        }
        standing.unwrap_or(Standing::BEGIN)
    }

    /// Keeps one for the next call.
    pub(in crate::communicator) fn keep(&self, tag: u32, standing: Standing) {
        event::lock(&self.0).entry(tag).or_default().push(standing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_last_round_everyone_has_been_heard_of_once() {
        for world_size in 1..20 {
            for rank in 0..world_size {
                let (mut standing, mut heard) = (Standing::BEGIN, vec![rank]);
                while standing.distance < world_size {
                    let (known, awaited) = standing.known(rank, world_size);
                    heard.sort_unstable();
                    assert_eq!(known, heard, "rank {rank} of {world_size}");
                    // Who speaks for those that are awaited has heard of as many.
                    let behind = (rank + world_size - standing.distance) % world_size;
                    let theirs = standing.known(behind, world_size).0;
                    assert!(awaited.iter().all(|rank| theirs.contains(rank) && !known.contains(rank)));
                    assert!(theirs.iter().all(|rank| awaited.contains(rank) || known.contains(rank)));
                    heard.extend(awaited);
                    standing.hear(Standing::BEGIN.told());
                }
                heard.sort_unstable();
                assert_eq!(heard, (0..world_size).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_first_rank_that_is_lost_is_passed_on() {
        let mut standing = Standing::BEGIN;
        standing.hear(standing.told());
        assert_eq!(standing, Standing { distance: 2, has_told: false, lost: None });
        standing.lose(7);
        let mut other = Standing::BEGIN;
        other.hear(standing.told());
        other.lose(3);
        assert_eq!(other, Standing { distance: 4, has_told: false, lost: Some(7) });
    }

    #[test]
    fn what_is_kept_is_taken_once() {
        let unfinished = Unfinished::default();
        let standing = Standing { distance: 4, has_told: true, lost: None };
        unfinished.keep(1, standing);
        assert_eq!([unfinished.take(2), unfinished.take(1), unfinished.take(1)], [Standing::BEGIN, standing, Standing::BEGIN]);
        assert!(event::lock(&unfinished.0).is_empty());
    }
}
