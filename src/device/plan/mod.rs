//! The parts of a device call, as plain values: the checked job, the algorithm of a reduction, and the steps of the
//! call.
//!
//! This module is pure: it uses no driver, no NCCL and no streams. A test runs the plans of all ranks over a model of
//! their memories (`model.rs`).

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

/// A checked collective on device memory. [`DeviceBackend::number`](crate::device::DeviceBackend::number) sets its
/// number.
pub(crate) type Job = job::Job<u64, u64, Reduction>;

/// How elements are folded on a device.
#[derive(Debug, Clone)]
pub(crate) enum Reduction {
    /// By NCCL or one of this crate's kernels. The element type is the call's.
    Builtin(ReduceOp),
    /// By a custom kernel.
    User(DeviceCode),
}

/// One checked message to or from a peer. NCCL has no tags and no shorter messages: both ends pass the same length and
/// type.
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
    /// The element type.
    pub(crate) element: TypeTag,
}
