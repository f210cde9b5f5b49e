//! burn with collectives: data-parallel training on burn's CPU backend.

mod model;
mod training;

pub use model::Network;
pub use training::train;
