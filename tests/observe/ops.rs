//! Custom ops, observers, and the closures of groups.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use collectives::observe::CallReport;
use collectives::{Collective, Communicator, CustomOp, Envelope, ReduceOp};

use super::common::ranks::{Wiring, alone_in_a_process, communicators, communicators_with, each, patience};
use super::{WANTED, quiet_panics, within};

/// Returns an op that adds, after it has run an action of the test. The action receives the number of earlier runs on
/// this rank.
fn op(action: impl Fn(usize) + Send + Sync + 'static) -> CustomOp<u32> {
    let calls = AtomicUsize::new(0);
    CustomOp::new("adds", move |sums: &mut [u32], others: &[u32]| {
        action(calls.fetch_add(1, Ordering::SeqCst));
        sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
    })
}

#[test]
fn an_op_that_panics_ends_its_communicator_on_every_rank() {
    alone_in_a_process("ops::an_op_that_panics_ends_its_communicator_on_every_rank", || {
        quiet_panics();
        for (wiring, started) in [Wiring::Shm, Wiring::Tcp, Wiring::Pairs].into_iter().flat_map(|wiring| [(wiring, false), (wiring, true)])
        {
            within(&format!("{wiring:?}, started: {started}"), move || {
                let comms = communicators_with(3, |rank| wiring.builder(rank).configure(|config| config.timeout = patience(10)));
                let did_panic = AtomicBool::new(false);
                each(comms, |comm| {
                    // On each rank that reduces.
                    let op = op(|_| std::panic::panic_any(WANTED));
                    for _ in 0..2 {
                        let x = vec![comm.rank() as u32; 20_000];
                        let call = catch_unwind(AssertUnwindSafe(|| {
                            if started {
                                return comm.start_all_reduce(x, &op)?.wait();
                            }
                            let mut x = x;
                            comm.all_reduce(&mut x, &op).map(|()| x)
                        }));
                        match call {
                            Ok(result) => assert!(result.is_err()),
                            Err(_) => {
                                assert!(!started);
                                did_panic.store(true, Ordering::SeqCst);
                            }
                        }
                    }
                    // The rank that panicked has notified the others.
                    assert!(comm.barrier().is_err(), "rank {} of {wiring:?}", comm.rank());
                    assert!(comm.send(&[1_u8], 0).is_err());
                });
                assert_eq!(did_panic.load(Ordering::SeqCst), !started, "{wiring:?}");
            });
        }
    });
}

thread_local! {
    static COMM: RefCell<Option<Rc<Communicator>>> = const { RefCell::new(None) };
}

#[test]
fn an_op_that_calls_its_communicator_gets_an_error_for_collectives_and_messages_go() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        within(&format!("{wiring:?}"), move || {
            each(communicators(wiring, 2), |comm| {
                let comm = Rc::new(comm);
                COMM.set(Some(Rc::clone(&comm)));
                let op = op(|_| {
                    let own = COMM.with_borrow(|comm| comm.clone()).unwrap();
                    assert!(own.barrier().is_err() && !own.explain().is_empty());
                    own.send(&[8_u8], Envelope::rank(own.rank()).tag(3)).unwrap();
                    let mut x = [0_u8];
                    own.recv(&mut x, Envelope::rank(own.rank()).tag(3)).unwrap();
                    assert_eq!(x, [8]);
                });
                let mut x = vec![comm.rank() as u32 + 1; 5000];
                comm.all_reduce(&mut x, &op).unwrap();
                assert_eq!(x, vec![3; 5000]);
                comm.barrier().unwrap();
                COMM.set(None);
            });
        });
    }
}

/// A value in an op whose drop panics.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        std::panic::panic_any(WANTED);
    }
}

#[test]
fn an_op_whose_drop_panics_on_the_worker_ends_neither_its_call_nor_the_next() {
    alone_in_a_process("ops::an_op_whose_drop_panics_on_the_worker_ends_neither_its_call_nor_the_next", || {
        quiet_panics();
        within("an op that explodes", || {
            each(communicators(Wiring::Shm, 2), |comm| {
                for round in 0..3 {
                    let bomb = Bomb;
                    let op = CustomOp::new("adds", move |sums: &mut [u32], others: &[u32]| {
                        let _bomb = &bomb;
                        sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
                    });
                    // Another started call goes first, so that the last holder of this op is the worker.
                    let first = comm.start_all_reduce(vec![round; 200_000], ReduceOp::Sum).unwrap();
                    let work = comm.start_all_reduce(vec![comm.rank() as u32 + 1; 10], op).unwrap();
                    assert_eq!(first.wait().unwrap()[0], 2 * round);
                    assert_eq!(work.wait().unwrap(), [3; 10]);
                }
                comm.barrier().unwrap();
            });
        });
    });
}

#[test]
fn an_observer_that_panics_or_calls_back_changes_nothing() {
    alone_in_a_process("ops::an_observer_that_panics_or_calls_back_changes_nothing", || {
        quiet_panics();
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            let told = Arc::new(AtomicUsize::new(0));
            for panics in [true, false] {
                let count = Arc::clone(&told);
                let observer = move |call: &CallReport<'_>| {
                    count.fetch_add(1, Ordering::SeqCst);
                    if panics {
                        std::panic::panic_any(WANTED);
                    }
                    if let Some(comm) = COMM.with_borrow(|comm| comm.clone()) {
                        assert!(!comm.flight_recorder().records().is_empty());
                        // A collective is refused inside a call. A message has already ended when it is reported.
                        assert!(call.kind != Collective::AllReduce || comm.barrier().is_err());
                    }
                };
                let observer = Arc::new(observer);
                within(&format!("{wiring:?}, panics: {panics}"), move || {
                    let observer = |_rank| {
                        let observer = Arc::clone(&observer);
                        move |call: &CallReport<'_>| observer(call)
                    };
                    let builder = |rank| wiring.builder(rank).configure(|config| config.observer = Some(Arc::new(observer(rank))));
                    each(communicators_with(2, builder), |comm| {
                        let (comm, other) = (Rc::new(comm), 1);
                        COMM.set(Some(Rc::clone(&comm)));
                        let mut x = [comm.rank() as u32 + 1];
                        comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                        assert_eq!(x, [3]);
                        assert_eq!(comm.start_all_reduce(vec![1_u8], ReduceOp::Sum).unwrap().wait().unwrap(), [2]);
                        let other = other - comm.rank();
                        let receive = comm.start_recv(vec![0_u8], other).unwrap();
                        comm.send(&[comm.rank() as u8], other).unwrap();
                        assert_eq!(receive.wait().unwrap().0, [other as u8]);
                        COMM.set(None);
                        comm.barrier().unwrap();
                    });
                });
            }
            assert!(told.load(Ordering::SeqCst) >= 2 * 2 * 4, "{wiring:?}");
        }
    });
}

/// If a call between posting and waiting panics, what was posted is taken back. Nothing is written into the buffers,
/// and what the peer sends is kept for the next receive.
#[test]
fn a_group_in_which_an_op_panics_leaves_no_receive_behind() {
    alone_in_a_process("ops::a_group_in_which_an_op_panics_leaves_no_receive_behind", || {
        quiet_panics();
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            within(&format!("{wiring:?}"), move || {
                each(communicators(wiring, 2), |comm| {
                    let panics = op(|_| std::panic::panic_any(WANTED));
                    let other = 1 - comm.rank();
                    let (mut theirs, mut x) = (vec![7_u8; 100_000], [1_u32; 4]);
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        comm.group(|group| {
                            group.recv(&mut theirs, other)?;
                            group.all_reduce(&mut x, &panics)
                        })
                    }));
                    assert!(outcome.is_err() || outcome.is_ok_and(|result| result.is_err()));
                    assert!(comm.send(&vec![1_u8; 100_000], other).is_err());
                    assert_eq!(theirs, vec![7; 100_000]);
                });
            });
        }
    });
}
