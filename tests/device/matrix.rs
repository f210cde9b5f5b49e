//! Every collective × op × element type × world size × kind of rank, compared bit by bit with the oracle that also
//! checks the host backend.

use collectives::{Config, F8E4M3, ReduceOp, bf16};

use super::gpu::{DeviceMemory, process_ranks, ranks, ranks_with};
use crate::common::cases::{everything_in, movements_in, reductions_in};
use crate::common::ranks::alone_in_a_process;

/// The fixed seed of the inputs. Every failure prints the seed it used.
const SEED: u64 = 0xdec1ce;

/// The counts at which every op and type is checked.
const COUNTS: [usize; 3] = [0, 1, 13];

/// Enough elements for several slabs of the scratch memory in these tests.
const LARGE: usize = 30_011;

macro_rules! world_sizes {
    ($($threads:ident $processes:ident $world_size:literal;)*) => {$(
        #[test]
        fn $threads() {
            ranks($world_size, |comm, memory| everything_in(memory, comm, &COUNTS, SEED));
        }

        #[test]
        fn $processes() {
            process_ranks(concat!("matrix::", stringify!($processes)), $world_size, |comm, memory| {
                everything_in(memory, comm, &[13], SEED);
            });
        }
    )*};
}

world_sizes! {
    threads_1 processes_1 1;
    threads_2 processes_2 2;
    threads_3 processes_3 3;
    threads_4 processes_4 4;
    threads_8 processes_8 8;
}

#[test]
fn everything_on_foreign_streams() {
    for world_size in [1, 2, 3, 4, 8] {
        ranks(world_size, |comm, memory| {
            let stream = memory.stream.context().new_stream().unwrap();
            everything_in(memory, &comm.with_stream(&stream), &[13], SEED);
        });
    }
}

#[test]
fn everything_inside_graphs() {
    // Creating the first stream of a context ends the captures in it, and other tests do that.
    alone_in_a_process("matrix::everything_inside_graphs", || {
        for world_size in [1, 2, 3, 4, 8] {
            ranks(world_size, |comm, memory| {
                let stream = memory.stream.context().new_stream().unwrap();
                everything_in(&DeviceMemory::capturing(comm, &stream), &comm.with_stream(&stream), &[13], SEED);
            });
        }
    });
}

/// Returns settings under which large calls take many slabs.
fn little_scratch() -> Config {
    let mut config = Config::default();
    config.device_scratch_bytes = 64 << 10;
    config
}

#[test]
fn large_calls_go_through_little_scratch() {
    for world_size in [2, 3, 5] {
        ranks_with(world_size, little_scratch(), |comm, memory| {
            reductions_in::<u32, _>(memory, comm, ReduceOp::BitOr, LARGE, SEED);
            reductions_in::<i16, _>(memory, comm, ReduceOp::Sum, LARGE, SEED + 1);
            reductions_in::<bf16, _>(memory, comm, ReduceOp::Avg, LARGE, SEED + 2);
            reductions_in::<u8, _>(memory, comm, ReduceOp::BitXor, LARGE, SEED + 3);
            reductions_in::<F8E4M3, _>(memory, comm, ReduceOp::Avg, LARGE, SEED + 4);
            reductions_in::<f32, _>(memory, comm, ReduceOp::Avg, LARGE, SEED + 5);
            movements_in::<u64, _>(memory, comm, LARGE, SEED + 6);
        });
    }
}

#[test]
fn a_reproducible_communicator_folds_like_the_host() {
    let mut config = little_scratch();
    config.reproducible = true;
    for world_size in [3, 4] {
        ranks_with(world_size, config.clone(), |comm, memory| {
            everything_in(memory, comm, &[13, 1000], SEED);
            rounding_agrees(comm, memory);
        });
    }
}

/// Checks inputs whose sums are rounded differently in every order. In the reproducible mode both backends nevertheless
/// give the same bits.
fn rounding_agrees(comm: &collectives::Communicator, memory: &super::gpu::DeviceMemory) {
    use crate::common::cases::Memory;
    let rank = comm.rank() as f32;
    let inputs: Vec<f32> = (0..5000).map(|index| (index as f32 + 0.1).sin() * (rank * 3.7 + 1.0).exp()).collect();
    for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Avg] {
        let (mut on_host, mut on_device) = (inputs.clone(), memory.put(&inputs));
        comm.all_reduce(&mut on_host, op).unwrap();
        comm.all_reduce(&mut on_device, op).unwrap();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&memory.get(&on_device)), bits(&on_host), "{op} of f32");
    }
}
