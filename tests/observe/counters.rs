//! The observer.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use collectives::observe::CallReport;
use collectives::{AbortHandle, Algorithm, Collective, Communicator, CustomOp, ReduceOp, flight::Backend, observe::CallKind};

use crate::common::ranks::{Wiring, communicators_with, each, threads_with};

/// The parts of a report that are kept.
type Seen = (String, &'static str, Option<String>, String, u64, u64, Option<usize>, &'static str);

fn seen(call: &CallReport<'_>) -> Seen {
    let (op, element) = (call.op.as_deref().map(str::to_owned), call.element.clone().into_owned());
    (call.communicator.to_owned(), call.kind.name(), op, element, call.count, call.bytes, call.root.or(call.peer), call.result())
}

/// Returns an observer, and the list of what it has seen.
fn listener() -> (impl Fn(&CallReport<'_>) + Clone, Arc<Mutex<Vec<Seen>>>) {
    let all = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&all);
    (move |call: &CallReport<'_>| kept.lock().unwrap().push(seen(call)), all)
}

#[test]
fn every_call_is_told_with_what_it_was() {
    let listeners: Vec<_> = (0..2).map(|_| listener()).collect();
    threads_with(
        2,
        |rank| Wiring::Shm.builder(rank).configure(|config| config.observer = Some(Arc::new(listeners[rank].0.clone()))),
        |comm| {
            listeners[comm.rank()].1.lock().unwrap().clear();
            let other = 1 - comm.rank();
            comm.all_reduce(&mut [1.0f32; 8], ReduceOp::Max).unwrap();
            comm.broadcast(&mut [[0u8; 3]; 2], 1).unwrap();
            comm.start_all_reduce(vec![1u64; 3], ReduceOp::Sum).unwrap().wait().unwrap();
            comm.send_recv(&[1u16], other, &mut [0u16; 4], other).unwrap();
            let work = comm.start_recv(vec![0i32; 5], other).unwrap();
            comm.send(&[7i32; 5], other).unwrap();
            work.wait().unwrap();
        },
    );
    for (rank, (_, seen)) in listeners.iter().enumerate() {
        let mut seen = seen.lock().unwrap().clone();
        seen.retain(|(communicator, ..)| communicator == "world");
        // A background message is reported when it ends.
        let background = seen.iter().position(|call| call.1 == "recv" && call.5 == 20).unwrap();
        let background = seen.remove(background);
        let call = |kind, op: Option<&str>, element: &str, count, bytes, whom| {
            ("world".to_owned(), kind, op.map(str::to_owned), element.to_owned(), count, bytes, whom, "ok")
        };
        let other = Some(1 - rank);
        assert_eq!(background, call("recv", None, "i32", 5, 20, other));
        let expected = [
            call("all_reduce", Some("max"), "f32", 8, 32, None),
            call("broadcast", None, "[u8; 3]", 2, 6, Some(1)),
            call("all_reduce", Some("sum"), "u64", 3, 24, None),
            call("recv", None, "u16", 4, 8, other),
            call("send", None, "u16", 1, 2, other),
            call("send", None, "i32", 5, 20, other),
        ];
        assert_eq!(seen, expected);
    }
}

#[test]
fn failures_are_told_as_what_they_are() {
    for (wiring, algorithm) in [(Wiring::Shm, Algorithm::Mailboxes), (Wiring::Tcp, Algorithm::Doubling)] {
        let results = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&results);
        let observer = move |call: &CallReport<'_>| {
            assert_eq!((call.backend, call.world_size), (Backend::Host, 2));
            kept.lock().unwrap().push((call.rank, call.kind.name(), call.sequence, call.result(), call.algorithm, call.elapsed));
        };
        threads_with(
            2,
            |rank| wiring.builder(rank).configure(|config| config.observer = Some(Arc::new(observer.clone()))),
            |comm| {
                comm.all_reduce(&mut [1.0f32; 2], ReduceOp::Sum).unwrap();
                let failed = if comm.rank() == 0 { comm.all_reduce(&mut [1u32; 2], ReduceOp::Sum) } else { comm.barrier() };
                assert!(failed.unwrap_err().is_mismatch());
                assert!(comm.barrier().unwrap_err().is_poisoned());
            },
        );
        let results = results.lock().unwrap();
        for rank in 0..2 {
            let of_rank: Vec<_> = results.iter().filter(|result| result.0 == rank).collect();
            // The first call is the barrier of the start.
            let told: Vec<_> = of_rank.iter().map(|(_, kind, _, result, ..)| (*kind, *result)).collect();
            let other = if rank == 0 { "all_reduce" } else { "barrier" };
            assert_eq!(told, [("barrier", "ok"), ("all_reduce", "ok"), (other, "mismatch"), ("barrier", "poisoned")]);
            assert_eq!(of_rank[1].2, of_rank[0].2.map(|sequence| sequence + 1));
            assert_eq!(of_rank[1].4, Some(algorithm), "{:?}", of_rank[1]);
            assert!(of_rank[1].5 > Duration::ZERO);
        }
    }
}

#[test]
fn children_are_observed_and_panics_in_observers_end_nothing() {
    let (observer, all) = listener();
    let listen = move |call: &CallReport<'_>| {
        observer(call);
        assert!(call.kind != Collective::AllGather, "an observer's own mistake");
    };
    Communicator::builder()
        .configure(|config| config.observer = Some(Arc::new(listen)))
        .run_local(2, |comm| {
            let child = comm.duplicate()?;
            let mut all = [0u64; 2];
            child.all_gather_into(&[comm.rank() as u64], &mut all)?;
            assert_eq!(all, [0, 1]);
            child.barrier()
        })
        .unwrap();
    let seen = all.lock().unwrap();
    let child = seen.iter().filter(|(communicator, kind, ..)| communicator == "world/0 from rank 0" && *kind == "all_gather");
    assert_eq!(child.count(), 2);
}

#[test]
fn a_custom_op_that_panics_is_told_as_a_failure() {
    let (observer, all) = listener();
    let comms = crate::common::ranks::communicators_with(2, |rank| {
        Wiring::Shm.builder(rank).configure(|config| config.observer = Some(Arc::new(observer.clone())))
    });
    each(comms, |comm| {
        let op = CustomOp::new("broken", |_: &mut [f32], _: &[f32]| panic!("on purpose"));
        let call = std::panic::AssertUnwindSafe(|| comm.all_reduce(&mut [1.0f32; 4], &op));
        let ended = std::panic::catch_unwind(call);
        assert!(!matches!(ended, Ok(Ok(()))));
    });
    let seen = all.lock().unwrap();
    let failed = seen.iter().filter(|call| call.1 == "all_reduce" && call.7 != "ok");
    assert_eq!(failed.count(), 2, "{seen:?}");
}

#[test]
fn an_observer_may_end_the_communicator_when_a_background_message_fails() {
    // The observer runs on the message thread, or on the thread that waits.
    for waits in [false, true] {
        let handle = Arc::new(OnceLock::<AbortHandle>::new());
        let (aborts, (tell, told)) = (Arc::clone(&handle), channel());
        let observer = move |call: &CallReport<'_>| {
            if call.kind == CallKind::Recv && call.error.is_some() {
                aborts.get().unwrap().abort();
                tell.send((call.result(), call.bytes)).unwrap();
            }
        };
        let observer = Arc::new(observer);
        let mut comms = communicators_with(2, |rank| {
            let observer = Arc::clone(&observer);
            Wiring::Shm.builder(rank).configure(|config| config.observer = Some(Arc::new(move |call: &CallReport<'_>| observer(call))))
        });
        drop(observer);
        handle.set(comms[0].abort_handle()).unwrap();
        comms[0].set_timeout(Duration::from_millis(20));
        let work = comms[0].start_recv(vec![0u32; 3], 1).unwrap();
        let (outcome, unfinished) = if waits { (Some(work.wait()), None) } else { (None, Some(work)) };
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok(("timeout", 12)), "the observer did not come back");
        assert!(outcome.is_none_or(|outcome| outcome.unwrap_err().is_timeout()));
        assert!(comms.remove(0).barrier().unwrap_err().is_poisoned());
        assert!(comms.remove(0).barrier().is_err());
        drop(unfinished);
        assert_eq!(Arc::strong_count(&handle), 1, "the observer, and what it holds, lives on");
    }
}
