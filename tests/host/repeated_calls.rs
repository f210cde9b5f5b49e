//! Calls over links that are made repeatedly: their plans are kept, by shape.

use std::time::Instant;

use crate::allocations::allocations;
use crate::common::cases::{movements, reductions};
use crate::common::random::Random;
use crate::common::ranks::{Wiring, communicators_with, each, patience, threads, threads_with};

use collectives::{Communicator, ReduceOp};

/// The number of tries. A rank that sleeps for the first time allocates memory for it.
const TRIES: usize = 10;

/// Makes each collective whose arguments allocate nothing once. `block` has one rank's elements and `wide` those of
/// all.
fn make_all(comm: &Communicator, wide: &mut [u32], block: &mut [u32]) {
    let op = ReduceOp::Sum;
    comm.all_reduce(block, op).unwrap();
    comm.all_reduce_into(&*block, &mut wide[..block.len()], op).unwrap();
    comm.reduce(block, 1, op).unwrap();
    comm.broadcast(block, 1).unwrap();
    comm.all_gather_into(&*block, wide).unwrap();
    comm.reduce_scatter_into(&*wide, block, op).unwrap();
    comm.all_to_all(wide).unwrap();
    comm.gather_into(&*block, (comm.rank() == 0).then_some(&mut *wide), 0).unwrap();
    comm.scatter_into((comm.rank() == 0).then_some(&*wide), block, 0).unwrap();
    comm.barrier().unwrap();
}

#[test]
fn a_call_of_a_known_shape_allocates_nothing() {
    for algorithm in [None, Some("doubling:0-,binomial:0-"), Some("ring:0-,chain:0-,scatter_gather:0-"), Some("direct:0-")] {
        let builder = |rank| match algorithm {
            Some(ranges) => Wiring::Tcp.builder(rank).configure(|config| config.algorithms = ranges.parse().unwrap()),
            None => Wiring::Tcp.builder(rank),
        };
        threads_with(2, builder, |comm| {
            // From one element to several segments. The plans of all shapes fit at once.
            for count in [1, 256, 200_000] {
                let (mut wide, mut block) = (vec![1; 2 * count], vec![1; count]);
                assert_ne!(allocations(|| make_all(comm, &mut wide, &mut block)), 0, "the first time of {count} with {algorithm:?}");
                let again = (0..TRIES).map(|_| allocations(|| make_all(comm, &mut wide, &mut block))).min();
                assert_eq!(again, Some(0), "{TRIES} times more of {count} with {algorithm:?}");
            }
        });
    }
}

#[test]
fn the_first_long_wait_in_shared_memory_allocates_nothing() {
    let comms = communicators_with(3, |rank| Wiring::Shm.builder(rank));
    let waiting = comms[0].flight_recorder();
    each(comms, |comm| {
        let mut elements = [1_i32; 9];
        // From here on, all shapes are known.
        (0..2).for_each(|_| comm.all_reduce(&mut elements, ReduceOp::Max).unwrap());
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            let deadline = Instant::now() + patience(20);
            while waiting.records().last().is_none_or(|last| last.waiting_for != [2]) {
                assert!(Instant::now() < deadline, "{:?}", waiting.records());
                std::thread::yield_now();
            }
        }
        let allocated = allocations(|| comm.all_reduce(&mut elements, ReduceOp::Max).unwrap());
        assert_eq!(allocated, 0, "rank {}", comm.rank());
    });
}

#[test]
fn a_plan_that_was_pushed_out_is_made_again() {
    const SHAPES: usize = 40;
    threads(Wiring::Tcp, 2, |comm| {
        let mut elements = [1_u32; SHAPES + 1];
        let mut of = |count: usize| allocations(|| comm.all_reduce(&mut elements[..count], ReduceOp::Max).unwrap());
        assert_ne!(of(1), 0);
        assert_eq!((0..TRIES).map(|_| of(1)).min(), Some(0));
        let first: Vec<usize> = (2..=SHAPES).map(&mut of).collect();
        assert!(first.iter().all(|count| *count > 0), "{first:?}");
        assert_ne!(of(1), 0, "{SHAPES} shapes were kept");
        assert_eq!((0..TRIES).map(|_| of(SHAPES)).min(), Some(0));
    });
}

#[test]
fn shapes_that_take_turns_do_not_disturb_each_other() {
    let (mut random, seed) = Random::new();
    eprintln!("seed {seed}");
    // A few shapes are frequent and others rare. Each pass makes about thirty calls of one count.
    let counts: Vec<usize> = (0..8).map(|_| 1 + random.below(3000)).collect();
    let turns: Vec<(usize, ReduceOp)> = (0..24)
        .map(|_| {
            let often = 1 + random.below(counts.len());
            (counts[random.below(often)], [ReduceOp::Sum, ReduceOp::Max][random.below(2)])
        })
        .collect();
    for (wiring, ranks) in [(Wiring::Tcp, 2), (Wiring::Tcp, 3), (Wiring::Dealt, 5)] {
        threads(wiring, ranks, |comm| {
            for (turn, (count, op)) in turns.iter().enumerate() {
                reductions::<u32>(comm, *op, *count, seed % 1000 + turn as u64);
                // The same bytes in different elements.
                reductions::<u8>(comm, *op, 4 * *count, seed % 1000 + turn as u64);
                movements::<u16>(comm, *count, seed % 1000 + turn as u64);
            }
        });
    }
}
