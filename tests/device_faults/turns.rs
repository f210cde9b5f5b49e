//! Threads and communicators that wait for each other in device calls. A deadline ends the deadlock, and the error
//! names what waits for what.

use std::time::Duration;

use collectives::{Communicator, Config, Error, ReduceOp, flight::State};

use super::common::cases::Memory;
use super::common::meeting::wait_until;
use super::common::ranks::{Meeting, threads_with};
use super::gpu::{DeviceMemory, alone, assert_nothing_found, be_strict, builder, unchecked};

/// Long enough for all ranks to wait for a good part of it, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(2);

#[test]
fn a_call_behind_a_receive_is_told_of_its_sender_and_the_communicator_lives() {
    let _alone = alone();
    let called = Meeting::new(2);
    threads_with(
        2,
        |_| builder(Config::default()),
        |comm| {
            let memory = DeviceMemory::of(comm);
            let mut sums = memory.put(&[1_u32; 10]);
            if comm.rank() == 0 {
                called.meet();
                comm.send(&memory.put(&[7_u32; 10]), 1).unwrap();
            } else {
                let mut received = memory.put(&[0_u32; 10]);
                std::thread::scope(|scope| {
                    let receiving = scope.spawn(|| comm.recv(&mut received, 0).unwrap());
                    let is_waiting = || {
                        comm.flight_recorder().records().iter().any(|record| record.kind.name() == "recv" && record.state == State::Started)
                    };
                    wait_until("the receive waits", is_waiting);
                    let error = comm.with_timeout(Duration::from_millis(20)).all_reduce(&mut sums, ReduceOp::Sum).unwrap_err();
                    assert!(error.is_timeout() && !error.is_poisoned(), "{error}");
                    let words =
                        "all_reduce, which has not begun: waiting for its turn behind an earlier call (a recv on the device from rank 0,";
                    assert!(error.call().is_some_and(|call| call.starts_with(words)), "{error}");
                    called.meet();
                    receiving.join().unwrap();
                });
                assert_eq!(memory.get(&received), [7; 10]);
            }
            comm.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
            assert_eq!(memory.get(&sums), [2; 10]);
            comm.device().unwrap().synchronize().unwrap();
        },
    );
    assert_nothing_found();
}

/// Lets rank 0 call on the world and rank 1 on a split of it. Returns the error of each.
fn in_opposite_orders(config: Config, call: impl Fn(&Communicator, &DeviceMemory) -> Error + Sync) -> Vec<String> {
    let (begun, ended) = (Meeting::new(2), Meeting::new(2));
    threads_with(
        2,
        |_| builder(config.clone()),
        |world| {
            let other = world.split(Some(0), 0).unwrap().unwrap();
            let memory = DeviceMemory::of(world);
            begun.meet();
            let error = call(&if world.rank() == 0 { world } else { &other }.with_timeout(LIMIT), &memory);
            assert!(error.is_timeout(), "{error}");
            ended.meet();
            error.to_string()
        },
    )
}

#[test]
fn two_communicators_in_opposite_orders_name_both_comparisons() {
    let _alone = alone();
    let errors =
        in_opposite_orders(Config::default(), |comm, memory| comm.all_reduce(&mut memory.put(&[1_u32; 10]), ReduceOp::Sum).unwrap_err());
    for (error, name) in errors.iter().zip(["world/0 from rank 0 (as rank 1) for ", "world (as rank 0) for "]) {
        assert!(error.starts_with("comparing all_reduce(sum, u32, count 10) number 0 with"), "{error}");
        let (_, meanwhile) = error.split_once("meanwhile this process waited in all_gather(comparing device calls, ").expect(error);
        assert!(meanwhile.contains(&format!(" of communicator {name}")), "{error}");
    }
}

/// Returns the error that freed the stream of a communicator.
fn failure_of_device(comm: &Communicator) -> Error {
    let device = comm.device().unwrap();
    let _ = device.stream().synchronize();
    device.failure().unwrap()
}

#[test]
fn two_communicators_in_opposite_orders_name_both_device_calls() {
    let _alone = alone();
    let errors = in_opposite_orders(unchecked(), |comm, memory| {
        comm.all_reduce(&mut memory.put(&[1_u32; 10]), ReduceOp::Sum).unwrap();
        failure_of_device(comm)
    });
    for (error, name) in errors.iter().zip(["world/0 from rank 0 (as rank 1) for ", "world (as rank 0) for "]) {
        let (own, meanwhile) = error.split_once("meanwhile this process waited in ").expect(error);
        assert!(own.contains("all_reduce(sum, u32, count 10) number 0"), "{error}");
        let call = format!("all_reduce(sum, u32, count 10) number 0 on the device of communicator {name}");
        assert!(meanwhile.starts_with(&call), "{error}");
    }
}

#[test]
fn two_communicators_whose_first_calls_are_in_opposite_orders_time_out_inside_nccl() {
    let _alone = alone();
    be_strict();
    let errors = in_opposite_orders(unchecked(), |comm, memory| {
        let called = comm.all_reduce(&mut memory.put(&[1_u32; 10]), ReduceOp::Sum);
        let failure = failure_of_device(comm);
        // A real NCCL has connected the ranks before.
        assert!(called.is_err() || !super::gpu::can_steer_nccl());
        called.err().unwrap_or(failure)
    });
    assert!(errors.iter().all(|error| error.contains("all_reduce(sum, u32, count 10) number 0")), "{errors:?}");
}
