//! burn with collectives: data-parallel training on burn's CPU backend.

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
/// The errors of any collective.
pub fn train(comm: &Communicator, options: &Options) -> anyhow::Result<Outcome> {
    if options.fully_sharded { sharded::train(comm, options) } else { training::train(comm, options) }
}
