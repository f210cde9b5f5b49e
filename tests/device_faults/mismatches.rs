//! Ranks whose device calls differ: an error on all of them that names both calls, before anything is queued.

#![expect(unsafe_code, reason = "an op of PTX, and cudarc's tracking of events")]

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use collectives::{
    Communicator, Config, CustomOp, Error, ReduceOp, Result,
    flight::{Backend, Record},
};
use cudarc::driver::CudaSlice;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::common::cases::Memory;
use super::common::ranks::{alone_in_a_process, patience, threads_with};
use super::gpu::{DeviceMemory, alone, builder, compared_before, ranks, ranks_with, unchecked};

/// A kernel that leaves everything as it is.
const IDLE: &str = "
.version 8.0
.target sm_70
.address_size 64
.visible .entry fold_user(
    .param .u64 inputs, .param .u64 stride, .param .u64 own, .param .u32 own_index,
    .param .u32 ranks, .param .u64 output, .param .u64 count, .param .u32 divisor)
{
    ret;
}
";

fn idle(name: &str) -> CustomOp<u32> {
    // SAFETY: it touches no memory.
    unsafe { CustomOp::<u32>::on_device(name, "a").with_ptx(IDLE, "fold_user") }
}

/// A call that differs on one rank.
type Deviant = fn(&Communicator, &DeviceMemory, bool) -> Result<()>;

/// The difference, the call, and what the error must contain about each rank's call.
const CASES: [(&str, Deviant, [&str; 2]); 10] = [
    (
        "kind",
        |comm, memory, differs| {
            let mut buffer = memory.put(&[1_u32; 4]);
            if differs { comm.broadcast(&mut buffer, 0) } else { comm.all_reduce(&mut buffer, ReduceOp::Sum) }
        },
        ["all_reduce(", "broadcast("],
    ),
    (
        "op",
        |comm, memory, differs| comm.all_reduce(&mut memory.put(&[1_u32; 4]), if differs { ReduceOp::BitOr } else { ReduceOp::Sum }),
        ["sum, ", "bor, "],
    ),
    (
        "element type",
        |comm, memory, differs| match differs {
            true => comm.all_reduce(&mut memory.put(&[1_f32; 4]), ReduceOp::Max),
            false => comm.all_reduce(&mut memory.put(&[1_i32; 4]), ReduceOp::Max),
        },
        ["i32", "f32"],
    ),
    (
        "count",
        |comm, memory, differs| comm.all_reduce(&mut memory.put(&vec![1_u8; if differs { 5 } else { 4 }]), ReduceOp::Sum),
        ["count 4", "count 5"],
    ),
    ("root", |comm, memory, differs| comm.broadcast(&mut memory.put(&[1_u8; 4]), usize::from(differs)), ["root 0", "root 1"]),
    (
        "the name of a custom op",
        |comm, memory, differs| {
            let op = idle(if differs { "lesser" } else { "greater" });
            comm.all_reduce(&mut memory.put(&[1_u32; 4]), &op)
        },
        ["custom op #", "custom op #"],
    ),
    (
        "counts of a list",
        |comm, memory, differs| {
            let counts = if differs { [1, 2, 3] } else { [3, 2, 1] };
            let mine = memory.put(&vec![1_u8; counts[comm.rank()]]);
            comm.all_gather_v_into(&mine, &mut memory.put(&[0_u8; 6]), &counts)
        },
        ["counts #", "counts #"],
    ),
    (
        "a block exchanged in place",
        |comm, memory, differs| {
            let (n, mut mine) = (comm.world_size(), memory.put(&[1_u32; 6]));
            if differs { comm.all_to_all(&mut mine) } else { comm.all_to_all_into(&memory.put(&vec![1_u32; 2 * n]), &mut mine) }
        },
        ["all_to_all(u32, count 2) number", ", in place"],
    ),
    (
        "the size of a group",
        |comm, memory, differs| {
            let (mut one, mut other) = (memory.put(&[1_u32]), memory.put(&[1_u32]));
            let group = comm.group(|group| {
                group.all_reduce(&mut one, ReduceOp::Sum)?;
                if differs { Ok(()) } else { group.broadcast(&mut other, 0) }
            });
            group.map(drop)
        },
        ["a group of 2 collectives that begins with all_reduce(", "all_reduce("],
    ),
    (
        "a later call of a group",
        |comm, memory, differs| {
            let (mut one, mut other) = (memory.put(&[1_u32]), memory.put(&[1_u32]));
            let group = comm.group(|group| {
                group.all_reduce(&mut one, ReduceOp::Sum)?;
                group.broadcast(&mut other, if differs { 2 } else { 1 })
            });
            group.map(drop)
        },
        ["root 1", "root 2"],
    ),
];

/// Checks that each difference is an error on every rank, and that the communicator stays usable.
fn every_difference_is_told(comm: &Communicator, memory: &DeviceMemory) {
    for (what, call, words) in CASES {
        let differs = comm.rank() == comm.world_size() - 1;
        let error = call(comm, memory, differs).expect_err(what);
        let Error::Mismatch { first, first_call, second, second_call } = &error else { panic!("{what}: {error}") };
        assert_eq!((first.rank, second.rank), (0, comm.world_size() - 1), "{what}: {error}");
        assert!(first_call.contains(words[0]) && second_call.contains(words[1]) && first_call != second_call, "{what}: {error}");
        let mut buffer = memory.put(&[1_u32; 4]);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&buffer), [comm.world_size() as u32; 4], "after {what}");
    }
}

#[test]
fn calls_past_the_first_64_are_compared() {
    let _alone = alone();
    ranks(3, |comm, memory| {
        every_difference_is_told(comm, memory);
        let mut buffer = memory.put(&[0_u32; 4]);
        (0..70).for_each(|_| comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap());
        every_difference_is_told(comm, memory);
    });
}

/// Makes a call with a difference that only a comparison finds and NCCL does not: the name of the custom op.
fn other_names(comm: &Communicator, memory: &DeviceMemory) -> Result<()> {
    CASES[5].1(comm, memory, comm.rank() == 0)
}

/// A call with a length that only two ranks know. One of them sends or expects a different one.
type PairDeviant = fn(&Communicator, &DeviceMemory, usize) -> Result<()>;

const PAIRS: [(&str, PairDeviant, [&str; 2]); 3] = [
    (
        "gather_v",
        |comm, memory, more| {
            let (me, counts) = (comm.rank(), [2, 2, 2]);
            let mine = memory.put(&vec![1_u16; if me == 1 { 2 + more } else { 2 }]);
            let mut all = memory.put(&[0_u16; 6]);
            comm.gather_v_into(&mine, (me == 0).then_some((&mut all, &counts[..])), 0)
        },
        ["gather_v that sends 6 B to rank 0", "gather_v that expects 4 B from rank 1"],
    ),
    (
        "scatter_v",
        |comm, memory, more| {
            let (me, counts) = (comm.rank(), [2, 2, 2]);
            let mut mine = memory.put(&vec![1_u16; if me == 2 { 2 + more } else { 2 }]);
            let all = memory.put(&[0_u16; 6]);
            comm.scatter_v_into((me == 0).then_some((&all, &counts[..])), &mut mine, 0)
        },
        ["scatter_v that sends 4 B to rank 2", "scatter_v that expects 6 B from rank 0"],
    ),
    (
        "all_to_all_v",
        |comm, memory, more| {
            let expected = [1, 1, if comm.rank() == 1 { 1 + more } else { 1 }];
            let mut theirs = memory.put(&vec![0_u16; expected.iter().sum()]);
            comm.all_to_all_v_into(&memory.put(&[1_u16; 3]), &[1; 3], &mut theirs, &expected)
        },
        ["all_to_all_v that sends 2 B to rank 1", "all_to_all_v that expects 4 B from rank 2"],
    ),
];

#[test]
fn lengths_that_two_ranks_alone_know_are_compared() {
    let _alone = alone();
    ranks(3, |comm, memory| {
        for (what, call, words) in PAIRS {
            let error = call(comm, memory, 1).expect_err(what);
            let Error::Mismatch { first_call, second_call, .. } = &error else { panic!("{what}: {error}") };
            assert_eq!([&first_call[..], &second_call[..]], words, "{what}");
            // Nothing was queued on any rank, so the communicator stays usable.
            call(comm, memory, 0).expect(what);
        }
    });
}

#[test]
fn no_call_on_the_host_stands_in_for_a_comparison() {
    let _alone = alone();
    ranks(2, |comm, memory| {
        let error = if comm.rank() == 0 {
            comm.all_reduce(&mut memory.put(&[1_u32; 4]), ReduceOp::Sum).unwrap_err()
        } else {
            comm.all_gather_into(&[[0_u8; 40]], &mut [[0_u8; 40]; 2][..]).unwrap_err()
        };
        assert!(error.is_mismatch() && error.to_string().contains("comparing device calls"), "{error}");
    });
}

#[test]
fn a_rank_that_captures_is_told_apart_from_one_that_runs() {
    alone_in_a_process("mismatches::a_rank_that_captures_is_told_apart_from_one_that_runs", || {
        ranks(2, |comm, memory| {
            let stream = memory.stream.context().new_stream().unwrap();
            let mut buffer = memory.put(&[1_u32; 4]);
            memory.stream.synchronize().unwrap();
            // SAFETY: everything below is on one stream, which is synchronised before the buffer is used elsewhere.
            unsafe {
                stream.context().disable_event_tracking();
            }
            let captures = comm.rank() == 0;
            if captures {
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            }
            let error = comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
            assert!(error.is_mismatch() && error.to_string().contains("captured into a graph"), "{error}");
            if captures {
                let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
                drop(stream.end_capture(flags).unwrap());
            }
            comm.barrier().unwrap();
            comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(memory.get(&buffer), [2; 4]);
        });
    });
}

#[test]
fn so_many_calls_are_compared_and_no_more() {
    let _alone = alone();
    ranks_with(2, compared_before(3), |comm, memory| {
        let mut buffer = memory.put(&[0_u32; 4]);
        for _ in 0..3 {
            // A refused call does not count.
            assert!(other_names(comm, memory).unwrap_err().is_mismatch());
            comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
        }
        other_names(comm, memory).unwrap();
        // Each communicator counts separately.
        let copy = comm.duplicate().unwrap();
        assert!(other_names(&copy, memory).unwrap_err().is_mismatch());
        copy.close().unwrap();
    });
    ranks_with(2, unchecked(), |comm, memory| other_names(comm, memory).unwrap());
}

#[test]
fn captured_calls_are_compared_when_they_are_captured() {
    // Creating the first stream of a context ends the captures in it, and other tests do that.
    alone_in_a_process("mismatches::captured_calls_are_compared_when_they_are_captured", || {
        ranks(2, |comm, memory| {
            let stream = memory.stream.context().new_stream().unwrap();
            let mut buffer = memory.put(&[1_u32; 4]);
            comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            stream.synchronize().unwrap();
            comm.barrier().unwrap();
            // SAFETY: everything below is on one stream, which is synchronised before the buffer is used elsewhere.
            unsafe {
                stream.context().disable_event_tracking();
            }
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let op = if comm.rank() == 0 { ReduceOp::Max } else { ReduceOp::Min };
            let error = comm.with_stream(&stream).all_reduce(&mut buffer, op).unwrap_err();
            assert!(error.is_mismatch(), "{error}");
            comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().unwrap();
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(memory.get(&buffer), [4; 4]);
            comm.barrier().unwrap();
        });
    });
}

/// Begins or ends the capture of rank 0's call while the ranks compare it. Returns the errors of both ranks. Rank 1
/// gets its error when it waits for the call, which was not captured there.
fn capture_changes_meanwhile(begins: bool) -> [Error; 2] {
    const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let first = OnceLock::new();
    let errors = threads_with(
        2,
        |_| builder(Config::default()),
        |comm| {
            let memory = DeviceMemory::of(comm);
            let stream = memory.stream.context().new_stream().unwrap();
            let mut buffer = memory.put(&[1_u32; 4]);
            comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            stream.synchronize().unwrap();
            // SAFETY: everything below is on one stream, which is synchronised before the buffer is dropped.
            unsafe {
                stream.context().disable_event_tracking();
            }
            if comm.rank() == 0 {
                first.set((comm.flight_recorder(), Arc::clone(&stream))).unwrap();
            }
            comm.barrier().unwrap();
            if !begins {
                stream.begin_capture(MODE).unwrap();
            }
            if comm.rank() == 1 {
                let (recorder, other) = first.get().unwrap();
                let deadline = Instant::now() + patience(20);
                // Not in the barrier before, in which rank 0 may still be.
                let is_awaited = |record: &Record| record.op.as_deref() == Some("comparing device calls") && record.waiting_for == [1];
                while !recorder.records().iter().any(is_awaited) {
                    assert!(Instant::now() < deadline, "{:?}", recorder.records());
                    std::thread::yield_now();
                }
                // Rank 0 has sent its part of the comparison and waits for this rank.
                if begins { other.begin_capture(MODE).unwrap() } else { drop(other.end_capture(FLAGS).unwrap()) }
            }
            let called = comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum);
            let ends_capture = if begins { comm.rank() == 0 } else { comm.rank() == 1 };
            if ends_capture {
                drop(stream.end_capture(FLAGS).unwrap());
            }
            // Returns because the communicator ends.
            stream.synchronize().unwrap();
            called.and_then(|()| comm.barrier()).unwrap_err()
        },
    );
    errors.try_into().unwrap()
}

#[test]
fn a_capture_that_another_thread_begins_or_ends_once_the_ranks_have_compared_a_call_is_an_error() {
    let name = "mismatches::a_capture_that_another_thread_begins_or_ends_once_the_ranks_have_compared_a_call_is_an_error";
    alone_in_a_process(name, || {
        for begins in [true, false] {
            let [own, others] = capture_changes_meanwhile(begins);
            let what = if begins { "another thread began to capture the stream" } else { "another thread ended the capture of the stream" };
            assert!(own.to_string().contains(what) && !own.is_timeout(), "{own}");
            assert!(others.peer().is_some_and(|peer| peer.rank == 0) && !others.is_timeout(), "{others}");
        }
    });
}

#[test]
fn messages_are_compared_by_their_two_ends_alone() {
    let _alone = alone();
    ranks(3, |comm, memory| {
        // Only two of three ranks take part.
        if comm.rank() < 2 {
            let (mine, mut theirs) = (memory.put(&[comm.rank() as u8; 3]), memory.put(&[9_u8; 3]));
            comm.send_recv(&mine, 1 - comm.rank(), &mut theirs, 1 - comm.rank()).unwrap();
            assert_eq!(memory.get(&theirs), [1 - comm.rank() as u8; 3]);
        }
        comm.barrier().unwrap();
    });
}

/// Lets one rank send and the other receive what does not match. Checks the errors of both.
fn ends_that_differ(
    send: impl Fn(&Communicator, &DeviceMemory) -> Result<()> + Sync,
    receive: impl Fn(&Communicator, &DeviceMemory) -> Result<()> + Sync,
) {
    let _alone = alone();
    threads_with(
        2,
        |_| builder(Config::default()),
        |comm| {
            let memory = DeviceMemory::of(comm);
            if comm.rank() == 0 {
                // The other rank's notification ends it long before the deadline: during the wait, or earlier if this
                // first message connects the two.
                let error = send(comm, &memory).and_then(|()| comm.device().unwrap().synchronize()).unwrap_err();
                assert!(error.is_peer_lost() && !error.is_timeout() && error.to_string().contains("rank 1"), "{error}");
            } else {
                let error = receive(comm, &memory).unwrap_err();
                let Error::Mismatch { first, first_call, second, second_call } = &error else { panic!("{error}") };
                assert_eq!((first.rank, second.rank), (0, 1), "{error}");
                assert!(first_call.starts_with("send of") && second_call.starts_with("recv of") && first_call != second_call, "{error}");
                assert!(comm.all_reduce(&mut memory.put(&[1_u8]), ReduceOp::Max).unwrap_err().is_poisoned());
            }
        },
    );
}

#[test]
fn a_send_of_u8_is_not_received_as_bool() {
    ends_that_differ(
        |comm, memory| comm.send(&memory.put(&[0xff_u8; 5]), 1),
        |comm, memory| {
            let mut truths = memory.put(&[false; 5]);
            let received = comm.recv(&mut truths, 0);
            assert_eq!(memory.get(&memory.as_bytes(&truths)), [0; 5]);
            received.map(drop)
        },
    );
}

#[test]
fn messages_of_other_lengths_end_with_a_mismatch() {
    ends_that_differ(
        |comm, memory| comm.send(&memory.put(&[7_u32; 1000]), 1),
        |comm, memory| comm.recv(&mut memory.put(&[0_u32; 10]), 0).map(drop),
    );
}

#[test]
fn a_later_message_of_a_group_that_differs_ends_with_a_mismatch() {
    ends_that_differ(
        |comm, memory| {
            let (one, other) = (memory.put(&[7_u32; 10]), memory.put(&[7_u32; 11]));
            comm.group(|group| group.send(&one, 1).and_then(|()| group.send(&other, 1))).map(drop)
        },
        |comm, memory| {
            let (mut one, mut other) = (memory.put(&[0_u32; 10]), memory.put(&[0_u32; 10]));
            comm.group(|group| group.recv(&mut one, 0).and_then(|()| group.recv(&mut other, 0))).map(drop)
        },
    );
}

#[test]
fn a_group_with_both_ends_of_another_type_is_refused_in_a_world_of_one() {
    let _alone = alone();
    for world_size in [1, 2] {
        ranks(world_size, |comm, memory| {
            let (bytes, mut truths) = (memory.put(&[0xff_u8; 5]), memory.put(&[false; 5]));
            let group = comm.group(|group| group.send(&bytes, comm.rank()).and_then(|()| group.recv(&mut truths, comm.rank())));
            let error = group.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("type"), "{error}");
            let mut copy = memory.put(&[0_u8; 5]);
            comm.group(|group| group.send(&bytes, comm.rank()).and_then(|()| group.recv(&mut copy, comm.rank()))).unwrap();
            assert_eq!(memory.get(&copy), [0xff; 5]);
        });
    }
}

#[test]
fn no_byte_but_0_and_1_becomes_a_bool() {
    let _alone = alone();
    // The calls are not compared. Rank 0 has bytes, the other rank has `bool` values.
    ranks_with(2, unchecked(), |comm, memory| {
        let bytes = memory.put(&(0..1000).map(|at| (at * 7) as u8).collect::<Vec<_>>());
        let (mut one, mut other) = (memory.put(&vec![false; 1000]), memory.put(&vec![false; 2000]));
        if comm.rank() == 0 {
            comm.send(&bytes, 1).unwrap();
            comm.broadcast(&mut memory.put(&memory.get(&bytes)), 0).unwrap();
            comm.all_gather_into(&bytes, &mut memory.put(&[0_u8; 2000])).unwrap();
        } else {
            let truths = |memory: &DeviceMemory, buffer: &CudaSlice<bool>| memory.get(&memory.as_bytes(buffer));
            let expected: Vec<u8> = memory.get(&bytes).iter().map(|byte| u8::from(*byte != 0)).collect();
            comm.recv(&mut one, 0).unwrap();
            assert_eq!(truths(memory, &one), expected);
            comm.broadcast(&mut one, 0).unwrap();
            assert_eq!(truths(memory, &one), expected);
            comm.all_gather_into(&one, &mut other).unwrap();
            assert_eq!(truths(memory, &other), [&expected[..], &expected].concat());
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn errors_of_device_calls_say_which_call() {
    let _alone = alone();
    ranks(2, |comm, memory| {
        let mut buffer = memory.put(&[0_u32; 4]);
        (0..3).for_each(|_| comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap());
        let op = if comm.rank() == 0 { ReduceOp::Max } else { ReduceOp::Min };
        let error = comm.all_reduce(&mut buffer, op).unwrap_err().to_string();
        assert!(error.contains("number 3"), "{error}");
        // The mismatched call does not count. The calls of a group count separately.
        let mut other = memory.put(&[0_u32; 4]);
        comm.group(|group| group.all_reduce(&mut buffer, ReduceOp::Max).and_then(|()| group.all_reduce(&mut other, ReduceOp::Max)))
            .unwrap();
        comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
        let records = comm.flight_recorder().records();
        let numbers: Vec<_> = records.iter().filter(|record| record.backend == Backend::Device).map(|record| record.sequence).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5].map(Some));
        let copy = comm.duplicate().unwrap();
        copy.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
        copy.device().unwrap().synchronize().unwrap();
        comm.barrier().unwrap();
        copy.abort();
        let error = copy.all_reduce(&mut buffer, ReduceOp::Max).unwrap_err().to_string();
        assert!(error.contains("number 1"), "{error}");
    });
}
