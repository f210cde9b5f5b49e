//! What a call becomes: transfers by NCCL, and work of our own between them, as plain values.

use crate::call::element::DType;

use super::algorithm::{FoldOp, NcclOp};

/// One call of NCCL's. Addresses are of this rank's memory; lengths are in bytes where no type is named.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Transfer {
    AllReduce {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        op: NcclOp,
    },
    /// The destination counts at the root alone.
    Reduce {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        op: NcclOp,
        root: usize,
    },
    /// `count` elements to each rank.
    ReduceScatter {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        op: NcclOp,
    },
    /// The source counts at the root alone.
    Broadcast {
        source: u64,
        destination: u64,
        bytes: usize,
        root: usize,
    },
    /// As many bytes from each rank.
    AllGather {
        source: u64,
        destination: u64,
        bytes: usize,
    },
    /// As many bytes from each rank to each rank.
    AllToAll {
        source: u64,
        destination: u64,
        bytes: usize,
    },
    /// As many bytes from each rank.
    Gather {
        source: u64,
        destination: u64,
        bytes: usize,
        root: usize,
    },
    /// As many bytes to each rank.
    Scatter {
        source: u64,
        destination: u64,
        bytes: usize,
        root: usize,
    },
    Send {
        address: u64,
        bytes: usize,
        peer: usize,
    },
    Receive {
        address: u64,
        bytes: usize,
        peer: usize,
    },
}

/// Where our own work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamRole {
    /// The stream of the call, on which NCCL's part runs, too.
    Call,
    /// A stream of the backend's, beside it.
    Side,
}

/// A moment on one stream for which the other waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepEvent {
    /// The inputs of a slab have come. The side waits.
    Arrived,
    /// The slab in this half of the scratch memory is folded. The call's stream waits.
    Folded(usize),
}

/// What a fold reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoldArguments {
    /// Where rank 0's input is.
    pub(crate) inputs: u64,
    /// How far apart inputs are, in bytes.
    pub(crate) stride: u64,
    /// Where this rank's own input is, and which one it is, if that is elsewhere.
    pub(crate) own: Option<(u64, u32)>,
    /// How many inputs there are.
    pub(crate) ranks: u32,
    /// Where the result goes: apart from all inputs, or exactly where this rank's own is.
    pub(crate) output: u64,
    /// How many elements; of bitwise ops, bytes.
    pub(crate) count: u64,
    /// What a mean divides by.
    pub(crate) divisor: u32,
}

impl FoldArguments {
    /// Whether our kernels move 16 bytes at once: all addresses have one remainder by that. Else they go element by element.
    pub(crate) fn is_wide(&self) -> bool {
        let agrees = |address: u64| (address ^ self.output).is_multiple_of(16);
        let others = self.ranks - u32::from(self.own.is_some());
        let other = if matches!(self.own, Some((_, 0))) { self.inputs + self.stride } else { self.inputs };
        self.own.is_none_or(|(own, _)| agrees(own)) && (others == 0 || agrees(other)) && (others < 2 || self.stride.is_multiple_of(16))
    }
}

/// A kernel that folds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Folder {
    /// One of ours.
    Ours(FoldOp, DType),
    /// One of the caller's, by its place among those that were loaded.
    User(usize),
}

/// One step of a call. Steps of one stream run one after another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// Transfers that are launched as one group. There may be none where other ranks have some.
    Transfer(Vec<Transfer>),
    /// A copy inside this device's memory.
    Copy {
        role: StreamRole,
        source: u64,
        destination: u64,
        bytes: usize,
    },
    Fold {
        role: StreamRole,
        folder: Folder,
        arguments: FoldArguments,
        element_bytes: usize,
    },
    /// Each element is divided by `divisor`, on the call's stream.
    Divide {
        data: u64,
        count: usize,
        dtype: DType,
        divisor: u32,
    },
    /// Each element times the scalar, on the call's stream.
    Multiply {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        scalar: f64,
    },
    /// Each byte becomes a truth value, on the call's stream.
    Truths {
        data: u64,
        bytes: usize,
    },
    /// The side waits for what the call's stream has done so far, or the reverse.
    Record(StepEvent),
    Wait(StepEvent),
}

/// What a call becomes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Plan {
    /// There is nothing to do on this rank.
    Nothing,
    /// One call of NCCL's.
    One(Transfer),
    /// One group of NCCL's calls, which may be empty, then work of our own.
    Group { transfers: Vec<Transfer>, after: Vec<Step> },
    /// Several exchanges through the backend's memory.
    Steps(Vec<Step>),
}

impl Plan {
    /// The plan, with a step of this rank's own behind it, on the call's stream.
    pub(crate) fn then(self, step: Step) -> Self {
        match self {
            Plan::Nothing => Plan::Group { transfers: Vec::new(), after: vec![step] },
            Plan::One(transfer) => Plan::Group { transfers: vec![transfer], after: vec![step] },
            Plan::Group { transfers, mut after } => {
                after.push(step);
                Plan::Group { transfers, after }
            }
            Plan::Steps(mut steps) => {
                steps.push(step);
                Plan::Steps(steps)
            }
        }
    }
}

/// A rank and how many there are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks {
    pub(crate) me: usize,
    pub(crate) n: usize,
}

impl Ranks {
    /// Every other rank, from the next one on, so that not all start with the same.
    pub(crate) fn others(self) -> impl Iterator<Item = usize> {
        (1..self.n).map(move |step| (self.me + step) % self.n)
    }
}

/// Memory of the backend's own on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}
