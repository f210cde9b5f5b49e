//! Collectives on candle's tensors, in host or GPU memory, and layers that are split over ranks.
//!
//! - [`all_reduce`], [`all_gather`], [`reduce_scatter`], [`broadcast`] and [`all_to_all`] return a new tensor and are
//!   differentiable. For example, a reduce-scatter computes the gradient of an all-gather. Each of these calls has a
//!   variant that writes to the tensor itself, such as [`all_reduce_in_place`].
//! - [`copy_to_ranks`], [`reduce_from_ranks`], [`gather_from_ranks`] and [`scatter_to_ranks`] begin and end a part of a
//!   model that is split over ranks, as in Megatron. Outside this part, every rank computes the same values.
//! - [`ColumnParallelLinear`], [`RowParallelLinear`] and [`VocabParallelEmbedding`] are layers for such a split part.
//!   [`vocab_parallel_cross_entropy`] computes the loss of logits that are split over the ranks. Each rank reads only
//!   its share of the weights from safetensors files. Layers with the same input, such as queries, keys and values, can
//!   share one matrix. [`AttentionHeads`] computes how many heads a rank has. Layers can contain any module, for
//!   example a quantised matrix. Several threads can share a layer, each with its own communicator.
//! - [`ExpertParallel`] is a mixture of experts that are spread over the ranks.
//! - [`send_tensor`] and [`recv_tensor`] pass tensors between the stages of a pipeline.
//! - [`DataParallel`] averages the gradients of a backward pass. [`FullySharded`] also shards the parameters, the
//!   gradients and the optimiser's state over the ranks.
//! - [`run_local`] runs ranks as threads, for tests. [`cause`] finds the error of a collective in an error of candle.
//! - The module [`checkpoint`] saves variables, and loads them with any number of ranks.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use collectives::ReduceOp;
//! use collectives_candle::{all_gather, all_reduce, run_local};
//!
//! let slopes = run_local(2, |comm| {
//!     let x = Var::new(&[1.0_f32 + comm.rank() as f32, 3.0], &Device::Cpu)?;
//!     let whole = all_gather(comm, &x, 0)?; // [1, 3, 2, 3] on both ranks
//!     let loss = all_reduce(comm, &whole.sqr()?.sum_all()?, ReduceOp::Avg)?;
//!     loss.backward()?.get(&x).expect("it is a leaf").to_vec1::<f32>()
//! })?;
//! assert_eq!(slopes, [[4.0, 12.0], [8.0, 12.0]]); // the gradients of both ranks' losses together
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! All ranks must make the same calls, with the same types and shapes, in the same order. Backward passes make calls
//! too, so all ranks must also run the same backward passes in the same order. If ranks make different calls, all ranks
//! get an error that names two of these calls. candle's error type wraps this error: see [`cause`].
//!
//! All types that candle computes with are supported: `u8`, `u32`, `i16`, `i32`, `i64`, `bf16`, `f16`, `f32`, `f64` and
//! `F8E4M3`. A tensor that is not contiguous is copied first.
//!
//! On GPUs (feature `cuda`), calls run on the communicator's device backend. No test builds this feature, and it has
//! never been run. See [`device_of`].

pub mod checkpoint;
mod column;
#[cfg(feature = "cuda")]
mod cuda;
mod data_parallel;
mod embedding;
mod error;
mod exchange;
mod experts;
mod fully_sharded;
mod function;
mod heads;
mod in_place;
mod local;
mod loss;
mod memory;
mod messages;
mod regions;
mod routing;
mod row;
mod share;

use candle_core::{Device, Result};
use collectives::Communicator;

pub use column::ColumnParallelLinear;
pub use data_parallel::DataParallel;
pub use embedding::VocabParallelEmbedding;
pub use error::cause;
use error::failed;
pub use experts::ExpertParallel;
pub use fully_sharded::{FullySharded, Unit};
pub use function::{all_gather, all_reduce, all_to_all, broadcast, reduce_scatter};
pub use heads::AttentionHeads;
pub use in_place::{all_gather_in_place, all_reduce_in_place, all_to_all_in_place, broadcast_in_place, reduce_scatter_in_place};
pub use local::run_local;
pub use loss::vocab_parallel_cross_entropy;
pub use messages::{recv_tensor, send_tensor};
pub use regions::{copy_to_ranks, gather_from_ranks, reduce_from_ranks, scatter_to_ranks};
pub use row::RowParallelLinear;

/// Returns the device for this rank's tensors: the communicator's GPU, or the CPU if the communicator has no GPU. On a
/// GPU, work on tensors runs on a separate stream. cudarc orders the work on this stream relative to the work on the
/// communicator's stream.
///
/// # Errors
///
/// The errors of candle.
pub fn device_of(comm: &Communicator) -> Result<Device> {
    #[cfg(feature = "cuda")]
    if let Some(device) = comm.device() {
        return Device::new_cuda_with_stream(device.ordinal());
    }
    #[cfg(not(feature = "cuda"))]
    let _ = comm;
    Ok(Device::Cpu)
}

/// The README's program.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
