//! Two kinds of groups of the same ranks: the even ranks, by a list, and rows of two ranks, by colour.
//!
//! `cargo launch --nproc-per-node 4 -- target/debug/examples/subgroup`

use collectives::{Communicator, ReduceOp};

fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let even: Vec<usize> = (0..comm.world_size()).step_by(2).collect();
    if let Some(group) = comm.subgroup(&even)? {
        let mut sum = comm.rank() as i64;
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        println!("rank {} is {} of the even ranks, whose sum is {sum}", comm.rank(), group.rank());
        assert_eq!(sum, even.iter().sum::<usize>() as i64);
    }
    let row = comm.split(Some(comm.rank() as u32 / 2), comm.rank() as i64)?;
    if let Some(row) = row {
        let mut members = vec![0_u64; row.world_size()];
        row.all_gather_into(&(comm.rank() as u64), &mut members)?;
        println!("rank {}: my row is {members:?}", comm.rank());
    }
    comm.close()
}
