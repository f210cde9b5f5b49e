//! Ranks whose device calls differ: an error on all of them that names both calls, before anything is queued.

#![expect(unsafe_code, reason = "an op of PTX, and cudarc's tracking of events")]

use collectives::{CheckDeviceCalls, Communicator, Config, CustomOp, Error, ReduceOp, Result};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::common::cases::Memory;
use super::common::ranks::alone_in_a_process;
use super::gpu::{DeviceMemory, is_real, ranks, ranks_with};

fn checking(calls: CheckDeviceCalls) -> Config {
    let mut config = Config::default();
    config.check_device_calls = calls;
    config
}

/// A fold that leaves everything as it is.
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

/// One rank makes another call than the others.
type Deviant = fn(&Communicator, &DeviceMemory, bool) -> Result<()>;

/// What differs, the call, and what the error must say of either.
const CASES: [(&str, Deviant, [&str; 2]); 9] = [
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

/// Every difference is told to every rank, and the communicator works on.
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
fn first_calls_are_compared_unless_told_otherwise() {
    let _alone = (!is_real()).then(simgpu::alone);
    ranks(3, every_difference_is_told);
}

#[test]
fn all_calls_are_compared_on_request() {
    let _alone = (!is_real()).then(simgpu::alone);
    ranks_with(3, checking(CheckDeviceCalls::Always), |comm, memory| {
        let mut buffer = memory.put(&[0_u32; 4]);
        (0..70).for_each(|_| comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap());
        every_difference_is_told(comm, memory);
    });
}

/// A difference that only a comparison finds, and that NCCL does not mind: which custom op the ranks fold with.
fn other_names(comm: &Communicator, memory: &DeviceMemory) -> Result<()> {
    CASES[5].1(comm, memory, comm.rank() == 0)
}

#[test]
fn so_many_calls_are_compared_and_no_more() {
    let _alone = (!is_real()).then(simgpu::alone);
    ranks_with(2, checking(CheckDeviceCalls::First(3)), |comm, memory| {
        for _ in 0..3 {
            assert!(other_names(comm, memory).unwrap_err().is_mismatch());
        }
        other_names(comm, memory).unwrap();
        // Each communicator has its own.
        let copy = comm.duplicate().unwrap();
        assert!(other_names(&copy, memory).unwrap_err().is_mismatch());
        copy.close().unwrap();
    });
    ranks_with(2, checking(CheckDeviceCalls::Never), |comm, memory| other_names(comm, memory).unwrap());
}

#[test]
fn captured_calls_are_compared_when_they_are_captured() {
    // Whoever makes the first stream of a context ends the captures in it: other tests do.
    alone_in_a_process("mismatches::captured_calls_are_compared_when_they_are_captured", || {
        ranks(2, |comm, memory| {
            let stream = memory.stream.context().new_stream().unwrap();
            let mut buffer = memory.put(&[1_u32; 4]);
            comm.on(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            stream.synchronize().unwrap();
            comm.barrier().unwrap();
            // SAFETY: everything below is on one stream, which is synchronised before the buffer is used elsewhere.
            unsafe {
                stream.context().disable_event_tracking();
            }
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let op = if comm.rank() == 0 { ReduceOp::Max } else { ReduceOp::Min };
            let error = comm.on(&stream).all_reduce(&mut buffer, op).unwrap_err();
            assert!(error.is_mismatch(), "{error}");
            comm.on(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = stream.end_capture(flags).unwrap().unwrap();
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(memory.get(&buffer), [4; 4]);
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn messages_are_not_compared() {
    let _alone = (!is_real()).then(simgpu::alone);
    ranks(3, |comm, memory| {
        // Only two of three take part.
        if comm.rank() < 2 {
            let (mine, mut theirs) = (memory.put(&[comm.rank() as u8; 3]), memory.put(&[9_u8; 3]));
            comm.send_recv(&mine, 1 - comm.rank(), &mut theirs, 1 - comm.rank()).unwrap();
            assert_eq!(memory.get(&theirs), [1 - comm.rank() as u8; 3]);
        }
        comm.barrier().unwrap();
    });
}
