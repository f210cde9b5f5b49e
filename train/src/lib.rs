//! Training on many ranks: gradients averaged in buckets while the backward pass goes on.
//!
//! [`DataParallel`] is what a training loop needs of torch's `DistributedDataParallel`: parameters that are the same everywhere at the
//! start, gradients that are averaged in large pieces and in the background, and errors where ranks or steps do not fit together. It
//! knows no tensor crate: gradients are slices (or any [`Buffer`](collectives::Buffer)), handed in one by one or all at once. With the feature
//! `checkpoint`, `checkpoint` saves and loads, by any number of ranks.
//!
//! All calls are made on the public face of the crate `collectives`, whose [`Communicator`](collectives::Communicator) they take.
//!
//! # Features
//!
//! `cuda` (on by default): gradients on devices. `checkpoint`: the module `checkpoint`. `float8`: the element types of the crate `float8`
//! in checkpoints.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod agreement;
mod any_flat;
mod bucket;
mod buckets;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
mod data_parallel;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "checkpoint")]
mod event;
mod flat;
mod fully_sharded;
mod hook;
mod host;
#[doc(hidden)]
#[cfg(all(feature = "__internals", feature = "checkpoint"))]
pub mod internals {
    //! What the fuzz targets call; no part of the interface.

    pub use crate::checkpoint::fuzz;
}
#[cfg(feature = "cuda")]
mod kernels;
mod layout;
mod loss_scaler;
mod matrix;
mod mesh;
mod parameter;
mod power_sgd;
mod random;
mod sampler;
mod shard;
mod sharded;
mod step_health;
mod step_order;
mod tuning;

pub use data_parallel::{Averaged, DataParallel};
pub use flat::Flat;
pub use fully_sharded::{FullySharded, FullyShardedOptions, ReducedGradients, ShardingStrategy, Unit};
pub use hook::{AllReduce, Compress, Hook, Progress};
pub use layout::{BucketLayout, Missing, Options, Slot};
pub use loss_scaler::{LossScaler, LossScalerOptions, LossScalerState};
pub use mesh::Mesh;
pub use parameter::{Float, Parameter};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use sampler::{Sampler, Samples, UnevenEnd};
pub use shard::Shard;
pub use sharded::{ShardedOptimizer, Shards, Updated};

/// The guide's code, so that `cargo test --doc` compiles it and runs what needs no launcher and no GPU.
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
        readme = "../README.md";
        #[cfg(all(feature = "checkpoint", feature = "cuda"))]
        training = "../docs/training.md";
    }
}
