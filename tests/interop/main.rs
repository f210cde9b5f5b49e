//! The real others: PyTorch's store and launcher, the MPIs' launchers, Slurm, and what Kubernetes sets. `tests/interop/setup` installs
//! them. What is absent is said in one line, and the test counts as skipped.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod gloo;
mod kubernetes;
mod mpi;
mod named_hosts;
mod nccl;
#[cfg(feature = "cuda")]
mod nccl_gpu;
mod peer;
mod rank;
mod slurm;
mod slurm_cluster;
mod splitter;
mod torch_client;
mod torch_server;
mod torchrun;

/// What says that a test did not run.
macro_rules! skip {
    ($($why:tt)*) => {{
        println!("skipped: {}", format_args!($($why)*));
        return;
    }};
}
pub(crate) use skip;

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
