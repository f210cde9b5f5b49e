//! The progress of a tagged barrier on one rank, and what this rank knows of the others. Pure: no input or output.
//!
//! In each round, a rank notifies the rank at a certain distance ahead that it has entered the barrier. The rank at the
//! same distance behind notifies it in the same way. The distance doubles with each round. A notification reports every
//! rank that its sender knows to have entered. So after log₂ n rounds, each rank knows whether all ranks have entered.
//!
//! In one barrier, a rank receives from each other rank in at most one round. So messages need no number: messages of
//! one source and tag arrive in order, and each barrier takes one. A barrier whose deadline has passed is not over: the
//! messages that it has sent stay valid, and the messages that it waits for still arrive. So the next barrier with the
//! same tag continues where the earlier one stopped. If several threads use a tag, the k-th thread to leave the barrier
//! knows that every rank has entered k times.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::base::event;

/// The progress of one barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::communicator) struct Standing {
    /// The distance to the ranks of this round.
    pub(in crate::communicator) distance: usize,
    /// Whether the rank ahead was notified in this round.
    pub(in crate::communicator) has_told: bool,
    /// A rank that can no longer enter.
    pub(in crate::communicator) lost: Option<u32>,
}

/// Stands for no lost rank.
const NOBODY: u32 = u32::MAX;

impl Standing {
    /// The state at the beginning of a barrier.
    const BEGIN: Self = Self { distance: 1, has_told: false, lost: None };

    /// Returns the notification for the rank ahead: the lost rank.
    pub(in crate::communicator) fn told(&self) -> [u8; 4] {
        self.lost.unwrap_or(NOBODY).to_le_bytes()
    }

    /// Takes the notification of the rank behind, which ends this round.
    pub(in crate::communicator) fn hear(&mut self, told: [u8; 4]) {
        let lost = Some(u32::from_le_bytes(told)).filter(|lost| *lost != NOBODY);
        *self = Self { distance: self.distance * 2, has_told: false, lost: self.lost.or(lost) };
    }

    /// Takes the rank behind as lost, which ends this round.
    pub(in crate::communicator) fn lose(&mut self, rank: usize) {
        self.hear((rank as u32).to_le_bytes());
    }

    /// Returns the ranks that `rank` knows to have entered, including itself, and those that the awaited message will
    /// add.
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
    /// Takes an unfinished barrier, or a new one.
    pub(in crate::communicator) fn take(&self, tag: u32) -> Standing {
        let mut standings = event::lock(&self.0);
        let Some(of_tag) = standings.get_mut(&tag) else { return Standing::BEGIN };
        let standing = of_tag.pop();
        if of_tag.is_empty() {
            standings.remove(&tag);
        }
        standing.unwrap_or(Standing::BEGIN)
    }

    /// Keeps a barrier for the next call.
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
                    // The sender that covers the awaited ranks knows of as many.
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
