//! The real others: PyTorch's store and launcher, the MPIs' launchers, Slurm, and what Kubernetes sets. `tests/interop/setup` installs
//! them. What is absent is said in one line, and the test counts as skipped, or fails where `COLLECTIVES_INTEROP_REQUIRE` names the part
//! of the setup that brings it (`launchers`, `torch`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod dlpack;
mod gloo;
mod kubernetes;
mod mpi;
mod named_hosts;
mod nccl;
#[cfg(feature = "cuda")]
mod nccl_gpu;
mod numpy;
mod peer;
mod rank;
mod slurm;
mod slurm_cluster;
mod splitter;
mod torch_client;
mod torch_server;
mod torchrun;

pub(crate) use common::hosts::skip;

/// The Python that has PyTorch, or the end of the test.
macro_rules! python {
    () => {
        match crate::peer::Python::find() {
            Ok(python) => python,
            Err(why) => crate::skip!("{why}"),
        }
    };
}
pub(crate) use python;
