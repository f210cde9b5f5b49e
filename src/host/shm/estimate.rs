//! How long a call should take in shared memory: the steps and bytes that `cut` gives it, times what each costs here.
//!
//! Of a rank that is never waited for longer than its flag takes, with its buffers in caches as near as their size lets them be. Buffers in
//! windows are not known here: they are ordinary memory to the estimate.

use super::cut::{Cut, Pace, in_shares, streams};
use super::group::Group;
use super::lane::Area;
use crate::call::Kind;

/// What a host costs, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Costs {
    /// A call by itself.
    pub(crate) call: f64,
    /// A step: from publishing a flag until everybody's has been seen.
    pub(crate) step: f64,
    /// A piece that is copied, whatever its length.
    pub(crate) piece: f64,
    /// The same of a fold.
    pub(crate) start_fold: f64,
    /// A byte copied inside this rank's own memory.
    pub(crate) copy: f64,
    /// A byte copied into an area or out of one, which lies in another processor's cache.
    pub(crate) cross: f64,
    /// A byte that goes into a fold.
    pub(crate) fold: f64,
    /// A byte that comes from memory or goes there rather than to a cache, beside what is done with it.
    pub(crate) memory: f64,
    /// The bytes of all ranks' buffers that stay in caches: no time, but measured like one.
    pub(crate) cached: f64,
}

/// A collective on ordinary memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) kind: Kind,
    /// The whole vector; where there are blocks, all of them together.
    pub(crate) bytes: usize,
    pub(crate) element_bytes: usize,
    pub(crate) in_place: bool,
}

/// How calls of one group are cut, and how many processors its ranks have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Estimate {
    ranks: usize,
    processors: usize,
    pace: Pace,
}

/// What the ranks do in a call: of times that overlap, the longest.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Work {
    way: &'static str,
    steps: f64,
    pieces: f64,
    folds: f64,
    /// Bytes copied inside a rank's memory, between ranks, and folded.
    copied: f64,
    crossed: f64,
    folded: f64,
    /// Bytes written past the caches, and other bytes of users' buffers: read, and twice as many as are written, since they are read first.
    streamed: f64,
    touched: f64,
    /// The bytes of all ranks' buffers.
    buffers: f64,
}

impl Group {
    /// The estimate for this group: the same on every rank.
    pub(crate) fn estimate(&self) -> Estimate {
        Estimate::new(self.ranks, self.running, self.pace)
    }
}

impl Estimate {
    fn new(ranks: usize, processors: usize, pace: Pace) -> Self {
        Self { ranks, processors: processors.clamp(1, ranks), pace }
    }

    /// What calls cost between two processors of one machine, and where four ranks share them: where a measurement begins.
    pub(crate) fn usual_costs(&self) -> Costs {
        let step = if self.ranks > self.processors { 2500.0 } else { 40.0 };
        let (cross, cached) = (0.02, f64::from(24 << 20));
        Costs { call: 40.0, step, piece: 8.0, start_fold: 30.0, copy: 0.01, cross, fold: 0.016, memory: 0.015, cached }
    }

    /// How the call is done, and how many nanoseconds it should take; `None` for those that go through streams.
    pub(crate) fn predict(&self, task: &Task, costs: &Costs) -> Option<(&'static str, f64)> {
        let work = self.work(task)?;
        let Work { way, steps, pieces, folds, copied, crossed, folded, streamed, touched, buffers } = work;
        let uncached = (1.0 - costs.cached / buffers.max(1.0)).max(0.0);
        let handled = copied * costs.copy + crossed * costs.cross + folded * costs.fold + (streamed + uncached * touched) * costs.memory;
        let begun = costs.call * self.turns() + steps * costs.step + pieces * costs.piece + folds * costs.start_fold;
        Some((way, begun + handled))
    }

    /// How many ranks have to share a processor, one after another.
    fn turns(&self) -> f64 {
        self.ranks as f64 / self.processors as f64
    }

    fn work(&self, task: &Task) -> Option<Work> {
        let bytes = task.bytes;
        let block = bytes / self.ranks;
        Some(match task.kind {
            Kind::Barrier => Work { way: "flags", steps: 1.0, ..Work::default() },
            Kind::AllReduce if Area::for_fold(bytes, 1, task.element_bytes) == Area::Slot && in_shares(bytes) => self.shares(task, false),
            Kind::Reduce if in_shares(bytes) => self.shares(task, true),
            Kind::AllReduce | Kind::Reduce => self.folded_whole(task),
            Kind::ReduceScatter | Kind::ReduceScatterV => self.reduce_scatter(task, block),
            Kind::Broadcast => self.broadcast(task),
            Kind::AllGather | Kind::AllGatherV => self.gather(task, block, false),
            Kind::Gather => self.gather(task, block, true),
            Kind::AllToAll => self.scatter(task, block, false),
            Kind::Scatter => self.scatter(task, block, true),
            Kind::GatherV | Kind::ScatterV | Kind::AllToAllV => return None,
        })
    }

    /// Work that every rank does alike, on a source and a destination of so many bytes.
    fn alike(&self, task: &Task, work: Work, [source, destination]: [f64; 2]) -> Work {
        let (turns, streams) = (self.turns(), streams(task.bytes) && work.streamed > 0.0);
        let buffers = source.max(destination) + if task.in_place { 0.0 } else { source.min(destination) };
        Work {
            pieces: work.pieces * turns,
            folds: work.folds * turns,
            copied: work.copied * turns,
            crossed: work.crossed * turns,
            folded: work.folded * turns,
            streamed: if streams { destination * turns } else { 0.0 },
            touched: (source + if streams { 0.0 } else { 2.0 * destination }) * turns,
            buffers: buffers * self.ranks as f64,
            ..work
        }
    }

    /// What takes one rank so long, and all of them so long together.
    fn longest(&self, one: f64, all: f64) -> f64 {
        one.max(all / self.processors as f64)
    }

    /// Everybody publishes its vector, and folds everyone's.
    fn folded_whole(&self, task: &Task) -> Work {
        let (bytes, cut) = (task.bytes as f64, Cut::folds(task.bytes, 1, task.element_bytes, self.pace.fold));
        let steps = cut.pieces().count() as f64;
        let folded = bytes * self.ranks as f64;
        let work = Work { way: way(cut.area), steps, pieces: steps, folds: steps, crossed: bytes, folded, ..Work::default() };
        self.alike(task, work, [bytes, bytes])
    }

    /// Everybody folds a share of each piece, and those who want them copy the others'.
    fn shares(&self, task: &Task, to_root: bool) -> Work {
        let (ranks, bytes) = (self.ranks as f64, task.bytes as f64);
        let others = bytes * (ranks - 1.0) / ranks;
        let count = Cut::folds(task.bytes, 1, task.element_bytes, self.pace.fold).pieces().count() as f64;
        let streamed = if task.in_place { 0.0 } else { bytes };
        let (steps, pieces, folds) = (2.0 * count, ranks * count, count);
        // Folded to two places at once.
        let copied = bytes / ranks;
        let work = Work { way: "shares", steps, pieces, folds, copied, crossed: others, folded: bytes, streamed, ..Work::default() };
        let work = self.alike(task, work, [bytes, bytes]);
        Work { crossed: work.crossed + if to_root { others } else { others * self.turns() }, ..work }
    }

    fn reduce_scatter(&self, task: &Task, block: usize) -> Work {
        let (bytes, ranks) = (task.bytes as f64, self.ranks as f64);
        let cut = Cut::folds(block, self.ranks, task.element_bytes, self.pace.reduce_scatter);
        let folds = cut.pieces().count() as f64;
        let (steps, pieces) = (folds * self.ranks.div_ceil(cut.width) as f64, (ranks - 1.0) * folds);
        let crossed = bytes * (ranks - 1.0) / ranks;
        let work = Work { way: way(cut.area), steps, pieces, folds, crossed, folded: bytes, ..Work::default() };
        self.alike(task, work, [bytes, block as f64])
    }

    /// The root copies a piece in while the others copy the one before out.
    fn broadcast(&self, task: &Task) -> Work {
        let (bytes, ranks) = (task.bytes as f64, self.ranks as f64);
        let cut = Cut::moves(task.bytes, 1, self.pace.broadcast(task.bytes));
        let count = cut.pieces().count() as f64;
        let own = if task.in_place { 0.0 } else { 1.0 };
        Work {
            way: way(cut.area),
            steps: count,
            pieces: self.longest(count + 1.0 + own, (ranks + own) * count),
            copied: bytes * own,
            crossed: self.longest(bytes / count + bytes, ranks * bytes),
            touched: bytes * (1.0 + 2.0 * (own + ranks - 1.0)) / self.processors as f64,
            buffers: bytes * (ranks + own),
            ..Work::default()
        }
    }

    fn gather(&self, task: &Task, block: usize, to_root: bool) -> Work {
        let (ranks, bytes) = (self.ranks as f64, task.bytes as f64);
        let (block, cut) = (block as f64, Cut::moves(block, 1, self.pace.gather(block)));
        let steps = cut.pieces().count() as f64;
        let own = if task.in_place { 0.0 } else { 1.0 };
        let (pieces, copied) = ((ranks + own) * steps, own * block);
        let work = Work { way: way(cut.area), steps, pieces, copied, crossed: bytes, streamed: bytes, ..Work::default() };
        self.all_or_root(task, work, [block, bytes], to_root)
    }

    fn scatter(&self, task: &Task, block: usize, from_root: bool) -> Work {
        let (ranks, bytes) = (self.ranks as f64, task.bytes as f64);
        let (block, cut) = (block as f64, Cut::moves(block, self.ranks, self.pace.scatter));
        let steps = cut.pieces().count() as f64;
        let own = if task.in_place { 0.0 } else { 1.0 };
        let (crossed, destination) = if from_root { (ranks * block, block) } else { (2.0 * (ranks - 1.0) * block, bytes) };
        let (pieces, copied) = ((2.0 * (ranks - 1.0) + own) * steps, own * block);
        let work = Work { way: way(cut.area), steps, pieces, copied, crossed, streamed: destination, ..Work::default() };
        self.all_or_root(task, work, [bytes, destination], from_root)
    }

    /// Work that every rank does, or that the root does while each of the others copies its block.
    fn all_or_root(&self, task: &Task, work: Work, buffers: [f64; 2], is_rooted: bool) -> Work {
        let alike = self.alike(task, work, buffers);
        if !is_rooted {
            return alike;
        }
        let turns = self.turns();
        let crossed = self.longest(work.crossed, 2.0 * work.crossed);
        let (pieces, copied) = (self.longest(work.pieces, 2.0 * work.pieces), work.copied);
        Work { pieces, copied, crossed, streamed: alike.streamed / turns, touched: alike.touched / turns, ..alike }
    }
}

/// What an area is called.
const fn way(area: Area) -> &'static str {
    match area {
        Area::Head | Area::Lines => "lanes",
        Area::Slot => "slots",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: usize = 1 << 20;

    fn estimate(ranks: usize, processors: usize) -> Estimate {
        Estimate::new(ranks, processors, Pace::new(SLOT, processors < ranks))
    }

    fn task(kind: Kind, bytes: usize) -> Task {
        Task { kind, bytes, element_bytes: 4, in_place: false }
    }

    #[test]
    fn predictions_are_finite_and_grow_with_the_size() {
        for (ranks, processors) in [(2, 2), (2, 0), (4, 2), (3, 8), (64, 4)] {
            let estimate = estimate(ranks, processors);
            let costs = estimate.usual_costs();
            for kind in Kind::ALL {
                let sizes = [0, 4, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20];
                let told: Vec<_> = sizes.iter().filter_map(|bytes| estimate.predict(&task(kind, *bytes), &costs)).collect();
                assert!(told.iter().all(|(_, time)| time.is_finite() && *time > 0.0), "{kind:?} {told:?}");
                // Another way, from a size that is the same for all, may be quicker.
                let grows = |pair: &[(&str, f64)]| pair[0].0 != pair[1].0 || pair[0].1 <= pair[1].1;
                assert!(told.windows(2).all(grows), "{kind:?} of {ranks} on {processors}: {told:?}");
            }
        }
    }

    #[test]
    fn the_way_is_the_one_that_is_gone() {
        let estimate = estimate(2, 2);
        let way = |kind, bytes| estimate.work(&task(kind, bytes)).map(|work| (work.way, work.steps));
        assert_eq!(way(Kind::Barrier, 0), Some(("flags", 1.0)));
        assert_eq!(way(Kind::AllReduce, 4), Some(("lanes", 1.0)));
        assert_eq!(way(Kind::AllReduce, 16 << 10), Some(("slots", 1.0)));
        assert_eq!(way(Kind::AllReduce, 1 << 20), Some(("shares", 8.0)));
        assert_eq!(way(Kind::Broadcast, 1 << 20), Some(("slots", 16.0)));
        assert_eq!(way(Kind::AllToAllV, 4), None);
    }

    #[test]
    fn ranks_that_share_processors_take_turns() {
        let (alone, shared) = (estimate(4, 4), estimate(4, 2));
        let costs = alone.usual_costs();
        for kind in [Kind::AllReduce, Kind::AllGather, Kind::Broadcast] {
            let time = |estimate: &Estimate| estimate.predict(&task(kind, 1 << 20), &costs).unwrap().1;
            assert!(time(&shared) > 1.2 * time(&alone), "{kind:?}");
        }
    }
}
