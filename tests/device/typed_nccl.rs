//! Typed calls of a communicator without a host backend: every collective × op × element type against the oracle,
//! messages, streams and threads.

use collectives::{F8E4M3, F8E5M2, ReduceOp, bf16, f16, nccl::NcclCommunicator};

use super::gpu::{DeviceMemory, assert_nothing_found, compared_before, nccl_ranks, patient};
use crate::common::cases::{Memory, ops};
use crate::common::oracle::{Predict, assert_bits, folded, inputs};
use crate::for_every_type;

/// The fixed seed of the inputs. Every failure prints the seed it used.
const SEED: u64 = 0x7c911;

/// Checks every reducing collective with one op and type, in place and not.
fn reductions<T: Predict>(comm: &NcclCommunicator, memory: &DeviceMemory, op: ReduceOp, count: usize, seed: u64) {
    let (n, me, stream) = (comm.world_size(), comm.rank(), &memory.stream);
    let what = |call: &str| format!("{call}({op}, {}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let (root, all, wide) = (seed as usize % n, inputs::<T>(op, seed, n, count), inputs::<T>(op, seed ^ 1, n, count * n));
    let (expected, expected_wide, own) = (folded(op, &all), folded(op, &wide), me * count..(me + 1) * count);
    let (source, wide_source, before) = (memory.put(&all[me]), memory.put(&wide[me]), inputs::<T>(op, 99, 1, count).remove(0));

    let (mut buffer, mut destination) = (memory.put(&all[me]), memory.put(&before));
    comm.all_reduce(&mut buffer, op, stream).unwrap();
    comm.all_reduce_into(&source, &mut destination, op, stream).unwrap();
    assert_bits(&what("all_reduce"), &memory.get(&buffer), &expected);
    assert_bits(&what("all_reduce_into"), &memory.get(&destination), &expected);
    assert_bits(&what("all_reduce_into, the source"), &memory.get(&source), &all[me]);

    let (mut buffer, mut destination) = (memory.put(&all[me]), memory.put(&before));
    comm.reduce(&mut buffer, root, op, stream).unwrap();
    comm.reduce_into(&source, (me == root).then_some(&mut destination), root, op, stream).unwrap();
    assert_bits(&what("reduce"), &memory.get(&buffer), if me == root { &expected } else { &all[me] });
    assert_bits(&what("reduce_into"), &memory.get(&destination), if me == root { &expected } else { &before });

    let (mut buffer, mut destination) = (memory.put(&wide[me]), memory.put(&before));
    comm.reduce_scatter(&mut buffer, op, stream).unwrap();
    comm.reduce_scatter_into(&wide_source, &mut destination, op, stream).unwrap();
    assert_bits(&what("reduce_scatter"), &memory.get(&buffer)[own.clone()], &expected_wide[own.clone()]);
    assert_bits(&what("reduce_scatter_into"), &memory.get(&destination), &expected_wide[own]);
}

/// Checks every moving collective with one type, in place and not.
fn movements<T: Predict>(comm: &NcclCommunicator, memory: &DeviceMemory, count: usize, seed: u64) {
    let (n, me, stream) = (comm.world_size(), comm.rank(), &memory.stream);
    let what = |call: &str| format!("{call}({}, {count}) on rank {me} of {n}, seed {seed}", T::ELEMENT_TYPE);
    let (root, all) = (seed as usize % n, inputs::<T>(ReduceOp::Max, seed, n, count));
    let matrix = inputs::<T>(ReduceOp::Max, seed ^ 3, n, count * n);
    let own = me * count..(me + 1) * count;
    let (source, wide_source) = (memory.put(&all[me]), memory.put(&matrix[me]));

    let (mut buffer, mut destination) = (memory.put(&all[me]), memory.put(&matrix[me][..count]));
    comm.broadcast(&mut buffer, root, stream).unwrap();
    comm.broadcast_into((me == root).then_some(&source), &mut destination, root, stream).unwrap();
    assert_bits(&what("broadcast"), &memory.get(&buffer), &all[root]);
    assert_bits(&what("broadcast_into"), &memory.get(&destination), &all[root]);

    let mut mine = matrix[me].clone();
    mine[own.clone()].copy_from_slice(&all[me]);
    let (mut buffer, mut destination) = (memory.put(&mine), memory.put(&matrix[me]));
    comm.all_gather(&mut buffer, stream).unwrap();
    comm.all_gather_into(&source, &mut destination, stream).unwrap();
    assert_bits(&what("all_gather"), &memory.get(&buffer), &all.concat());
    assert_bits(&what("all_gather_into"), &memory.get(&destination), &all.concat());

    let expected: Vec<T> = matrix.iter().flat_map(|row| row[own.clone()].to_vec()).collect();
    let (mut buffer, mut destination) = (memory.put(&matrix[me]), memory.put(&mine));
    comm.all_to_all(&mut buffer, stream).unwrap();
    comm.all_to_all_into(&wide_source, &mut destination, stream).unwrap();
    assert_bits(&what("all_to_all"), &memory.get(&buffer), &expected);
    assert_bits(&what("all_to_all_into"), &memory.get(&destination), &expected);
}

fn everything(comm: &NcclCommunicator, memory: &DeviceMemory, counts: &[usize]) {
    for (count, seed) in counts.iter().zip(SEED..) {
        for_every_type!(T, {
            for op in ops().into_iter().filter(|op| op.check(<T as collectives::Element>::ELEMENT_TYPE).is_ok()) {
                reductions::<T>(comm, memory, op, *count, seed);
            }
            movements::<T>(comm, memory, *count, seed);
        });
    }
}

#[test]
fn every_collective_op_and_type_gives_what_the_oracle_says() {
    for world_size in [1, 2, 3] {
        nccl_ranks(world_size, patient, |comm, memory| {
            everything(comm, memory, &[0, 13]);
            comm.close().unwrap();
        });
    }
    assert_nothing_found();
}

#[test]
fn the_same_without_comparing() {
    nccl_ranks(
        3,
        |_| compared_before(0),
        |comm, memory| {
            everything(comm, memory, &[13]);
            comm.close().unwrap();
        },
    );
    assert_nothing_found();
}

#[test]
fn large_calls_go_through_little_scratch_in_rank_order() {
    let mut config = patient(0);
    (config.device_scratch_bytes, config.reproducible) = (64 << 10, true);
    nccl_ranks(
        3,
        |_| config.clone(),
        |comm, memory| {
            reductions::<u8>(comm, memory, ReduceOp::BitXor, 30_011, SEED);
            reductions::<f32>(comm, memory, ReduceOp::Sum, 30_011, SEED + 1);
            movements::<u64>(comm, memory, 30_011, SEED + 2);
        },
    );
    assert_nothing_found();
}

#[test]
fn calls_on_several_streams_are_ordered_by_their_buffers() {
    nccl_ranks(3, patient, |comm, memory| {
        let context = memory.stream.context();
        let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let mut buffer = memory.put(&vec![comm.rank() as u32 + 1; 1000]);
        comm.all_reduce(&mut buffer, ReduceOp::Sum, &first).unwrap();
        comm.all_reduce(&mut buffer.slice_mut(..), ReduceOp::Sum, &second).unwrap();
        comm.all_reduce(&mut buffer, ReduceOp::BitOr, &first).unwrap();
        assert_eq!(memory.get(&buffer), vec![18; 1000]);
    });
    assert_nothing_found();
}

#[test]
fn a_buffer_may_be_dropped_as_soon_as_the_call_returns() {
    for config in [patient(0), compared_before(3)] {
        nccl_ranks(
            2,
            |_| config.clone(),
            |comm, memory| {
                let stream = memory.stream.context().new_stream().unwrap();
                for round in 0..20_u64 {
                    let source = memory.put(&vec![round + comm.rank() as u64; 5000]);
                    let mut destination = memory.put(&vec![0_u64; 5000]);
                    comm.all_reduce_into(&source, &mut destination, ReduceOp::Sum, &stream).unwrap();
                    drop(source);
                    let mut bits = memory.put(&vec![round; 5000]);
                    comm.all_reduce(&mut bits, ReduceOp::BitXor, &stream).unwrap();
                    drop(bits);
                    assert_eq!(memory.get(&destination), vec![2 * round + 1; 5000]);
                }
            },
        );
    }
    assert_nothing_found();
}

#[test]
fn threads_that_share_one_make_their_calls_in_turns() {
    nccl_ranks(2, patient, |comm, memory| {
        let me = comm.rank() as u32;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let (comm, stream) = (comm.clone(), memory.stream.context().new_stream().unwrap());
                scope.spawn(move || {
                    let memory = DeviceMemory::on(stream);
                    // All threads make the same call, so any order is the same on all ranks.
                    for _ in 0..20 {
                        let mut buffer = memory.put(&[me + 1; 300]);
                        comm.all_reduce(&mut buffer, ReduceOp::Sum, &memory.stream).unwrap();
                        assert_eq!(memory.get(&buffer), [3; 300]);
                    }
                });
            }
        });
    });
    assert_nothing_found();
}

#[test]
fn messages_go_from_one_to_another_and_round_a_ring() {
    for config in [patient(0), compared_before(2)] {
        nccl_ranks(
            3,
            |_| config.clone(),
            |comm, memory| {
                let (n, me, stream) = (comm.world_size(), comm.rank(), &memory.stream);
                let mut tokens = memory.put(&[7 * me as u16; 33]);
                match me {
                    0 => comm.send(&tokens, 1, stream).unwrap(),
                    1 => comm.recv(&mut tokens, 0, stream).unwrap(),
                    _ => {}
                }
                assert_eq!(memory.get(&tokens), [if me == 1 { 0 } else { 7 * me as u16 }; 33]);
                for round in 0..5 {
                    let (mine, mut theirs) = (memory.put(&vec![10 * round + me as u64; 777]), memory.put(&vec![99_u64; 777]));
                    let group = comm.group(stream, |group| {
                        group.send(&mine, (me + 1) % n)?;
                        group.recv(&mut theirs, (me + n - 1) % n)
                    });
                    group.unwrap();
                    drop(mine);
                    assert_eq!(memory.get(&theirs), vec![10 * round + ((me + n - 1) % n) as u64; 777]);
                }
                comm.group(stream, |_| Ok(())).unwrap();
            },
        );
    }
    assert_nothing_found();
}

#[test]
fn two_ranks_swap_several_messages_in_one_group() {
    nccl_ranks(2, patient, |comm, memory| {
        let (me, other) = (comm.rank(), 1 - comm.rank());
        let (short, long) = (memory.put(&[me as u8 + 1; 3]), memory.put(&[me as f64 + 0.5; 100]));
        let (mut short_back, mut long_back) = (memory.put(&[0_u8; 3]), memory.put(&[0.0_f64; 100]));
        let group = comm.group(&memory.stream, |group| {
            group.send(&short, other)?;
            group.send(&long, other)?;
            group.recv(&mut short_back, other)?;
            group.recv(&mut long_back, other)
        });
        group.unwrap();
        assert_eq!(memory.get(&short_back), [other as u8 + 1; 3]);
        assert_eq!(memory.get(&long_back), [other as f64 + 0.5; 100]);
    });
    assert_nothing_found();
}

#[test]
fn what_is_only_moved_may_be_any_plain_data() {
    nccl_ranks(2, patient, |comm, memory| {
        let stream = &memory.stream;
        let source = stream.clone_htod(&[[comm.rank() as u32, 5]; 4]).unwrap();
        let mut whole = stream.clone_htod(&[[9_u32; 2]; 8]).unwrap();
        comm.all_gather_into(&source, &mut whole, stream).unwrap();
        let got = stream.clone_dtoh(&whole).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(got, [[[0, 5]; 4], [[1, 5]; 4]].concat());
    });
    assert_nothing_found();
}
