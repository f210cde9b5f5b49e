//! Calls in the background: their results, their order, and what happens when their handle or their communicator is
//! dropped.

#![expect(unsafe_code, reason = "memory that other code owns")]

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::common::oracle::hash;
use crate::common::ranks::{Meeting, Wiring, alone_in_a_process, communicators, each, patience, threads};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use collectives::interop::RawHostSlice;
use collectives::{Communicator, CustomOp, Envelope, Error, ReduceOp, Result, Work};

const SEED: u64 = 0xbac6;

/// A message whose sender waits for its receive.
const LONG: usize = 1 << 20;

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(20);

/// Returns what `rank` contributes to call number `call`.
fn contribution(call: usize, rank: usize, count: usize) -> Vec<u64> {
    (0..count).map(|index| hash(SEED + call as u64, rank, index)).collect()
}

/// Returns the sum of all ranks' contributions.
fn sums(call: usize, ranks: usize, count: usize) -> Vec<u64> {
    (0..count).map(|index| (0..ranks).fold(0_u64, |sum, rank| sum.wrapping_add(hash(SEED + call as u64, rank, index)))).collect()
}

/// Returns each rank's own block of the contribution of `from`.
fn block(call: usize, from: usize, of: usize, count: usize, ranks: usize) -> Vec<u64> {
    contribution(call, from, count * ranks)[of * count..(of + 1) * count].to_vec()
}

/// Shuffles the items in an order that differs between ranks.
fn shuffle<T>(items: &mut [T], rank: usize) {
    for last in (1..items.len()).rev() {
        items.swap(last, hash(SEED, rank, last) as usize % (last + 1));
    }
}

/// The check of a started call, which waits for it first.
type Check<'a> = Box<dyn FnOnce() + 'a>;

/// Starts one call of every kind, numbered from `call`. Returns their checks in the order of the starts.
fn start_every_kind<'a>(comm: &'a Communicator, call: usize, count: usize) -> Vec<Check<'a>> {
    let (n, me) = (comm.world_size(), comm.rank());
    let root = call % n;
    let joined: Vec<u64> = (0..n).flat_map(|rank| contribution(call, rank, count)).collect();
    let mut own_in_place = vec![0; n * count];
    own_in_place[me * count..(me + 1) * count].copy_from_slice(&contribution(call, me, count));
    let mut checks: Vec<Check<'a>> = Vec::new();
    macro_rules! check {
        ($work:expr, |$got:ident| $verify:expr) => {{
            let work: Work<_> = $work.unwrap();
            let text = stringify!($work);
            checks.push(Box::new(move || {
                let $got = work.wait().unwrap_or_else(|error| panic!("{text} on rank {me} of {n}: {error}"));
                assert!($verify, "{text} of {count} on rank {me} of {n}, call {call}, root {root}");
            }));
        }};
    }
    check!(comm.start_all_reduce(contribution(call, me, count), ReduceOp::Sum), |got| got == sums(call, n, count));
    check!(comm.start_reduce(contribution(call, me, count), root, ReduceOp::Sum), |got| got
        == if me == root { sums(call, n, count) } else { contribution(call, me, count) });
    check!(comm.start_broadcast(contribution(call, me, count), root), |got| got == contribution(call, root, count));
    let all = joined.clone();
    check!(comm.start_all_gather(own_in_place.clone()), |got| got == all);
    let all = joined.clone();
    check!(comm.start_all_gather_into(contribution(call, me, count), vec![0; n * count]), |got| got
        == (contribution(call, me, count), all));
    check!(comm.start_reduce_scatter(contribution(call, me, n * count), ReduceOp::Sum), |got| got[me * count..(me + 1) * count]
        == sums(call, n, n * count)[me * count..(me + 1) * count]);
    check!(comm.start_reduce_scatter_into(contribution(call, me, n * count), vec![0; count], ReduceOp::Sum), |got| got.1
        == sums(call, n, n * count)[me * count..(me + 1) * count]);
    check!(comm.start_all_to_all(contribution(call, me, n * count)), |got| got
        == (0..n).flat_map(|from| block(call, from, me, count, n)).collect::<Vec<_>>());
    let gathered = if me == root { own_in_place } else { contribution(call, me, count) };
    check!(comm.start_gather(gathered, root), |got| got == if me == root { joined } else { contribution(call, me, count) });
    let scattered = if me == root { contribution(call, me, n * count) } else { vec![0; count] };
    check!(comm.start_scatter(scattered, root), |got| got
        == if me == root { contribution(call, root, n * count) } else { block(call, root, me, count, n) });
    check!(comm.start_barrier(), |_got| true);
    checks
}

#[test]
fn every_kind_gives_the_right_result() {
    for wiring in Wiring::ALL {
        for ranks in [1, 2, 3, 5] {
            threads(wiring, ranks, |comm| {
                for (call, count) in [0, 1, 13, 20_001].into_iter().enumerate() {
                    start_every_kind(comm, call, count).into_iter().for_each(|check| check());
                }
            });
        }
    }
}

#[test]
fn many_are_outstanding_and_waited_for_out_of_order() {
    for wiring in Wiring::ALL {
        threads(wiring, 4, |comm| {
            let mut checks: Vec<_> = (0..20).flat_map(|call| start_every_kind(comm, call, 1 + call * 97)).collect();
            assert!(checks.len() > 200);
            shuffle(&mut checks, comm.rank());
            checks.into_iter().for_each(|check| check());
        });
    }
}

#[test]
fn blocking_collectives_wait_for_started_ones_and_a_later_one_ends_after_an_earlier_one() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            for round in 0..5 {
                let start = |call: usize| comm.start_all_reduce(contribution(call, comm.rank(), 3000), ReduceOp::Sum).unwrap();
                let works: Vec<_> = (0..10).map(start).collect();
                let mut x = [comm.rank() as u64];
                match round % 2 {
                    0 => comm.all_reduce(&mut x, ReduceOp::Sum).unwrap(),
                    _ => comm.start_all_reduce(x, ReduceOp::Sum).unwrap().wait().map(|sum| x = sum).unwrap(),
                }
                assert_eq!(x, [3]);
                assert!(works.iter().all(Work::is_done), "a call ended before one that was started before it");
                works.into_iter().enumerate().for_each(|(call, work)| assert_eq!(work.wait().unwrap(), sums(call, 3, 3000)));
            }
        });
    }
}

#[test]
fn a_deadline_that_passes_lets_the_call_go_on() {
    for wiring in Wiring::ALL {
        let meeting = Meeting::new(2);
        threads(wiring, 2, |comm| {
            if comm.rank() == 1 {
                meeting.meet();
                comm.all_reduce(&mut [1_i32], ReduceOp::Sum).unwrap();
                comm.send(&[7_u8], 0).unwrap();
                return comm.recv(&mut vec![0_u8; 100_000], 0).map(drop).unwrap();
            }
            let mut reduction = comm.start_all_reduce([2_i32], ReduceOp::Sum).unwrap();
            let mut receive = comm.start_recv([0_u8; 3], 1).unwrap();
            let mut send = comm.start_send(vec![1_u8; 100_000], 1).unwrap();
            assert_eq!(reduction.wait_timeout(Duration::ZERO).unwrap(), None);
            assert_eq!(reduction.wait_timeout(Duration::from_millis(10)).unwrap(), None);
            assert_eq!(receive.wait_timeout(Duration::from_millis(10)).unwrap(), None);
            assert_eq!(send.wait_timeout(Duration::from_millis(10)).unwrap(), None);
            assert!(!reduction.is_done() && !receive.is_done() && !send.is_done());
            meeting.meet();
            assert_eq!(reduction.wait_timeout(PATIENCE).unwrap(), Some([3]));
            let (buffer, received) = receive.wait_timeout(PATIENCE).unwrap().unwrap();
            assert_eq!((buffer, received.count, received.source), ([7, 0, 0], 1, 1));
            assert_eq!(send.wait_timeout(PATIENCE).unwrap(), Some(vec![1; 100_000]));
            assert!(reduction.is_done() && receive.is_done() && send.is_done());
            let again = reduction.wait().expect_err("the buffer has been given back");
            assert!(matches!(again, Error::InvalidArgument { .. }), "{again}");
        });
    }
}

#[test]
fn a_call_ends_in_the_background_without_anyone_waiting() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let reduction = comm.start_all_reduce(vec![1_i32; 50_000], ReduceOp::Sum).unwrap();
            let send = comm.start_send(vec![comm.rank() as u8; 300_000], next).unwrap();
            let receive = comm.start_recv(vec![9_u8; 300_000], previous).unwrap();
            let begin = Instant::now();
            while !(reduction.is_done() && send.is_done() && receive.is_done()) {
                assert!(begin.elapsed() < PATIENCE, "nobody moves the calls on");
                std::thread::yield_now();
            }
            assert_eq!(reduction.wait().unwrap(), [3; 50_000]);
            assert_eq!(receive.wait().unwrap().0, vec![previous as u8; 300_000]);
            // Each rank polls until its own calls have ended, and these need the other ranks.
            comm.barrier().unwrap();
            drop(send);
        });
    }
}

#[test]
fn a_dropped_or_leaked_handle_lets_the_call_go_on() {
    for wiring in Wiring::ALL {
        threads(wiring, 3, |comm| {
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            for count in [1, 3, 30_000] {
                drop(comm.start_all_reduce(vec![1_i32; count], ReduceOp::Sum).unwrap());
                std::mem::forget(comm.start_all_gather(vec![1_i32; count * 3]).unwrap());
                drop(comm.start_barrier().unwrap());
                // The first message goes to a dropped receive, the second to one that is leaked.
                drop(comm.start_recv(vec![0_i32; count], previous).unwrap());
                std::mem::forget(comm.start_recv(vec![0_i32; count], previous).unwrap());
                drop(comm.start_send(vec![1_i32; count], next).unwrap());
                std::mem::forget(comm.start_send(vec![2_i32; count], next).unwrap());
                drop(comm.start_send(vec![3_i32; count], next).unwrap());
                let mut x = vec![comm.rank() as i32; count];
                comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                assert_eq!(x, vec![3; count]);
                assert_eq!(comm.recv(&mut x, previous).unwrap().count, count);
                assert_eq!(x, vec![3; count], "the receives were not served in their order");
            }
        });
    }
}

#[test]
fn a_handle_outlives_its_communicator() {
    for wiring in Wiring::ALL {
        let works = each(communicators(wiring, 3), |comm| {
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let reduction = comm.start_all_reduce(vec![1_i32; 40_000], ReduceOp::Sum).unwrap();
            let receive = comm.start_recv(vec![0_u64; 2000], previous).unwrap();
            let send = comm.start_send(vec![comm.rank() as u64; 2000], next).unwrap();
            let in_vain = comm.start_recv(vec![0_u64; 10], Envelope::rank(previous).tag(99)).unwrap();
            comm.close().unwrap();
            (reduction, send, receive, in_vain)
        });
        for (rank, (reduction, send, receive, in_vain)) in works.into_iter().enumerate() {
            assert_eq!(reduction.wait().unwrap(), [3; 40_000]);
            assert_eq!(send.wait().unwrap(), [rank as u64; 2000]);
            // The message may not have come before the communicator closed. If it has, its content is known.
            if let Ok((buffer, _)) = receive.wait() {
                assert_eq!(buffer, [(rank as u64 + 2) % 3; 2000]);
            }
            in_vain.wait().expect_err("nobody sends under this tag");
        }
    }
}

#[test]
fn a_dropped_communicator_waits_for_its_started_calls() {
    for wiring in Wiring::ALL {
        let works = each(communicators(wiring, 3), |comm| comm.start_all_reduce(vec![comm.rank() as i64; 100_000], ReduceOp::Sum).unwrap());
        assert!(works.iter().all(Work::is_done), "{wiring:?}");
        works.into_iter().for_each(|work| assert_eq!(work.wait().unwrap(), [3; 100_000]));
    }
}

#[test]
fn a_dropped_communicator_delivers_its_pending_sends() {
    for wiring in Wiring::ALL {
        // On open links, rank 0 is gone before a rank receives. On links that this opens, it leaves while they receive.
        for is_open in [true, false] {
            let meeting = Meeting::new(3);
            each(communicators(wiring, 3), |comm| {
                if is_open {
                    (0..3).filter(|peer| *peer != comm.rank()).for_each(|peer| drop(comm.start_send([9_u32], peer).unwrap()));
                    (0..3).filter(|peer| *peer != comm.rank()).for_each(|peer| assert_eq!(comm.recv(&mut [0_u32], peer).unwrap().count, 1));
                    meeting.meet();
                }
                if comm.rank() == 0 {
                    for to in [1, 2] {
                        (0..100_u32).for_each(|number| drop(comm.start_send([number; 50], to).unwrap()));
                    }
                    drop(comm);
                    return if is_open {
                        meeting.meet()
                    };
                }
                if is_open {
                    meeting.meet();
                }
                for number in 0..100_u32 {
                    let mut x = [0; 50];
                    comm.recv(&mut x, 0).unwrap_or_else(|error| panic!("{wiring:?}, open: {is_open}, message {number}: {error}"));
                    assert_eq!(x, [number; 50]);
                }
            });
        }
        each(communicators(wiring, 2), |comm| match comm.rank() {
            0 => drop(comm.start_send(vec![5_u8; 3 << 20], 1).unwrap()),
            _ => {
                let mut x = vec![0_u8; 3 << 20];
                comm.recv(&mut x, 0).unwrap();
                assert!(x.iter().all(|byte| *byte == 5));
            }
        });
    }
}

/// Returns an op that panics on rank 0 only.
fn brittle(comm: &Communicator) -> CustomOp<f32> {
    let rank = comm.rank();
    CustomOp::new("brittle", move |into: &mut [f32], from: &[f32]| {
        assert_ne!(rank, 0, "a panic that the test wants");
        into.iter_mut().zip(from).for_each(|(a, b)| *a += *b);
    })
}

/// Makes a call whose op panics on rank 0. Every rank gets an error at once: from that call, or from the next one if
/// the first had all it needed. Rank 0 does not touch its communicator again before all have the error.
fn after_a_panic(wiring: Wiring, ranks: usize, count: usize, call: impl Fn(&Communicator, Vec<f32>) -> Result<()> + Sync) {
    let meeting = Meeting::new(ranks);
    threads(wiring, ranks, |comm| {
        let place = format!("rank {} of {ranks}, {count} elements, {wiring:?}", comm.rank());
        comm.set_timeout(PATIENCE / 2);
        let begin = Instant::now();
        match catch_unwind(AssertUnwindSafe(|| call(comm, vec![1.0; count]))) {
            Ok(outcome) if comm.rank() == 0 => drop(outcome.expect_err("the op panics here")),
            Ok(outcome) => {
                let error = outcome.and_then(|()| comm.barrier()).expect_err("rank 0 is gone");
                assert!(error.is_peer_lost() && error.to_string().contains("rank 0"), "{place}: {error}");
            }
            Err(_) => assert_eq!(comm.rank(), 0),
        }
        assert!(begin.elapsed() < patience(2), "{place}: {:?}", begin.elapsed());
        meeting.meet();
        let later = comm.barrier().expect_err("the communicator is ended");
        let says_why = if comm.rank() == 0 { later.to_string().contains("panicked") } else { later.is_peer_lost() };
        assert!(later.is_poisoned() && says_why && !later.to_string().contains("abort"), "{place}: {later}");
        assert!(comm.start_barrier().unwrap().wait().unwrap_err().is_poisoned(), "{place}");
    });
}

#[test]
fn a_panic_in_an_op_ends_the_communicator_everywhere() {
    for wiring in Wiring::ALL {
        for (ranks, count) in [(2, 1000), (3, 100_000), (5, 40_000)] {
            after_a_panic(wiring, ranks, count, |comm, x| comm.start_all_reduce(x, brittle(comm))?.wait().map(drop));
            after_a_panic(wiring, ranks, count, |comm, mut x| comm.all_reduce(&mut x, brittle(comm)));
        }
    }
}

thread_local! {
    /// The communicator that an op on this thread uses.
    static MINE: RefCell<Option<Rc<Communicator>>> = const { RefCell::new(None) };
}

#[test]
fn an_op_that_calls_its_own_communicator_is_told_so() {
    for wiring in Wiring::ALL {
        each(communicators(wiring, 2), |comm| {
            let comm = Rc::new(comm);
            MINE.set(Some(Rc::clone(&comm)));
            let op = CustomOp::new("nested", |into: &mut [i32], from: &[i32]| {
                let error = MINE.with_borrow(|comm| comm.as_ref().unwrap().barrier()).expect_err("it is in a call already");
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                into[0] += from[0];
            });
            let mut x = [1];
            comm.all_reduce(&mut x, &op).unwrap();
            assert_eq!(x, [2]);
            MINE.take();
        });
    }
}

#[test]
fn an_op_in_the_background_that_calls_its_own_communicator_is_told_so() {
    for wiring in Wiring::ALL {
        let answers = each(communicators(wiring, 2), |comm| {
            let comm = Arc::new(Mutex::new(comm));
            let (mine, answers) = (Arc::clone(&comm), Arc::new(Mutex::new(Vec::new())));
            let told = Arc::clone(&answers);
            let op = CustomOp::new("nested", move |into: &mut [i32], from: &[i32]| {
                let outcome = mine.lock().unwrap().all_reduce(&mut [1_u8], ReduceOp::Sum);
                told.lock().unwrap().push(outcome.expect_err("this call is part of another"));
                into[0] += from[0];
            });
            let work = comm.lock().unwrap().start_all_reduce([1], &op).unwrap();
            assert_eq!(work.wait().unwrap(), [2]);
            comm.lock().unwrap().barrier().unwrap();
            // The op holds the communicator, and would keep it alive on the thread that drops it last.
            drop(op);
            answers
        });
        let answers: Vec<Error> = answers.iter().flat_map(|answers| answers.lock().unwrap().clone()).collect();
        assert!(!answers.is_empty() && answers.iter().all(|error| matches!(error, Error::InvalidArgument { .. })), "{answers:?}");
    }
}

#[test]
fn an_op_in_the_background_may_drop_its_own_communicator() {
    for wiring in Wiring::ALL {
        let works = each(communicators(wiring, 2), |comm| {
            let comm = Arc::new(Mutex::new(Some(comm)));
            let mine = Arc::clone(&comm);
            let op = CustomOp::new("suicidal", move |into: &mut [i32], from: &[i32]| {
                drop(mine.lock().unwrap().take());
                into[0] += from[0];
            });
            let comm = comm.lock().unwrap();
            comm.as_ref().unwrap().start_all_reduce([1], &op).unwrap()
        });
        // It ends with or without success: a rank may see the other leave before it has everything.
        works.into_iter().for_each(|mut work| match work.wait_timeout(PATIENCE) {
            Ok(Some(sum)) => assert_eq!(sum, [2]),
            Ok(None) => panic!("{wiring:?}: the call does not end"),
            Err(error) => assert!(error.is_peer_lost(), "{wiring:?}: {error}"),
        });
    }
}

#[test]
fn bad_arguments_are_refused_at_the_start() {
    for wiring in Wiring::ALL {
        threads(wiring, 2, |comm| {
            let three = || vec![1_i32; 3];
            let refused = [
                comm.start_all_reduce(three(), ReduceOp::PreMulSum(2.0)).map(drop),
                comm.start_all_reduce([true], ReduceOp::Avg).map(drop),
                comm.start_reduce(three(), 2, ReduceOp::Sum).map(drop),
                comm.start_broadcast(three(), usize::MAX).map(drop),
                comm.start_all_gather(three()).map(drop),
                comm.start_all_gather_into(three(), three()).map(drop),
                comm.start_reduce_scatter(three(), ReduceOp::Sum).map(drop),
                comm.start_reduce_scatter_into(three(), three(), ReduceOp::Sum).map(drop),
                comm.start_all_to_all(three()).map(drop),
                comm.start_gather(three(), comm.rank()).map(drop),
                comm.start_gather(three(), 2).map(drop),
                comm.start_scatter(three(), comm.rank()).map(drop),
                comm.start_send(three(), 2).map(drop),
                comm.start_send(three(), Envelope::rank(1).tag(1 << 63)).map(drop),
                comm.start_recv(three(), 2).map(drop),
                comm.start_recv(three(), Envelope::rank(1).tag(u64::MAX)).map(drop),
            ];
            for (number, result) in refused.into_iter().enumerate() {
                let error = result.expect_err(&format!("start {number} must be refused"));
                assert!(matches!(error, Error::InvalidArgument { .. } | Error::Unsupported { .. }), "start {number}: {error}");
            }
            assert_eq!(comm.start_all_reduce([comm.rank() as i32], ReduceOp::Sum).unwrap().wait().unwrap(), [1]);
        });
    }
}

#[test]
fn a_started_call_has_the_timeout_of_its_start() {
    for wiring in Wiring::ALL {
        let meeting = Meeting::new(2);
        threads(wiring, 2, |comm| {
            if comm.rank() == 0 {
                comm.set_timeout(Duration::from_millis(50));
                let work = comm.start_all_reduce([1_i32; 4], ReduceOp::Sum).unwrap();
                comm.set_timeout(PATIENCE);
                let error = work.wait().expect_err("rank 1 does not come");
                assert!(error.is_timeout() && !error.is_poisoned(), "{error}");
                assert!(comm.start_barrier().unwrap().wait().unwrap_err().is_poisoned());
            }
            meeting.meet();
        });
    }
}

#[test]
fn a_communicator_is_used_on_another_thread_than_it_was_made_on() {
    for wiring in Wiring::ALL {
        each(communicators(wiring, 3), |comm| {
            // The calls are started on this thread and waited for on the other. The communicator goes on there, with
            // the worker that was started here.
            let works = [(); 3].map(|()| comm.start_all_reduce(vec![1_i32; 10_000], ReduceOp::Sum).unwrap());
            let (next, previous) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
            let send = comm.start_send([comm.rank() as u64], next).unwrap();
            let there = move || {
                works.into_iter().for_each(|work| assert_eq!(work.wait().unwrap(), [3; 10_000]));
                let mut x = [0_u64];
                comm.recv(&mut x, previous).unwrap();
                assert_eq!(x, [previous as u64]);
                send.wait().unwrap();
                let again = comm.start_all_gather_into([comm.rank() as u16], [0_u16; 3]).unwrap();
                comm.barrier().unwrap();
                assert_eq!(again.wait().unwrap().1, [0, 1, 2]);
                comm
            };
            let comm = std::thread::spawn(there).join().unwrap();
            comm.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
        });
    }
}

#[test]
fn a_wait_ends_at_its_limit_while_another_thread_waits_for_a_message() {
    let mut comms = Communicator::local(2).unwrap();
    let (peer, comm) = (comms.pop().unwrap(), comms.pop().unwrap());
    // Rank 0's first message comes after many waits for the second one have timed out.
    let mut second = comm.start_recv(vec![0_u8; 4], Envelope::rank(1).tag(2)).unwrap();
    let (done, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..50 {
                assert!(second.wait_timeout(Duration::from_millis(1)).unwrap().is_none());
            }
            done.send(second).unwrap();
        });
        scope.spawn(move || {
            let second = told.recv().unwrap();
            peer.send(&[1_u8; 4], Envelope::rank(0).tag(1)).unwrap();
            peer.send(&[2_u8; 4], Envelope::rank(0).tag(2)).unwrap();
            assert_eq!(second.wait().unwrap().0, [2; 4]);
            peer
        });
        let mut first = [0_u8; 4];
        comm.recv(&mut first, Envelope::rank(1).tag(1)).unwrap();
        assert_eq!(first, [1; 4]);
    });
}

/// Returns the size of this process's address space in bytes.
fn address_space() -> u64 {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Runs `body` while the system has no memory for the stack of another thread.
fn without_threads<R>(body: impl FnOnce() -> R) -> R {
    // These threads take the stacks of earlier ones, so that none is left for the next. They begin before the limit
    // holds, since a thread that begins needs memory too.
    let (all, end) = (Arc::new(Barrier::new(9)), Arc::new(Barrier::new(9)));
    let other = |(all, end): (Arc<Barrier>, Arc<Barrier>)| {
        std::thread::spawn(move || {
            all.wait();
            end.wait();
        })
    };
    let others: Vec<_> = (0..8).map(|_| other((Arc::clone(&all), Arc::clone(&end)))).collect();
    all.wait();
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(address_space() + (1 << 20)), maximum: before.maximum }).unwrap();
    let result = body();
    setrlimit(Resource::As, before).unwrap();
    end.wait();
    others.into_iter().for_each(|other| other.join().unwrap());
    result
}

#[test]
fn a_message_that_no_thread_can_be_had_for_is_not_begun_and_its_memory_is_free() {
    alone_in_a_process("background::a_message_that_no_thread_can_be_had_for_is_not_begun_and_its_memory_is_free", || {
        for wiring in [Wiring::Shm, Wiring::Tcp] {
            let met = Meeting::new(2);
            threads(wiring, 2, |comm| {
                comm.barrier().unwrap();
                if comm.rank() == 1 {
                    met.meet();
                    let long = comm.start_send(vec![7_u8; LONG], Envelope::rank(0).tag(1)).unwrap();
                    (1..4_u8).for_each(|number| comm.send(&number, 0).unwrap());
                    return drop(long.wait().unwrap());
                }
                let mut memory = vec![5_u8; LONG];
                without_threads(|| {
                    // SAFETY: a vector, which is neither touched nor freed before the value is dropped.
                    let place = unsafe { RawHostSlice::new(memory.as_mut_ptr(), LONG) }.unwrap();
                    let errors = [
                        comm.start_recv(place, Envelope::rank(1).tag(1)).map(drop).unwrap_err(),
                        comm.start_recv(vec![0_u8], 1).map(drop).unwrap_err(),
                        comm.start_all_reduce(vec![0_u8], ReduceOp::Sum).map(drop).unwrap_err(),
                    ];
                    for error in errors {
                        let words = error.to_string();
                        assert!(matches!(error, Error::Io { .. }) && words.contains("nothing was started"), "{words}");
                    }
                });
                met.meet();
                // The memory belongs to the program again: the message goes to where it is received.
                let mut x = [0_u8];
                comm.recv(&mut x, 1).unwrap();
                assert_eq!(x, [1]);
                let mut long = vec![0_u8; LONG];
                comm.recv(&mut long, Envelope::rank(1).tag(1)).unwrap();
                assert!(long.iter().all(|byte| *byte == 7) && memory.iter().all(|byte| *byte == 5), "{wiring:?}");
                for number in [2, 3] {
                    assert_eq!((comm.recv(&mut x, 1).unwrap().count, x), (1, [number]));
                }
            });
        }
    });
}
