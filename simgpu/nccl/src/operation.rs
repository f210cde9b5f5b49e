//! One call's communication, as a rank passes it to its clique.

use crate::abi::Kind;

/// The operation on the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Verb {
    AllReduce = 0,
    Reduce = 1,
    ReduceScatter = 2,
    AllGather = 3,
    Broadcast = 4,
    AlltoAll = 5,
    Gather = 6,
    Scatter = 7,
    Send = 8,
    Recv = 9,
}

impl Verb {
    /// All verbs, by number.
    pub(crate) const ALL: [Verb; 10] = [
        Verb::AllReduce,
        Verb::Reduce,
        Verb::ReduceScatter,
        Verb::AllGather,
        Verb::Broadcast,
        Verb::AlltoAll,
        Verb::Gather,
        Verb::Scatter,
        Verb::Send,
        Verb::Recv,
    ];

    /// Whether elements are folded.
    #[must_use]
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Verb::AllReduce | Verb::Reduce | Verb::ReduceScatter)
    }

    /// Whether this concerns two ranks only.
    #[must_use]
    pub(crate) fn is_point_to_point(self) -> bool {
        matches!(self, Verb::Send | Verb::Recv)
    }

    /// Returns the elements that rank `rank` of `size` reads, for the count of the call.
    #[must_use]
    pub(crate) fn reads(self, rank: usize, root: usize, size: usize, count: usize) -> usize {
        match self {
            Verb::AllReduce | Verb::Reduce | Verb::AllGather | Verb::Gather | Verb::Send => count,
            Verb::ReduceScatter | Verb::AlltoAll => count * size,
            Verb::Broadcast if rank == root => count,
            Verb::Scatter if rank == root => count * size,
            Verb::Broadcast | Verb::Scatter | Verb::Recv => 0,
        }
    }

    /// Returns the elements that rank `rank` of `size` writes, for the count of the call.
    #[must_use]
    pub(crate) fn writes(self, rank: usize, root: usize, size: usize, count: usize) -> usize {
        match self {
            Verb::AllReduce | Verb::ReduceScatter | Verb::Broadcast | Verb::Scatter | Verb::Recv => count,
            Verb::AllGather | Verb::AlltoAll => count * size,
            Verb::Reduce if rank == root => count,
            Verb::Gather if rank == root => count * size,
            Verb::Reduce | Verb::Gather | Verb::Send => 0,
        }
    }

    /// Returns the bytes that rank `rank` of `size` sends by the plain algorithms used to compute bandwidth: rings for
    /// reductions, gathers and broadcasts, direct sends for the rest. `bytes` is the size of the call's count.
    #[must_use]
    pub(crate) fn sends(self, rank: usize, root: usize, size: usize, bytes: usize) -> usize {
        let others = size - 1;
        match self {
            Verb::AllReduce => 2 * others * bytes / size,
            Verb::ReduceScatter | Verb::AllGather | Verb::AlltoAll => others * bytes,
            Verb::Broadcast => bytes * usize::from((rank + 1) % size != root),
            Verb::Reduce | Verb::Gather => bytes * usize::from(rank != root),
            Verb::Scatter => others * bytes * usize::from(rank == root),
            Verb::Send => bytes * usize::from(rank != root),
            Verb::Recv => 0,
        }
    }
}

/// The operator that folds elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Fold {
    Sum = 0,
    Prod = 1,
    Max = 2,
    Min = 3,
    Avg = 4,
    /// Each rank multiplies by its own scalar before the sum.
    PreMulSum = 5,
}

impl Fold {
    /// All folds, by number.
    pub(crate) const ALL: [Fold; 6] = [Fold::Sum, Fold::Prod, Fold::Max, Fold::Min, Fold::Avg, Fold::PreMulSum];
}

/// The part of a call on which all ranks have to agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The operation.
    pub(crate) verb: Verb,
    /// The elements, as in the call.
    pub(crate) count: usize,
    /// The element type.
    pub(crate) kind: Kind,
    /// The fold; `Sum` if nothing is folded.
    pub(crate) fold: Fold,
    /// The root, or the peer of a send or receive; 0 if there is none.
    pub(crate) root: usize,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Signature { verb, count, kind, fold, root } = self;
        match verb {
            verb if verb.is_point_to_point() => write!(f, "{verb:?} of {count} {kind:?} with peer {root}"),
            verb if verb.reduces() => write!(f, "{verb:?} of {count} {kind:?} by {fold:?} with root {root}"),
            _ => write!(f, "{verb:?} of {count} {kind:?} with root {root}"),
        }
    }
}

/// A range of device memory, which is memory of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    /// Its address.
    pub(crate) address: usize,
    /// Its length.
    pub(crate) bytes: usize,
}

/// One call of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    /// The part that has to match the other ranks.
    pub signature: Signature,
    /// The input.
    pub(crate) input: Region,
    /// The output; may be shorter than the result, whose end is then dropped.
    pub(crate) output: Region,
    /// The bits of the scalar of `PreMulSum`.
    pub(crate) scalar: u64,
}
