//! The control and data communicators: calls that start no thread, aborts that reach into calls, ends that do not wait
//! for other ranks.

use std::sync::atomic::Ordering;
use std::thread;

use simgpu::nccl;

use super::*;
use crate::device::memory::{NcclBuffer, Registration, Window};

const SHORT: Duration = Duration::from_millis(100);

/// Counts NCCL's threads; `tests/device/threads.rs` counts those of a whole process, in a test with its own process.
#[test]
fn a_thousand_all_reduces_start_no_thread_and_ask_nothing_afterwards() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = rank.vector(10);
        rank.all_reduce(&mut vector, LONG).unwrap();
        rank.stream.synchronize().unwrap();
        let started = nccl::threads_started();
        let asked = ["ncclCommGetAsyncError", "ncclAllReduce", "ncclGroupStart"].map(nccl::calls_of_this_thread);
        for _ in 0..1000 {
            rank.all_reduce(&mut vector, LONG).unwrap();
        }
        assert_eq!(nccl::threads_started(), started);
        assert_eq!(
            ["ncclCommGetAsyncError", "ncclAllReduce", "ncclGroupStart"].map(nccl::calls_of_this_thread),
            [asked[0], asked[1] + 1000, asked[2]]
        );
        assert_eq!(read(&rank.stream, &vector), total(10, &[0]));
    });
    sim.finish();
}

#[test]
fn the_two_communicators_are_configured_for_their_purpose() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let of = |handle: &std::sync::atomic::AtomicPtr<nccl_sys::ncclComm>| nccl::config(handle.load(Ordering::Acquire).cast()).unwrap();
        let (control, data) = (of(&rank.comm.inner.control), of(&rank.comm.inner.data));
        assert_eq!((control.blocking, control.split_share, data.blocking, data.split_share), (0, 1, 1, 0));
    });
    sim.finish();
}

/// Makes the first call of rank 0, which waits inside NCCL for rank 1 to connect to, and returns its error.
fn stuck_inside(rank: &Rank, timeout: Duration) -> Error {
    let mut vector = rank.vector(10);
    rank.all_reduce(&mut vector, timeout).unwrap_err()
}

#[test]
fn whoever_is_inside_is_counted_and_the_last_entry_has_a_number() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let inner = &rank.comm.inner;
        assert!(inner.is_left() && inner.last_entry().is_none());
        let first = inner.begin_call(LONG).unwrap();
        let number = inner.last_entry().unwrap();
        assert!(!inner.is_left());
        let second = inner.begin_call(LONG).unwrap();
        assert!(!inner.is_left() && inner.last_entry() == Some(number + 1));
        drop(first);
        assert!(!inner.is_left() && inner.last_entry() == Some(number + 1));
        drop(second);
        assert!(inner.is_left() && inner.last_entry().is_none());
    });
    sim.finish();
}

#[test]
fn a_deadline_ends_a_first_call_that_waits_inside_nccl() {
    let sim = Sim::new();
    nccl::connect_lazily();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            until_called("ncclCommAbort", 1);
            return rank.comm.abort();
        }
        let error = stuck_inside(&rank, SHORT);
        assert!(error.is_timeout() && !error.is_poisoned() && error.to_string().starts_with("all_reduce: timed out"), "{error}");
        assert!(stuck_inside(&rank, SHORT).is_poisoned());
    });
    sim.finish();
}

#[test]
fn a_deadline_ends_a_call_without_a_stream_that_waits_inside_nccl() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            until_called("ncclCommAbort", 1);
            return rank.comm.abort();
        }
        let buffer = NcclBuffer::<f32>::zeroed(&rank.comm, &rank.stream, 1024).unwrap();
        let window = Window::new(&rank.comm, buffer, &Deadline::after(SHORT));
        let error = window.map(drop).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        // Its buffer, which NCCL may have known, was dropped after that.
        assert!(rank.comm.inner.is_gone());
    });
    sim.finish();
}

#[test]
fn an_abort_reaches_a_thread_inside_nccl() {
    let sim = Sim::new();
    nccl::connect_lazily();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            until_called("ncclCommAbort", 1);
            return rank.comm.abort();
        }
        let error = thread::scope(|scope| {
            let inside = scope.spawn(|| stuck_inside(&rank, LONG));
            until_called("ncclAllReduce", 1);
            rank.comm.abort();
            inside.join().unwrap()
        });
        assert!(matches!(&error, Error::Poisoned { cause, .. } if matches!(**cause, Error::Aborted { .. })), "{error}");
    });
    sim.finish();
}

type Stop = fn(&NcclComm, &Deadline) -> Result<()>;

#[test]
fn what_a_call_inside_nccl_does_not_let_stop_it_aborts() {
    let stops: [(&str, Stop); 2] = [
        ("ncclCommRevoke", |comm, deadline| comm.revoke(deadline)),
        ("ncclCommShrink", |comm, deadline| comm.shrink(&[1], true, &NcclConfig::default(), deadline).map(drop)),
    ];
    for (function, stop) in stops {
        let sim = Sim::new();
        nccl::connect_lazily();
        ranks(2, |rank| {
            if rank.comm.rank() == 1 {
                until_called("ncclCommAbort", 1);
                return rank.comm.abort();
            }
            thread::scope(|scope| {
                let inside = scope.spawn(|| stuck_inside(&rank, LONG));
                until_called("ncclAllReduce", 1);
                let error = stop(&rank.comm, &Deadline::after(LONG)).unwrap_err();
                assert!(matches!(&error, Error::Aborted { doing, .. } if doing.contains("aborted instead")), "{error}");
                assert!(inside.join().unwrap().is_poisoned());
            });
        });
        assert_eq!(nccl::calls(function), 0);
        sim.finish();
    }
}

#[test]
fn an_abort_ends_the_making_of_the_data_communicator() {
    let sim = Sim::new();
    nccl::in_progress("ncclCommSplit", u32::MAX);
    let gpu = driver::open(0).unwrap();
    let ids = [unique_id(library()).unwrap()];
    let error = NcclComm::create(setup(&gpu, &ids, 0, 1, &NcclConfig::default(), &Deadline::after(SHORT))).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    drop(gpu);
    sim.finish();
}

#[test]
fn closing_with_a_peer_missing_is_a_timeout_and_frees_the_stream() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            until_called("ncclCommAbort", 1);
            return rank.comm.abort();
        }
        let mut vector = rank.vector(10);
        rank.all_reduce(&mut vector, LONG).unwrap();
        let error = rank.comm.finalize(&Deadline::after(SHORT)).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains("closing"), "{error}");
        let _ = rank.stream.synchronize();
        assert!(rank.comm.failure().is_some_and(|failure| failure.is_timeout()));
    });
    sim.finish();
}

#[test]
fn a_destroy_that_fails_leaves_later_calls_of_the_thread_alone() {
    let sim = Sim::new();
    let gpu = driver::open(0).unwrap();
    let create = |config: &NcclConfig| {
        let ids = [unique_id(library()).unwrap()];
        NcclComm::create(setup(&gpu, &ids, 0, 1, config, &Deadline::after(LONG))).unwrap()
    };
    let config = NcclConfig::default();
    let (first, second) = (create(&config), create(&config));
    let lost = first.handle();
    nccl::fail_call("ncclCommDestroy", 1, 3);
    let error = first.finalize(&Deadline::after(LONG)).unwrap_err();
    assert!(error.to_string().contains("ncclCommDestroy"), "{error}");
    assert_eq!((nccl::group_depth(), nccl::calls_of_this_thread("ncclCommDestroy")), (0, 0));
    let stream = gpu.context.new_stream().unwrap();
    let mut vector = stream.clone_htod(&[1.0_f32, 2.0]).unwrap();
    sum(&second, &stream, &mut vector, LONG).unwrap();
    assert_eq!(read(&stream, &vector), [1.0, 2.0]);
    second.finalize(&Deadline::after(LONG)).unwrap();
    // The communicator that was not destroyed is known only to this test.
    assert_eq!(nccl::counts().communicators, 1);
    // SAFETY: the handle is of a communicator that still exists, and that nothing else knows any longer.
    let aborted = unsafe { library().ncclCommAbort(lost) };
    assert_eq!(aborted.map(|code| code.0).ok(), Some(0));
    drop((first, second, stream, vector, gpu));
    sim.finish();
}

#[test]
fn first_calls_of_two_communicators_in_opposite_orders_do_not_wait_for_each_other() {
    let sim = Sim::new();
    nccl::connect_lazily();
    let ids = [unique_id(library()).unwrap()];
    ranks(2, |rank| {
        let own = rank.comm.rank();
        let config = NcclConfig::default();
        let other = NcclComm::create(setup(&rank.gpu, &ids, own, 2, &config, &Deadline::after(LONG))).unwrap();
        let (other, comms) = (&other, [&rank.comm, &other]);
        let streams = [rank.stream.clone(), rank.gpu.context.new_stream().unwrap()];
        let call = |index: usize| {
            let mut vector = streams[index].clone_htod(&[own as f32 + 1.0]).unwrap();
            sum(comms[index], &streams[index], &mut vector, LONG).unwrap();
            assert_eq!(read(&streams[index], &vector), [3.0]);
        };
        let entered = |index: usize| comms[index].inner.entries.load(Ordering::SeqCst);
        // The communicator that this rank calls first; the other rank first calls the other communicator.
        let before = entered(own);
        thread::scope(|scope| {
            scope.spawn(|| call(own));
            wait_until("the call has entered", || entered(own) != before);
            call(1 - own);
        });
        other.finalize(&Deadline::after(LONG)).unwrap();
    });
    // A thread that went on without its turn may launch while the other one does.
    assert!(nccl::reports().iter().all(|report| report.starts_with("two threads inside NCCL on device")));
    sim.finish();
}

#[test]
fn a_child_by_an_id_lives_on_when_its_parent_is_aborted() {
    let sim = Sim::new();
    let ids = [unique_id(library()).unwrap()];
    ranks(2, |rank| {
        let own = rank.comm.rank();
        let child = NcclComm::create(setup(&rank.gpu, &ids, own, 2, &NcclConfig::default(), &Deadline::after(LONG))).unwrap();
        rank.comm.abort();
        let mut vector = rank.vector(10);
        sum(&child, &rank.stream, &mut vector, LONG).unwrap();
        assert_eq!(read(&rank.stream, &vector), total(10, &[0, 1]));
    });
    sim.finish();
}

#[test]
fn registrations_end_with_a_communicator_that_is_aborted() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let registration = Registration::new(&rank.comm, rank.vector(10), &Deadline::after(LONG)).unwrap();
        rank.comm.abort();
        drop(registration);
    });
    sim.finish();
}
