//! Every failure ends on time, in a typed error, which is the cause of all later refusals.

use std::thread;

use simgpu::nccl;

use super::*;
use crate::call::{Call, Collective};
use crate::device::memory::{NcclBuffer, Registration};

const SHORT: Duration = Duration::from_millis(100);

#[test]
fn a_rank_that_never_joins_is_a_timeout() {
    let sim = Sim::new();
    let gpu = driver::open(0).unwrap();
    let ids = [unique_id(library()).unwrap()];
    let began = std::time::Instant::now();
    let error = NcclComm::create(setup(&gpu, &ids, 0, 2, &NcclConfig::default(), &Deadline::after(SHORT))).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("rank 0 of 2"), "{error}");
    assert!(began.elapsed() >= SHORT && began.elapsed() < LONG);
    drop(gpu);
    sim.finish();
}

#[test]
fn a_rank_that_does_not_call_is_noticed_by_the_watchdog() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            return leave_late(&rank.comm);
        }
        let mut vector = rank.vector(100);
        let call = Call {
            kind: Collective::AllReduce,
            op: 1,
            element: crate::call::element::TypeTag::Scalar(crate::call::element::DType::F32),
            count: 100,
            root: None,
            counts_hash: 0,
            sequence: 7,
        };
        rank.comm.label(&call);
        rank.all_reduce(&mut vector, SHORT).unwrap();
        // Returns because the watchdog aborts.
        let _ = rank.stream.synchronize();
        let failure = failure_of(&rank.comm);
        assert!(matches!(&failure, Error::Timeout { elapsed, .. } if *elapsed >= SHORT), "{failure}");
        assert!(failure.to_string().contains("rank 0 of 2: all_reduce(sum, f32, count 100) number 7"), "{failure}");
        let refused = rank.all_reduce(&mut vector, LONG).unwrap_err();
        assert!(refused.is_poisoned() && refused.is_timeout(), "{refused}");
    });
    sim.finish();
}

#[test]
fn abort_ends_what_other_threads_wait_for_and_may_be_done_again() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let comm = Arc::new(rank.comm);
        if comm.rank() == 1 {
            return leave_late(&comm);
        }
        let mut vector = rank.stream.alloc_zeros::<f32>(10).unwrap();
        sum(&comm, &rank.stream, &mut vector, LONG).unwrap();
        let event = comm.position(&rank.stream);
        let waiter = thread::spawn({
            let comm = Arc::clone(&comm);
            move || comm.wait(&event, &Deadline::after(LONG))
        });
        let aborters: Vec<_> = (0..3)
            .map(|_| {
                thread::spawn({
                    let comm = Arc::clone(&comm);
                    move || comm.abort()
                })
            })
            .collect();
        aborters.into_iter().for_each(|aborter| aborter.join().unwrap());
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Poisoned { cause, .. } if matches!(**cause, Error::Aborted { .. })), "{error}");
        comm.abort();
        assert!(sum(&comm, &rank.stream, &mut vector, LONG).unwrap_err().is_poisoned());
        assert!(comm.shrink(&[1], true, &NcclConfig::default(), &Deadline::after(LONG)).unwrap_err().is_poisoned());
        assert!(comm.finalize(&Deadline::after(LONG)).unwrap_err().is_poisoned());
        let _ = rank.stream.synchronize();
    });
    sim.wait_until_none_is_left();
    // Each rank's control and data communicator, once.
    assert_eq!(nccl::calls("ncclCommAbort"), 4);
    sim.finish();
}

#[test]
fn work_that_a_shrink_stops_is_waited_for_in_vain() {
    let sim = Sim::new();
    let all = Meeting::new(3);
    ranks(3, |rank| {
        let stopped = rank.comm.rank() != 2;
        if stopped {
            let mut vector = rank.vector(10);
            rank.all_reduce(&mut vector, LONG).unwrap();
            let event = rank.comm.position(&rank.stream);
            let (error, child) = thread::scope(|scope| {
                let waiting = scope.spawn(|| rank.comm.wait(&event, &Deadline::after(LONG)).unwrap_err());
                let child = rank.comm.shrink(&[2], true, &NcclConfig::default(), &Deadline::after(LONG)).unwrap();
                (waiting.join().unwrap(), child)
            });
            // The device has reached the event: only this communicator knows that the sum is invalid.
            rank.stream.synchronize().unwrap();
            assert!(error.is_poisoned() && rank.comm.wait(&event, &Deadline::after(LONG)).unwrap_err().is_poisoned(), "{error}");
            assert!(rank.all_reduce(&mut vector, LONG).unwrap_err().is_poisoned());
            // A communicator that NCCL would split off now would have this one's abort flags.
            let error = rank.comm.split_revoked(Some(0), 0, &NcclConfig::default(), &Deadline::after(LONG)).unwrap_err();
            assert!(error.is_unsupported() && error.to_string().contains("split the communicator that the shrink created"), "{error}");
            let mut vector = rank.vector(10);
            rank.comm.abort();
            sum(&child, &rank.stream, &mut vector, LONG).unwrap();
            assert_eq!(read(&rank.stream, &vector), total(10, &[0, 1]));
        }
        all.meet();
        rank.comm.abort();
    });
    sim.finish();
}

#[test]
fn a_shrink_that_stopped_work_and_failed_ends_the_communicator_whatever_nccl_says() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 0 {
            nccl::fail_call("ncclCommShrink", 1, 4);
            let error = rank.comm.shrink(&[1], true, &NcclConfig::default(), &Deadline::after(LONG)).unwrap_err();
            assert!(matches!(&error, Error::Nccl { code: 4, .. }), "{error}");
            assert_eq!(rank.comm.failure().map(|failure| failure.to_string()), Some(error.to_string()));
        }
        rank.comm.abort();
    });
    sim.finish();
}

#[test]
fn a_thread_that_does_not_come_out_of_nccl_is_noticed() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = rank.vector(10);
        rank.all_reduce(&mut vector, SHORT).unwrap();
        // SAFETY: nothing is put on the stream.
        let outcome = unsafe {
            rank.comm.enqueue(&|| "stuck".to_owned(), &rank.stream, SHORT, |_| {
                assert!(failure_of(&rank.comm).is_timeout());
                Ok(())
            })
        };
        let error = outcome.unwrap_err();
        assert!(error.is_timeout() && !error.is_poisoned() && error.to_string().starts_with("stuck: timed out"), "{error}");
        assert!(rank.all_reduce(&mut vector, LONG).unwrap_err().is_timeout());
    });
    sim.finish();
}

#[test]
fn a_lost_rank_ends_the_others() {
    let sim = Sim::new();
    let both = Meeting::new(2);
    ranks(2, |rank| {
        both.meet();
        if rank.comm.rank() == 1 {
            nccl::lose(1);
            return rank.comm.abort();
        }
        let mut vector = rank.vector(10);
        // It may be noticed before, during or after the call.
        let _ = rank.all_reduce(&mut vector, LONG);
        let _ = rank.stream.synchronize();
        let failure = failure_of(&rank.comm);
        assert!(matches!(&failure, Error::Nccl { code: 6, name: "ncclRemoteError", .. }), "{failure}");
        assert!(rank.all_reduce(&mut vector, LONG).unwrap_err().is_poisoned());
        // NCCL would report the same for everything that is created from it.
        let (config, deadline) = (NcclConfig::default(), Deadline::after(LONG));
        let refused =
            [rank.comm.shrink(&[1], true, &config, &deadline).map(drop), rank.comm.split_revoked(Some(0), 0, &config, &deadline).map(drop)];
        for error in refused.map(Result::unwrap_err) {
            let words = error.to_string();
            assert!(
                error.is_poisoned()
                    && words.contains("ncclRemoteError")
                    && words.contains("create a new communicator for the surviving ranks"),
                "{error}"
            );
        }
    });
    sim.finish();
}

#[test]
fn a_lost_rank_that_nccl_tells_of_in_a_shrink_comes_with_what_to_do() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 0 {
            nccl::fail_call("ncclCommShrink", 1, 6);
            let error = rank.comm.shrink(&[1], false, &NcclConfig::default(), &Deadline::after(LONG)).unwrap_err();
            assert!(
                matches!(&error, Error::Nccl { code: 6, text, .. } if text.contains("create a new communicator for the surviving ranks")),
                "{error}"
            );
        }
        rank.comm.abort();
    });
    sim.finish();
}

#[test]
fn a_failing_collective_is_an_error_with_words_of_nccl_and_poisons_unless_it_is_an_argument() {
    let sim = Sim::new();
    for code in 1..=6 {
        ranks(1, |rank| {
            let mut vector = rank.vector(10);
            nccl::fail_call_of_this_thread("ncclAllReduce", 1, code);
            let error = rank.all_reduce(&mut vector, LONG).unwrap_err();
            assert!(matches!(&error, Error::Nccl { code: found, .. } if *found == code.unsigned_abs()), "{error}");
            assert!(error.to_string().contains("all_reduce (ncclAllReduce)"), "{error}");
            let again = rank.all_reduce(&mut vector, LONG);
            match code {
                4 => again.unwrap(),
                _ => assert!(again.unwrap_err().is_poisoned()),
            }
            let _ = rank.stream.synchronize();
        });
    }
    sim.finish();
}

#[test]
fn failures_at_the_start_of_a_communicator_leave_nothing_behind() {
    let sim = Sim::new();
    for (function, nth) in [
        ("ncclCommInitRankConfig", 1),
        ("ncclCommGetAsyncError", 1),
        ("ncclCommGetAsyncError", 2),
        ("ncclCommCount", 1),
        ("ncclCommSplit", 1),
        ("ncclCommGetAsyncError", 5),
        ("ncclCommCount", 2),
        ("ncclCommUserRank", 1),
        ("ncclCommCount", 3),
    ] {
        let gpu = driver::open(0).unwrap();
        let ids = [unique_id(library()).unwrap()];
        nccl::fail_call(function, nth, 3);
        let error = NcclComm::create(setup(&gpu, &ids, 0, 1, &NcclConfig::default(), &Deadline::after(LONG))).unwrap_err();
        assert!(matches!(&error, Error::Nccl { code: 3, .. }) && error.to_string().contains(function), "{function}: {error}");
        drop(gpu);
        sim.wait_until_none_is_left();
    }
    nccl::fail_call_of_this_thread("ncclGetUniqueId", 1, 2);
    assert!(matches!(unique_id(library()), Err(Error::Nccl { code: 2, .. })));
    sim.finish();
}

#[test]
fn a_failing_close_aborts_what_is_left() {
    let sim = Sim::new();
    for (function, nth) in [("ncclCommFinalize", 1), ("ncclCommFinalize", 2), ("ncclCommGetAsyncError", 1)] {
        let closed = || {
            let closed = ranks(1, |rank| {
                nccl::fail_call(function, nth, 3);
                rank.comm.finalize(&Deadline::after(LONG))
            });
            sim.wait_until_none_is_left();
            nccl::reset();
            closed.into_iter().next().unwrap()
        };
        // The timekeeper queries NCCL for errors too, and may get this one first.
        let error = (0..10).find_map(|_| closed().err()).unwrap();
        assert!(error.to_string().contains(function), "{error}");
    }
    sim.finish();
}

#[test]
fn a_failing_group_ends_all_its_communicators_and_is_closed() {
    let sim = Sim::new();
    for function in ["ncclAllReduce", "ncclGroupEnd"] {
        // Two communicators of one rank each, on one device.
        let pair: Vec<Rank> = (0..2).map(|_| Rank::new(&[unique_id(library()).unwrap()], 0, 1)).collect();
        let mut works: Vec<_> = pair
            .iter()
            .map(|rank| {
                let vector = rank.vector(10);
                let stream = rank.stream.cu_stream();
                move |raw: &Raw<'_>| {
                    let (address, _guard) = vector.device_ptr(vector.stream());
                    // SAFETY: the vector lives as long as the closure, and dropping it waits for the stream.
                    unsafe { raw.all_reduce(address, address, 10, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, stream) }
                }
            })
            .collect();
        nccl::fail_call_of_this_thread(function, if function == "ncclAllReduce" { 2 } else { 1 }, 4);
        let mut parts: Vec<Part<'_>> = pair.iter().zip(&mut works).map(|(rank, work)| (&rank.comm, &rank.stream, work as _)).collect();
        // SAFETY: as above.
        let error = unsafe { grouped(&mut parts, &|| "group".to_owned(), LONG) }.unwrap_err();
        assert!(matches!(&error, Error::Nccl { code: 4, .. }) && error.to_string().contains(function), "{error}");
        assert!(pair.iter().all(|rank| rank.comm.failure().is_some()));
        if function == "ncclGroupEnd" {
            // The planted failure replaced the end of the group. SAFETY: the function has no preconditions.
            let _ = unsafe { library().ncclGroupEnd() };
        }
        assert_eq!(nccl::group_depth(), 0);
        drop(works);
        drop(pair);
        sim.wait_until_none_is_left();
    }
    drop(sim);
}

#[test]
fn a_broken_device_is_noticed() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let work = || {
            // This thread has no context yet, and gets none.
            simgpu::fail_call_of_this_thread("cuCtxSetCurrent", 1, 201);
            // SAFETY: nothing is put on the stream.
            unsafe { rank.comm.enqueue(&|| "nothing".to_owned(), &rank.stream, LONG, |_| Ok(())) }
        };
        let error = thread::scope(|scope| scope.spawn(work).join().unwrap().unwrap_err());
        assert!(matches!(&error, Error::Cuda { code: 201, .. }), "{error}");
        assert!(rank.comm.failure().is_some());
    });
    sim.finish();
}

#[test]
fn an_error_of_the_device_in_the_background_ends_the_communicator() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = rank.vector(10);
        simgpu::fail_stream(rank.stream.cu_stream().cast(), 700);
        // It may be noticed before, during or after the call.
        let _ = rank.all_reduce(&mut vector, LONG);
        let failure = failure_of(&rank.comm);
        assert!(matches!(&failure, Error::Cuda { code: 700, .. } | Error::Nccl { code: 1, .. }), "{failure}");
    });
    sim.wait_until_none_is_left();
}

type Case<'a> = &'a (dyn Fn(&Rank, &Deadline) -> Result<()> + Sync);

#[test]
fn failures_of_calls_that_use_no_stream_are_named_and_end_the_communicator() {
    let sim = Sim::new();
    let config = NcclConfig::default();
    let later = || Deadline::after(LONG);
    let cases: [(&str, Case<'_>); 4] = [
        ("ncclCommSplit", &|rank, deadline| rank.comm.shrink(&[1], false, &config, deadline).map(|_| ())),
        ("ncclCommShrink", &|rank, deadline| rank.comm.shrink(&[1], true, &config, deadline).map(|_| ())),
        ("ncclCommRevoke", &|rank, deadline| rank.comm.revoke(deadline)),
        ("ncclCommRegister", &|rank, deadline| Registration::new(&rank.comm, rank.vector(5), deadline).map(|_| ())),
    ];
    for (function, call) in cases {
        let both = Meeting::new(2);
        ranks(2, |rank| {
            both.meet();
            if rank.comm.rank() == 0 {
                nccl::fail_call(function, 1, 3);
                let error = call(&rank, &later()).unwrap_err();
                assert!(matches!(&error, Error::Nccl { code: 3, .. }) && error.to_string().contains(function), "{error}");
                let failure = rank.comm.failure().unwrap();
                assert_eq!(failure.to_string(), error.to_string());
            }
            both.meet();
            rank.comm.abort();
        });
        sim.wait_until_none_is_left();
    }
    sim.finish();
}

#[test]
fn an_argument_that_nccl_refuses_of_the_control_communicator_ends_nothing() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 0 {
            nccl::fail_call("ncclCommShrink", 1, 4);
            let error = rank.comm.shrink(&[1], false, &NcclConfig::default(), &Deadline::after(LONG)).unwrap_err();
            assert!(matches!(&error, Error::Nccl { code: 4, .. }), "{error}");
            assert!(rank.comm.failure().is_none());
        }
        let mut vector = rank.vector(10);
        rank.all_reduce(&mut vector, LONG).unwrap();
        assert_eq!(read(&rank.stream, &vector), total(10, &[0, 1]));
    });
    sim.finish();
}

#[test]
fn memory_that_nccl_does_not_have_is_an_error_and_ends_nothing() {
    let sim = Sim::new();
    ranks(1, |rank| {
        nccl::fail_call_of_this_thread("ncclMemAlloc", 1, 1);
        let error = NcclBuffer::<f32>::zeroed(&rank.comm, &rank.stream, 10).unwrap_err();
        assert!(matches!(&error, Error::Nccl { code: 1, .. }) && error.to_string().contains("10 elements of 4 bytes"), "{error}");
        assert!(rank.comm.failure().is_none());
    });
    sim.finish();
}

#[test]
fn communicators_and_what_they_give_may_go_to_other_threads() {
    fn may<T: Send + Sync>() {}
    may::<NcclComm>();
    may::<NcclBuffer<f32>>();
    may::<Registration<f32, CudaSlice<f32>>>();
}
