//! Data-parallel training with candle and collectives-candle.

mod model;
mod sharded;
mod training;

use collectives::Communicator;
use training_common::{Options, Outcome};

pub use model::Network;

/// Trains on this rank's share of every batch, with whole or with sharded parameters.
///
/// # Errors
///
/// The errors of candle and of any collective.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    if options.fully_sharded { sharded::train(comm, options) } else { training::train(comm, options) }
}
