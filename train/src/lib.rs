//! Training on many ranks: gradients averaged in buckets during the backward pass.
//!
//! [`DataParallel`] does for a training loop what torch's `DistributedDataParallel` does. `DataParallel` gives all
//! ranks the same initial parameters, and averages gradients in large pieces in the background. If the ranks'
//! parameters differ, or a rank lacks a gradient, every rank gets an error. This crate depends on no tensor crate:
//! gradients are slices or any other [`Buffer`](collectives::Buffer). You pass gradients one by one, or all together.
//! With the feature `checkpoint`, the module `checkpoint` saves models, and loads them with any number of ranks, and
//! `StateTransfer` gives state to ranks that join a running job.
//!
//! This crate uses only the public interface of the crate `collectives`. The functions of this crate take a
//! [`Communicator`](collectives::Communicator).
//!
//! # Features
//!
//! - `cuda` (on by default): gradients on devices.
//! - `checkpoint`: the module `checkpoint`, and `StateTransfer`.
//! - `float8`: the element types of the crate `float8` in checkpoints.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod agreement;
mod any_flat;
mod bucket;
mod buckets;
mod bytes;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
mod comparison;
mod data_parallel;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "checkpoint")]
mod event;
mod finite;
mod flat;
mod fully_sharded;
mod hook;
mod host;
#[doc(hidden)]
#[cfg(all(feature = "__internals", feature = "checkpoint"))]
pub mod internals {
    //! Functions that the fuzz targets call. Not part of the interface.

    pub use crate::checkpoint::fuzz;
    pub use crate::state_transfer::fuzz as state_transfer;
}
#[cfg(feature = "cuda")]
mod kernels;
mod layout;
mod loss_scaler;
mod matrix;
mod mesh;
mod metrics;
mod parameter;
mod power_sgd;
mod random;
mod replicas;
mod same;
mod sampler;
mod seed;
mod shard;
mod sharded;
#[cfg(feature = "checkpoint")]
mod state_transfer;
mod step_health;
mod step_order;
mod stop_flag;
mod tuning;

pub use data_parallel::{Averaged, DataParallel};
pub use finite::check_finite;
pub use flat::Flat;
pub use fully_sharded::{FullySharded, FullyShardedOptions, ReducedGradients, ShardingStrategy, Unit};
pub use hook::{AllReduce, Compress, Hook, Progress};
pub use layout::{BucketLayout, Missing, Options, Slot};
pub use loss_scaler::{LossScaler, LossScalerOptions, LossScalerState};
pub use mesh::Mesh;
pub use metrics::Metrics;
pub use parameter::{Float, Parameter};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use replicas::check_replicas;
pub use same::check_same;
pub use sampler::{Sampler, Samples, UnevenEnd};
pub use seed::seed_for;
pub use shard::Shard;
pub use sharded::{ShardedOptimizer, Shards, Updated};
#[cfg(feature = "checkpoint")]
pub use state_transfer::{StateTransfer, TransferProgress};
pub use stop_flag::StopFlag;

/// The guide, so that `cargo test --doc` compiles its code and runs the code that needs no launcher and no GPU.
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
        #[cfg(feature = "checkpoint")]
        checkpoints = "../docs/checkpoints.md";
        readme = "../README.md";
        #[cfg(feature = "cuda")]
        training = "../docs/training.md";
        training_loops = "../docs/training-loops.md";
        training_membership = "../docs/training-membership.md";
        training_sharding = "../docs/training-sharding.md";
        training_tensors = "../docs/training-tensors.md";
    }
}
