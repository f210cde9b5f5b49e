//! Trains a network on two spirals with burn: `burn-ddp --ranks 2`, or under a launcher.

use clap::Parser as _;
use collectives::Communicator;
use training_common::{Options, print_once};

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let outcomes = options.run(|comm: &Communicator| Ok((comm.rank() == 0, burn_ddp::train(comm, &options)?)))?;
    let is_first = outcomes.first().is_some_and(|(is_first, _)| *is_first);
    print_once(&outcomes.into_iter().map(|(_, outcome)| outcome).collect::<Vec<_>>(), &options, is_first);
    Ok(())
}
