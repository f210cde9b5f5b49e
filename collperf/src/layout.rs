//! The expected result of every collective, out of place and in place: which element of which rank's input must be at
//! each place.

use crate::collective::Collective;
use crate::traffic::Exchange;

/// The origin of a run of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Elements of the input of `rank`, from the index `start` on.
    Of { rank: usize, start: usize },
    /// The reduction over all ranks' inputs, from the index `start` on.
    Folded { start: usize },
}

/// `length` elements of a buffer from `start` on, and their origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) origin: Origin,
}

/// One collective of one size, for all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    collective: Collective,
    world_size: usize,
    root: usize,
    /// Elements per block, or of the whole vector if there are no blocks.
    count: usize,
    /// Each rank's share of the whole; all have `count` elements unless the collective is uneven.
    shares: Vec<usize>,
    /// The blocks of `all_to_all_v`, if they are not those of the shares.
    exchange: Option<Exchange>,
}

impl Layout {
    pub(crate) fn new(collective: Collective, world_size: usize, root: usize, count: usize) -> Self {
        let shares = match collective {
            _ if collective.is_uneven() => uneven_shares(count, world_size),
            _ => vec![count; world_size],
        };
        Self { collective, world_size, root, count, shares, exchange: None }
    }

    /// Returns the layout with these blocks, if it is that of `all_to_all_v`.
    pub(crate) fn with_exchange(self, exchange: Option<Exchange>) -> Self {
        let exchange = exchange.filter(|_| self.collective == Collective::AllToAllV);
        Self { exchange, ..self }
    }

    /// Returns the elements per block, or of the whole vector.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the elements of the larger of a rank's two buffers, on the rank with the most.
    pub(crate) fn largest(&self) -> usize {
        let usual = || self.collective.bytes(self.count, 1, self.world_size);
        self.exchange.as_ref().map_or_else(usual, |exchange| exchange.largest().unwrap_or(usize::MAX))
    }

    /// Returns the lengths of the blocks that a rank receives in `all_to_all_v`; [`Layout::counts`] has those it sends.
    pub(crate) fn received_counts(&self, rank: usize) -> Vec<usize> {
        self.exchange.as_ref().map_or_else(|| self.counts(rank), |exchange| exchange.receives(rank))
    }

    /// Returns the shares of the uneven forms, one for each rank. In `all_to_all_v`, rank `r`'s block for `q` is as
    /// long as share `r + q`.
    pub(crate) fn counts(&self, rank: usize) -> Vec<usize> {
        if let Some(exchange) = &self.exchange {
            return exchange.sends(rank);
        }
        match self.collective {
            Collective::AllToAllV => (0..self.world_size).map(|peer| self.shares[(rank + peer) % self.world_size]).collect(),
            _ => self.shares.clone(),
        }
    }

    /// Returns the elements of all blocks together.
    fn whole(&self) -> usize {
        self.shares.iter().sum()
    }

    /// Returns the number of elements in this rank's input.
    pub(crate) fn source_length(&self, rank: usize) -> usize {
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::SendRecv => self.count,
            Collective::Broadcast => self.only(rank == self.root, self.count),
            Collective::AllGather | Collective::AllGatherV | Collective::Gather | Collective::GatherV | Collective::Hypercube => {
                self.shares[rank]
            }
            Collective::AllToAllV => self.counts(rank).iter().sum(),
            Collective::ReduceScatter | Collective::ReduceScatterV | Collective::AllToAll => self.whole(),
            Collective::Scatter | Collective::ScatterV => self.only(rank == self.root, self.whole()),
            Collective::Barrier => 0,
        }
    }

    /// Returns the expected content of this rank's destination, from first to last element without a gap.
    pub(crate) fn expected(&self, rank: usize) -> Vec<Run> {
        let one = |length, origin| vec![Run { start: 0, length, origin }];
        match self.collective {
            Collective::AllReduce => one(self.count, Origin::Folded { start: 0 }),
            Collective::Reduce if rank == self.root => one(self.count, Origin::Folded { start: 0 }),
            Collective::Broadcast => one(self.count, Origin::Of { rank: self.root, start: 0 }),
            Collective::AllGather | Collective::AllGatherV | Collective::Hypercube => self.gathered(|_| 0),
            Collective::Gather | Collective::GatherV if rank == self.root => self.gathered(|_| 0),
            Collective::ReduceScatter | Collective::ReduceScatterV => {
                one(self.shares[rank], Origin::Folded { start: before(&self.shares, rank) })
            }
            Collective::Scatter | Collective::ScatterV => {
                one(self.shares[rank], Origin::Of { rank: self.root, start: before(&self.shares, rank) })
            }
            Collective::AllToAll => self.gathered(|_| before(&self.shares, rank)),
            Collective::AllToAllV => self.exchanged(rank),
            Collective::SendRecv => one(self.count, Origin::Of { rank: self.previous(rank), start: 0 }),
            Collective::Reduce | Collective::Gather | Collective::GatherV | Collective::Barrier => vec![],
        }
    }

    /// Returns the content of this rank's one buffer before a call in place. The call writes the elements that no run
    /// covers.
    pub(crate) fn initial_in_place(&self, rank: usize) -> Vec<Run> {
        let start = match self.collective {
            Collective::AllGather | Collective::Hypercube => self.count * rank,
            Collective::Gather if rank == self.root => self.count * rank,
            _ => 0,
        };
        vec![Run { start, length: self.source_length(rank), origin: Origin::Of { rank, start: 0 } }]
    }

    /// Returns the expected content of this rank's one buffer after a call in place. Elements that no run covers are
    /// unspecified.
    pub(crate) fn expected_in_place(&self, rank: usize) -> Vec<Run> {
        let untouched = |length| vec![Run { start: 0, length, origin: Origin::Of { rank, start: 0 } }];
        match self.collective {
            Collective::Reduce | Collective::Gather if rank != self.root => untouched(self.count),
            Collective::Scatter if rank == self.root => untouched(self.whole()),
            Collective::ReduceScatter => {
                let start = self.count * rank;
                vec![Run { start, length: self.count, origin: Origin::Folded { start } }]
            }
            _ => self.expected(rank),
        }
    }

    /// Returns the rank that sends to this one in a ring.
    pub(crate) fn previous(&self, rank: usize) -> usize {
        (rank + self.world_size - 1) % self.world_size
    }

    fn only(&self, condition: bool, length: usize) -> usize {
        if condition { length } else { 0 }
    }

    /// Returns a block from every rank, at `start` in its input.
    fn gathered(&self, start: impl Fn(usize) -> usize) -> Vec<Run> {
        (0..self.world_size)
            .map(|from| {
                let origin = Origin::Of { rank: from, start: start(from) };
                Run { start: before(&self.shares, from), length: self.shares[from], origin }
            })
            .collect()
    }

    /// Returns what this rank receives in `all_to_all_v`.
    fn exchanged(&self, rank: usize) -> Vec<Run> {
        let counts = self.received_counts(rank);
        (0..self.world_size)
            .map(|from| {
                let origin = Origin::Of { rank: from, start: before(&self.counts(from), rank) };
                Run { start: before(&counts, from), length: counts[from], origin }
            })
            .collect()
    }
}

/// Returns where a rank's share begins.
fn before(shares: &[usize], rank: usize) -> usize {
    shares[..rank].iter().sum()
}

/// Returns shares that grow with the rank and have as many elements in total as even ones. The largest is nearly twice
/// the mean, and with few elements the first ranks have none, because the uneven forms must support empty shares.
fn uneven_shares(count: usize, world_size: usize) -> Vec<usize> {
    let whole = (count * world_size) as u128;
    let n = world_size as u128;
    let bound = |rank: u128| (whole * rank * (rank + 1) / (n * (n + 1))) as usize;
    (0..n).map(|rank| bound(rank + 1) - bound(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Traffic;

    /// Returns where the last run ends.
    fn end(runs: &[Run]) -> usize {
        runs.iter().map(|run| run.start + run.length).max().unwrap_or(0)
    }

    fn layouts() -> impl Iterator<Item = Layout> {
        Collective::known().flat_map(|collective| {
            [1, 2, 3, 13].into_iter().flat_map(move |world_size| {
                [0, 1, 7].into_iter().flat_map(move |count| {
                    (0..if collective.is_rooted() { world_size } else { 1 })
                        .map(move |root| Layout::new(collective, world_size, root, count))
                })
            })
        })
    }

    #[test]
    fn blocks_of_a_matrix_arrive_from_where_they_were_sent() {
        let traffic = Traffic::Matrix { side: 3, bytes: vec![0, 32, 16, 160, 0, 48, 0, 0, 16] };
        let layout = Layout::new(Collective::AllToAllV, 3, 0, 5).with_exchange(traffic.exchange(3, 0, 4).ok());
        assert_eq!((layout.source_length(0), layout.source_length(1), layout.largest()), (12, 52, 52));
        let run = |start, length, rank, from| Run { start, length, origin: Origin::Of { rank, start: from } };
        assert_eq!(layout.expected(0), [run(0, 0, 0, 0), run(0, 40, 1, 0), run(40, 0, 2, 0)]);
        assert_eq!(layout.expected(2), [run(0, 4, 0, 8), run(4, 12, 1, 40), run(16, 4, 2, 0)]);
        let other = Layout::new(Collective::AllReduce, 3, 0, 5).with_exchange(traffic.exchange(3, 0, 4).ok());
        assert_eq!((other.largest(), other.source_length(1)), (5, 5));
    }

    #[test]
    fn uneven_shares_keep_the_whole() {
        for (count, world_size) in [(0, 3), (1, 1), (1, 5), (100, 4), (1 << 30, 1000)] {
            let shares = uneven_shares(count, world_size);
            assert_eq!(shares.len(), world_size);
            assert_eq!(shares.iter().sum::<usize>(), count * world_size);
        }
        assert_eq!(uneven_shares(100, 4), [40, 80, 120, 160]);
        assert_eq!(uneven_shares(1, 3)[0], 0);
    }

    #[test]
    fn destinations_have_no_gap_and_come_from_inputs_that_are_there() {
        for layout in layouts() {
            for rank in 0..layout.world_size {
                let mut at = 0;
                for run in layout.expected(rank) {
                    assert_eq!(run.start, at, "{layout:?} rank {rank}");
                    at += run.length;
                }
                for run in layout.expected(rank).into_iter().chain(layout.expected_in_place(rank)) {
                    match run.origin {
                        Origin::Of { rank: from, start } => {
                            assert!(start + run.length <= layout.source_length(from), "{layout:?} rank {rank}")
                        }
                        Origin::Folded { start } => {
                            assert!((0..layout.world_size).all(|from| start + run.length <= layout.source_length(from)), "{layout:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_element_that_is_sent_arrives() {
        for layout in layouts().filter(|layout| !layout.collective.reduces()) {
            let mut arrived: Vec<Vec<usize>> = (0..layout.world_size).map(|rank| vec![0; layout.source_length(rank)]).collect();
            for rank in 0..layout.world_size {
                for run in layout.expected(rank) {
                    if let Origin::Of { rank: from, start } = run.origin {
                        arrived[from][start..start + run.length].iter_mut().for_each(|times| *times += 1);
                    }
                }
            }
            let copies = match layout.collective {
                Collective::Broadcast | Collective::AllGather | Collective::AllGatherV | Collective::Hypercube => layout.world_size,
                _ => 1,
            };
            assert!(arrived.iter().flatten().all(|times| *times == copies), "{layout:?}");
        }
    }

    #[test]
    fn both_sides_of_an_uneven_exchange_count_alike() {
        let layout = Layout::new(Collective::AllToAllV, 5, 0, 9);
        for rank in 0..5 {
            for peer in 0..5 {
                assert_eq!(layout.counts(rank)[peer], layout.counts(peer)[rank]);
            }
        }
    }

    #[test]
    fn buffers_of_all_blocks_hold_everything() {
        for layout in layouts() {
            let length = layout.collective.bytes(layout.count, 1, layout.world_size);
            for rank in 0..layout.world_size {
                assert!(layout.source_length(rank) <= length && end(&layout.expected(rank)) <= length, "{layout:?}");
                if layout.collective.has_in_place() {
                    assert!(end(&layout.initial_in_place(rank)) <= length && end(&layout.expected_in_place(rank)) <= length, "{layout:?}");
                }
            }
        }
    }
}
