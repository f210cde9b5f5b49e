//! Calls that do not end, peers that are lost, aborts: typed errors, and never a hang.

use std::time::{Duration, Instant};

use collectives::{Communicator, ReduceOp};

use super::common::cases::Memory;
use super::common::ranks::{each, threads_with};
use super::gpu::{DeviceMemory, builder, unchecked};

fn short(limit: Duration) -> impl Fn(usize) -> collectives::Builder {
    move |_| builder(unchecked()).timeout(limit)
}

#[test]
fn a_rank_that_does_not_call_makes_the_others_time_out() {
    let _alone = simgpu::alone();
    let comms = threads_with(2, short(Duration::from_secs(60)), |comm| comm.rank());
    assert_eq!(comms, [0, 1]);
    threads_with(2, short(Duration::from_millis(1500)), |comm| {
        let memory = DeviceMemory::of(comm);
        if comm.rank() == 0 {
            let began = Instant::now();
            let mut buffer = memory.put(&[1_u32; 100]);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            let error = comm.device().unwrap().synchronize().unwrap_err();
            assert!(error.is_timeout(), "{error}");
            assert!(began.elapsed() < Duration::from_secs(20), "{error}");
            let error = comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err();
            assert!(error.is_poisoned() && error.is_timeout(), "{error}");
        }
        comm.set_timeout(Duration::from_secs(60));
        comm.barrier().unwrap();
    });
}

#[test]
fn the_watchdog_frees_a_stream_that_nobody_waits_on_with_a_deadline() {
    let _alone = simgpu::alone();
    threads_with(2, short(Duration::from_millis(1500)), |comm| {
        let memory = DeviceMemory::of(comm);
        if comm.rank() == 0 {
            let stream = memory.stream.context().new_stream().unwrap();
            let mut buffer = memory.put(&[1_u32; 100]);
            comm.on(&stream).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            // Without the watchdog this waits for ever.
            stream.synchronize().unwrap();
            let failure = comm.device().unwrap().failure().unwrap();
            assert!(failure.is_timeout() && failure.to_string().contains("all_reduce"), "{failure}");
        }
        comm.set_timeout(Duration::from_secs(60));
        comm.barrier().unwrap();
    });
}

#[test]
fn an_abort_from_another_thread_ends_a_wait() {
    let _alone = simgpu::alone();
    threads_with(2, short(Duration::from_secs(60)), |comm| {
        let memory = DeviceMemory::of(comm);
        if comm.rank() == 0 {
            let mut buffer = memory.put(&[1_u32; 100]);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            let handle = comm.abort_handle();
            let began = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(move || handle.abort());
                assert!(comm.device().unwrap().synchronize().is_err());
            });
            assert!(began.elapsed() < Duration::from_secs(20));
            assert!(comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err().is_poisoned());
        }
    });
}

#[test]
fn a_lost_peer_is_an_error_on_the_others() {
    let _alone = simgpu::alone();
    threads_with(3, short(Duration::from_secs(30)), |comm| {
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
    let _alone = simgpu::alone();
    threads_with(2, short(Duration::from_secs(30)), |comm| {
        let memory = DeviceMemory::of(comm);
        let mut buffer = memory.put(&vec![1_u32; 10_000]);
        for _ in 0..5 {
            comm.all_reduce(&mut buffer, ReduceOp::BitOr).unwrap();
        }
        drop(buffer);
    });
    assert!(simgpu::reports().is_empty());
    let communicators: Vec<Communicator> = super::common::ranks::communicators_with(2, short(Duration::from_secs(30)));
    each(communicators, drop);
    super::gpu::assert_nothing_found();
}
