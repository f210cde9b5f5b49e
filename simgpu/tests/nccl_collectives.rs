//! The results of the simulated NCCL, called through its C interface and compared with an independent oracle.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;
#[path = "../../src/base/random.rs"]
mod random;

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode};
use nccl_common::oracle::{self, SIZES};
use nccl_common::*;
use random::Random;

const SEED: u64 = 20_261_121;
const U8: c_int = 1;
const F32: c_int = 7;

/// Returns the input of each rank.
fn inputs(ranks: usize, kind: usize, count: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(seed);
    let mut input = || {
        let mut bytes = random.bytes(count * SIZES[kind]);
        oracle::tame(kind, &mut bytes);
        bytes
    };
    (0..ranks).map(|_| input()).collect()
}

#[test]
fn every_operator_reduces_every_type_as_nccl_does() {
    let _alone = alone();
    println!("seed {SEED}");
    for ranks in [2, 3] {
        in_ranks(ranks, move |rank| {
            for kind in 0..12 {
                for op in oracle::SUM..=oracle::AVG {
                    reduce_all_ways(rank, kind, op, SEED + kind as u64);
                }
            }
        });
    }
    expect_clean();
}

fn reduce_all_ways(rank: &Rank, kind: usize, op: c_int, seed: u64) {
    let (count, size) = (9, SIZES[kind]);
    let brought = inputs(rank.size, kind, count * rank.size, seed);
    let expected = oracle::reduce(kind, op, &brought, None);
    let check = |name: &str, found: &[u8], expected: &[u8]| {
        assert!(
            oracle::same(kind, found, expected),
            "{name} of type {kind} by {op} at rank {}: {found:x?} is not {expected:x?}",
            rank.rank
        );
    };
    let (comm, stream, kind_) = (rank.comm, rank.stream(), kind as c_int);
    let from = rank.upload(&brought[rank.rank]);
    let into = rank.room(expected.len());
    ok(ncclAllReduce(rank.at(&from), rank.at(&into), count * rank.size, kind_, op, comm, stream));
    check("all-reduce", &rank.download(&into), &expected);
    let root = rank.size - 1;
    let into = rank.room(expected.len());
    ok(ncclReduce(rank.at(&from), rank.at(&into), count * rank.size, kind_, op, root as c_int, comm, stream));
    let untouched = vec![0xee; expected.len()];
    let found = rank.download(&into);
    if rank.rank == root {
        check("reduce", &found, &expected)
    } else {
        assert_eq!(found, untouched)
    }
    let own = rank.rank * count * size;
    ok(ncclReduceScatter(rank.at(&from), rank.at(&from) + own as u64, count, kind_, op, comm, stream));
    check("reduce-scatter in place", &rank.download(&from)[own..own + count * size], &expected[own..own + count * size]);
}

#[test]
fn numbers_beat_nans_and_float_averages_are_biased_as_documented() {
    let _alone = alone();
    in_ranks(3, |rank| {
        let brought: Vec<Vec<u8>> = [[f32::NAN, 1.0, 0.0], [2.0, f32::NAN, -0.0], [1.0, f32::NAN, 0.0]]
            .iter()
            .map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect())
            .collect();
        for op in [oracle::MAX, oracle::MIN, oracle::SUM] {
            let buffer = rank.upload(&brought[rank.rank]);
            ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 3, F32, op, rank.comm, rank.stream()));
            let found = rank.download(&buffer);
            assert!(oracle::same(7, &found, &oracle::reduce(7, op, &brought, None)), "{op}: {found:x?}");
        }
    });
    expect_clean();
}

#[test]
fn scalars_of_each_rank_multiply_before_the_sum() {
    let _alone = alone();
    in_ranks(3, |rank| {
        for kind in 0..12 {
            let brought = inputs(rank.size, kind, 17, SEED);
            let scalars = inputs(rank.size, kind, 1, SEED + 1);
            let expected = oracle::reduce(kind, oracle::SUM, &brought, Some(&scalars));
            let on_device = rank.upload(&scalars[rank.rank]);
            for residence in [0, 1] {
                let mut host = scalars[rank.rank].clone();
                let scalar = if residence == 0 { rank.at(&on_device) as usize } else { host.as_mut_ptr() as usize };
                let mut op = -1;
                ok(ncclRedOpCreatePreMulSum(&raw mut op, scalar as *mut _, kind as c_int, residence, rank.comm));
                host.fill(0);
                let (from, into) = (rank.upload(&brought[rank.rank]), rank.room(expected.len()));
                ok(ncclAllReduce(rank.at(&from), rank.at(&into), 17, kind as c_int, op, rank.comm, rank.stream()));
                let found = rank.download(&into);
                assert!(oracle::same(kind, &found, &expected), "{kind} {residence}: {found:x?} is not {expected:x?}");
                assert_eq!(ncclAllReduce(rank.at(&from), rank.at(&into), 1, (kind as c_int + 1) % 12, op, rank.comm, rank.stream()), 4);
                ok(ncclRedOpDestroy(op, rank.comm));
                assert_eq!(ncclRedOpDestroy(op, rank.comm), 4);
                assert_eq!(ncclRedOpDestroy(3, rank.comm), 4);
            }
        }
    });
    expect_clean();
}

#[test]
fn data_goes_where_each_collective_says() {
    let _alone = alone();
    for ranks in [1, 2, 5] {
        in_ranks(ranks, move |rank| {
            let (n, me, count) = (rank.size, rank.rank, 7);
            let part = |from: usize, to: usize| -> Vec<u8> { (0..count).map(|at| (from * 50 + to * 10 + at) as u8).collect() };
            let (comm, stream) = (rank.comm, rank.stream());
            let parts = |of: &dyn Fn(usize) -> Vec<u8>| (0..n).flat_map(of).collect::<Vec<u8>>();
            let (one, all) = (rank.upload(&part(me, 0)), rank.upload(&parts(&|to| part(me, to))));
            let wide = rank.room(n * count);
            ok(ncclAllGather(rank.at(&one), rank.at(&wide), count, U8, comm, stream));
            assert_eq!(rank.download(&wide), parts(&|from| part(from, 0)));
            ok(ncclAlltoAll(rank.at(&all), rank.at(&wide), count, U8, comm, stream));
            assert_eq!(rank.download(&wide), parts(&|from| part(from, me)));
            for root in 0..n {
                let (narrow, wide) = (rank.room(count), rank.room(n * count));
                ok(ncclBroadcast(rank.at(&one), rank.at(&narrow), count, U8, root as c_int, comm, stream));
                assert_eq!(rank.download(&narrow), part(root, 0));
                ok(ncclScatter(rank.at(&all), rank.at(&narrow), count, U8, root as c_int, comm, stream));
                assert_eq!(rank.download(&narrow), part(root, me));
                ok(ncclGather(rank.at(&one), rank.at(&wide), count, U8, root as c_int, comm, stream));
                let gathered = if me == root { parts(&|from| part(from, 0)) } else { vec![0xee; n * count] };
                assert_eq!(rank.download(&wide), gathered);
                let buffer = rank.upload(&part(me, 0));
                ok(ncclBcast(rank.at(&buffer), count, U8, root as c_int, comm, stream));
                assert_eq!(rank.download(&buffer), part(root, 0));
            }
        });
    }
    expect_clean();
}

#[test]
fn a_ring_of_sends_and_receives_in_one_group_does_not_deadlock() {
    let _alone = alone();
    in_ranks(4, |rank| {
        let (n, me) = (rank.size, rank.rank);
        let from = rank.upload(&[me as u8; 300]);
        let (ring, own) = (rank.room(300), rank.room(300));
        ok(ncclGroupStart());
        ok(ncclGroupStart());
        ok(ncclSend(rank.at(&from), 300, U8, ((me + 1) % n) as c_int, rank.comm, rank.stream()));
        ok(ncclSend(rank.at(&from), 300, U8, me as c_int, rank.comm, rank.stream()));
        ok(ncclGroupEnd());
        ok(ncclRecv(rank.at(&ring), 300, U8, ((me + n - 1) % n) as c_int, rank.comm, rank.stream()));
        ok(ncclRecv(rank.at(&own), 300, U8, me as c_int, rank.comm, rank.stream()));
        ok(ncclGroupEnd());
        assert_eq!(rank.download(&ring), [((me + n - 1) % n) as u8; 300]);
        assert_eq!(rank.download(&own), [me as u8; 300]);
        assert_eq!(simgpu::nccl::group_depth(), 0);
    });
    assert_eq!(simgpu::nccl::bytes_sent(Some("Send"), Some(2)), 300, "what a rank sends to itself is on no wire");
    expect_clean();
}

#[test]
fn transfers_of_a_pair_keep_their_order() {
    let _alone = alone();
    in_ranks(2, |rank| {
        for at in 0..20u8 {
            let buffer = rank.upload(&[at; 8]);
            if rank.rank == 0 {
                ok(ncclSend(rank.at(&buffer), 8, U8, 1, rank.comm, rank.stream()));
            } else {
                let into = rank.room(8);
                ok(ncclRecv(rank.at(&into), 8, U8, 0, rank.comm, rank.stream()));
                assert_eq!(rank.download(&into), [at; 8]);
            }
            rank.wait();
        }
    });
    expect_clean();
}

#[test]
fn one_thread_drives_several_ranks_in_groups() {
    let _alone = alone();
    let mut comms = [std::ptr::null_mut(); 3];
    let ranks: Vec<Rank> = (0..3).map(|rank| Rank::on(rank, rank, 3)).collect();
    ok(ncclCommInitAll(comms.as_mut_ptr(), 3, std::ptr::null()));
    let buffers: Vec<_> = ranks.iter().map(|rank| rank.upload(&[1 + rank.rank as u8; 16])).collect();
    ok(ncclGroupStart());
    for (rank, (buffer, comm)) in ranks.iter().zip(buffers.iter().zip(comms)) {
        ok(ncclAllReduce(rank.at(buffer), rank.at(buffer), 16, U8, oracle::PROD, comm, rank.stream()));
        ok(ncclBcast(rank.at(buffer), 8, U8, 2, comm, rank.stream()));
    }
    ok(ncclGroupEnd());
    for (rank, buffer) in ranks.iter().zip(&buffers) {
        assert_eq!(rank.download(buffer), [6; 16]);
    }
    let mut device = -1;
    ok(ncclCommCuDevice(comms[2], &raw mut device));
    assert_eq!(device, 2);
    comms.iter().for_each(|&comm| ok(ncclCommDestroy(comm)));
    expect_clean();
}

#[test]
fn graphs_replay_collectives() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let buffer = rank.upload(&[0; 64]);
        let (from, comm, stream) = (rank.at(&buffer), rank.comm, rank.stream());
        rank.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        ok(ncclAllReduce(from, from, 64, U8, oracle::SUM, comm, stream));
        ok(ncclGroupStart());
        ok(ncclSend(from, 32, U8, 1 - rank.rank as c_int, comm, stream));
        ok(ncclRecv(from + 32, 32, U8, 1 - rank.rank as c_int, comm, stream));
        ok(ncclGroupEnd());
        let graph = rank.stream.end_capture(Flags(0)).unwrap().unwrap();
        for round in 1..4u8 {
            let fresh = rank.upload(&[round + rank.rank as u8; 64]);
            let target = rank.at(&buffer);
            // SAFETY: both buffers are of 64 bytes.
            unsafe { cudarc::driver::result::memcpy_dtod_async(target, rank.at(&fresh), 64, rank.stream.cu_stream()) }.unwrap();
            graph.launch().unwrap();
            assert_eq!(rank.download(&buffer), [2 * round + 1; 64]);
            // An eager call in between is ordered like any other.
            ok(ncclAllReduce(from, from, 64, U8, oracle::MAX, comm, stream));
        }
        rank.wait();
        drop(graph);
    });
    expect_clean();
}

#[test]
fn calls_on_two_streams_of_one_communicator_run_in_their_order() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let other = rank.context.new_stream().unwrap();
        let buffers = [rank.upload(&[1; 1000]), rank.upload(&[2; 999])];
        for round in 0..50 {
            let streams = [rank.stream(), other.cu_stream().cast()];
            // Without an order between the streams, a rank would run them in the opposite order.
            let gate = (round % 2 == rank.rank).then(|| simgpu::Gate::close(streams[0]));
            for (buffer, stream) in buffers.iter().zip(streams) {
                ok(ncclAllReduce(rank.at(buffer), rank.at(buffer), buffer.len(), U8, oracle::MAX, rank.comm, stream));
            }
            drop(gate);
        }
        other.synchronize().unwrap();
        assert_eq!(rank.download(&buffers[1]), [2; 999]);
    });
    expect_clean();
}

#[test]
fn bytes_and_calls_are_counted() {
    let _alone = alone();
    in_ranks(4, |rank| {
        let (buffer, wide) = (rank.room(400), rank.room(1600));
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 100, F32, oracle::SUM, rank.comm, rank.stream()));
        ok(ncclAllGather(rank.at(&buffer), rank.at(&wide), 400, U8, rank.comm, rank.stream()));
        assert_eq!(simgpu::nccl::calls_of_this_thread("ncclAllReduce"), 1);
    });
    assert_eq!(simgpu::nccl::calls("ncclAllReduce"), 4);
    assert_eq!(simgpu::nccl::bytes_sent(Some("AllReduce"), Some(3)), 600);
    assert_eq!(simgpu::nccl::bytes_sent(None, Some(0)), 600 + 1200);
    assert_eq!(simgpu::nccl::bytes_sent(None, None), 4 * 1800);
    expect_clean();
}

#[test]
fn a_mebibyte_among_eight_ranks_does_not_take_long() {
    let _alone = alone();
    let times = in_ranks(8, |rank| {
        let buffer = Arc::new(rank.room(1 << 20));
        let times = (0..5).map(|_| {
            let begin = std::time::Instant::now();
            ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 1 << 18, F32, oracle::SUM, rank.comm, rank.stream()));
            rank.wait();
            begin.elapsed()
        });
        times.min().unwrap()
    });
    println!("1 MiB among 8 ranks: {:?}", times[0]);
    assert!(times[0].as_millis() < 2000, "{times:?}");
    expect_clean();
}
