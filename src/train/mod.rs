//! Training on many ranks: gradients averaged in buckets while the backward pass goes on.
//!
//! [`DataParallel`] is what a training loop needs of torch's `DistributedDataParallel`: parameters that are the same everywhere at the
//! start, gradients that are averaged in large pieces and in the background, and errors where ranks or steps do not fit together. It
//! knows no tensor crate: gradients are slices (or any [`Buffer`](crate::Buffer)), handed in one by one or all at once. With the feature
//! `checkpoint`, `checkpoint` saves and loads, by any number of ranks.

mod agreement;
mod bucket;
mod buckets;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
mod data_parallel;
#[cfg(feature = "cuda")]
mod device;
mod flat;
mod hook;
mod host;
mod layout;
mod matrix;
mod parameter;
mod power_sgd;
mod sharded;

pub use data_parallel::{Averaged, DataParallel};
pub use flat::Flat;
pub use hook::{AllReduce, Compress, Hook, Progress};
pub use layout::{BucketLayout, Missing, Options, Slot};
pub use parameter::{Float, Parameter};
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use sharded::{Shard, ShardedOptimizer, Shards, Updated};
