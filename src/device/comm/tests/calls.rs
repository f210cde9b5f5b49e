//! Successful calls: collectives, groups, waits, and the waits of a drop.

use std::time::Instant;

use simgpu::nccl;

use super::*;
use crate::call::element::DType;
use crate::call::element::TypeTag;
use crate::call::{Call, Collective};
use crate::flight::{Flight, Orders, State};

#[test]
fn ranks_sum_what_they_have() {
    let sim = Sim::new();
    for size in [1, 2, 4, 8] {
        let len = 1000 + size;
        let sums = ranks(size, |rank| {
            assert_eq!((rank.comm.rank(), rank.comm.world_size()), (rank.gpu.ordinal, size));
            let mut vector = rank.vector(len);
            rank.all_reduce(&mut vector, LONG).unwrap();
            let sum = read(&rank.stream, &vector);
            rank.comm.finalize(&Deadline::after(LONG)).unwrap();
            sum
        });
        assert_eq!(sums, vec![total(len, &(0..size).collect::<Vec<_>>()); size]);
    }
    sim.finish();
}

#[test]
fn several_ids_start_the_same_communicator() {
    let sim = Sim::new();
    let ids = [unique_id(library()).unwrap(), unique_id(library()).unwrap()];
    std::thread::scope(|scope| {
        for rank in 0..4 {
            scope.spawn(move || {
                let rank = Rank::new(&ids, rank, 4);
                let mut vector = rank.vector(10);
                rank.all_reduce(&mut vector, LONG).unwrap();
                assert_eq!(read(&rank.stream, &vector), total(10, &[0, 1, 2, 3]));
            });
        }
    });
    assert_eq!(nccl::calls("ncclCommInitRankScalable"), 4);
    sim.finish();
}

#[test]
fn calls_that_are_in_progress_for_a_while_come_to_their_end() {
    let sim = Sim::new();
    for function in ["ncclCommInitRankConfig", "ncclCommSplit", "ncclCommFinalize"] {
        nccl::in_progress(function, 20);
    }
    ranks(2, |rank| {
        for round in 0..5 {
            let mut vector = rank.vector(round + 1);
            rank.all_reduce(&mut vector, LONG).unwrap();
            assert_eq!(read(&rank.stream, &vector), total(round + 1, &[0, 1]));
        }
        rank.comm.finalize(&Deadline::after(LONG)).unwrap();
    });
    assert!(nccl::calls("ncclCommGetAsyncError") >= 2 * (20 + 20 + 20));
    sim.finish();
}

#[test]
fn one_thread_has_calls_of_several_communicators_in_one_group() {
    let sim = Sim::new();
    let ids = [unique_id(library()).unwrap()];
    // Each rank is created by its own thread, as all of them must be there at once; then one thread has them all.
    let ranks: Vec<Rank> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || Rank::new(&ids, rank, 3))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let vectors: Vec<_> = ranks.iter().map(|rank| rank.vector(50)).collect();
    let mut works: Vec<_> = ranks
        .iter()
        .zip(&vectors)
        .map(|(rank, vector)| {
            let stream = rank.stream.cu_stream();
            let (address, _guard) = vector.device_ptr(&rank.stream);
            move |raw: &Raw<'_>| {
                // SAFETY: the vector is alive until the test has waited for the stream.
                unsafe { raw.all_reduce(address, address, 50, ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum, stream) }
            }
        })
        .collect();
    let mut parts: Vec<Part<'_>> = ranks.iter().zip(&mut works).map(|(rank, work)| (&rank.comm, &rank.stream, work as _)).collect();
    // SAFETY: as above.
    unsafe { grouped(&mut parts, &|| "group".to_owned(), LONG) }.unwrap();
    for (rank, vector) in ranks.iter().zip(&vectors) {
        rank.stream.synchronize().unwrap();
        assert_eq!(read(&rank.stream, vector), total(50, &[0, 1, 2]));
    }
    drop(ranks);
    drop(sim);
}

#[test]
fn several_calls_of_one_communicator_are_one_group() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let peer = 1 - rank.comm.rank();
        let mine = rank.vector(7);
        let mut theirs = rank.stream.alloc_zeros::<f32>(7).unwrap();
        {
            let (from, _read) = mine.device_ptr(&rank.stream);
            let (to, _written) = theirs.device_ptr_mut(&rank.stream);
            let stream = rank.stream.cu_stream();
            let mut swap = |raw: &Raw<'_>| {
                // SAFETY: both vectors are alive until the stream has been waited for below.
                unsafe {
                    raw.send(from, 7, ncclDataType_t::ncclFloat32, peer, stream)?;
                    raw.recv(to, 7, ncclDataType_t::ncclFloat32, peer, stream)
                }
            };
            // SAFETY: as above.
            unsafe { grouped(&mut [(&rank.comm, &rank.stream, &mut swap)], &|| "swap".to_owned(), LONG) }.unwrap();
        }
        assert_eq!(read(&rank.stream, &theirs), total(7, &[peer]));
    });
    sim.finish();
}

#[test]
fn dropping_waits_for_healthy_work() {
    let sim = Sim::new();
    ranks(4, |rank| {
        let mut vectors: Vec<_> = (0..10).map(|_| rank.vector(1000)).collect();
        for vector in &mut vectors {
            rank.all_reduce(vector, LONG).unwrap();
        }
        let Rank { comm, stream, gpu: _gpu } = rank;
        drop(comm);
        for vector in &vectors {
            assert_eq!(read(&stream, vector), total(1000, &[0, 1, 2, 3]));
        }
    });
    assert_eq!((nccl::calls("ncclCommDestroy"), nccl::calls("ncclCommAbort")), (8, 0));
    sim.finish();
}

#[test]
fn waiting_for_an_event_ends_with_the_work_or_the_deadline() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = rank.vector(10);
        let gate = simgpu::Gate::close(rank.stream.cu_stream().cast());
        rank.all_reduce(&mut vector, LONG).unwrap();
        let event = rank.comm.position(&rank.stream);
        gate.open();
        rank.comm.wait(&event, &Deadline::after(LONG)).unwrap();
        let gate = simgpu::Gate::close(rank.stream.cu_stream().cast());
        rank.all_reduce(&mut vector, LONG).unwrap();
        let event = rank.comm.position(&rank.stream);
        let error = rank.comm.wait(&event, &Deadline::after(Duration::from_millis(5))).unwrap_err();
        assert!(error.is_timeout() && !error.is_poisoned(), "{error}");
        assert!(rank.comm.failure().is_some_and(|cause| cause.is_timeout()));
        gate.open();
    });
    sim.finish();
}

#[test]
fn scalars_multiply_before_the_sum() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let len = 20;
        let mut vector = rank.vector(len);
        let own = rank.comm.rank();
        {
            let stream = rank.stream.cu_stream();
            let (address, _guard) = vector.device_ptr_mut(&rank.stream);
            // SAFETY: the vector is alive until the stream has been waited for below.
            let done = unsafe {
                rank.comm.enqueue(&|| "all_reduce".to_owned(), &rank.stream, LONG, |raw| {
                    let op = raw.pre_mul_sum(own as f64 + 2.0, crate::call::element::DType::F32)?;
                    raw.all_reduce(address, address, len, ncclDataType_t::ncclFloat32, op, stream)?;
                    raw.destroy_op(op)
                })
            };
            done.unwrap();
        }
        let expected: Vec<f32> = (0..len).map(|index| index as f32 * 2.0 + (index as f32 + 1.0) * 3.0).collect();
        assert_eq!(read(&rank.stream, &vector), expected);
    });
    assert_eq!(nccl::counts().operators, 0);
    sim.finish();
}

#[test]
fn communicators_of_one_device_take_turns() {
    let sim = Sim::new();
    nccl::linger(200);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let rank = Rank::new(&[unique_id(library()).unwrap()], 0, 1);
                for _ in 0..20 {
                    let mut vector = rank.vector(3);
                    rank.all_reduce(&mut vector, LONG).unwrap();
                    assert_eq!(read(&rank.stream, &vector), total(3, &[0]));
                }
            });
        }
    });
    sim.finish();
}

#[test]
fn threads_that_share_a_communicator_take_turns() {
    let sim = Sim::new();
    nccl::linger(100);
    ranks(1, |rank| {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let stream = rank.gpu.context.new_stream().unwrap();
                    for _ in 0..20 {
                        let mut vector = stream.clone_htod(&[1.0f32, 2.0]).unwrap();
                        sum(&rank.comm, &stream, &mut vector, LONG).unwrap();
                        assert_eq!(read(&stream, &vector), [1.0, 2.0]);
                    }
                });
            }
        });
    });
    sim.finish();
}

#[test]
fn the_watchdog_leaves_a_capture_alone() {
    let sim = Sim::new();
    ranks(2, |rank| {
        use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
        let mut vector = rank.vector(10);
        rank.stream.synchronize().unwrap();
        // SAFETY: one stream at a time uses the vector; cudarc's own events would be useless inside a capture.
        unsafe { rank.gpu.context.disable_event_tracking() };
        rank.stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        rank.all_reduce(&mut vector, LONG).unwrap();
        let looks = nccl::calls("ncclCommGetAsyncError");
        // Some rounds of the watchdog, which queries both communicators in each.
        wait_until("the watchdog has looked", || nccl::calls("ncclCommGetAsyncError") >= looks + 6);
        let graph = rank.stream.end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap().unwrap();
        graph.launch().unwrap();
        assert_eq!(read(&rank.stream, &vector), total(10, &[0, 1]));
        assert!(rank.comm.failure().is_none());
    });
    sim.finish();
}

#[test]
fn a_call_that_is_done_before_it_is_on_record_is_known_to_be_done_while_another_stream_is_held() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let flight = Arc::new(Flight::new(Orders { calls: 8, ..Orders::default() }));
        rank.comm.record_in(&flight);
        let states = || flight.records().iter().map(|record| record.state).collect::<Vec<_>>();
        let kind = Collective::Barrier;
        let call = Call { kind, op: 0, element: TypeTag::Scalar(DType::U8), count: 0, root: None, counts_hash: 0, sequence: 0 };
        let held = rank.gpu.context.new_stream().unwrap();
        let gate = simgpu::Gate::close(held.cu_stream().cast());
        let queue = |stream: &Arc<CudaStream>| {
            // SAFETY: nothing is put on the stream.
            unsafe { rank.comm.enqueue(&|| "nothing".to_owned(), stream, LONG, |_| Ok(())) }.unwrap();
            rank.comm.inner.tracker_of(stream).unwrap()
        };
        let probe = || rank.comm.inner.probe(Instant::now());
        let free = queue(&rank.stream);
        wait_until("the call is marked and done", || {
            probe();
            free.is_idle()
        });
        flight.note_device_call(&call, free.number, None);
        flight.note_device_call(&call, queue(&held).number, None);
        wait_until("it is known to be done", || {
            probe();
            states()[0] == State::Finished
        });
        assert_eq!(states()[1], State::Queued);
        gate.open();
        wait_until("the other one is, too", || {
            probe();
            states()[1] == State::Finished
        });
    });
    sim.finish();
}

fn later() -> Deadline {
    Deadline::after(LONG)
}

/// Sums each rank's vector over a communicator.
fn check(comm: &NcclComm, rank: &Rank, members: &[usize]) {
    let mut vector = rank.vector(33);
    sum(comm, &rank.stream, &mut vector, LONG).unwrap();
    assert_eq!(read(&rank.stream, &vector), total(33, members), "rank {} of {members:?}", rank.comm.rank());
}

#[test]
fn splits_of_what_was_revoked_order_ranks_by_key_and_leave_out_those_without_colour() {
    let sim = Sim::new();
    ranks(5, |rank| {
        let own = rank.comm.rank();
        rank.comm.revoke(&later()).unwrap();
        let color = (own != 4).then_some(own as u32 % 2);
        let child = rank.comm.split_revoked(color, -(own as i32), &NcclConfig::default(), &later()).unwrap();
        assert_eq!(child.is_none(), own == 4);
        let Some(child) = child else { return };
        let members = [own % 2, own % 2 + 2];
        assert_eq!((child.rank(), child.world_size()), (usize::from(own < 2), 2));
        check(&child, &rank, &members);
        // The child's flags are separate.
        rank.comm.abort();
        check(&child, &rank, &members);
    });
    sim.finish();
}

#[test]
fn shrinking_leaves_the_others() {
    let sim = Sim::new();
    ranks(4, |rank| {
        if rank.comm.rank() == 1 {
            return;
        }
        let error = rank.comm.shrink(&[9], false, &NcclConfig::default(), &later()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { call: "shrink", .. }), "{error}");
        let error = rank.comm.shrink(&[], false, &NcclConfig::default(), &later()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { call: "shrink", .. }), "{error}");
        let child = rank.comm.shrink(&[1, 1], false, &NcclConfig::default(), &later()).unwrap();
        let place = [0, 9, 1, 2][rank.comm.rank()];
        assert_eq!((child.rank(), child.world_size()), (place, 3));
        check(&child, &rank, &[0, 2, 3]);
        // Its parent lacks a rank, and could only wait for it.
        rank.comm.abort();
    });
    sim.wait_until_none_is_left();
}

#[test]
fn a_split_that_a_rank_does_not_take_part_in_is_a_timeout() {
    let sim = Sim::new();
    let error = ranks(2, |rank| {
        rank.comm.revoke(&later()).unwrap();
        let mut vector = rank.vector(5);
        assert!(rank.all_reduce(&mut vector, LONG).unwrap_err().is_poisoned());
        if rank.comm.rank() == 1 {
            leave_late(&rank.comm);
            return None;
        }
        let deadline = Deadline::after(Duration::from_millis(100));
        let error = rank.comm.split_revoked(Some(0), 0, &NcclConfig::default(), &deadline).unwrap_err();
        assert!(rank.comm.failure().is_some());
        Some(error)
    });
    assert!(error[0].as_ref().is_some_and(Error::is_timeout), "{error:?}");
    sim.finish();
}
