//! Everything that a plan depends on, and nothing else: two calls of the same shape have the same plan.

use super::all_gather::all_gather;
use super::all_to_all::{all_to_all, all_to_all_v};
use super::builder::{Blocks, Builder, barrier};
use super::reduce::{all_reduce, reduce, reduce_scatter};
use super::rooted::{broadcast, gather, scatter};
use super::{Plan, Step};
use crate::call::Collective;
use crate::call::algorithm::Algorithm;

/// One rank's view of a collective, as far as its plan depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape<'a> {
    pub(crate) kind: Collective,
    /// Ignored by kinds that have one algorithm.
    pub(crate) algorithm: Algorithm,
    /// How many ranks take part.
    pub(crate) n: usize,
    /// This rank's number among the participants.
    pub(crate) me: usize,
    /// The root's number; 0 if there is none.
    pub(crate) root: usize,
    /// The ranks' blocks; for `all_to_all_v`, what this rank sends. A vector without blocks is one `Equal` block.
    pub(crate) blocks: Blocks<'a>,
    /// The bytes that this rank receives from each rank, if they differ from `blocks` (in `all_to_all_v`).
    pub(crate) receives: Option<&'a [usize]>,
    /// The bytes of an element; 1 if nothing is folded.
    pub(crate) element: usize,
    /// The size in bytes of the segments in which large messages travel.
    pub(crate) segment: usize,
    /// Whether source and destination are the same memory.
    pub(crate) in_place: bool,
}

impl Shape<'_> {
    /// Returns the plan of this shape.
    pub(crate) fn plan(&self) -> Plan {
        let Self { kind, algorithm, n, me, root, blocks, receives, element, segment, in_place } = *self;
        let whole = || blocks.len(me);
        match kind {
            Collective::Barrier => barrier(n, me),
            Collective::AllReduce => all_reduce(algorithm, n, me, whole(), element, segment),
            // A rank that only sends must hear from every rank too.
            Collective::Reduce => agreed(reduce(algorithm, n, me, root, whole(), element, segment), n, me),
            Collective::Broadcast => broadcast(algorithm, n, me, root, whole(), segment),
            Collective::AllGather | Collective::AllGatherV => all_gather(algorithm, n, me, blocks, segment),
            Collective::ReduceScatter | Collective::ReduceScatterV => reduce_scatter(algorithm, n, me, blocks, element, segment),
            Collective::Gather => gather(Builder::agreed(n, me), n, me, root, blocks),
            Collective::Scatter => scatter(Builder::agreed(n, me), n, me, root, blocks),
            Collective::AllToAll => all_to_all(n, me, whole(), in_place, segment),
            // Every rank was heard from when the counts were compared.
            Collective::GatherV => gather(Builder::new(n), n, me, root, blocks),
            Collective::ScatterV => scatter(Builder::new(n), n, me, root, blocks),
            Collective::AllToAllV => all_to_all_v(n, me, blocks, receives.map_or(blocks, Blocks::Each)),
        }
    }
}

/// Returns the plan with an agreement in parallel, by which a rank that only sends learns that all ranks make this
/// call.
fn agreed(plan: Plan, n: usize, me: usize) -> Plan {
    let mut joined = barrier(n, me);
    let first = joined.steps.len();
    joined.steps.extend(plan.steps.into_iter().map(|step| {
        let after = step.after.into_iter().map(|before| before + first).collect();
        Step { after, ..step }
    }));
    joined.scratch_bytes = plan.scratch_bytes;
    joined
}
