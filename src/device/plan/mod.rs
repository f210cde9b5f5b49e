//! What a device call is made of, as plain values: the checked job, which algorithm a reduction takes, and the steps that a call becomes.
//!
//! Pure: no driver, no NCCL, no streams. A test runs the plans of all ranks over a model of their memories (`model.rs`).

#![forbid(unsafe_code)]

mod algorithm;
#[cfg(test)]
pub(crate) mod cases;
pub(crate) mod fold;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod nccl;
mod slabs;
mod step;

use crate::call::element::TypeTag;
use crate::call::job;
use crate::call::op::{DeviceCode, ReduceOp};

pub(crate) use algorithm::{Capabilities, DeviceAlgorithm, FoldOp, NcclOp, explain};
pub(crate) use fold::Folding;
#[cfg(test)]
pub(crate) use model::combine;
pub(crate) use nccl::Library;
pub(crate) use step::{FoldArguments, Folder, Plan, Ranks, Scratch, Step, StepEvent, StreamRole, Transfer};

/// A checked collective on device memory. Its number is [`DeviceBackend::number`](crate::device::DeviceBackend::number)'s.
pub(crate) type Job = job::Job<u64, u64, Reduction>;

/// How elements are folded on a device.
#[derive(Debug, Clone)]
pub(crate) enum Reduction {
    /// By NCCL or one of our kernels. The element type is the call's.
    Builtin(ReduceOp),
    /// By a kernel of the caller's.
    User(DeviceCode),
}

/// One message to or from a peer, checked. NCCL knows no tags and no shorter messages: both ends name the same length, and one type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message {
    /// The other end.
    pub(crate) peer: usize,
    /// Whether this rank sends.
    pub(crate) sends: bool,
    /// Device address.
    pub(crate) address: u64,
    /// Length in bytes.
    pub(crate) bytes: usize,
    /// What it is made of.
    pub(crate) element: TypeTag,
}
