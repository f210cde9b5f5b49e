//! One communicator with several owners: clones, threads that share it, and how it ends for all of them.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::meeting::wait_until;
use crate::common::ranks::{Meeting, Wiring, communicators, communicators_with, each, threads, threads_with};

use collectives::{
    Collective, Communicator, CustomOp, Envelope, Error, ReduceOp,
    flight::{Record, State},
};

const WIRINGS: [Wiring; 2] = [Wiring::Shm, Wiring::Tcp];

/// The state of an engine.
#[derive(Clone)]
struct Engine {
    comm: Communicator,
    sums: Arc<Mutex<Vec<u64>>>,
}

#[test]
fn threads_that_share_a_communicator_take_turns() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 100;
    for wiring in WIRINGS {
        each(communicators_with(3, |rank| wiring.builder_for_threads(rank)), |comm| {
            let engine = Engine { comm, sums: Arc::default() };
            let workers: Vec<_> = (0..THREADS)
                .map(|_| {
                    let engine = engine.clone();
                    // All threads make the same call, so any order is the same on all ranks.
                    std::thread::spawn(move || {
                        for _ in 0..ROUNDS {
                            let mut x = [engine.comm.rank() as u64 + 1; 100];
                            engine.comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                            assert_eq!(x, [6; 100]);
                            engine.sums.lock().unwrap().push(x[0]);
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            assert_eq!(engine.sums.lock().unwrap().len(), THREADS * ROUNDS as usize);
            engine.comm.barrier().unwrap();
        });
    }
}

#[test]
fn threads_that_agree_on_an_order_make_different_calls() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let (first_done, second_may) = channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let mut x = [1_u8];
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert_eq!(x, [2]);
                    first_done.send(()).unwrap();
                });
                scope.spawn(move || {
                    second_may.recv().unwrap();
                    let mut all = [0_u32; 2];
                    comm.all_gather_into(&(comm.rank() as u32), &mut all).unwrap();
                    assert_eq!(all, [0, 1]);
                });
            });
        });
    }
}

#[test]
fn messages_come_and_go_while_another_thread_waits_in_a_barrier() {
    for wiring in WIRINGS {
        let meeting = Meeting::new(2);
        threads(wiring, 2, |comm| {
            let other = 1 - comm.rank();
            std::thread::scope(|scope| {
                let (entering, entered) = channel();
                let waiting = scope.spawn(move || {
                    // Rank 1 comes to the barrier only after all messages.
                    if comm.rank() == 0 {
                        entering.send(()).unwrap();
                        comm.barrier().unwrap();
                    }
                });
                if comm.rank() == 0 {
                    entered.recv().unwrap();
                }
                for number in 0..50_u64 {
                    let mut theirs = 0;
                    comm.send_recv(&number, other, &mut theirs, other).unwrap();
                    assert_eq!(theirs, number);
                }
                // A message that is never sent ends at its deadline, and the communicator stays usable.
                let error = comm.with_timeout(Duration::from_millis(5)).recv(&mut 0_u8, Envelope::rank(other).tag(99)).unwrap_err();
                assert!(error.is_timeout(), "{error}");
                meeting.meet();
                if comm.rank() == 1 {
                    comm.barrier().unwrap();
                }
                waiting.join().unwrap();
            });
        });
    }
}

/// Waits until this rank waits in a barrier for another rank.
fn wait_for_barrier(comm: &Communicator) {
    let is_waiting = |record: &Record| record.kind == Collective::Barrier && record.state == State::Started;
    wait_until("this rank is in a barrier", || comm.flight_recorder().records().iter().any(is_waiting));
}

#[test]
fn a_call_is_started_while_another_thread_is_in_a_blocking_one() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            let start = || comm.start_all_reduce(vec![1_u32; 10], ReduceOp::Sum).unwrap();
            let work = if comm.rank() == 0 {
                std::thread::scope(|scope| {
                    let blocking = scope.spawn(|| comm.barrier().unwrap());
                    wait_for_barrier(comm);
                    let work = start();
                    assert!(!work.is_done());
                    // Only now the other rank comes.
                    comm.send(&1_u8, 1).unwrap();
                    blocking.join().unwrap();
                    work
                })
            } else {
                comm.recv(&mut 0_u8, 0).unwrap();
                comm.barrier().unwrap();
                start()
            };
            assert_eq!(work.wait().unwrap(), [2; 10]);
        });
    }
}

#[test]
fn a_call_whose_turn_does_not_come_says_behind_which_and_the_communicator_lives() {
    for wiring in WIRINGS {
        let meeting = Meeting::new(2);
        let builder = |rank| wiring.builder_for_threads(rank);
        threads_with(2, builder, |comm| {
            if comm.rank() == 1 {
                meeting.meet();
                comm.barrier().unwrap();
                return;
            }
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| comm.barrier().unwrap());
                wait_for_barrier(comm);
                let late = comm.with_timeout(Duration::from_millis(20));
                let error = late.all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap_err();
                assert!(error.is_timeout() && !error.is_poisoned(), "{error}");
                let words = error.to_string();
                assert!(words.contains("all_reduce") && words.contains("behind an earlier call (barrier number"), "{words}");
                meeting.meet();
                waiting.join().unwrap();
            });
        });
    }
}

#[test]
fn closing_ends_it_for_all_clones() {
    for wiring in WIRINGS {
        each(communicators(wiring, 2), |comm| {
            let kept = comm.clone();
            let receiving = std::thread::spawn({
                let comm = comm.clone();
                move || comm.recv(&mut 0_u8, 1 - comm.rank())
            });
            comm.close().unwrap();
            let error = receiving.join().unwrap().unwrap_err();
            assert!(error.is_closed() || error.is_peer_lost(), "{error}");
            let refused = |error: Error| assert!(error.is_closed(), "{error}");
            refused(kept.barrier().unwrap_err());
            refused(kept.send(&1_u8, 0).unwrap_err());
            refused(kept.start_all_reduce(vec![1_u8], ReduceOp::Sum).unwrap().wait().unwrap_err());
            refused(kept.split(Some(0), 0).unwrap_err());
            refused(kept.alloc::<u8>(10).unwrap_err());
            refused(kept.close().unwrap_err());
            assert_eq!(kept.rank(), comm.rank());
        });
    }
}

#[test]
fn who_closes_is_gone_for_the_others_though_a_clone_is_left() {
    for wiring in WIRINGS {
        let meeting = Meeting::new(2);
        each(communicators(wiring, 2), |comm| {
            let kept = comm.clone();
            if comm.rank() == 0 {
                comm.close().unwrap();
            } else {
                // The barrier for which the other rank waits before it leaves.
                comm.barrier().unwrap();
                let error = comm.barrier().unwrap_err();
                assert!(error.is_peer_lost(), "{error}");
            }
            meeting.meet();
            drop(kept);
        });
    }
}

#[test]
fn the_last_clone_is_dropped_with_an_op_on_the_worker() {
    for wiring in WIRINGS {
        each(communicators(wiring, 2), |comm| {
            let kept = comm.clone();
            let op = CustomOp::new("keeping", move |into: &mut [u8], from: &[u8]| {
                // From inside its own call, it is refused.
                let error = kept.barrier().unwrap_err();
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
            });
            let work = comm.start_all_reduce(vec![1_u8; 3], op).unwrap();
            drop(comm);
            assert_eq!(work.wait().unwrap(), [2; 3]);
        });
    }
}

#[test]
fn a_call_that_waits_for_itself_is_refused() {
    for wiring in WIRINGS {
        threads(wiring, 2, |comm| {
            for starts in [false, true] {
                let (inner, (said, errors)) = (comm.clone(), channel());
                let op = CustomOp::new("waiting", move |into: &mut [u8], from: &[u8]| {
                    let work = inner.start_barrier().unwrap();
                    said.send((work.wait().unwrap_err(), inner.alloc::<u8>(3).map(drop).unwrap_err(), inner.split(None, 0).unwrap_err()))
                        .unwrap();
                    into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
                });
                let mut x = vec![1_u8];
                if starts {
                    x = comm.start_all_reduce(x, op).unwrap().wait().unwrap();
                } else {
                    comm.all_reduce(&mut x, op).unwrap();
                }
                assert_eq!(x, [2]);
                // Both ranks reduce here, each once.
                let (waiting, allocating, splitting) = errors.try_recv().unwrap();
                for error in [waiting, allocating, splitting] {
                    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                }
                assert!(errors.try_recv().is_err(), "the op is called once");
                // The calls that the op started come after the op's own.
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn of_two_threads_that_shrink_one_goes_on() {
    for wiring in WIRINGS {
        each(communicators(wiring, 3), |comm| {
            if comm.rank() == 2 {
                comm.abort();
                return;
            }
            comm.barrier().unwrap_err();
            let shrink = |comm: Communicator| std::thread::spawn(move || comm.shrink());
            let attempts: Vec<_> = (0..2).map(|_| shrink(comm.clone())).collect();
            let shrunk: Vec<_> = attempts.into_iter().map(|attempt| attempt.join().unwrap()).collect();
            let errors: Vec<_> = shrunk.iter().filter_map(|shrunk| shrunk.as_ref().err().map(ToString::to_string)).collect();
            let survivors: Vec<_> = shrunk.into_iter().filter_map(Result::ok).collect();
            assert_eq!(survivors.len(), 1, "{errors:?}");
            assert_eq!(survivors[0].world_size(), 2);
            survivors[0].barrier().unwrap();
        });
    }
}

#[test]
fn two_threads_close_and_one_is_told() {
    for wiring in WIRINGS {
        each(communicators(wiring, 2), |comm| {
            let other = comm.clone();
            let closing = std::thread::spawn(move || other.close());
            let closed = [comm.close(), closing.join().unwrap()];
            assert_eq!(closed.iter().filter(|closed| closed.is_ok()).count(), 1, "{closed:?}");
            assert!(closed.iter().any(|closed| closed.as_ref().is_err_and(Error::is_closed)), "{closed:?}");
        });
    }
}

#[test]
fn who_left_early_is_said_to_have_left_and_the_barrier_of_close_to_be_its() {
    for wiring in Wiring::ALL {
        each(communicators(wiring, 3), |comm| {
            if comm.rank() == 2 {
                return; // as in a program that takes a different path
            }
            let said = comm.close().unwrap_err().to_string();
            let begins = "barrier() number 1 (of close): lost rank 2 (";
            let left = "it closed or dropped its communicator before it made this call";
            assert!(said.starts_with(begins) && said.contains(left), "{wiring:?}: {said}");
        });
    }
}

#[test]
fn errors_of_the_barrier_of_close_say_so() {
    for wiring in WIRINGS {
        let done = Meeting::new(2);
        each(communicators(wiring, 2), |comm| {
            let late = comm.with_timeout(Duration::from_millis(20));
            if comm.rank() == 0 {
                let said = late.close().unwrap_err().to_string();
                assert!(said.starts_with("barrier() number 1 (of close): timed out"), "{wiring:?}: {said}");
            }
            done.meet();
        });
        each(communicators(wiring, 2), |comm| {
            if comm.rank() == 1 {
                return assert!(comm.all_reduce(&mut [1_u8], ReduceOp::Sum).is_err());
            }
            let said = comm.close().unwrap_err().to_string();
            assert!(
                said.contains("called barrier() number 1 (of close)") && said.contains("rank 1 called all_reduce("),
                "{wiring:?}: {said}"
            );
        });
        each(communicators(wiring, 2), |comm| {
            comm.abort();
            let said = comm.close().unwrap_err().to_string();
            assert!(said.starts_with("barrier (of close): this communicator was ended by"), "{wiring:?}: {said}");
        });
    }
}
