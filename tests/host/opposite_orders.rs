//! Two communicators that are used in opposite orders: a deadline ends the deadlock, and the errors name both calls.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::common::meeting::wait_until;
use crate::common::ranks::{Meeting, Wiring, threads_with};

use collectives::{
    Communicator, Envelope, Error, ReduceOp,
    flight::{Record, State},
};

const WIRINGS: [Wiring; 2] = [Wiring::Shm, Wiring::Tcp];

/// Long enough for all ranks to wait for a good part of it, even on a busy machine.
const LIMIT: Duration = Duration::from_millis(if cfg!(one_mapping) { 10_000 } else { 2000 });

/// Waits until the flight recorder shows that this rank waits in a call of this name.
fn wait_for(comm: &Communicator, kind: &str) {
    let is_waiting = |record: &Record| record.kind.name() == kind && record.state == State::Started;
    wait_until(kind, || comm.flight_recorder().records().iter().any(is_waiting));
}

/// Returns the other call that an error names.
fn meanwhile(error: &Error) -> &str {
    let Error::Timeout { meanwhile, .. } = error else { panic!("{error}") };
    assert_eq!(meanwhile.len(), 1, "{error}");
    assert!(error.to_string().ends_with("are two communicators used in opposite orders?"), "{error}");
    &meanwhile[0]
}

/// Runs one test at a time, since an error names all calls in which the process waits.
static ALONE: Mutex<()> = Mutex::new(());

/// Makes a second communicator of all ranks and runs each rank's program on both, the world's first. The ranks begin
/// together, and none leaves before all have ended.
fn with_two(wiring: Wiring, program: impl Fn(&Communicator, &Communicator) + Sync) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (begun, ended) = (Meeting::new(2), Meeting::new(2));
    let builder = |rank| wiring.builder_for_threads(rank);
    threads_with(2, builder, |world| {
        let other = world.split(Some(0), 0).unwrap().unwrap();
        begun.meet();
        program(world, &other);
        ended.meet();
    });
}

#[test]
fn two_ranks_that_order_two_communicators_differently_name_both_calls() {
    for wiring in WIRINGS {
        with_two(wiring, |world, other| {
            if world.rank() == 0 {
                let error = world.with_timeout(LIMIT).all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap_err();
                assert!(error.call().is_some_and(|call| call.starts_with("all_reduce(sum, f32, count 4) number ")), "{error}");
                let call = meanwhile(&error);
                assert!(call.starts_with("broadcast(u8, count 3, root 0) number "), "{error}");
                assert!(call.contains(" of communicator world/0 from rank 0 (as rank 1) for "), "{error}");
            } else {
                let error = other.with_timeout(LIMIT).broadcast(&mut [1_u8; 3], 0).unwrap_err();
                assert!(error.call().is_some_and(|call| call.starts_with("broadcast(u8, count 3, root 0) number ")), "{error}");
                let call = meanwhile(&error);
                assert!(call.starts_with("all_reduce(sum, f32, count 4) number "), "{error}");
                assert!(call.contains(" of communicator world (as rank 0) for "), "{error}");
            }
        });
    }
}

#[test]
fn later_calls_are_refused_with_both_calls() {
    with_two(Wiring::Shm, |world, other| {
        let first = if world.rank() == 0 { world } else { other };
        first.with_timeout(LIMIT).all_reduce(&mut [1_u8], ReduceOp::Max).unwrap_err();
        let refused = first.barrier().unwrap_err();
        assert!(
            refused.is_poisoned() && refused.to_string().contains("meanwhile this process waited in all_reduce(max, u8, count 1)"),
            "{refused}"
        );
    });
}

#[test]
fn a_message_and_a_collective_that_wait_for_each_other_are_both_named() {
    for wiring in WIRINGS {
        with_two(wiring, |world, other| {
            if world.rank() == 0 {
                let error = world.with_timeout(LIMIT).recv(&mut 0_u8, Envelope::rank(1).tag(7)).unwrap_err();
                assert!(error.call() == Some("recv from rank 1, tag 7") && meanwhile(&error).starts_with("barrier() number "), "{error}");
            } else {
                let error = other.with_timeout(LIMIT).barrier().unwrap_err();
                assert!(meanwhile(&error).starts_with("recv from rank 1, tag 7 of communicator world (as rank 0) for "), "{error}");
            }
        });
    }
}

#[test]
fn a_thread_behind_another_one_and_behind_a_started_call_names_both_too() {
    for starts in [false, true] {
        with_two(Wiring::Shm, |world, other| {
            if world.rank() == 1 {
                let error = other.with_timeout(2 * LIMIT).barrier().unwrap_err();
                assert!(error.is_timeout(), "{error}");
                return;
            }
            std::thread::scope(|scope| {
                let first = world.with_timeout(2 * LIMIT);
                let first = scope.spawn(move || match starts {
                    true => first.start_all_reduce(vec![1_u8], ReduceOp::Sum).unwrap().wait().map(drop),
                    false => first.all_reduce(&mut [1_u8], ReduceOp::Sum),
                });
                wait_for(world, "all_reduce");
                let error = world.with_timeout(LIMIT).barrier().unwrap_err();
                assert!(
                    !error.is_poisoned() && error.call().is_some_and(|call| call.contains("behind an earlier call (all_reduce number ")),
                    "{error}"
                );
                assert!(meanwhile(&error).starts_with("barrier() number "), "{error}");
                let error = first.join().unwrap().unwrap_err();
                assert!(meanwhile(&error).starts_with("barrier() number "), "{error}");
            });
        });
    }
}

#[test]
fn ranks_that_use_one_communicator_alone_are_told_of_no_other() {
    with_two(Wiring::Shm, |world, _| {
        if world.rank() == 0 {
            let error = world.with_timeout(Duration::from_millis(50)).all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap_err();
            assert!(matches!(&error, Error::Timeout { meanwhile, .. } if meanwhile.is_empty()), "{error}");
        }
    });
}
