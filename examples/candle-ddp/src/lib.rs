//! candle with collectives: data-parallel training, and tensor-parallel layers as inference engines use them.

mod collective;
mod model;
mod parallel_linear;
mod training;

pub use collective::{Call, on_memory_of};
pub use model::Network;
pub use parallel_linear::{ColumnParallel, RowParallel};
pub use training::train;
