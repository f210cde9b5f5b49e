//! Interoperation with other programs: PyTorch's store and launcher, MPI launchers, Slurm, and the variables that
//! Kubernetes sets. `tests/interop/setup` installs them. If one is absent, the test prints a line and counts as
//! skipped. It fails if `COLLECTIVES_INTEROP_REQUIRE` names the part of the setup that installs it (`launchers`,
//! `torch`).
//!
//! Scripts in Python are in this folder; each begins with its arguments. A store does not answer a `set`, so a second
//! connection may not see the value yet. A test must first ask for something on the connection that has set it.

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

/// Returns the Python that has PyTorch, or ends the test.
macro_rules! python {
    () => {
        match crate::peer::Python::find() {
            Ok(python) => python,
            Err(why) => crate::skip!("{why}"),
        }
    };
}
pub(crate) use python;
