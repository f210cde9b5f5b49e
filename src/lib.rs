//! Collective communication between threads, processes, hosts and GPUs: all-reduce, broadcast, gather, scatter,
//! all-to-all, messages. Device support is experimental, and has not run on a real GPU yet.
//!
//! ```
//! use collectives::{Communicator, ReduceOp};
//!
//! // Four ranks as threads of this process.
//! let means = Communicator::run_local(4, |comm| {
//!     let mut gradient = vec![comm.rank() as f32; 1000];
//!     comm.all_reduce(&mut gradient, ReduceOp::Avg)?; // every rank now has the mean
//!     Ok(gradient[0])
//! })?;
//! assert_eq!(means, [1.5; 4]);
//! # Ok::<(), collectives::Error>(())
//! ```
//!
//! The same calls work between processes that a launcher starts, on one host or on several:
//!
//! ```no_run
//! use collectives::{Communicator, ReduceOp};
//!
//! fn main() -> collectives::Result<()> {
//!     let comm = Communicator::from_env()?; // torchrun, collrun, Slurm, mpirun or plain variables
//!     let mut gradient = vec![comm.rank() as f32; 1 << 20];
//!     comm.all_reduce(&mut gradient, ReduceOp::Avg)?;
//!     comm.close()
//! }
//! ```
//!
//! A [`Communicator`] is one rank's handle to a set of ranks that make calls together. Create it from a launcher's
//! variables, from a URL or from your own store ([`Communicator::builder`]), or with [`Communicator::local`] for the
//! threads of one process. Ranks of one host communicate over shared memory, and ranks of different hosts communicate
//! over TCP.
//!
//! The guide explains concepts, failures and performance. It is an mdBook in the repository's folder `docs/`: read
//! `docs/src/SUMMARY.md`, or run `mdbook build docs`.
//!
//! - Collectives are methods of [`Communicator`]. They take any [`Buffer`]: a slice, a vector, an array or a single
//!   element. The elements can be of any [`Element`] type or plain [`Data`] type. Collectives that reduce also take a
//!   [`ReduceOp`] or a [`CustomOp`].
//! - Methods whose names begin with `start_` start *background calls*. Such a method returns a [`Work`] before the call
//!   has ended. The `Work` gives the buffers back at the end of the call.
//! - If the communicator has a GPU (`Builder::device`), the same methods also take device buffers, including cudarc's
//!   slices. Calls with device buffers use NCCL and this crate's own kernels, and are queued on a stream, which
//!   `Communicator::with_stream` chooses. [`nccl`] is the device interface without the host backend. With [`interop`],
//!   calls can use memory of other crates.
//! - [`store`] contains the stores through which ranks find each other. [`flight`] contains the records of the last
//!   calls.
//! - All errors have one type, [`Error`], which gives the operation, the peers involved, and the time the operation
//!   took.
//! - [`observe`] explains how calls are reported to `tracing`, to counters, to trace files and to NVIDIA's profilers.
//!
//! # Features
//!
//! - `cuda` (on by default): support for devices, which is experimental. The crate does not link to the driver or to
//!   NCCL. It loads each of them when it is first needed.
//! - `serde`: collectives and messages with any serialisable value.
//! - `float8`: the element types of the crate `float8`.
//! - `encryption`: encrypted TCP connections ([`Config::encrypt`]).
//!
//! Training on many ranks is in a separate crate, `collectives-train`. Two programs are in separate crates too:
//! `collperf` measures performance, and `collrun` starts ranks.
//!
//! The crate supports only Linux, on 64-bit little-endian processors.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_os = "linux"))]
compile_error!("collectives supports only Linux: it relies on memfd, futexes and other Linux-only system calls");
#[cfg(not(target_pointer_width = "64"))]
compile_error!("collectives supports only 64-bit processors: sizes, and the memory that the ranks of a host share, use 64-bit words");
#[cfg(target_endian = "big")]
compile_error!("collectives supports only little-endian processors: ranks send elements in the byte order of their memory");

mod authentication;
mod base;
mod call;
mod communicator;
mod config;
#[cfg(feature = "cuda")]
mod device;
mod error;
pub mod flight;
mod host;
#[doc(hidden)]
#[cfg(feature = "__internals")]
pub mod internals;
pub mod interop;
#[cfg(test)]
#[path = "../tests/common/meeting.rs"]
#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "the integration tests share it")]
mod meeting;
mod metrics;
pub mod observe;
mod rendezvous;
mod status;

pub use authentication::Secret;
pub use call::Collective;
pub use call::algorithm::{Algorithm, AlgorithmRanges};
pub use call::buffer::{Buffer, BufferMut, TypedBytes};
pub use call::element::{DType, Data, Element, F8E4M3, F8E5M2};
pub use call::op::{CustomOp, ReduceOp, Reduction};
pub use communicator::{AbortHandle, Builder, Communicator, Envelope, Group, Membership, OwnedBuffer, OwnedSource, Received};
#[cfg(feature = "cuda")]
pub use communicator::{Device, DeviceChoice, device_count};
pub use communicator::{SharedBuffer, Work, WorkFuture};
pub use config::{Config, Transport, Waiting};
#[cfg(feature = "cuda")]
pub use cudarc;
pub use error::{Error, Peer, Result};
pub use half::{self, bf16, f16};
pub use rendezvous::error_file::record_failure;

/// Direct access to NCCL: its communicators without the host backend, its settings, and its memory.
///
/// [`NcclCommunicator`](nccl::NcclCommunicator) is for engines that have their own start-up, streams and memory. A
/// [`Communicator`] with a device contains one ([`Device::raw`]).
#[cfg(feature = "cuda")]
pub mod nccl {
    pub use crate::communicator::NcclGroup;
    pub use crate::config::nccl::{CheckDeviceCalls, CtaPolicy, GraphUsage, NcclConfig, NcclLibrary};
    pub use crate::device::{
        NcclAbortHandle, NcclBuffer, NcclCommunicator, RawBuffer, RawCall, Registrable, Registration, ShrinkMode, UniqueId, Window,
    };
}

/// The network interfaces and ports on which a rank listens: the types of [`Config::interfaces`] and
/// [`Config::port_range`].
pub mod network {
    pub use crate::config::{Interfaces, PortRange};
}

/// The stores through which the ranks of a job find each other: over TCP (with PyTorch's protocol), in a file, or in
/// memory. Also the trait for your own store.
pub mod store {
    pub use crate::rendezvous::{FileStore, MemoryStore, PrefixStore, Store, TcpStore, TcpStoreServer};
}

/// Items that the expansion of [`element!`] names, and items that the workspace's programs share.
#[doc(hidden)]
pub mod __private {
    pub use core;

    #[cfg(feature = "cuda")]
    pub use crate::device::milliseconds_between;

    /// For the workspace's programs: opening files without blocking, and reading them up to a limit.
    pub mod regular_file {
        pub use crate::base::regular_file::{create, open, read};
    }
}

/// The code of the guide and the README, so that `cargo test --doc` compiles it and runs the parts that need neither a
/// launcher nor a GPU.
#[cfg(doctest)]
mod guide {
    macro_rules! pages {
        ($($(#[$condition:meta])? $name:ident = $file:literal;)*) => {$(
            $(#[$condition])?
            #[doc = include_str!($file)]
            mod $name {}
        )*};
    }

    pages! {
        collectives = "../docs/src/collectives.md";
        concepts = "../docs/src/concepts.md";
        data = "../docs/src/data.md";
        embedding = "../docs/src/embedding.md";
        failures = "../docs/src/failures.md";
        membership = "../docs/src/membership.md";
        first = "../docs/src/first.md";
        from_mpi = "../docs/src/from-mpi.md";
        #[cfg(feature = "cuda")]
        from_nccl = "../docs/src/from-nccl.md";
        from_torch = "../docs/src/from-torch.md";
        from_torchrun = "../docs/src/from-torchrun.md";
        pytorch_backend = "../docs/src/pytorch-backend.md";
        #[cfg(feature = "cuda")]
        gpu = "../docs/src/gpu.md";
        #[cfg(feature = "cuda")]
        gpu_advanced = "../docs/src/gpu-advanced.md";
        hangs = "../docs/src/hangs.md";
        index = "../docs/src/index.md";
        interchange = "../docs/src/interchange.md";
        launchers = "../docs/src/launchers.md";
        messages = "../docs/src/messages.md";
        observing = "../docs/src/observing.md";
        readme = "../README.md";
        settings = "../docs/src/settings.md";
        subgroups = "../docs/src/subgroups.md";
        threads = "../docs/src/threads.md";
        tuning = "../docs/src/tuning.md";
    }
}
