//! Edge cases of the public API: odd types and sizes, panics, limits, and communicators that ranks leave at different
//! times.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::limit::within;
use crate::common::meeting::End;
use crate::common::ranks::{Meeting, Wiring, free_port, threads, threads_with};

use collectives::{Communicator, CustomOp, Data, Envelope, Error, ReduceOp, Result};

/// Defines plain data with an alignment of its own, and a sum of it.
macro_rules! aligned {
    ($name:ident, $align:literal) => {
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[repr(C, align($align))]
        struct $name([u64; $align / 8]);

        #[expect(unsafe_code, reason = "plain data of the test's own")]
        // SAFETY: integers that fill the alignment, so there is no padding, and any bytes are a value.
        unsafe impl Data for $name {}

        impl $name {
            fn sum() -> CustomOp<Self> {
                CustomOp::new(stringify!($name), |into: &mut [Self], from: &[Self]| {
                    assert!(into.as_ptr().is_aligned() && from.as_ptr().is_aligned());
                    for (into, from) in into.iter_mut().zip(from) {
                        into.0.iter_mut().zip(from.0).for_each(|(into, from)| *into += from);
                    }
                })
            }

            fn check(wiring: Wiring, ranks: usize, count: usize) {
                threads(wiring, ranks, |comm| {
                    let expected = $name([(0..ranks as u64).sum(); $align / 8]);
                    let mut x = vec![$name([comm.rank() as u64; $align / 8]); count];
                    comm.all_reduce(&mut x, Self::sum()).unwrap();
                    assert!(x.iter().all(|x| *x == expected), "{count} of {} on {ranks} ranks, {wiring:?}", stringify!($name));
                });
            }
        }
    };
}

aligned!(Aligned128, 128);
aligned!(Aligned8192, 8192);

#[test]
fn elements_of_any_alignment_are_reduced() {
    for wiring in Wiring::ALL {
        for (ranks, count) in [(2, 1), (3, 3), (5, 20)] {
            Aligned128::check(wiring, ranks, count);
            Aligned8192::check(wiring, ranks, count);
        }
    }
}

#[test]
fn elements_larger_than_a_slot_of_shared_memory_are_reduced() {
    const N: usize = 10_000;
    let add = |into: &mut [[f64; N]], from: &[[f64; N]]| {
        into.iter_mut().flatten().zip(from.iter().flatten()).for_each(|(into, from)| *into += from);
    };
    for wiring in Wiring::ALL {
        for op in [CustomOp::new("add", add), CustomOp::ordered("add in order", add)] {
            threads(wiring, 3, |comm| {
                let mut x = vec![[comm.rank() as f64; N]; 2];
                comm.all_reduce(&mut x, &op).unwrap();
                assert!(x.iter().flatten().all(|x| *x == 3.0), "{wiring:?} {op:?}");
                comm.reduce(&mut x, 2, &op).unwrap();
                assert_eq!(x[1][N - 1], if comm.rank() == 2 { 9.0 } else { 3.0 });
                let mut blocks = vec![[1.0; N]; 3];
                comm.reduce_scatter(&mut blocks, &op).unwrap();
                assert_eq!(blocks[comm.rank()][N - 1], 3.0);
            });
        }
    }
}

#[test]
fn arrays_of_truth_values_meet_no_other_arrays() {
    for wiring in Wiring::ALL {
        let seen = threads(wiring, 2, |comm| match comm.rank() {
            0 => comm.broadcast(&mut vec![[7_u8; 4]], 0),
            _ => comm.broadcast(&mut vec![[false; 4]], 0),
        });
        for result in seen {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(error.is_mismatch() && text.contains("[u8; 4]") && text.contains("[bool; 4]"), "{error}");
        }
        threads(wiring, 2, |comm| {
            let mut x = vec![[false; 4]];
            let result: Result<()> = match comm.rank() {
                0 => comm.send(&vec![[7_u8; 4]], 1),
                _ => Err(comm.recv(&mut x, 0).unwrap_err()),
            };
            // The sender of a short message has finished before its receiver checks it.
            assert!(comm.rank() == 0 || matches!(result, Err(Error::Message { .. })), "{result:?}");
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn an_op_in_rank_order_meets_none_of_the_same_name_that_is_not() {
    for wiring in Wiring::ALL {
        let seen = threads(wiring, 3, |comm| {
            let add = |into: &mut [u32], from: &[u32]| into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
            let op = if comm.rank() == 1 { CustomOp::ordered("add", add) } else { CustomOp::new("add", add) };
            comm.all_reduce(&mut [1_u32; 100], &op).unwrap_err()
        });
        assert!(seen.iter().all(|error| error.is_mismatch() && error.to_string().contains("in rank order")), "{seen:?}");
    }
}

#[test]
fn a_panic_in_an_op_is_told_to_the_others_at_once() {
    for wiring in Wiring::ALL {
        // Rank 0 keeps its communicator, without using it, until the others have the error.
        let everyone = std::sync::Barrier::new(3);
        let seen = threads(wiring, 3, |comm| {
            let culprit = comm.rank() == 0;
            let op = CustomOp::new("panics", move |_: &mut [u32], _: &[u32]| {
                if culprit {
                    resume_unwind(Box::new("on purpose"));
                }
            });
            let mut x = vec![1_u32; 100_000];
            let result = catch_unwind(AssertUnwindSafe(|| comm.all_reduce(&mut x, &op)));
            let panicked = result.is_err();
            let heard = result.map_or(Ok(()), |result| result.and_then(|()| comm.barrier()));
            everyone.wait();
            assert_eq!(panicked, culprit, "{wiring:?}");
            if culprit { comm.barrier().unwrap_err() } else { heard.unwrap_err() }
        });
        assert!(seen[0].is_poisoned() && seen[0].to_string().contains("a custom op panicked"), "{wiring:?}: {}", seen[0]);
        for error in &seen[1..] {
            assert!(error.is_peer_lost() && error.to_string().contains("rank 0"), "{wiring:?}: {error}");
        }
    }
}

#[test]
fn calls_made_while_a_panic_unwinds_are_like_any_others() {
    struct Last<'a>(&'a Communicator);
    impl Drop for Last<'_> {
        fn drop(&mut self) {
            self.0.barrier().unwrap();
        }
    }
    threads(Wiring::Shm, 2, |comm| {
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _last = Last(comm);
            resume_unwind(Box::new("on purpose"));
        }));
        assert!(unwound.is_err());
        comm.barrier().unwrap();
    });
}

#[test]
fn later_calls_quote_the_first_error() {
    let texts = threads(Wiring::Shm, 2, |comm| {
        let mut x = [0_u8; 3];
        comm.all_reduce(&mut x[..comm.rank() + 1], ReduceOp::Sum).unwrap_err();
        [comm.barrier().unwrap_err(), comm.send(&x, 0).unwrap_err(), comm.start_send(x, 0).unwrap_err()].map(|error| error.to_string())
    });
    for [barrier, send, isend] in texts {
        assert!(barrier.starts_with("barrier: ") && send.starts_with("send to rank 0: "), "{barrier}; {send}");
        let cause = |text: &str| text.split_once(" by an earlier error: ").unwrap().1.to_owned();
        assert!(cause(&barrier).contains("all_reduce(sum, u8, count 1)"), "{barrier}");
        assert!(cause(&send) == cause(&barrier) && cause(&isend) == cause(&barrier), "{send}");
    }
}

#[test]
fn a_call_with_counts_that_is_given_up_says_how_much_it_was() {
    let calls: [(&str, fn(&Communicator) -> Result<()>); 4] = [
        ("all_to_all_v(u16, count 5 to send and 3 to receive)", |comm| {
            comm.all_to_all_v_into(&[0_u16; 5], &[1, 4], &mut [0_u16; 3], &[1, 2])
        }),
        ("gather_v(u16, count 7 on this rank, root 1)", |comm| comm.gather_v_into(&[0_u16; 7], None::<(&mut [u16], &[usize])>, 1)),
        ("scatter_v(u16, count 9 in 2 blocks, root 0)", |comm| {
            comm.scatter_v_into(Some((&[0_u16; 9][..], &[2, 7][..])), &mut [0_u16; 2], 0)
        }),
        ("all_gather_v(u16, count 9 in 2 blocks)", |comm| comm.all_gather_v(&mut [0_u16; 9], &[2, 7])),
    ];
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        for (said, call) in calls {
            let done = Meeting::new(2);
            let errors = threads(wiring, 2, |comm| {
                comm.barrier().unwrap();
                comm.set_timeout(Duration::from_millis(50));
                let error = (comm.rank() == 0).then(|| call(comm).expect_err("nobody else makes this call").to_string());
                done.meet();
                error
            });
            let error = errors[0].as_ref().unwrap();
            assert!(error.contains(&format!("{said} number")), "{wiring:?}: {error}");
        }
    }
}

#[test]
fn the_place_on_a_host_does_not_depend_on_the_transport() {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        assert_eq!(threads(wiring, 3, |comm| (comm.local_rank(), comm.local_world_size())), [(0, 3), (1, 3), (2, 3)]);
    }
    assert_eq!(threads(Wiring::Dealt, 3, |comm| (comm.local_rank(), comm.local_world_size())), [(0, 2), (1, 2), (0, 1)]);
}

#[test]
fn the_timeout_of_a_url_bounds_the_start_too() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}?rank=0&world_size=2&timeout=0.1", folder.path().join("store").display());
    let begin = Instant::now();
    let error = Communicator::builder().configure(|config| config.timeout = Duration::from_secs(60)).from_url(&url).unwrap_err();
    assert!(error.is_timeout() && begin.elapsed() < Duration::from_secs(10), "{error}");
}

#[test]
fn a_monitored_barrier_may_wait_longer_than_a_call() {
    let late = Meeting::new(2);
    let seen = threads(Wiring::Shm, 3, |comm| {
        comm.set_timeout(Duration::from_millis(20));
        match comm.rank() {
            // A call that times out, so that more than the timeout has passed when rank 2 comes.
            1 => {
                assert!(comm.recv(&mut [0_u8], 1).unwrap_err().is_timeout());
                late.meet();
            }
            2 => late.meet(),
            _ => {}
        }
        comm.monitored_barrier(Duration::from_secs(60)).map_err(|error| error.to_string())
    });
    assert_eq!(seen, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn communicators_part_ways_and_live_on() {
    for wiring in Wiring::ALL {
        threads(wiring, 4, |comm| {
            assert!(comm.split(None, 0).unwrap().is_none() && comm.subgroup(&[]).unwrap().is_none());
            let alone = comm.split(Some(comm.rank() as u32), 0).unwrap().unwrap();
            assert_eq!((alone.rank(), alone.world_size()), (0, 1));
            let pair = comm.split(Some(comm.rank() as u32 % 2), -(comm.rank() as i64)).unwrap().unwrap();
            assert_eq!(pair.rank(), 1 - comm.rank() / 2);
            let nested = pair.split(Some(0), 0).unwrap().unwrap();
            let twin = nested.duplicate().unwrap();
            drop((nested, pair));
            let mut x = comm.rank();
            let sum = |comm: &Communicator, x: usize| {
                let mut x = x as u64;
                comm.all_reduce(&mut x, ReduceOp::Sum).map(|()| x as usize)
            };
            x = sum(&twin, x).unwrap();
            assert_eq!(x, [2, 4][comm.rank() % 2]);
            assert_eq!((sum(&alone, x).unwrap(), sum(comm, 1).unwrap()), (x, 4));
        });
    }
}

#[test]
fn a_split_outlives_what_it_was_split_from() {
    let comms = Communicator::local(3).unwrap();
    std::thread::scope(|scope| {
        for comm in comms {
            scope.spawn(move || {
                let child = comm.duplicate().unwrap();
                comm.close().unwrap();
                let mut x = 1;
                child.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, 3);
            });
        }
    });
}

#[test]
fn lists_that_differ_are_both_quoted() {
    let errors = threads(Wiring::Shm, 3, |comm| {
        let list: &[usize] = if comm.rank() == 2 { &[1, 0] } else { &[0, 1] };
        let error = comm.subgroup(list).unwrap_err();
        comm.barrier().unwrap();
        error.to_string()
    });
    assert!(errors.iter().all(|error| error.contains("[0, 1]") && error.contains("rank 2") && error.contains("[1, 0]")), "{errors:?}");
}

#[test]
fn started_calls_of_many_communicators_run_in_any_order() {
    threads(Wiring::Shm, 3, |comm| {
        let comms: Vec<_> = (0..8).map(|_| comm.duplicate().unwrap()).collect();
        let mut order: Vec<usize> = (0..comms.len()).collect();
        order.rotate_left(comm.rank() * 3);
        let start = |at: usize| (at, comms[at].start_all_reduce(vec![at as u32; 10], ReduceOp::Sum).unwrap());
        let works: Vec<_> = order.into_iter().map(start).collect();
        for (at, work) in works {
            assert_eq!(work.wait().unwrap(), [at as u32 * 3; 10]);
        }
    });
}

#[test]
fn sixty_four_threads_are_ranks() {
    let seen = Communicator::run_local(64, |comm| {
        let me = comm.rank() as u32;
        let mut x = [me; 100];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        let mut half = 1;
        comm.split(Some(me % 2), 0)?.unwrap().all_reduce(&mut half, ReduceOp::Sum)?;
        let mut blocks = vec![0; 64];
        comm.all_gather_into(&me, &mut blocks)?;
        comm.all_to_all(&mut blocks)?;
        Ok((x[99], half, blocks[63]))
    });
    assert!(seen.unwrap().into_iter().enumerate().all(|(rank, seen)| seen == (2016, 32, rank as u32)));
}

#[test]
fn a_group_of_one_is_a_group() {
    let comm = Communicator::local(1).unwrap().pop().unwrap();
    let mut x = [1.0_f32, 3.0];
    comm.all_reduce(&mut x, ReduceOp::PreMulSum(0.5)).unwrap();
    comm.all_reduce(&mut x, ReduceOp::Avg).unwrap();
    comm.reduce(&mut x, 0, ReduceOp::PreMulSum(2.0)).unwrap();
    comm.reduce_scatter(&mut x, ReduceOp::PreMulSum(2.0)).unwrap();
    assert_eq!(x, [2.0, 6.0]);
    let mut y = [0.0_f32; 2];
    comm.all_to_all_v_into(&x, &[2], &mut y, &[2]).unwrap();
    assert_eq!(y, x);
    comm.send_recv(&[5.0_f32], 0, &mut y, 0).unwrap();
    assert_eq!(y, [5.0, 6.0]);
    comm.monitored_barrier(Duration::ZERO).unwrap();
    comm.duplicate().unwrap().close().unwrap();
    assert!(comm.broadcast(&mut x, 1).unwrap_err().to_string().contains("root 1 does not exist"));
    comm.abort();
    assert!(comm.all_reduce(&mut x, ReduceOp::Sum).unwrap_err().is_poisoned());
}

#[test]
fn elements_without_bytes_are_refused_however_many() {
    let comm = Communicator::local(1).unwrap().pop().unwrap();
    let nothing = CustomOp::new("nothing", |_: &mut [[u8; 0]], _: &[[u8; 0]]| {});
    let (mut many, mut more) = (vec![[0_u8; 0]; usize::MAX], vec![[0_u8; 0]; usize::MAX]);
    let refused = [
        comm.all_reduce_many(&mut [&mut many[..], &mut more[..]], &nothing),
        comm.all_reduce(&mut many, &nothing),
        comm.all_gather_v(&mut many, &[usize::MAX]),
        comm.reduce_into(&many, Some(&mut more), 0, &nothing),
        comm.send(&many, 0),
        comm.start_send(many.clone(), 0).map(drop),
        comm.recv(&mut many, 0).map(drop),
    ];
    for result in refused {
        assert!(result.unwrap_err().to_string().contains("size 0"));
    }
}

#[test]
fn an_op_that_calls_its_own_communicator_is_refused() {
    thread_local! {
        static COMM: RefCell<Option<Communicator>> = const { RefCell::new(None) };
    }
    fn with<R>(call: impl FnOnce(&Communicator) -> R) -> R {
        COMM.with_borrow(|comm| call(comm.as_ref().unwrap()))
    }
    let comms = Communicator::local(2).unwrap();
    std::thread::scope(|scope| {
        for comm in comms {
            scope.spawn(move || {
                COMM.set(Some(comm));
                let op = CustomOp::new("recursive", |_: &mut [u8], _: &[u8]| {
                    assert!(matches!(with(Communicator::barrier), Err(Error::InvalidArgument { .. })));
                    assert!(matches!(with(|comm| comm.split(Some(0), 0)), Err(Error::InvalidArgument { .. })));
                });
                with(|comm| comm.all_reduce(&mut 1_u8, &op)).unwrap();
                with(Communicator::barrier).unwrap();
            });
        }
    });
}

#[test]
fn an_op_may_drop_the_communicator_that_runs_it() {
    let comms = Communicator::local(2).unwrap();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for comm in comms {
            scope.spawn(move || {
                let (give, take) = std::sync::mpsc::channel::<Communicator>();
                let take = std::sync::Mutex::new(take);
                let op = CustomOp::new("drops", move |_: &mut [u8], _: &[u8]| drop(take.lock().unwrap().recv()));
                let work = comm.start_all_reduce(vec![1_u8], op).unwrap();
                give.send(comm).unwrap();
                assert_eq!(work.wait().unwrap(), [1]);
            });
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

#[test]
fn a_rank_that_panics_is_named_by_run_local() {
    let error = Communicator::run_local(3, |comm| match comm.rank() {
        1 => resume_unwind(Box::new("on purpose")),
        _ => comm.barrier(),
    });
    let error = error.unwrap_err();
    assert!(error.is_peer_lost() && error.to_string().contains("rank 1 after") && error.to_string().contains("panicked"), "{error}");
    assert!(Communicator::run_local(0, |_| Ok(())).unwrap_err().to_string().contains("at least one rank"));
}

#[test]
fn no_timeout_is_too_long() {
    let endless = |_| Communicator::builder().configure(|config| config.timeout = Duration::MAX);
    within("calls without end", move || {
        threads_with(2, endless, |comm| {
            let other = 1 - comm.rank();
            let work = comm.start_send(vec![1_u8], other).unwrap();
            assert_eq!(comm.recv(&mut [0_u8], other).unwrap().source, other);
            work.wait().unwrap();
            comm.start_barrier().unwrap().wait().unwrap();
            comm.monitored_barrier(Duration::MAX).unwrap();
        })
    });
    let folder = tempfile::tempdir().unwrap();
    let urls = [format!("file://{}?", folder.path().join("store").display()), format!("tcp://127.0.0.1:{}?", free_port())];
    for url in urls {
        within(&format!("a start without end at {url}"), move || {
            std::thread::scope(|scope| {
                for rank in 0..2 {
                    let url = format!("{url}rank={rank}&world_size=2");
                    scope.spawn(move || endless(rank).from_url(&url).unwrap().close().unwrap());
                }
            });
        });
    }
}

#[test]
fn some_ranks_may_call_in_place_and_others_not() {
    for wiring in Wiring::ALL {
        for (ranks, block) in [(2, 1), (3, 5000), (5, 40)] {
            threads(wiring, ranks, |comm| {
                let me = comm.rank();
                let value = |from: usize, at: usize| (from * 1_000_000 + at) as u64;
                let mut x: Vec<u64> = (0..ranks * block).map(|at| value(me, at)).collect();
                let expected: Vec<u64> = (0..ranks * block).map(|at| value(at / block, me * block + at % block)).collect();
                if me.is_multiple_of(2) {
                    comm.all_to_all(&mut x).unwrap();
                } else {
                    let source = x.clone();
                    comm.all_to_all_into(&source, &mut x).unwrap();
                }
                assert!(x == expected, "{wiring:?} {ranks} {block}");
            });
        }
    }
}

#[test]
fn a_message_that_is_late_names_whoever_could_have_sent_it() {
    threads(Wiring::Shm, 3, |comm| {
        comm.set_timeout(Duration::from_millis(1));
        let missing = |result: Result<_>| match result {
            Err(Error::Timeout { missing, arrived, .. }) => {
                assert!(arrived.iter().all(|peer| peer.rank == comm.rank()));
                missing.iter().map(|peer| peer.rank).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        let me = comm.rank();
        let others: Vec<_> = (0..3).filter(|rank| *rank != me).collect();
        assert_eq!(missing(comm.recv(&mut [0_u8], Envelope::any())), others);
        assert_eq!(missing(comm.recv(&mut [0_u8], others[1])), others[1..]);
        assert_eq!(missing(comm.recv(&mut [0_u8], me)), [me]);
        comm.set_timeout(Duration::from_secs(60));
        comm.barrier().unwrap();
    });
}

#[test]
fn a_port_that_tests_are_given_is_free_while_processes_start() {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                std::process::Command::new("true").status().unwrap();
            }
        });
        let end = End(&done);
        let taken = (0..500).filter(|_| std::net::TcpListener::bind(("127.0.0.1", free_port())).is_err()).count();
        drop(end);
        assert_eq!(taken, 0);
    });
}
