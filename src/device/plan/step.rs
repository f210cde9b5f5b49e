//! The steps of a call, as plain values: transfers by NCCL, and this rank's own work between them.

use crate::call::element::DType;

use super::algorithm::{FoldOp, NcclOp};

/// One NCCL call. Addresses are in this rank's memory; lengths are in bytes if there is no type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Transfer {
    AllReduce {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        op: NcclOp,
    },
    /// Only the root uses the destination.
    Reduce {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        op: NcclOp,
        root: usize,
    },
    /// Each rank gets `count` elements.
    ReduceScatter {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        op: NcclOp,
    },
    /// Only the root uses the source.
    Broadcast {
        source: u64,
        destination: u64,
        bytes: usize,
        root: usize,
    },
    /// Each rank contributes `bytes` bytes.
    AllGather {
        source: u64,
        destination: u64,
        bytes: usize,
    },
    /// Each rank sends `bytes` bytes to each rank.
    AllToAll {
        source: u64,
        destination: u64,
        bytes: usize,
    },
    /// Each rank contributes `bytes` bytes.
    Gather {
        source: u64,
        destination: u64,
        bytes: usize,
        root: usize,
    },
    /// Each rank gets `bytes` bytes.
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

/// The stream on which this rank's own work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamRole {
    /// The stream of the call, on which NCCL's transfers also run.
    Call,
    /// The backend's second stream.
    Side,
}

/// A point on one stream for which the other stream waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepEvent {
    /// The inputs of a slab have arrived. The side stream waits.
    Arrived,
    /// The slab in this half of the scratch memory has been folded. The call's stream waits.
    Folded(usize),
}

/// The addresses and lengths that a fold uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoldArguments {
    /// The address of rank 0's input.
    pub(crate) inputs: u64,
    /// The distance between inputs, in bytes.
    pub(crate) stride: u64,
    /// The address and index of this rank's own input, if it is elsewhere.
    pub(crate) own: Option<(u64, u32)>,
    /// The number of inputs.
    pub(crate) ranks: u32,
    /// The address of the result: apart from all inputs, or exactly that of this rank's own input.
    pub(crate) output: u64,
    /// The number of elements; for bitwise ops, of bytes.
    pub(crate) count: u64,
    /// The divisor of a mean.
    pub(crate) divisor: u32,
}

impl FoldArguments {
    /// Whether this crate's kernels move 16 bytes at once, because all addresses have the same remainder modulo 16. If
    /// the remainders differ, the kernels move single elements.
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
    /// One of this crate's kernels.
    Ours(FoldOp, DType),
    /// A custom kernel, by its index among the loaded custom kernels.
    User(usize),
}

/// One step of a call. Steps of one stream run one after another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// Transfers that are launched as one group. The group of one rank may be empty if the groups of other ranks have
    /// transfers.
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
    /// Divides each element by `divisor`, on the call's stream.
    Divide {
        data: u64,
        count: usize,
        dtype: DType,
        divisor: u32,
    },
    /// Multiplies each element by the scalar, on the call's stream.
    Multiply {
        source: u64,
        destination: u64,
        count: usize,
        dtype: DType,
        scalar: f64,
    },
    /// Turns each byte into a truth value, on the call's stream.
    Truths {
        data: u64,
        bytes: usize,
    },
    /// Records the event on one of the two streams.
    Record(StepEvent),
    /// Makes the other stream wait for the recorded event.
    Wait(StepEvent),
}

/// The plan of a call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Plan {
    /// This rank has nothing to do.
    Nothing,
    /// One NCCL call.
    One(Transfer),
    /// One group of NCCL calls, which may be empty, then this rank's own work.
    Group { transfers: Vec<Transfer>, after: Vec<Step> },
    /// Several exchanges through the backend's scratch memory.
    Steps(Vec<Step>),
}

impl Plan {
    /// Returns the plan with one more step of this rank's own work at its end, on the call's stream.
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

/// A rank's number and the number of ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranks {
    pub(crate) me: usize,
    pub(crate) n: usize,
}

impl Ranks {
    /// Returns every other rank, from the next one on, so that not all ranks start with the same one.
    pub(crate) fn others(self) -> impl Iterator<Item = usize> {
        (1..self.n).map(move |step| (self.me + step) % self.n)
    }
}

/// Memory of the backend on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}
