//! Collectives on burn's tensors, and data-parallel training across processes and hosts.
//!
//! - [`all_reduce`], [`all_gather`], [`reduce_scatter`], [`broadcast`] and [`all_to_all`] take a tensor of any backend
//!   and return a new one. No gradient flows through these calls.
//! - [`DataParallel`] gives all ranks the same parameters, and averages the gradients over the ranks, after a backward
//!   pass and before the optimiser's step.
//! - [`Trainer`] runs whole training steps: the backward pass, the averaging, and the optimiser's update.
//! - The module [`checkpoint`] saves modules and optimisers, and loads them with any number of ranks.
//! - [`FullySharded`] shards the parameters, the gradients and the optimiser's state over the ranks.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use collectives::{Communicator, ReduceOp};
//!
//! let sums = Communicator::run_local(2, |comm| {
//!     let mine = Tensor::<1>::from_data([1.0 + comm.rank() as f32, 3.0], &Device::default());
//!     let sum = collectives_burn::all_reduce(comm, mine, ReduceOp::Sum).expect("burn");
//!     Ok(sum.into_data().try_into_vec::<f32>().expect("f32"))
//! })?;
//! assert_eq!(sums, [[3.0, 6.0], [3.0, 6.0]]);
//! # Ok::<(), collectives::Error>(())
//! ```
//!
//! All ranks must make the same calls, with the same types and shapes, in the same order. If ranks make different
//! calls, all ranks get an error that names two of these calls. The calls support `f64`, `f32`, `f16`, `bf16` and the
//! integer types. Quantised types and `bool` are not supported. Convert `bool` tensors with burn's method `int` first.
//!
//! A call moves the tensor to the host as [`TensorData`](burn::tensor::TensorData), computes there, and moves the
//! result back. If the backend computes on the host and no other tensor shares the memory, nothing is copied. A tensor
//! on a GPU is copied twice: to the host and back.

#![deny(missing_docs)]

mod calls;
pub mod checkpoint;
mod data;
mod data_parallel;
mod error;
mod fully_sharded;
mod parameters;
mod trainer;
mod units;

pub use calls::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};
pub use data_parallel::{DataParallel, broadcast_parameters};
pub use error::{Error, Result};
pub use fully_sharded::FullySharded;
pub use trainer::Trainer;

/// The README's programs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
