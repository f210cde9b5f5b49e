//! Training on many ranks: gradients averaged in buckets while the backward pass goes on.
//!
//! [`DataParallel`] is what a training loop needs of torch's `DistributedDataParallel`: parameters that are the same everywhere at the
//! start, gradients that are averaged in large pieces and in the background, and errors where ranks or steps do not fit together. It
//! knows no tensor crate: gradients are slices (or any [`Buffer`](crate::Buffer)), handed in one by one or all at once.

mod averaged;
mod bucket;
mod buckets;
mod compress;
mod data_parallel;
#[cfg(feature = "cuda")]
mod device;
mod flat;
mod float;
mod hook;
mod host;
mod layout;
mod matrix;
mod options;
mod outcome;
mod parameter;
mod pending;
mod power_sgd;
mod sharded;
mod squares;

pub use averaged::Averaged;
pub use compress::Compress;
pub use data_parallel::DataParallel;
pub use flat::Flat;
pub use float::Float;
pub use hook::{AllReduce, Hook, Progress};
pub use layout::{BucketLayout, Slot};
pub use options::{Missing, Options};
pub use parameter::Parameter;
pub use power_sgd::{PowerSgd, PowerSgdOptions};
pub use sharded::{Shard, ShardedOptimizer, Shards, Updated};
