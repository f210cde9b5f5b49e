//! The life of communicators of the simulated NCCL: making, splitting, shrinking, growing, revoking, aborting, ending.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::Barrier;

use nccl_common::*;

const U8: c_int = 1;
const SUM: c_int = 0;

/// Adds up the ranks and checks the sum.
#[track_caller]
fn add_up(rank: &Rank) {
    let buffer = rank.upload(&[1 + rank.rank as u8; 5]);
    rank.complete(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 5, U8, SUM, rank.comm, rank.stream()));
    let sum = rank.size * (rank.size + 1) / 2;
    assert_eq!(rank.download(&buffer), [sum as u8; 5]);
}

#[test]
fn a_communicator_that_is_not_ready_refuses_calls() {
    let _alone = alone();
    simgpu::nccl::in_progress("ncclCommInitRankConfig", 5);
    let id = new_id();
    on_threads(2, move |mut rank| {
        let mut config = blocking(false);
        let code = ncclCommInitRankConfig(&raw mut rank.comm, 2, id, rank.rank as c_int, &raw mut config);
        assert_eq!((code, rank.comm.is_null()), (7, false));
        let (buffer, turn) = (rank.room(8), my_turn());
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()), 4);
        assert!(last_error().contains("before the previous operation returned"), "{}", last_error());
        assert_eq!(ncclCommCount(rank.comm, &mut 0), 4);
        assert_eq!(ncclCommDestroy(rank.comm), 4);
        ok(ncclGroupEnd());
        drop(turn);
        let (error, polls) = rank.settle();
        assert!(error == 0 && polls > 5, "{error} after {polls}");
        add_up(&rank);
        assert_eq!(ncclCommFinalize(rank.comm), 7);
        assert_eq!(rank.settle().0, 0);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn a_collective_in_progress_is_on_the_stream_only_at_the_last_poll() {
    let _alone = alone();
    simgpu::nccl::in_progress("ncclAllReduce", 3);
    let id = new_id();
    on_threads(2, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[1; 8]);
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()), 7);
        rank.wait();
        assert_eq!(rank.download(&buffer), [1; 8], "nothing happened yet");
        let (error, polls) = rank.settle();
        assert!(error == 0 && polls >= 4, "{error} after {polls}");
        assert_eq!(rank.download(&buffer), [2; 8]);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn splits_order_ranks_by_key_and_leave_some_out() {
    let _alone = alone();
    let id = new_id();
    on_threads(5, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let (color, key) = if rank.rank == 4 { (-1, 0) } else { (rank.rank as c_int % 2, -(rank.rank as c_int)) };
        let mut child = 1 as Comm;
        // As with NCCL, the call itself does not report that it is in progress.
        ok(ncclCommSplit(rank.comm, color, key, &raw mut child, null_mut()));
        assert!(child.is_null());
        assert_eq!(rank.async_error(), 7);
        assert_eq!(rank.settle().0, 0);
        if rank.rank == 4 {
            assert!(child.is_null());
        } else {
            let half = seen_from(&rank, child);
            assert_eq!((half.rank, half.size), (1 - rank.rank / 2, 2));
            add_up(&half);
            add_up(&half);
            ok(ncclCommDestroy(child));
        }
        add_up(&rank);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn survivors_shrink_around_a_rank_that_hangs() {
    let _alone = alone();
    simgpu::nccl::hang(3, 1);
    let (id, shrunk) = (new_id(), Barrier::new(4));
    on_threads(4, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        add_up(&rank);
        let buffer = rank.upload(&[7; 8]);
        rank.complete(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()));
        if rank.rank == 3 {
            shrunk.wait();
            return ok(ncclCommAbort(rank.comm));
        }
        let (mut child, mut excluded) = (null_mut(), [3]);
        ok(ncclCommShrink(rank.comm, excluded.as_mut_ptr(), 1, &raw mut child, null_mut(), 1));
        assert_eq!(rank.settle().0, 0);
        add_up(&seen_from(&rank, child));
        ok(ncclCommDestroy(child));
        shrunk.wait();
        ok(ncclCommAbort(rank.comm));
    });
    expect_clean();
}

#[test]
fn what_the_loss_of_a_rank_has_broken_can_only_be_aborted() {
    let _alone = alone();
    let (id, added) = (new_id(), Barrier::new(3));
    on_threads(3, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        add_up(&rank);
        added.wait();
        if rank.rank == 2 {
            assert_eq!(simgpu::nccl::lose(2), 1);
        }
        assert_eq!(rank.await_error(), 6);
        let (mut child, mut excluded) = (null_mut(), [(rank.rank as c_int + 1) % 3]);
        for flags in [0, 1] {
            assert_eq!(ncclCommShrink(rank.comm, excluded.as_mut_ptr(), 1, &raw mut child, null_mut(), flags), 6);
        }
        ok(ncclCommAbort(rank.comm));
    });
    expect_clean();
}

#[test]
fn aborting_in_order_to_shrink_waits_for_earlier_work_of_the_stream() {
    let _alone = alone();
    let id = new_id();
    on_threads(2, move |rank| {
        let rank = rank.join(id);
        if rank.rank == 1 {
            return ok(ncclCommAbort(rank.comm));
        }
        let buffer = rank.upload(&[1; 5]);
        let gate = simgpu::Gate::close(rank.stream());
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 5, U8, SUM, rank.comm, rank.stream()));
        let comm = rank.comm as usize;
        let shrinking = std::thread::spawn(move || {
            let mut child = null_mut();
            let code = ncclCommShrink(comm as Comm, [1].as_mut_ptr(), 1, &raw mut child, null_mut(), 1);
            (code, child as usize)
        });
        while simgpu::nccl::calls("ncclCommShrink") == 0 {
            std::thread::yield_now();
        }
        assert!((0..1000).all(|_| {
            std::thread::yield_now();
            !shrinking.is_finished()
        }));
        gate.open();
        let (code, child) = shrinking.join().unwrap();
        ok(code);
        add_up(&seen_from(&rank, child as Comm));
        ok(ncclCommDestroy(child as Comm));
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 5, U8, SUM, rank.comm, rank.stream()), 5);
        ok(ncclCommAbort(rank.comm));
    });
    assert_eq!(simgpu::nccl::reports(), ["ncclAllReduce on a communicator that was shrunk with NCCL_SHRINK_ABORT"]);
    expect_clean();
}

#[test]
fn a_group_in_flight_ends_when_its_communicator_is_revoked() {
    let _alone = alone();
    simgpu::nccl::in_progress("ncclAllReduce", u32::MAX);
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[1; 8]);
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()), 7);
        assert_eq!(ncclCommRevoke(rank.comm, 0), 7);
        assert_eq!(rank.settle().0, 0);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn a_communicator_is_finalized_once() {
    let _alone = alone();
    let ids = [new_id(), new_id()];
    on_threads(1, move |rank| {
        let later = Rank::on(1, 0, 1).join_later(ids[1], blocking(false));
        rank.context.bind_to_thread().unwrap();
        let rank = rank.join(ids[0]);
        ok(ncclCommFinalize(rank.comm));
        assert_eq!(ncclCommFinalize(rank.comm), 4);
        ok(ncclCommDestroy(rank.comm));
        later.complete(ncclCommFinalize(later.comm));
        assert_eq!(ncclCommFinalize(later.comm), 4);
        assert_eq!(later.async_error(), 4, "what does not block is over");
        ok(ncclCommAbort(later.comm));
    });
    expect_clean();
}

#[test]
fn a_window_of_memory_without_a_handle_ends_the_communicator() {
    let _alone = alone();
    for there in [true, false] {
        simgpu::nccl::symmetric_memory(there);
        let id = new_id();
        on_threads(2, move |rank| {
            let rank = rank.join_later(id, blocking(false));
            let (plain, mut window) = (rank.room(8192), null_mut());
            let aligned = (rank.at(&plain) as usize).next_multiple_of(4096) as *mut _;
            ok(ncclCommWindowRegister(rank.comm, null_mut(), 64, &raw mut window, 1));
            assert!(window.is_null(), "nothing to register");
            ok(ncclCommWindowRegister(rank.comm, aligned, 64, &raw mut window, 1));
            assert_eq!(rank.settle().0, if there { 1 } else { 0 });
            assert_eq!(window.is_null(), there);
            ok(ncclCommAbort(rank.comm));
        });
    }
    expect_clean();
}

#[test]
fn shrinking_takes_healthy_communicators_too() {
    let _alone = alone();
    in_ranks(3, |rank| {
        if rank.rank > 0 {
            let (mut child, mut excluded) = (null_mut(), [0]);
            ok(ncclCommShrink(rank.comm, excluded.as_mut_ptr(), 1, &raw mut child, null_mut(), 0));
            add_up(&seen_from(rank, child));
            ok(ncclCommDestroy(child));
            excluded = [rank.rank as c_int];
            assert_eq!(ncclCommShrink(rank.comm, excluded.as_mut_ptr(), 1, &raw mut child, null_mut(), 0), 4);
            assert_eq!(ncclCommShrink(rank.comm, [9].as_mut_ptr(), 1, &raw mut child, null_mut(), 0), 4);
        }
        add_up(rank);
    });
    expect_clean();
}

#[test]
fn a_communicator_grows_by_ranks_that_were_not_there() {
    let _alone = alone();
    let (id, (tell, told)) = (new_id(), std::sync::mpsc::channel());
    let told = std::sync::Mutex::new(told);
    on_threads(4, move |rank| {
        let mut grown = null_mut();
        let mut config = blocking(true);
        if rank.rank >= 2 {
            let new: Id = told.lock().unwrap().recv().unwrap();
            ok(ncclCommGrow(null_mut(), 4, &raw const new, rank.rank as c_int, &raw mut grown, &raw mut config));
        } else {
            let small = Rank { size: 2, ..rank };
            let small = small.join(id);
            let mut new = Id([0; 128]);
            if small.rank == 1 {
                ok(ncclCommGetUniqueId(small.comm, &raw mut new));
                assert_eq!(ncclCommGetUniqueId(small.comm, &raw mut new), 5, "one at a time");
                (0..2).for_each(|_| tell.send(new).unwrap());
            }
            let id = if small.rank == 1 { &raw const new } else { null() };
            assert_eq!(ncclCommGrow(small.comm, 2, id, -1, &raw mut grown, null_mut()), 4);
            ok(ncclCommGrow(small.comm, 4, id, -1, &raw mut grown, null_mut()));
            ok(ncclCommDestroy(small.comm));
            let all = seen_from(&small, grown);
            assert_eq!(all.rank, small.rank);
            add_up(&all);
            return ok(ncclCommDestroy(grown));
        }
        add_up(&seen_from(&rank, grown));
        ok(ncclCommDestroy(grown));
    });
    expect_clean();
}

#[test]
fn an_abort_frees_streams_that_wait_for_a_rank_that_hangs() {
    let _alone = alone();
    simgpu::nccl::hang(1, 1);
    let id = new_id();
    on_threads(3, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        add_up(&rank);
        let buffer = rank.upload(&[9; 64]);
        rank.complete(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 64, U8, SUM, rank.comm, rank.stream()));
        let done = rank.stream.record_event(None).unwrap();
        assert!(!done.is_complete());
        assert_eq!(rank.async_error(), 0, "NCCL has no watchdog");
        let comm = rank.comm as usize;
        std::thread::spawn(move || ok(ncclCommAbort(comm as Comm))).join().unwrap();
        rank.wait();
        assert_eq!(rank.download(&buffer), [9; 64]);
        assert_eq!(ncclCommCount(rank.comm, &mut 0), 4);
    });
    assert_eq!(simgpu::nccl::reports(), ["ncclCommCount called with a communicator that was aborted"]);
    expect_clean();
}

#[test]
fn an_abort_ends_a_communicator_that_never_became_one() {
    let _alone = alone();
    let mut rank = Rank::on(0, 0, 2);
    let mut config = blocking(false);
    assert_eq!(ncclCommInitRankConfig(&raw mut rank.comm, 2, new_id(), 0, &raw mut config), 7);
    assert_eq!(rank.async_error(), 7);
    ok(ncclCommAbort(rank.comm));
    ok(ncclCommAbort(null_mut()));
    ok(ncclCommDestroy(null_mut()));
    expect_clean();
}

#[test]
fn a_revoked_communicator_can_be_split_and_destroyed_but_not_used() {
    let _alone = alone();
    simgpu::nccl::hang(0, 0);
    simgpu::nccl::in_progress("ncclCommRevoke", 1);
    let id = new_id();
    on_threads(2, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[3; 8]);
        rank.complete(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()));
        assert_eq!(ncclCommRevoke(rank.comm, 1), 4);
        assert_eq!(ncclCommRevoke(rank.comm, 0), 7);
        rank.wait();
        assert_eq!(rank.download(&buffer), [3; 8]);
        assert_eq!(rank.settle().0, 0);
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()), 5);
        let mut child = null_mut();
        ok(ncclCommSplit(rank.comm, 0, 0, &raw mut child, null_mut()));
        assert_eq!(rank.settle().0, 0);
        ok(ncclCommDestroy(child));
        if rank.rank == 0 {
            return ok(ncclCommDestroy(rank.comm));
        }
        assert_eq!(ncclCommFinalize(rank.comm), 4);
        assert_eq!(rank.async_error(), 4, "nor finalized, which is its end");
        ok(ncclCommAbort(rank.comm));
    });
    expect_clean();
}

#[test]
fn dead_handles_are_reported_and_do_no_harm() {
    let _alone = alone();
    let dead = in_ranks(1, |rank| rank.comm as usize)[0] as Comm;
    assert_eq!(ncclCommDestroy(dead), 4);
    assert_eq!(ncclCommAbort(dead), 4);
    assert_eq!(ncclCommGetAsyncError(dead, &mut 0), 4);
    assert_eq!(ncclCommCount(0x1234_5670 as Comm, &mut 0), 4);
    assert_eq!(ncclCommCount(null_mut(), &mut 0), 4);
    let reports = simgpu::nccl::reports();
    assert_eq!(reports.len(), 4, "{reports:#?}");
    assert_eq!(reports[0], "ncclCommDestroy called with a communicator that was destroyed");
    assert_eq!(reports[3], "ncclCommCount called with a communicator that never was");
    expect_clean();
}

#[test]
fn what_is_not_given_back_is_counted() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let (mut memory, mut handle, mut window, mut pointer, mut op) = (null_mut(), null_mut(), null_mut(), null_mut(), -1);
        ok(ncclMemAlloc(&raw mut memory, 5000));
        ok(ncclCommRegister(rank.comm, memory, 5000, &raw mut handle));
        ok(ncclCommWindowRegister(rank.comm, memory, 5000, &raw mut window, 1));
        ok(ncclWinGetUserPtr(rank.comm, window, &raw mut pointer));
        assert_eq!(pointer, memory);
        ok(ncclRedOpCreatePreMulSum(&raw mut op, [2u8].as_mut_ptr().cast(), U8, 1, rank.comm));
        let counts = simgpu::nccl::counts();
        assert!(counts.communicators >= 1 && counts.registrations >= 1 && counts.windows >= 1 && counts.operators >= 1, "{counts:?}");
        let plain = rank.room(8192);
        let aligned = (rank.at(&plain) as usize).next_multiple_of(4096) as *mut _;
        assert_eq!(ncclCommWindowRegister(rank.comm, aligned, 64, &raw mut window, 1), 1, "not memory of ncclMemAlloc");
        ok(ncclCommDeregister(rank.comm, handle));
        assert_eq!(ncclCommDeregister(rank.comm, handle), 4);
        assert_eq!(ncclMemFree(0x1000 as *mut _), 4);
        ok(ncclMemFree(memory));
    });
    expect_clean();
}

#[test]
fn configurations_are_read_and_refused_as_nccl_does() {
    let _alone = alone();
    let rank = Rank::on(0, 0, 1);
    let mut comm = null_mut();
    let mut init = |mut config: simgpu::nccl::Config| (ncclCommInitRankConfig(&raw mut comm, 1, new_id(), 0, &raw mut config), comm);
    let (code, comm) = init(simgpu::nccl::Config { max_ctas: 8, blocking: 1, version: 21700, max_p2p_peers: 3, ..unset() });
    ok(code);
    let seen = simgpu::nccl::config(comm).unwrap();
    assert_eq!((seen.max_ctas, seen.max_p2p_peers), (8, c_int::MIN));
    ok(ncclCommDestroy(comm));
    assert_eq!(init(simgpu::nccl::Config { magic: 0, ..unset() }), (4, null_mut()));
    assert_eq!(init(simgpu::nccl::Config { blocking: 3, ..unset() }).0, 4);
    assert_eq!(init(simgpu::nccl::Config { min_ctas: 1, ..unset() }).0, 4, "not without a maximum");
    let mut lone = null_mut();
    assert_eq!(ncclCommInitRank(&raw mut lone, 2, new_id(), 2), 4);
    assert_eq!(ncclCommInitRank(&raw mut lone, 1, Id([0; 128]), 0), 4);
    assert!(lone.is_null());
    drop(rank);
    expect_clean();
}

#[test]
fn a_suspended_communicator_waits_for_its_resumption() {
    let _alone = alone();
    in_ranks(2, |rank| {
        ok(ncclCommSuspend(rank.comm, 1));
        let buffer = rank.room(8);
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()), 5);
        ok(ncclCommResume(rank.comm));
        add_up(rank);
    });
    expect_clean();
}

#[test]
fn several_ids_make_one_communicator() {
    let _alone = alone();
    let ids = [new_id(), new_id()];
    on_threads(3, move |mut rank| {
        let (mut ids, mut config) = (ids, blocking(true));
        assert_eq!(ncclCommInitRankScalable(&raw mut rank.comm, 3, rank.rank as c_int, 4, ids.as_mut_ptr(), &raw mut config), 4);
        ok(ncclCommInitRankScalable(&raw mut rank.comm, 3, rank.rank as c_int, 2, ids.as_mut_ptr(), &raw mut config));
        add_up(&rank);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

/// The first fields of the structures that calls and groups take.
#[repr(C)]
struct Head {
    size: usize,
    magic: u32,
    version: u32,
    time: f32,
    rest: [u64; 6],
}

#[test]
fn calls_take_configurations_and_groups_tell_how_long_they_would_take() {
    type Config = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, *mut std::ffi::c_void, *const Head) -> c_int;
    type Simulate = unsafe extern "C" fn(*mut Head) -> c_int;
    let _alone = alone();
    let (with_config, simulate): (Config, Simulate) = (find("ncclAllReduceConfig").unwrap(), find("ncclGroupSimulateEnd").unwrap());
    in_ranks(2, move |rank| {
        let buffer = rank.upload(&[4; 16]);
        let head = |magic| Head { size: 72, magic, version: 23203, time: 0.0, rest: [0; 6] };
        let (at, stream) = (rank.at(&buffer), rank.stream());
        // SAFETY: the structure is as long as it states.
        let call = |head: &Head| unsafe { with_config(at, at, 16, U8, SUM, rank.comm, stream, head) };
        assert_eq!(call(&head(1)), 4);
        ok(call(&head(0xcafe_beef)));
        assert_eq!(rank.download(&buffer), [8; 16]);
        ok(ncclGroupStart());
        ok(call(&head(0xcafe_beef)));
        let mut info = Head { size: 24, ..head(0x7468_5283) };
        // SAFETY: as above.
        ok(unsafe { simulate(&raw mut info) });
        assert!(info.time > 0.0);
        assert_eq!(rank.download(&buffer), [8; 16], "nothing was launched");
        ok(ncclGroupStart());
        // SAFETY: as above.
        ok(unsafe { simulate(&raw mut info) });
        assert_eq!(info.time, -1.0);
    });
    expect_clean();
}
