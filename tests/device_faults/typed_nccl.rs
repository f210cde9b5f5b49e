//! Invalid typed calls of a communicator without a host backend: ranks that differ, ranks that do not come, and memory
//! that is not the device's. Each rank gets an error with a reason before anything is queued.

#![expect(unsafe_code, reason = "bytes that are no truth values, ops of PTX, and cudarc's tracking of events")]

use std::sync::Arc;
use std::time::Duration;

use collectives::{Config, CustomOp, Error, ReduceOp, Result, nccl::NcclCommunicator};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};

use super::common::cases::Memory;
use super::common::ranks::{Meeting, alone_in_a_process};
use super::gpu::{DeviceMemory, assert_nothing_found, can_steer_nccl, compared_before, nccl_ranks, patient, steers_nccl};

/// A call that differs on one rank.
type Deviant = fn(&NcclCommunicator, &DeviceMemory, bool) -> Result<()>;

/// The difference, the call, and what the error must contain about each rank's call.
const CASES: [(&str, Deviant, [&str; 2]); 7] = [
    (
        "kind",
        |comm, memory, differs| {
            let mut buffer = memory.put(&[1_u32; 6]);
            match differs {
                true => comm.broadcast(&mut buffer, 0, &memory.stream),
                false => comm.all_reduce(&mut buffer, ReduceOp::Sum, &memory.stream),
            }
        },
        ["all_reduce(sum, u32, count 6)", "broadcast(u32, count 6, root 0)"],
    ),
    (
        "op",
        |comm, memory, differs| {
            let op = if differs { ReduceOp::BitOr } else { ReduceOp::Sum };
            comm.all_reduce(&mut memory.put(&[1_u32; 4]), op, &memory.stream)
        },
        ["sum, ", "bor, "],
    ),
    (
        "element type",
        |comm, memory, differs| match differs {
            true => comm.all_reduce(&mut memory.put(&[1_f32; 4]), ReduceOp::Max, &memory.stream),
            false => comm.all_reduce(&mut memory.put(&[1_i32; 4]), ReduceOp::Max, &memory.stream),
        },
        ["i32", "f32"],
    ),
    (
        "count",
        |comm, memory, differs| comm.all_gather(&mut memory.put(&vec![1_u8; if differs { 9 } else { 6 }]), &memory.stream),
        ["count 2", "count 3"],
    ),
    (
        "root",
        |comm, memory, differs| comm.broadcast(&mut memory.put(&[1_u8; 4]), usize::from(differs), &memory.stream),
        ["root 0", "root 1"],
    ),
    (
        "the name of a custom op",
        |comm, memory, differs| {
            let op = idle(if differs { "lesser" } else { "greater" }, IDLE);
            comm.all_reduce(&mut memory.put(&[1_u32; 4]), &op, &memory.stream)
        },
        ["custom op #", "custom op #"],
    ),
    (
        "a block exchanged in place",
        |comm, memory, differs| {
            let (mine, mut theirs) = (memory.put(&[1_u32; 6]), memory.put(&[1_u32; 6]));
            match differs {
                true => comm.all_to_all(&mut theirs, &memory.stream),
                false => comm.all_to_all_into(&mine, &mut theirs, &memory.stream),
            }
        },
        ["all_to_all(u32, count 2) number", ", in place"],
    ),
];

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

fn idle(name: &str, image: &str) -> CustomOp<u32> {
    // SAFETY: it touches no memory.
    unsafe { CustomOp::<u32>::on_device(name, "a").with_ptx(image, "fold_user") }
}

/// Checks the result of a call that all ranks make alike.
fn works(comm: &NcclCommunicator, memory: &DeviceMemory) {
    let mut buffer = memory.put(&[comm.rank() as u32 + 1; 5]);
    comm.all_reduce(&mut buffer, ReduceOp::Max, &memory.stream).unwrap();
    assert_eq!(memory.get(&buffer), [comm.world_size() as u32; 5]);
}

/// Checks the mismatch that a rank gets, and which two ranks and calls it names.
fn assert_mismatch(what: &str, error: &Error, ranks: (usize, usize), words: [&str; 2]) {
    let Error::Mismatch { first, first_call, second, second_call } = error else { panic!("{what}: {error}") };
    assert_eq!((first.rank, second.rank), ranks, "{what}: {error}");
    assert!(first_call.contains(words[0]) && second_call.contains(words[1]), "{what}: {error}");
}

#[test]
fn every_difference_is_told_to_every_rank_and_the_communicator_works_on() {
    let _alone = simgpu::alone();
    nccl_ranks(3, patient, |comm, memory| {
        for (what, call, words) in CASES {
            let error = call(comm, memory, comm.rank() == 2).expect_err(what);
            assert_mismatch(what, &error, (0, 2), words);
            works(comm, memory);
        }
        assert!(comm.failure().is_none());
    });
    assert_nothing_found();
}

#[test]
fn a_split_beside_another_call_is_a_mismatch_on_every_rank() {
    let _alone = simgpu::alone();
    nccl_ranks(3, patient, |comm, memory| {
        let error = match comm.rank() {
            2 => comm.split(Some(1), 0).unwrap_err(),
            _ => comm.all_reduce(&mut memory.put(&[1_u32; 4]), ReduceOp::Sum, &memory.stream).unwrap_err(),
        };
        assert!(error.is_mismatch(), "{error}");
        works(comm, memory);
        let part = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
        assert_eq!(part.world_size(), if comm.rank() == 2 { 1 } else { 2 });
    });
    assert_nothing_found();
}

#[test]
fn a_difference_leaves_buffers_alone() {
    let _alone = simgpu::alone();
    nccl_ranks(2, patient, |comm, memory| {
        let mut buffer = memory.put(&vec![comm.rank() as u16; 10 + comm.rank()]);
        let error = comm.all_reduce(&mut buffer, ReduceOp::Sum, &memory.stream).unwrap_err();
        assert!(error.is_mismatch(), "{error}");
        assert_eq!(memory.get(&buffer), vec![comm.rank() as u16; 10 + comm.rank()]);
    });
    assert_nothing_found();
}

#[test]
fn settings_that_differ_are_a_mismatch_that_names_them() {
    let _alone = simgpu::alone();
    type Change = fn(&mut Config);
    let cases: [(Change, [&str; 2]); 2] = [
        (|config| config.device_scratch_bytes = 4096, ["268435456 B of scratch memory", "4096 B of scratch memory"]),
        (|config| config.reproducible = true, ["compute capability 9.0", ", reproducible"]),
    ];
    for (change, words) in cases {
        let config = |rank: usize| {
            let mut config = patient(rank);
            if rank == 1 {
                change(&mut config);
            }
            config
        };
        nccl_ranks(2, config, |comm, memory| {
            let error = comm.all_reduce(&mut memory.put(&[1_u8; 8]), ReduceOp::BitXor, &memory.stream).unwrap_err();
            assert_mismatch("settings", &error, (0, 1), words);
        });
    }
    assert_nothing_found();
}

#[test]
fn wrong_arguments_are_refused_and_nothing_happens() {
    let _alone = simgpu::alone();
    nccl_ranks(2, patient, |comm, memory| {
        let stream = &memory.stream;
        let elsewhere = DeviceMemory::on(CudaContext::new(5).unwrap().new_stream().unwrap());
        let (three, mut two) = (memory.put(&[1_u32; 3]), memory.put(&[1_u32; 2]));
        let mut far = elsewhere.put(&[1_u32; 2]);
        let none: Option<&CudaSlice<u32>> = None;
        let refused: [(Result<()>, &str); 14] = [
            (comm.all_reduce(&mut [1_u32; 2], ReduceOp::Sum, stream), "host memory"),
            (comm.all_gather_into(&[1_u32], &mut two, stream), "the source is in host memory"),
            (comm.send(&[1_u32; 2], 1 - comm.rank(), stream), "host memory"),
            (comm.recv(&mut [1_u32; 2], 1 - comm.rank(), stream), "host memory"),
            (comm.all_reduce(&mut far, ReduceOp::Sum, stream), "is on device 5"),
            (comm.send(&far, 1 - comm.rank(), stream), "is on device 5"),
            (comm.all_reduce(&mut two, ReduceOp::Sum, &elsewhere.stream), "the stream is on device 5"),
            (comm.all_reduce_into(&three, &mut two, ReduceOp::Sum, stream), "a source of 3 elements does not fit a destination of 2"),
            (comm.reduce_scatter_into(&three, &mut two, ReduceOp::Sum, stream), "not a multiple of the world size 2"),
            (comm.broadcast(&mut two, 2, stream), "the root does not exist"),
            (comm.broadcast_into(none, &mut two, comm.rank(), stream), "must pass a source"),
            (comm.reduce_into(&three, Some(&mut two), 1 - comm.rank(), ReduceOp::Sum, stream), "must pass a destination"),
            (comm.send(&three, comm.rank(), stream), "not a peer"),
            (comm.recv(&mut two, 2, stream), "not a peer"),
        ];
        for (refused, words) in refused {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(words), "{words}: {error}");
        }
        let error = comm.all_reduce(&mut memory.put(&[1_f32]), ReduceOp::BitOr, stream).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        let error = comm.group(stream, |_| Err(Error::InvalidArgument { call: "mine", reason: "no".to_owned() })).unwrap_err();
        assert!(error.to_string().contains("mine"), "{error}");
        works(comm, memory);
    });
    assert_nothing_found();
}

#[test]
fn a_rank_that_never_calls_is_a_timeout_for_the_others() {
    let _alone = simgpu::alone();
    let over = Meeting::new(2);
    let hasty = |rank| {
        let mut config = patient(rank);
        // Creating the communicators has the same timeout, and takes a real NCCL longer.
        config.timeout = Duration::from_millis(if can_steer_nccl() { 800 } else { 8000 });
        config
    };
    let message: Deviant = |comm, memory, _| comm.send(&memory.put(&[1_u8; 4]), 1, &memory.stream);
    let collective: Deviant = |comm, memory, _| comm.all_reduce(&mut memory.put(&[1_u8; 4]), ReduceOp::Sum, &memory.stream);
    for (call, words) in [(collective, "comparing all_reduce(sum, u8, count 4)"), (message, "comparing send to rank 1: 4 elements (u8)")] {
        nccl_ranks(2, hasty, |comm, memory| {
            if comm.rank() == 0 {
                let error = call(comm, memory, false).unwrap_err();
                assert!(error.is_timeout() && error.to_string().contains(words), "{error}");
                let error = call(comm, memory, false).unwrap_err();
                assert!(error.is_poisoned(), "{error}");
                assert!(comm.failure().is_some_and(|failure| failure.is_timeout()));
            }
            over.meet();
        });
    }
}

/// Returns how often `call` calls each of five NCCL functions.
fn calls_of(comm: &NcclCommunicator, call: impl FnOnce()) -> [u64; 5] {
    let count = || ["ncclAllReduce", "ncclAllGather", "ncclSend", "ncclRecv", "ncclGroupStart"].map(simgpu::nccl::calls_of_this_thread);
    let before = count();
    call();
    let after = count();
    assert_eq!(comm.failure().map(|error| error.to_string()), None);
    std::array::from_fn(|verb| after[verb] - before[verb])
}

#[test]
fn a_call_that_is_compared_costs_an_all_gather_more_and_one_that_is_not_costs_nothing() {
    steers_nccl!();
    let _alone = simgpu::alone();
    for (compared, gathers) in [(1000, 1), (0, 0)] {
        nccl_ranks(
            2,
            |_| compared_before(compared),
            |comm, memory| {
                let (mut buffer, other) = (memory.put(&[1_f32; 64]), 1 - comm.rank());
                let sum = calls_of(comm, || comm.all_reduce(&mut buffer, ReduceOp::Sum, &memory.stream).unwrap());
                // The exchange for the comparison is an NCCL group.
                assert_eq!(sum, [1, gathers, 0, 0, gathers]);
                let message = calls_of(comm, || match comm.rank() {
                    0 => comm.send(&buffer, other, &memory.stream).unwrap(),
                    _ => comm.recv(&mut buffer, other, &memory.stream).unwrap(),
                });
                let (sends, receives) = if comm.rank() == 0 { (1 + gathers, gathers) } else { (gathers, 1 + gathers) };
                assert_eq!(message, [0, 0, sends, receives, 1 + gathers]);
                assert_eq!(memory.get(&buffer), [2.0; 64]);
            },
        );
    }
    assert_nothing_found();
}

#[test]
fn only_the_first_calls_are_compared_where_so_many_were_promised() {
    steers_nccl!();
    let _alone = simgpu::alone();
    nccl_ranks(
        2,
        |_| compared_before(2),
        |comm, memory| {
            let mut buffer = memory.put(&[1_u64; 8]);
            let gathers = [(); 4].map(|()| calls_of(comm, || comm.all_reduce(&mut buffer, ReduceOp::Sum, &memory.stream).unwrap())[1]);
            assert_eq!(gathers, [1, 1, 0, 0]);
            assert_eq!(memory.get(&buffer), [16; 8]);
        },
    );
    assert_nothing_found();
}

/// Makes a call while `stream` captures, and returns its outcome and the graph.
fn captured(stream: &Arc<CudaStream>, call: impl FnOnce() -> Result<()>) -> (Result<()>, Option<cudarc::driver::CudaGraph>) {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let called = call();
    let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap();
    (called, graph)
}

#[test]
fn calls_that_are_compared_cannot_be_captured_and_others_can() {
    // Creating the first stream of a context ends the captures in it, and other tests do that.
    alone_in_a_process("typed_nccl::calls_that_are_compared_cannot_be_captured_and_others_can", || {
        let made = Meeting::new(2);
        nccl_ranks(
            2,
            |_| compared_before(1),
            |comm, memory| {
                let (stream, mut buffer) = (&memory.stream, memory.put(&[comm.rank() as u32; 100]));
                // SAFETY: everything below is on one stream, which is synchronised before the buffer is dropped.
                unsafe { stream.context().disable_event_tracking() };
                stream.synchronize().unwrap();
                made.meet();
                let (refused, _) = captured(stream, || comm.all_reduce(&mut buffer, ReduceOp::Sum, stream));
                let error = refused.unwrap_err();
                let words = error.to_string();
                assert!(error.is_unsupported() && words.contains("unchecked_after") && words.contains("NcclCommunicator::call"), "{words}");
                let (refused, _) = captured(stream, || comm.send(&buffer, 1 - comm.rank(), stream));
                assert!(refused.unwrap_err().is_unsupported());
                comm.all_reduce(&mut buffer, ReduceOp::Sum, stream).unwrap();
                let (queued, graph) = captured(stream, || comm.all_reduce(&mut buffer, ReduceOp::Sum, stream));
                queued.unwrap();
                graph.unwrap().launch().unwrap();
                assert_eq!(memory.get(&buffer), [2; 100]);
                stream.synchronize().unwrap();
            },
        );
        assert_nothing_found();
    });
}

/// The difference between the ends of a message, the calls of the two ranks, and what the error contains about each.
type Ends = (&'static str, Deviant, [&'static str; 2]);

const MESSAGES: [Ends; 4] = [
    (
        "length",
        |comm, memory, sends| match sends {
            true => comm.send(&memory.put(&[1_u32; 5]), 1, &memory.stream),
            false => comm.recv(&mut memory.put(&[1_u32; 4]), 0, &memory.stream),
        },
        ["send to rank 1: 5 elements (u32)", "recv from rank 0: 4 elements (u32)"],
    ),
    (
        "type",
        |comm, memory, sends| match sends {
            true => comm.send(&memory.put(&[1_u32; 4]), 1, &memory.stream),
            false => comm.recv(&mut memory.put(&[1_f32; 4]), 0, &memory.stream),
        },
        ["(u32)", "(f32)"],
    ),
    (
        "direction",
        |comm, memory, _| comm.send(&memory.put(&[1_u32; 4]), 1 - comm.rank(), &memory.stream),
        ["send to rank 1", "send to rank 0"],
    ),
    (
        "grouping",
        |comm, memory, sends| {
            let (one, other) = (memory.put(&[1_u8; 4]), memory.put(&[1_u8; 4]));
            let mut whole = memory.put(&[1_u8; 4]);
            comm.group(&memory.stream, |group| match sends {
                true => group.send(&one, 1).and_then(|()| group.send(&other, 1)),
                false => group.recv(&mut whole, 0),
            })
        },
        ["the first of 2 messages in a group", "recv from rank 0: 4 elements (u8)"],
    ),
];

#[test]
fn ends_of_messages_that_differ_are_told_to_both_and_end_the_communicator() {
    let _alone = simgpu::alone();
    for (what, call, words) in MESSAGES {
        nccl_ranks(2, patient, |comm, memory| {
            let error = call(comm, memory, comm.rank() == 0).expect_err(what);
            let (peer, me) = (1 - comm.rank(), comm.rank());
            assert_mismatch(what, &error, (peer, me), [words[peer], words[me]]);
            let error = call(comm, memory, comm.rank() == 0).expect_err(what);
            assert!(error.is_poisoned(), "{what}: {error}");
        });
    }
    assert_nothing_found();
}

#[test]
fn a_rank_ends_its_communicator_over_a_message_when_the_other_end_has_heard_why() {
    steers_nccl!();
    const WORDS_BYTES: u64 = 64;
    let _alone = simgpu::alone();
    let (what, differ, _) = MESSAGES[0];
    let sent = || simgpu::nccl::bytes_sent(Some("Send"), None);
    let before = sent();
    nccl_ranks(2, patient, |comm, memory| {
        differ(comm, memory, comm.rank() == 0).expect_err(what);
    });
    // Each rank sends its description to the other, and a second message once it has received the other's.
    assert_eq!(sent() - before, 4 * WORDS_BYTES);
    assert_nothing_found();
}

#[test]
fn a_communicator_ends_by_the_difference_though_the_other_end_does_not_hear_of_it() {
    let _alone = simgpu::alone();
    let config = |_| {
        let mut config = patient(0);
        config.timeout = Duration::from_millis(if can_steer_nccl() { 800 } else { 8000 });
        config
    };
    let over = Meeting::new(3);
    nccl_ranks(3, config, |comm, memory| {
        let (mut few, mut none) = (memory.put(&[1_u32; 4]), memory.put(&[1_u32; 4]));
        let mut receive = || comm.group(&memory.stream, |group| group.recv(&mut few, 0).and_then(|()| group.recv(&mut none, 2)));
        let send = |count: usize| comm.send(&memory.put(&vec![1_u32; count]), 1, &memory.stream);
        // These calls connect the ranks.
        if comm.rank() == 1 {
            receive().unwrap()
        } else {
            send(4).unwrap()
        }
        match comm.rank() {
            0 => {
                let error = send(5).unwrap_err();
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                let cause = comm.failure().expect("it has ended");
                assert!(matches!(cause, Error::Mismatch { .. }), "{cause}");
            }
            // Rank 2 does not come, so this rank does not confirm to rank 0 that it has received its description.
            1 => drop(receive().unwrap_err()),
            _ => {}
        }
        over.meet();
    });
    assert_nothing_found();
}

#[test]
fn a_custom_op_runs_where_all_ranks_can_load_it_and_is_refused_where_one_cannot() {
    let _alone = simgpu::alone();
    for config in [patient(0), compared_before(0)] {
        nccl_ranks(
            2,
            |_| config.clone(),
            |comm, memory| {
                let broken = if comm.rank() == 1 { "this is no PTX" } else { IDLE };
                let mut buffer = memory.put(&[1_u32; 4]);
                let error = comm.all_reduce(&mut buffer, idle("broken", broken), &memory.stream).unwrap_err();
                let is_own = !error.to_string().contains("rank 1 cannot load the call's kernel");
                assert!(is_own == (comm.rank() == 1) && comm.failure().is_none(), "{error}");
                for _ in 0..2 {
                    comm.all_reduce(&mut buffer, idle("sound", IDLE), &memory.stream).unwrap();
                }
                works(comm, memory);
            },
        );
    }
    // The simulation records what the driver refused.
    let found = simgpu::reports();
    assert!(found.iter().all(|report| report.contains("a module was not loaded")), "{found:?}");
    assert_eq!(simgpu::nccl::reports(), Vec::<String>::new());
}

#[test]
fn what_comes_as_a_truth_value_is_one() {
    let _alone = simgpu::alone();
    nccl_ranks(2, patient, |comm, memory| {
        let (me, stream) = (comm.rank(), &memory.stream);
        let bytes = memory.put(&[7_u8, 0, 255]);
        // SAFETY: broken on purpose on this side: bytes that are not valid `bool` values. Only the calls under test
        // read them as such.
        let truths = unsafe { bytes.transmute::<bool>(3) }.unwrap();
        let (mut gathered, mut received) = (memory.put(&[false; 6]), memory.put(&[false; 3]));
        comm.all_gather_into(&truths, &mut gathered, stream).unwrap();
        let group = comm.group(stream, |group| {
            group.send(&truths, 1 - me)?;
            group.recv(&mut received, 1 - me)
        });
        group.unwrap();
        assert_eq!(memory.get(&memory.as_bytes(&gathered)), [1, 0, 1, 1, 0, 1]);
        assert_eq!(memory.get(&memory.as_bytes(&received)), [1, 0, 1]);
    });
    assert_nothing_found();
}

#[test]
fn a_window_on_memory_of_a_pool_is_refused_on_every_rank_and_registered_by_none() {
    let _alone = simgpu::alone();
    nccl_ranks(3, patient, |comm, memory| {
        let (me, stream) = (comm.rank(), &memory.stream);
        // The calls of a different NCCL are not counted.
        let registered = || can_steer_nccl().then(|| simgpu::nccl::calls("ncclCommWindowRegister"));
        let before = registered();
        // SAFETY: no call uses a window.
        let opened = unsafe {
            match me {
                1 => comm.window(memory.put(&[1_f32; 64])).map(drop),
                _ => comm.window(comm.allocate::<f32>(stream, 64).unwrap()).map(drop),
            }
        };
        let error = opened.unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        let words = if me == 1 { ["256 B", "NcclCommunicator::allocate (ncclMemAlloc)"] } else { ["rank 1", "so no rank has registered"] };
        assert!(words.iter().all(|words| error.to_string().contains(words)), "{error}");
        // No rank registers anything before all have checked the count.
        comm.all_reduce(&mut memory.put(&[1_u32]), ReduceOp::Sum, stream).unwrap();
        assert_eq!(registered(), before);
        assert!(comm.failure().is_none());
        comm.all_reduce(&mut memory.put(&[1_u32]), ReduceOp::Sum, stream).unwrap();

        let length = 64 + usize::from(me == 2);
        // SAFETY: no call uses a window.
        let error = unsafe { comm.window(comm.allocate::<f32>(stream, length).unwrap()) }.unwrap_err();
        assert!(error.is_mismatch() && error.to_string().contains("window on 260 B"), "{error}");
        // SAFETY: all ranks open one of the same length, and all use it in the next call.
        let mut window = unsafe { comm.window(comm.allocate::<f32>(stream, 64).unwrap()) }.unwrap();
        comm.all_reduce(&mut window, ReduceOp::Sum, stream).unwrap();
        drop(window);
        comm.close().unwrap();
    });
    assert_nothing_found();
}

#[test]
fn a_window_that_nccl_refuses_on_one_rank_ends_its_communicator() {
    steers_nccl!();
    let _alone = simgpu::alone();
    nccl_ranks(1, patient, |comm, memory| {
        // 4 is ncclInvalidArgument. Other ranks may have registered their memory.
        simgpu::nccl::fail_call_of_this_thread("ncclCommWindowRegister", 1, 4);
        // SAFETY: no call uses a window.
        let error = unsafe { comm.window(comm.allocate::<f32>(&memory.stream, 64).unwrap()) }.map(drop).unwrap_err();
        assert!(error.to_string().contains("ncclInvalidArgument"), "{error}");
        assert!(comm.failure().is_some_and(|cause| cause.to_string() == error.to_string()));
    });
    simgpu::nccl::reset();
}

#[test]
fn memory_for_a_large_call_that_one_rank_lacks_is_an_error_on_every_rank_and_no_end() {
    let _alone = simgpu::alone();
    nccl_ranks(2, patient, |comm, memory| {
        // 12 MiB, in place: more than is allocated at the start.
        let blocks: Vec<u64> = (0..3 << 19).map(|place| place * 2 + comm.rank() as u64).collect();
        let half = blocks.len() / 2;
        let mut buffer = memory.put(&blocks);
        if comm.rank() == 1 {
            simgpu::fail_call_of_this_thread("cuMemAlloc_v2", 1, 2);
        }
        let error = comm.all_to_all(&mut buffer, &memory.stream).unwrap_err();
        let words = if comm.rank() == 1 { "Config::device_scratch_bytes" } else { "rank 1" };
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(memory.get(&buffer), blocks);
        comm.all_to_all(&mut buffer, &memory.stream).unwrap();
        let got = memory.get(&buffer);
        let from = |rank: usize| (0..half).map(move |place| ((comm.rank() * half + place) * 2 + rank) as u64);
        assert!(got.iter().copied().eq(from(0).chain(from(1))));
        comm.close().unwrap();
    });
    assert_nothing_found();
}
