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
    /// A piece that is copied or folded, whatever its length.
    pub(crate) piece: f64,
    /// A byte copied into an area or out of one.
    pub(crate) copy: f64,
    /// A byte that goes into a fold.
    pub(crate) fold: f64,
    /// A byte of a user's buffer that is in memory rather than in a cache, beside what is done with it.
    pub(crate) memory: f64,
}

impl Default for Costs {
    /// As measured between two processors of one machine.
    fn default() -> Self {
        Self { call: 40.0, step: 60.0, piece: 20.0, copy: 0.018, fold: 0.02, memory: 0.012 }
    }
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
#[derive(Debug, Clone, Copy, PartialEq)]
struct Work {
    way: &'static str,
    steps: f64,
    pieces: f64,
    copied: f64,
    folded: f64,
    /// Of users' buffers: read, and written, which takes twice as much where it does not go past the cache.
    touched: f64,
}

impl Group {
    /// The estimate for this group: the same on every rank.
    pub(crate) fn estimate(&self) -> Estimate {
        Estimate::new(self.ranks, super::wait::processors(&self.region), self.pace)
    }
}

impl Estimate {
    fn new(ranks: usize, processors: usize, pace: Pace) -> Self {
        Self { ranks, processors: processors.clamp(1, ranks), pace }
    }

    /// How the call is done, and how many nanoseconds it should take; `None` for those that go through streams.
    pub(crate) fn predict(&self, task: &Task, costs: &Costs) -> Option<(&'static str, f64)> {
        let Work { way, steps, pieces, copied, folded, touched } = self.work(task)?;
        let done = costs.call * self.turns() + steps * costs.step + pieces * costs.piece + copied * costs.copy + folded * costs.fold;
        let fetched = if streams(task.bytes) { touched * costs.memory } else { 0.0 };
        Some((way, done + fetched))
    }

    /// How many ranks have to share a processor, one after another.
    fn turns(&self) -> f64 {
        self.ranks as f64 / self.processors as f64
    }

    fn work(&self, task: &Task) -> Option<Work> {
        let bytes = task.bytes;
        let block = bytes / self.ranks;
        Some(match task.kind {
            Kind::Barrier => Work { way: "flags", steps: 1.0, pieces: 0.0, copied: 0.0, folded: 0.0, touched: 0.0 },
            Kind::AllReduce if Area::for_fold(bytes, task.element_bytes) == Area::Slot && in_shares(bytes) => self.shares(task, false),
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

    /// Work that every rank does alike.
    fn alike(&self, work: Work) -> Work {
        let turns = self.turns();
        let Work { pieces, copied, folded, touched, .. } = work;
        Work { pieces: pieces * turns, copied: copied * turns, folded: folded * turns, touched: touched * turns, ..work }
    }

    /// What takes one rank so long, and all of them so long together.
    fn longest(&self, one: f64, all: f64) -> f64 {
        one.max(all / self.processors as f64)
    }

    /// Everybody publishes its vector, and folds everyone's.
    fn folded_whole(&self, task: &Task) -> Work {
        let (bytes, cut) = (task.bytes as f64, Cut::folds(task.bytes, 1, task.element_bytes, self.pace.fold));
        let count = cut.pieces().count() as f64;
        let folded = bytes * self.ranks as f64;
        self.alike(Work {
            way: way(cut.area),
            steps: count,
            pieces: 2.0 * count,
            copied: bytes,
            folded,
            touched: self.touched(task, 1.0, 2.0),
        })
    }

    /// Everybody folds a share of each piece, and those who want them copy the others'.
    fn shares(&self, task: &Task, to_root: bool) -> Work {
        let ranks = self.ranks as f64;
        let others = task.bytes as f64 * (ranks - 1.0) / ranks;
        let count = Cut::folds(task.bytes, 1, task.element_bytes, self.pace.fold).pieces().count() as f64;
        let (folded, fetched) = (task.bytes as f64, if to_root { self.longest(others, others) } else { others * self.turns() });
        let work = Work { way: "shares", steps: 2.0 * count, pieces: (1.0 + ranks) * count, copied: others, folded, touched: 0.0 };
        let writes = if !task.in_place && streams(task.bytes) { 1.0 } else { 2.0 };
        let work = self.alike(Work { touched: self.touched(task, 1.0, writes), ..work });
        Work { copied: work.copied + fetched, ..work }
    }

    fn reduce_scatter(&self, task: &Task, block: usize) -> Work {
        let (bytes, ranks) = (task.bytes as f64, self.ranks as f64);
        let cut = Cut::folds(block, self.ranks, task.element_bytes, self.pace.reduce_scatter);
        let steps = (cut.pieces().count() * self.ranks.div_ceil(cut.width)) as f64;
        let pieces = ranks * cut.pieces().count() as f64;
        let touched = self.touched(task, 1.0, 2.0 / ranks);
        self.alike(Work { way: way(cut.area), steps, pieces, copied: bytes * (ranks - 1.0) / ranks, folded: bytes, touched })
    }

    /// The root copies a piece in while the others copy the one before out.
    fn broadcast(&self, task: &Task) -> Work {
        let (bytes, others) = (task.bytes as f64, self.ranks as f64 - 1.0);
        let cut = Cut::moves(task.bytes, 1, self.pace.broadcast(task.bytes));
        let count = cut.pieces().count() as f64;
        let own = if task.in_place { 0.0 } else { 1.0 };
        let first = bytes / count;
        Work {
            way: way(cut.area),
            steps: count,
            pieces: self.longest(count + 1.0, (1.0 + own + others) * count),
            copied: self.longest(first + bytes * (1.0 + own), bytes * (1.0 + own + others)),
            folded: 0.0,
            // In the memory's time, in which all ranks take turns, as large as that of one rank where all do alike.
            touched: bytes * (1.0 + 2.0 * (own + others)) / self.processors as f64,
        }
    }

    fn gather(&self, task: &Task, block: usize, to_root: bool) -> Work {
        let ranks = self.ranks as f64;
        let (block, cut) = (block as f64, Cut::moves(block, 1, self.pace.gather(block)));
        let count = cut.pieces().count() as f64;
        let own = if task.in_place { 0.0 } else { 1.0 };
        let out = ranks - 1.0 + own;
        let writes = if streams(task.bytes) { 1.0 } else { 2.0 };
        let work = |copies: f64, touched: f64| Work {
            way: way(cut.area),
            steps: count,
            pieces: copies * count,
            copied: copies * block,
            folded: 0.0,
            touched: touched * block,
        };
        if to_root {
            let copies = self.longest(1.0 + out, ranks - 1.0 + out);
            return work(copies, (ranks + writes * out) / self.processors as f64);
        }
        self.alike(work(1.0 + out, 1.0 + writes * out))
    }

    fn scatter(&self, task: &Task, block: usize, from_root: bool) -> Work {
        let ranks = self.ranks as f64;
        let (block, cut) = (block as f64, Cut::moves(block, self.ranks, self.pace.scatter));
        let count = cut.pieces().count() as f64;
        let own = if task.in_place { 0.0 } else { 1.0 };
        let writes = if streams(task.bytes) { 1.0 } else { 2.0 };
        let work = |copies: f64, touched: f64| Work {
            way: way(cut.area),
            steps: count,
            pieces: copies * count,
            copied: copies * block,
            folded: 0.0,
            touched: touched * block,
        };
        if from_root {
            let copies = self.longest(ranks + own, 2.0 * (ranks - 1.0) + own);
            return work(copies, (ranks + writes * (ranks - 1.0 + own)) / self.processors as f64);
        }
        self.alike(work(2.0 * (ranks - 1.0) + own, (1.0 + writes) * (ranks - 1.0 + own)))
    }

    /// A vector read and a vector written, so many times.
    fn touched(&self, task: &Task, reads: f64, writes: f64) -> f64 {
        task.bytes as f64 * (reads + writes)
    }
}

/// What an area is called.
const fn way(area: Area) -> &'static str {
    match area {
        Area::Head | Area::Lines => "lanes",
        Area::Slot => "slots",
    }
}
