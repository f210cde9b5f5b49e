//! The flight recorder's records of device calls.

use std::process::Command;
use std::time::{Duration, Instant};

use collectives::{
    Communicator, ReduceOp,
    flight::{Backend, Record, State},
};
use simgpu::Gate;

use super::common::cases::Memory;
use super::common::hosts::skip;
use super::common::programs::program;
use super::common::ranks::{alone_in_a_process, threads_with};
use super::gpu::{DeviceMemory, builder, ranks, unchecked};

fn device_records(comm: &Communicator) -> Vec<Record> {
    comm.flight_recorder().records().into_iter().filter(|record| record.backend == Backend::Device).collect()
}

fn states(comm: &Communicator) -> Vec<State> {
    device_records(comm).iter().map(|record| record.state).collect()
}

#[test]
fn a_device_call_is_finished_once_the_device_has_done_it() {
    let _alone = simgpu::alone();
    ranks(2, |comm, memory| {
        let device = comm.device().unwrap();
        let mut buffer = memory.put(&[1_u32; 100]);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        device.synchronize().unwrap();
        let held = Gate::close(device.stream().cu_stream().cast());
        comm.all_reduce(&mut buffer, ReduceOp::BitOr).unwrap();
        comm.broadcast(&mut buffer, 0).unwrap();
        assert_eq!(states(comm), [State::Finished, State::Queued, State::Queued]);
        held.open();
        device.synchronize().unwrap();
        assert_eq!(states(comm), [State::Finished; 3]);
        for record in device_records(comm) {
            assert!(record.finished_ns >= record.started_ns && record.started_ns.is_some(), "{record:?}");
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn the_watchdog_notes_what_nobody_waits_for() {
    // NCCL may still free memory of communicators that earlier tests aborted. A free holds the lock of its context
    // while a stream is blocked, and this context's prober needs that lock.
    alone_in_a_process("records::the_watchdog_notes_what_nobody_waits_for", || {
        ranks(2, |comm, memory| {
            let streams = [0, 1].map(|_| memory.stream.context().new_stream().unwrap());
            let mut buffer = memory.put(&[1_u32; 100]);
            let held = Gate::close(streams[1].cu_stream().cast());
            comm.with_stream(&streams[0]).all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            comm.with_stream(&streams[1]).broadcast(&mut buffer, 0).unwrap();
            // Only the first of the two streams has finished its call.
            let began = Instant::now();
            while states(comm)[0] == State::Queued && began.elapsed() < Duration::from_secs(20) {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            assert_eq!(states(comm), [State::Finished, State::Queued]);
            held.open();
            while states(comm)[1] == State::Queued && began.elapsed() < Duration::from_secs(20) {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            assert_eq!(states(comm), [State::Finished; 2]);
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn a_hang_on_the_device_is_explained_from_the_records() {
    let collperf = match program("collperf") {
        Ok(collperf) => collperf,
        Err(why) => skip!("{why}"),
    };
    let _alone = simgpu::alone();
    let folder = tempfile::tempdir().unwrap();
    let mut config = unchecked();
    config.flight_recorder_dir = Some(folder.path().to_owned());
    threads_with(
        2,
        |_| builder(config.clone()),
        |comm| {
            let memory = DeviceMemory::of(comm);
            let mut buffer = memory.put(&[1_u32; 100]);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            comm.device().unwrap().synchronize().unwrap();
            if comm.rank() == 0 {
                comm.set_timeout(Duration::from_millis(1500));
                comm.broadcast(&mut buffer, 0).unwrap();
                comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
                // The watchdog ends this wait and writes the records.
                comm.device().unwrap().stream().synchronize().unwrap();
                let records = device_records(comm);
                let ends: Vec<_> =
                    records.iter().map(|record| (record.state, record.error.as_ref().is_some_and(|e| e.is_timeout()))).collect();
                // The progress of a stream between two checks of the watchdog is not known: the root of a broadcast may
                // have finished.
                assert_eq!((ends[0], ends[2].0), ((State::Finished, false), State::Failed), "{records:?}");
                assert!(ends[1].1 || ends[2].1, "{records:?}");
            } else {
                comm.flight_recorder().write(folder.path()).unwrap();
            }
            comm.set_timeout(Duration::from_secs(60));
            comm.barrier().unwrap();
        },
    );
    let output = Command::new(collperf).arg("--explain-hang").arg(folder.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("rank 1") && said.contains("is behind") && said.contains("queued on the device"), "{said}");
    assert!(said.contains("its last call, all_reduce(sum, u32, count 100) number 0, has ended"), "{said}");
}
