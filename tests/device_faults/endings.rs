//! Calls that do not end, lost peers and aborts: typed errors, and never a hang.

#![expect(unsafe_code, reason = "registers a buffer with NCCL")]

use std::sync::Mutex;
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, Error, ReduceOp};
use cudarc::driver::CudaContext;

use super::common::cases::Memory;
use super::common::meeting::{Meeting, wait_until};
use super::common::ranks::{alone_in_a_process, each, threads_with};
use super::common::tasks::block_on;
use super::gpu::{DeviceMemory, alone, be_strict, builder, can_steer_nccl, is_real, steers_gpu, steers_nccl, unchecked};
use super::kills::root;

/// Returns the builder of a rank whose calls are not compared.
fn patient(_rank: usize) -> collectives::Builder {
    builder(unchecked())
}

/// Runs `program` on ranks whose calls have the timeout `limit`. Their start has the usual one.
fn threads_within<R: Send>(limit: Duration, world_size: usize, program: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    threads_with(world_size, patient, |comm| {
        comm.set_timeout(limit);
        program(comm)
    })
}

/// Runs a test twice: with the simulated NCCL as it is, and as strict as a real one may be.
fn in_both_ways(test: impl Fn()) {
    let _alone = alone();
    test();
    be_strict();
    test();
}

#[test]
fn a_rank_that_does_not_call_makes_the_others_time_out() {
    in_both_ways(|| {
        let comms = threads_with(2, patient, |comm| comm.rank());
        assert_eq!(comms, [0, 1]);
        threads_within(Duration::from_millis(1500), 2, |comm| {
            let memory = DeviceMemory::of(comm);
            if comm.rank() == 0 {
                let began = Instant::now();
                let mut buffer = memory.put(&[1_u32; 100]);
                // The first call may wait inside NCCL for the other ranks.
                let called = comm.all_reduce(&mut buffer, ReduceOp::Sum);
                let error = called.and_then(|()| comm.device().unwrap().synchronize()).unwrap_err();
                assert!(error.is_timeout(), "{error}");
                assert!(began.elapsed() < Duration::from_secs(20), "{error}");
                let error = comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
                assert!(error.is_poisoned() && error.is_timeout(), "{error}");
            }
            comm.set_timeout(Duration::from_secs(60));
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn the_watchdog_frees_a_stream_that_nobody_waits_on_with_a_deadline() {
    in_both_ways(|| {
        threads_within(Duration::from_millis(1500), 2, |comm| {
            let memory = DeviceMemory::of(comm);
            if comm.rank() == 0 {
                let stream = memory.stream.context().new_stream().unwrap();
                let mut buffer = memory.put(&[1_u32; 100]);
                let called = comm.with_stream(&stream).all_reduce(&mut buffer, ReduceOp::Sum);
                assert!(called.is_ok() || comm.device().unwrap().failure().is_some(), "{called:?}");
                // Without the watchdog, this would wait forever.
                stream.synchronize().unwrap();
                let failure = comm.device().unwrap().failure().unwrap();
                assert!(failure.is_timeout() && failure.to_string().contains("all_reduce"), "{failure}");
            }
            comm.set_timeout(Duration::from_secs(60));
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn an_abort_from_another_thread_ends_a_call_and_a_wait() {
    in_both_ways(|| {
        threads_with(2, patient, |comm| {
            let memory = DeviceMemory::of(comm);
            if comm.rank() == 0 {
                let mut buffer = memory.put(&[1_u32; 100]);
                let (handle, began) = (comm.abort_handle(), Instant::now());
                let calls_made = || if can_steer_nccl() { simgpu::nccl::calls("ncclAllReduce") } else { 0 };
                let before = calls_made();
                let calls = || comm.all_reduce(&mut buffer, ReduceOp::Sum).and_then(|()| comm.device().unwrap().synchronize());
                std::thread::scope(|scope| {
                    let calling = scope.spawn(calls);
                    wait_until("the call reaches NCCL, or ends", || !can_steer_nccl() || calls_made() != before || calling.is_finished());
                    handle.abort();
                    assert!(calling.join().unwrap().is_err());
                });
                assert!(began.elapsed() < Duration::from_secs(20));
                assert!(comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err().is_poisoned());
            }
        });
    });
}

/// Makes calls that the other rank does not make, until one fails with a timeout, which frees the stream. `beside` runs
/// on another thread.
fn call_until_a_timeout(comm: &Communicator, beside: impl FnOnce(&CudaContext) + Send) {
    let device = comm.device().unwrap();
    let mut buffer = DeviceMemory::of(comm).put(&[1_u32; 100]);
    let began = Instant::now();
    comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| beside(device.context()));
        loop {
            if let Err(error) = comm.all_reduce(&mut buffer, ReduceOp::Sum) {
                return error;
            }
        }
    });
    assert!(error.is_timeout() && began.elapsed() < Duration::from_secs(20), "{error} after {:?}", began.elapsed());
    device.stream().synchronize().unwrap();
    let failure = device.failure().unwrap();
    assert!(failure.is_timeout() && failure.to_string().contains("all_reduce"), "{failure}");
}

#[test]
fn calls_that_find_no_room_in_their_stream_end_in_time() {
    steers_gpu!();
    let _alone = alone();
    let before = simgpu::waits_for_room();
    threads_within(Duration::from_secs(5), 2, |comm| {
        if comm.rank() == 0 {
            call_until_a_timeout(comm, |_| ());
        }
        comm.set_timeout(Duration::from_secs(60));
        comm.barrier().unwrap();
    });
    assert!(simgpu::waits_for_room() > before || !can_steer_nccl(), "the queue was never full");
}

#[test]
fn calls_that_wait_behind_another_threads_wait_for_the_device_end_in_time() {
    steers_gpu!();
    let _alone = alone();
    let before = simgpu::waits_for_context();
    threads_within(Duration::from_millis(1500), 2, |comm| {
        if comm.rank() == 0 {
            call_until_a_timeout(comm, |context| {
                let _ = context.synchronize();
            });
        }
        comm.set_timeout(Duration::from_secs(60));
        comm.barrier().unwrap();
    });
    assert!(simgpu::waits_for_context() > before, "nobody was held up");
}

#[test]
fn a_lost_peer_is_an_error_on_the_others() {
    steers_nccl!();
    let _alone = alone();
    be_strict();
    threads_within(Duration::from_secs(30), 3, |comm| {
        let memory = DeviceMemory::of(comm);
        let mut buffer = memory.put(&[1_u32; 100]);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        comm.device().unwrap().synchronize().unwrap();
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            simgpu::nccl::lose(2);
        } else {
            let queued = comm.all_reduce(&mut buffer, ReduceOp::Sum);
            let ended = comm.device().unwrap().synchronize();
            let error = queued.and(ended).unwrap_err();
            assert!(!error.is_timeout(), "{error}");
        }
    });
}

#[test]
fn a_communicator_may_be_dropped_with_work_in_flight() {
    let _alone = alone();
    be_strict();
    threads_within(Duration::from_secs(30), 2, |comm| {
        let memory = DeviceMemory::of(comm);
        let mut buffer = memory.put(&vec![1_u32; 10_000]);
        for _ in 0..5 {
            comm.all_reduce(&mut buffer, ReduceOp::BitOr).unwrap();
        }
        drop(buffer);
    });
    assert!(is_real() || simgpu::reports().is_empty());
    let communicators: Vec<Communicator> = super::common::ranks::communicators_with(2, patient);
    each(communicators, drop);
    super::gpu::assert_nothing_found();
}

#[test]
fn memory_that_nccl_did_not_forget_is_not_let_go() {
    steers_nccl!();
    // Lost memory stays with the process.
    alone_in_a_process("endings::memory_that_nccl_did_not_forget_is_not_let_go", || {
        threads_with(
            1,
            |_| builder(Config::default()),
            |comm| {
                let device = comm.device().unwrap();
                let raw = device.raw();
                // SAFETY: no call is made on it.
                let registered = || unsafe { raw.register(raw.allocate::<f32>(device.stream(), 1024).unwrap()) }.unwrap();
                let (whole, dropped, taken) = (registered(), registered(), registered());
                drop(whole.into_buffer().unwrap());
                assert_eq!(simgpu::nccl::counts().allocations, 2);
                // An invalid argument, which leaves the communicator as it is.
                simgpu::nccl::fail_call_of_this_thread("ncclCommDeregister", 1, 4);
                drop(dropped);
                simgpu::nccl::fail_call_of_this_thread("ncclCommDeregister", 1, 4);
                let error = taken.into_buffer().unwrap_err();
                assert!(error.to_string().contains("memory is leaked"), "{error}");
                assert_eq!(simgpu::nccl::counts().allocations, 2);
            },
        );
    });
}

#[test]
fn a_device_that_has_failed_for_good_leaves_the_host_backend_and_says_to_start_the_process_again() {
    steers_gpu!();
    alone_in_a_process("endings::a_device_that_has_failed_for_good_leaves_the_host_backend_and_says_to_start_the_process_again", || {
        let finished = Meeting::new(3);
        threads_with(3, patient, |comm| {
            let device = comm.device().unwrap();
            let mut sum = DeviceMemory::of(comm).put(&[1_u32]);
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            device.synchronize().unwrap();
            // A shrink ends the calls that other ranks have not finished.
            finished.meet();
            if comm.rank() == 1 {
                // Like a kernel that reads memory of a killed peer, which no longer exists.
                simgpu::fail_stream(device.stream().cu_stream().cast(), 700);
                let error = device.synchronize().unwrap_err();
                assert!(error.to_string().contains("ILLEGAL_ADDRESS") && error.to_string().contains("restart the process"), "{error}");
            }
            let left = comm.shrink().unwrap();
            assert_eq!(left.world_size(), 3);
            assert!(left.device().is_none());
            let why = left.why_no_device().unwrap();
            let words = ["rank 1", "device 1", "ILLEGAL_ADDRESS", "this process cannot use the device any more: restart the process"];
            assert!(words.iter().all(|words| why.contains(words)), "{why}");
            let mut ranks = [1_u32 << comm.rank()];
            left.all_reduce(&mut ranks, ReduceOp::BitOr).unwrap();
            assert_eq!(ranks, [0b111]);
            // On a failed device, buffers cannot be freed.
            std::mem::forget(sum);
            left.close().unwrap();
        });
    });
}

/// Runs a device call of ranks 0 and 1 that waits for rank 2. On rank 0 it has the timeout `timeout`, and then
/// `give_up` runs. Rank 1 waits with `wait`. Aborted NCCL kernels continue without waiting, so rank 1's call may end
/// with wrong data.
fn given_up(timeout: Duration, give_up: impl Fn(&Communicator) + Sync, wait: impl Fn(&Communicator, Vec<u32>) -> Error + Sync) {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let (senders, receiver) = (Mutex::new(vec![sender.clone(), sender]), Mutex::new(receiver));
    let give_up_in_call = |comm: &Communicator| {
        let mut buffer = DeviceMemory::of(comm).put(&[1_u32; 100]);
        let usual = comm.timeout();
        comm.set_timeout(timeout);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        comm.set_timeout(usual);
        comm.barrier().unwrap();
        give_up(comm);
        comm.device().unwrap().synchronize().expect_err("it has given up");
    };
    let wait_in_call = |comm: &Communicator| {
        let error = wait(comm, vec![1; 100]);
        let by_rank_0 = match root(&error) {
            Error::Aborted { by, .. } => by.rank == 0,
            Error::Timeout { arrived, missing, .. } => missing.is_empty() && arrived.iter().any(|peer| peer.rank == 0),
            _ => false,
        };
        assert!(by_rank_0, "{error}");
    };
    threads_with(
        3,
        |_| builder(unchecked()),
        |comm| {
            be_strict();
            // This call connects all ranks.
            let mut buffer = DeviceMemory::of(comm).put(&[1_u32; 100]);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            comm.device().unwrap().synchronize().unwrap();
            comm.barrier().unwrap();
            if comm.rank() == 2 {
                comm.barrier().unwrap();
                // It stays until the others are done, so that they do not notice its end.
                receiver.lock().unwrap().recv_timeout(Duration::from_secs(120)).unwrap_err();
                return;
            }
            let _done = senders.lock().unwrap().pop();
            if comm.rank() == 0 { give_up_in_call(comm) } else { wait_in_call(comm) }
        },
    );
}

/// The ways to wait for a device call.
const WAITS: [fn(&Communicator, Vec<u32>) -> Error; 4] = [
    |comm, values| {
        let mut buffer = DeviceMemory::of(comm).put(&values);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        comm.barrier().unwrap();
        comm.device().unwrap().synchronize().unwrap_err()
    },
    |comm, values| {
        let work = comm.start_all_reduce(DeviceMemory::of(comm).put(&values), ReduceOp::Sum).unwrap();
        comm.barrier().unwrap();
        work.wait().unwrap_err()
    },
    |comm, values| {
        let work = comm.start_all_reduce(DeviceMemory::of(comm).put(&values), ReduceOp::Sum).unwrap();
        comm.barrier().unwrap();
        block_on(work.into_future()).0.unwrap_err()
    },
    |comm, values| {
        let mut buffer = DeviceMemory::of(comm).put(&values);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        comm.barrier().unwrap();
        comm.device().unwrap().stream().synchronize().unwrap();
        comm.device().unwrap().failure().expect("the stream has come free by an abort")
    },
];

#[test]
fn a_call_that_another_ranks_abort_has_ended_is_not_well() {
    let _alone = alone();
    for wait in WAITS {
        given_up(Duration::from_secs(60), Communicator::abort, wait);
    }
}

#[test]
fn a_call_that_another_ranks_deadline_has_ended_is_not_well() {
    let _alone = alone();
    for wait in WAITS {
        given_up(Duration::from_millis(500), |_| (), wait);
    }
}

#[test]
fn a_call_that_another_ranks_revocation_has_ended_is_not_well() {
    let _alone = alone();
    // Another rank's revocation is not guaranteed to free a stream.
    for wait in &WAITS[..3] {
        given_up(Duration::from_secs(60), |comm| comm.device().unwrap().raw().revoke().unwrap(), wait);
    }
}
