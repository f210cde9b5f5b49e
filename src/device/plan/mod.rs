//! What a device call is made of, as plain values: which algorithm a reduction takes, and the steps that a call becomes.
//!
//! Pure: no driver, no NCCL, no streams. A test runs the plans of all ranks over a model of their memories (`model.rs`).

#![forbid(unsafe_code)]

mod algorithm;
mod arguments;
#[cfg(test)]
pub(crate) mod cases;
pub(crate) mod fold;
mod job;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod nccl;
mod slabs;
mod step;

pub(crate) use algorithm::{Capabilities, DeviceAlgorithm, FoldOp, NcclOp, explain};
pub(crate) use arguments::FoldArguments;
pub(crate) use fold::Folding;
pub(crate) use job::{Job, Message, Reduction};
#[cfg(test)]
pub(crate) use model::combine;
pub(crate) use nccl::Library;
pub(crate) use step::{Folder, Plan, Ranks, Scratch, Step, StepEvent, StreamRole, Transfer};
