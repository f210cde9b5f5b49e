//! Ranks that call different things: each of them gets an error that names both calls and both ranks, within a second, and no
//! buffer is touched.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::ranks::{Meeting, Wiring, patience, threads};

use collectives::{Communicator, CustomOp, Envelope, Error, ReduceOp, Result};

/// What a rank of a mismatched call sees, and how long it took.
struct Seen {
    error: Error,
    elapsed: Duration,
}

/// Runs `call` on every rank with a buffer of `count(rank)` elements; every rank must fail, and its buffer keep its content.
fn mismatched(
    wiring: Wiring,
    ranks: usize,
    count: impl Fn(usize) -> usize + Sync,
    call: impl Fn(&Communicator, &mut [f32]) -> Result<()> + Sync,
) {
    let everyone = Meeting::new(ranks);
    let seen = threads(wiring, ranks, |comm| {
        // A call that agrees first, so that links are open and numbers have moved on. A rank that is still in it when another finds
        // a disagreement in the next would hear of that at once.
        comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
        everyone.meet();
        let before: Vec<f32> = (0..count(comm.rank())).map(|index| (index * 10 + comm.rank()) as f32).collect();
        let mut buffer = before.clone();
        let begin = Instant::now();
        let error = call(comm, &mut buffer).expect_err("ranks that disagree must fail");
        let elapsed = begin.elapsed();
        assert_eq!(buffer, before, "rank {}: the buffer was touched", comm.rank());
        let again = comm.barrier().expect_err("the communicator is ended");
        assert!(again.is_poisoned() && again.is_mismatch(), "{again}");
        Seen { error, elapsed }
    });
    for (rank, Seen { error, elapsed }) in seen.iter().enumerate() {
        let Error::Mismatch { first, first_call, second, second_call } = error else {
            panic!("rank {rank} of {ranks}, {wiring:?}: {error}")
        };
        assert_ne!(first.rank, second.rank, "{error}");
        assert_ne!(first_call, second_call, "{error}");
        assert!(first.pid == std::process::id() && !second.host.is_empty(), "{error}");
        assert!(*elapsed < patience(1), "rank {rank} of {ranks}, {wiring:?}: {elapsed:?}");
    }
}

fn everywhere(count: impl Fn(usize) -> usize + Sync + Copy, call: impl Fn(&Communicator, &mut [f32]) -> Result<()> + Sync + Copy) {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5, 8] {
            mismatched(wiring, ranks, count, call);
        }
    }
}

#[test]
fn another_collective() {
    everywhere(|_| 8, |comm, x| if comm.rank() == 1 { comm.broadcast(x, 0) } else { comm.all_reduce(x, ReduceOp::Sum) });
    everywhere(|_| 40_000, |comm, x| if comm.rank() == 0 { comm.barrier() } else { comm.broadcast(x, 0) });
    // 840 is a multiple of every world size.
    everywhere(|_| 840, |comm, x| if comm.rank() == 1 { comm.all_to_all(x) } else { comm.all_gather(x) });
}

#[test]
fn another_op() {
    everywhere(|_| 8, |comm, x| comm.all_reduce(x, if comm.rank() == 1 { ReduceOp::Max } else { ReduceOp::Sum }));
    everywhere(|_| 300_000, |comm, x| comm.all_reduce(x, if comm.rank() == 0 { ReduceOp::Avg } else { ReduceOp::Sum }));
}

#[test]
fn another_count() {
    everywhere(|rank| if rank == 1 { 9 } else { 8 }, |comm, x| comm.all_reduce(x, ReduceOp::Sum));
    everywhere(|rank| if rank == 1 { 400_000 } else { 8 }, |comm, x| comm.all_reduce(x, ReduceOp::Sum));
    everywhere(|rank| if rank == 0 { 8 } else { 100_000 }, |comm, x| comm.broadcast(x, 0));
    everywhere(|rank| if rank == 0 { 840 } else { 1680 }, |comm, x| comm.reduce_scatter(x, ReduceOp::Sum));
}

#[test]
fn another_root() {
    everywhere(|_| 8, |comm, x| comm.broadcast(x, usize::from(comm.rank() == 1)));
    everywhere(|_| 100_000, |comm, x| comm.reduce(x, usize::from(comm.rank() == 0), ReduceOp::Sum));
}

#[test]
fn another_type() {
    everywhere(
        |_| 8,
        |comm, x| if comm.rank() == 1 { comm.all_reduce(&mut [1_i32; 8], ReduceOp::Sum) } else { comm.all_reduce(x, ReduceOp::Sum) },
    );
    everywhere(|_| 8, |comm, x| if comm.rank() == 1 { comm.broadcast(&mut [[1_u8; 3]; 8], 0) } else { comm.broadcast(x, 0) });
}

#[test]
fn another_custom_op() {
    everywhere(
        |_| 8,
        |comm, x| {
            let name = if comm.rank() == 1 { "one" } else { "other" };
            comm.all_reduce(x, CustomOp::new(name, |into: &mut [f32], from: &[f32]| into.copy_from_slice(from)))
        },
    );
}

#[test]
fn other_counts_in_a_variable_collective() {
    for wiring in Wiring::ALL {
        for ranks in [2, 3, 5] {
            let everyone = std::sync::Barrier::new(ranks);
            let errors = threads(wiring, ranks, |comm| {
                everyone.wait();
                let mut counts = vec![2; comm.world_size()];
                if comm.rank() == 1 {
                    counts[0] += 1;
                    counts[1] -= 1;
                }
                let mine = vec![1_u8; counts[comm.rank()]];
                let mut all = vec![9_u8; 2 * comm.world_size()];
                let error = comm.all_gather_v_into(&mine, &mut all, &counts).expect_err("counts differ");
                assert!(all.iter().all(|byte| *byte == 9), "the buffer was touched");
                error
            });
            assert!(errors.iter().all(Error::is_mismatch), "{errors:?}");

            // Only the two ends of a transfer know its count.
            let errors = threads(wiring, ranks, |comm| {
                everyone.wait();
                let n = comm.world_size();
                let send = vec![1; n];
                let receive: Vec<usize> = (0..n).map(|from| if comm.rank() == 1 && from == 0 { 2 } else { 1 }).collect();
                let source = vec![comm.rank() as u8; n];
                let mut destination = vec![9_u8; receive.iter().sum()];
                comm.all_to_all_v_into(&source, &send, &mut destination, &receive).expect_err("counts differ")
            });
            assert!(errors.iter().all(Error::is_mismatch), "{errors:?}");
        }
    }
}

#[test]
fn counts_and_ops_of_one_short_hash_are_told_apart() {
    // Whoever compares 24 bits of FNV-1a takes these for the same.
    let (counts, ops) = ([[690, 3410], [1225, 2875]], ["op 2921", "op 4283"]);
    for wiring in Wiring::ALL {
        let errors = threads(wiring, 2, |comm| {
            let counts = &counts[comm.rank()];
            let mut all = vec![true; 4100];
            let error = comm.all_gather_v_into(&vec![false; counts[comm.rank()]], &mut all, counts).expect_err("counts differ");
            assert!(all.iter().all(|truth| *truth), "the buffer was touched");
            error
        });
        assert!(errors.iter().all(Error::is_mismatch), "{wiring:?}: {errors:?}");
        let errors = threads(wiring, 2, |comm| {
            let mut mine = vec![7_u16; counts[comm.rank()][comm.rank()]];
            let error = comm.reduce_scatter_v_into(&[1_u16; 4100], &mut mine, &counts[comm.rank()], ReduceOp::Sum);
            assert!(mine.iter().all(|value| *value == 7), "the buffer was touched");
            error.expect_err("counts differ")
        });
        assert!(errors.iter().all(Error::is_mismatch), "{wiring:?}: {errors:?}");
        for varied in [false, true] {
            let errors = threads(wiring, 2, |comm| {
                let op = CustomOp::new(ops[comm.rank()], |into: &mut [u16], from: &[u16]| into.copy_from_slice(from));
                let mut x = [comm.rank() as u16; 2];
                let result = if varied { comm.reduce_scatter_v(&mut x, &[1, 1], op) } else { comm.all_reduce(&mut x, op) };
                result.expect_err("the ops differ")
            });
            assert!(errors.iter().all(Error::is_mismatch), "{wiring:?}: {errors:?}");
        }
    }
}

#[test]
fn bad_arguments_are_refused_here_and_leave_the_communicator_alone() {
    threads(Wiring::Shm, 2, |comm| {
        let mut three = [1.0_f32; 3];
        let refused = [
            comm.all_reduce_into(&[1.0_f32; 2], &mut three, ReduceOp::Sum),
            comm.all_gather(&mut three),
            comm.all_gather_into(&[1.0_f32; 2], &mut three),
            comm.reduce_scatter_into(&three.clone(), &mut [0.0_f32], ReduceOp::Sum),
            comm.broadcast(&mut three, 2),
            comm.reduce(&mut three, 99, ReduceOp::Sum),
            comm.scatter_into(None::<&[f32; 4]>, &mut three, comm.rank()),
            comm.gather_into(&three.clone(), Some(&mut [0.0_f32; 6]), 1 - comm.rank()),
            comm.all_to_all_v_into(&three.clone(), &[1, 1], &mut [0.0_f32; 2], &[1, 1]),
            comm.all_gather_v(&mut three, &[3]),
            comm.all_gather_v(&mut three, &[usize::MAX, 4]),
            comm.send(&three.clone(), 2),
            comm.send(&three.clone(), Envelope::rank(1).tag(1 << 63)),
            comm.recv(&mut three, 5).map(drop),
        ];
        for (number, result) in refused.into_iter().enumerate() {
            let error = result.expect_err(&format!("call {number} must be refused"));
            assert!(matches!(error, Error::InvalidArgument { .. }), "call {number}: {error}");
        }
        assert!(comm.all_reduce(&mut [true], ReduceOp::Avg).unwrap_err().is_unsupported());
        assert!(comm.all_reduce(&mut three, ReduceOp::BitOr).unwrap_err().is_unsupported());
        assert!(comm.all_reduce(&mut [1_u8], ReduceOp::PreMulSum(2.0)).unwrap_err().is_unsupported());
        let mut x = comm.rank() as i32;
        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        assert_eq!((x, three), (1, [1.0; 3]));
    });
}
