//! Data-parallel training with candle and collectives-candle.

mod model;
mod training;

pub use model::Network;
pub use training::train;
