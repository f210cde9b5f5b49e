//! The threads of groups in the simulated NCCL: the calling thread, or separate ones.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::sync::Barrier;

use nccl_common::*;

const U8: c_int = 1;
const SUM: c_int = 0;

fn all_reduce(rank: &Rank, buffer: u64) -> c_int {
    ncclAllReduce(buffer, buffer, 8, U8, SUM, rank.comm, rank.stream())
}

#[test]
fn a_blocking_communicator_starts_no_thread() {
    let _alone = alone();
    let before = simgpu::nccl::threads_started();
    in_ranks(2, |rank| {
        let buffer = rank.upload(&[0; 8]);
        (0..200).for_each(|_| ok(all_reduce(rank, rank.at(&buffer))));
    });
    assert_eq!(simgpu::nccl::threads_started(), before);
    expect_clean();
}

#[test]
fn a_communicator_that_does_not_block_starts_a_thread_for_each_group() {
    let _alone = alone();
    let id = new_id();
    let before = simgpu::nccl::threads_started();
    on_threads(1, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        assert_eq!(simgpu::nccl::threads_started(), before + 1);
        let buffer = rank.upload(&[1; 8]);
        for call in 1..=20 {
            assert_eq!(all_reduce(&rank, rank.at(&buffer)), 7);
            assert_eq!(simgpu::nccl::counts().threads, 1, "no poll has joined it");
            rank.complete(7);
            assert_eq!((simgpu::nccl::counts().threads, simgpu::nccl::threads_started()), (0, before + 1 + call));
        }
        // This thread has made all calls, and another thread none.
        assert_eq!(simgpu::nccl::threads_started_by_this_thread(), 21);
        assert_eq!(std::thread::spawn(simgpu::nccl::threads_started_by_this_thread).join().unwrap(), 0);
        ok(ncclGroupStart());
        (0..5).for_each(|_| ok(all_reduce(&rank, rank.at(&buffer))));
        assert_eq!(rank.async_error(), 0);
        assert_eq!(ncclGroupEnd(), 7);
        rank.complete(7);
        assert_eq!(simgpu::nccl::threads_started(), before + 22);
        ok(ncclCommDestroy(rank.comm));
        assert_eq!(simgpu::nccl::threads_started(), before + 22, "what destroys does not go on in the background");
    });
    expect_clean();
}

#[test]
fn jobs_of_several_communicators_run_beside_each_other() {
    let _alone = alone();
    let ranks: Vec<Rank> = (0..2).map(|rank| Rank::on(rank, rank, 2)).collect();
    let before = simgpu::nccl::threads_started();
    let mut comms = [std::ptr::null_mut(); 2];
    ok(ncclCommInitAll(comms.as_mut_ptr(), 2, std::ptr::null()));
    assert_eq!(simgpu::nccl::threads_started(), before + 2, "a thread for each, since they wait for each other");
    simgpu::nccl::connect_lazily();
    let buffers: Vec<_> = ranks.iter().map(|rank| rank.upload(&[1; 8])).collect();
    let call = || {
        ok(ncclGroupStart());
        for (rank, buffer) in ranks.iter().zip(&buffers) {
            ok(ncclAllReduce(rank.at(buffer), rank.at(buffer), 8, U8, SUM, comms[rank.rank], rank.stream()));
        }
        ok(ncclGroupEnd());
    };
    call();
    assert_eq!(simgpu::nccl::threads_started(), before + 4, "they connect beside each other too");
    call();
    assert_eq!(simgpu::nccl::threads_started(), before + 4);
    assert!(ranks.iter().zip(&buffers).all(|(rank, buffer)| rank.download(buffer) == [4; 8]));
    comms.into_iter().for_each(|comm| ok(ncclCommAbort(comm)));
    expect_clean();
}

#[test]
fn an_abort_joins_the_group_that_is_in_progress() {
    let _alone = alone();
    simgpu::nccl::in_progress("ncclAllReduce", u32::MAX);
    simgpu::nccl::connect_lazily();
    for polls in [u32::MAX, 0] {
        simgpu::nccl::in_progress("ncclAllReduce", polls);
        let (id, called) = (new_id(), Barrier::new(2));
        on_threads(2, move |rank| {
            let rank = rank.join_later(id, blocking(false));
            let buffer = rank.upload(&[1; 8]);
            if rank.rank == 0 {
                // The other rank never comes.
                assert_eq!(all_reduce(&rank, rank.at(&buffer)), 7);
                assert_eq!(rank.async_error(), 7);
            }
            called.wait();
            ok(ncclCommAbort(rank.comm));
            rank.wait();
            assert_eq!(rank.download(&buffer), [1; 8]);
        });
        assert_eq!(simgpu::nccl::counts().threads, 0);
    }
    expect_clean();
}

#[test]
fn a_group_that_fails_is_an_error_of_all_its_communicators() {
    let _alone = alone();
    let ids = [new_id(), new_id()];
    on_threads(1, move |rank| {
        let second = Rank::on(1, 0, 1).join_later(ids[1], blocking(false));
        rank.context.bind_to_thread().unwrap();
        let first = rank.join_later(ids[0], blocking(false));
        let buffers = (first.upload(&[1; 8]), second.upload(&[1; 8]));
        ok(ncclGroupStart());
        ok(all_reduce(&first, first.at(&buffers.0)));
        ok(ncclSend(second.at(&buffers.1), 8, U8, 0, second.comm, second.stream()));
        assert_eq!(ncclGroupEnd(), 7, "nothing was looked at yet");
        assert_eq!((first.await_error(), second.await_error()), (5, 5));
        ok(ncclCommAbort(first.comm));
        ok(ncclCommAbort(second.comm));
    });
    expect_clean();
}

#[test]
fn a_launch_that_meets_another_on_its_device_is_reported() {
    let _alone = alone();
    let ids = [new_id(), new_id()];
    on_threads(1, move |rank| {
        let second = Rank::on(0, 0, 1).join_later(ids[1], blocking(false));
        let first = rank.join_later(ids[0], blocking(false));
        let buffers = (first.upload(&[1; 8]), second.upload(&[1; 8]));
        assert_eq!(all_reduce(&first, first.at(&buffers.0)), 7);
        first.complete(7);
        assert_eq!(all_reduce(&second, second.at(&buffers.1)), 7);
        second.complete(7);
        assert_eq!(simgpu::nccl::reports(), [""; 0], "one after the other is fine");
        simgpu::nccl::linger(100_000);
        // One thread makes the calls, and the groups still overlap: a lock that it may hold covers the calls, not the
        // launches.
        assert_eq!(all_reduce(&first, first.at(&buffers.0)), 7);
        assert_eq!(all_reduce(&second, second.at(&buffers.1)), 7);
        first.complete(7);
        second.complete(7);
        ok(ncclCommDestroy(first.comm));
        ok(ncclCommDestroy(second.comm));
    });
    let reports = simgpu::nccl::reports();
    assert!(reports.iter().any(|text| text.starts_with("two threads inside NCCL on device 0")), "{reports:#?}");
    expect_clean();
}
