//! A custom reduction: the greatest value over all ranks and its rank, like MPI's MAXLOC.
//!
//! `cargo launch --nproc-per-node 4 -- target/debug/examples/custom_op`

#![expect(unsafe_code, reason = "promises that any bytes are a value of its type")]

use collectives::{Communicator, CustomOp, Data};

/// A value and the rank that has it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
struct Located {
    value: f32,
    rank: u32,
}

// SAFETY: two 4-byte fields without padding, and any bytes are a valid value.
unsafe impl Data for Located {}

fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let greatest = CustomOp::new("greatest with its rank", |into: &mut [Located], from: &[Located]| {
        for (a, b) in into.iter_mut().zip(from) {
            if (b.value, a.rank) > (a.value, b.rank) {
                *a = *b;
            }
        }
    });
    let rank = comm.rank() as u32;
    let value = ((rank * 7 + 3) % comm.world_size() as u32) as f32;
    let mut located = [Located { value, rank }];
    comm.all_reduce(&mut located, &greatest)?;
    println!("rank {rank} has {value}; the greatest is {} on rank {}", located[0].value, located[0].rank);
    assert!(located[0].value >= value);
    comm.close()
}
