//! One call: every rank contributes a number and gets the mean.
//!
//! `cargo launch --nproc-per-node 4 -- target/debug/examples/hello`

use collectives::{Communicator, ReduceOp};

fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let mut mean = comm.rank() as f32;
    comm.all_reduce(&mut mean, ReduceOp::Avg)?;
    println!("rank {} of {}: the mean of all ranks is {mean}", comm.rank(), comm.world_size());
    comm.close()
}
