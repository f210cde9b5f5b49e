//! Communicators made from others: whose configuration they use, and whose abort flags they hold.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Barrier;

use nccl_common::*;
use simgpu::nccl::Config;

const U8: c_int = 1;
const SUM: c_int = 0;

/// Returns the configuration of a parent that does not block, with or without sharing.
fn control(share: bool) -> Config {
    Config { split_share: share.into(), shrink_share: share.into(), ..blocking(false) }
}

/// Makes a blocking child of a non-blocking communicator.
fn split(parent: &Rank) -> Rank {
    let (mut child, mut config) = (null_mut(), blocking(true));
    ok(ncclCommSplit(parent.comm, 0, parent.rank as c_int, &raw mut child, &raw mut config));
    assert_eq!(parent.async_error(), 7, "the split is the parent's");
    assert_eq!(parent.settle().0, 0);
    seen_from(parent, child)
}

fn all_reduce(rank: &Rank, buffer: u64) -> c_int {
    ncclAllReduce(buffer, buffer, 8, U8, SUM, rank.comm, rank.stream())
}

/// Aborts from another thread, as a watchdog would.
fn abort(rank: &Rank) {
    let comm = rank.comm as usize;
    std::thread::spawn(move || ok(ncclCommAbort(comm as Comm))).join().unwrap();
}

#[test]
fn a_blocking_child_of_a_parent_that_does_not_block_blocks() {
    let _alone = alone();
    simgpu::nccl::in_progress("ncclAllReduce", 5);
    let id = new_id();
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, control(true));
        let child = split(&parent);
        let buffer = child.upload(&[1; 8]);
        ok(all_reduce(&child, child.at(&buffer)));
        assert_eq!(child.download(&buffer), [2; 8], "it is on the stream when the call returns");
        ok(ncclCommFinalize(child.comm));
        ok(ncclCommDestroy(child.comm));
        assert_eq!(ncclCommFinalize(parent.comm), 7);
        assert_eq!(parent.settle().0, 0);
        ok(ncclCommDestroy(parent.comm));
    });
    expect_clean();
}

#[test]
fn an_abort_of_a_parent_that_shares_frees_the_streams_of_its_child() {
    let _alone = alone();
    simgpu::nccl::hang(1, 1);
    let id = new_id();
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, control(true));
        let child = split(&parent);
        let buffer = child.upload(&[1; 8]);
        ok(all_reduce(&child, child.at(&buffer)));
        assert_eq!(child.download(&buffer), [2; 8]);
        ok(all_reduce(&child, child.at(&buffer)));
        let done = child.stream.record_event(None).unwrap();
        assert!(!done.is_complete());
        abort(&parent);
        child.wait();
        assert_eq!(child.download(&buffer), [2; 8]);
        assert_eq!(child.async_error(), 0, "the child does not say that it is over");
        ok(all_reduce(&child, child.at(&buffer)));
        assert_eq!(child.download(&buffer), [2; 8], "kernels end at once under raised flags");
        if child.rank == 0 { ok(ncclCommAbort(child.comm)) } else { ok(ncclCommDestroy(child.comm)) }
    });
    expect_clean();
}

#[test]
fn an_abort_of_a_parent_that_shares_ends_a_call_inside_its_child() {
    let _alone = alone();
    let (id, aborted) = (new_id(), Barrier::new(2));
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, control(true));
        let child = split(&parent);
        simgpu::nccl::connect_lazily();
        if child.rank == 0 {
            let buffer = child.upload(&[1; 8]);
            std::thread::scope(|scope| {
                let (comm, stream, at) = (child.comm as usize, child.stream() as usize, child.at(&buffer));
                let inside = scope.spawn(move || ncclAllReduce(at, at, 8, U8, SUM, comm as Comm, stream as *mut _));
                while simgpu::nccl::calls("ncclAllReduce") == 0 {
                    std::thread::yield_now();
                }
                abort(&parent);
                assert_eq!(inside.join().unwrap(), 3);
            });
            aborted.wait();
            assert_eq!((child.async_error(), child.download(&buffer)), (0, vec![1; 8]));
        } else {
            aborted.wait();
            abort(&parent);
        }
        ok(ncclCommAbort(child.comm));
    });
    expect_clean();
}

#[test]
fn a_child_with_flags_of_its_own_outlives_an_abort_of_its_parent() {
    let _alone = alone();
    let id = new_id();
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, control(false));
        let child = split(&parent);
        abort(&parent);
        let buffer = child.upload(&[1; 8]);
        ok(all_reduce(&child, child.at(&buffer)));
        assert_eq!(child.download(&buffer), [2; 8]);
        ok(ncclCommDestroy(child.comm));
    });
    expect_clean();
}

#[test]
fn an_abort_ends_the_split_that_it_interrupts() {
    let _alone = alone();
    for share in [false, true] {
        let id = new_id();
        on_threads(2, move |rank| {
            let parent = rank.join_later(id, control(share));
            let (mut child, mut config) = (null_mut(), blocking(true));
            if parent.rank == 0 {
                // The other rank never comes.
                ok(ncclCommSplit(parent.comm, 0, 0, &raw mut child, &raw mut config));
                assert_eq!(parent.async_error(), 7);
            }
            abort(&parent);
            if parent.rank == 0 {
                assert!(!child.is_null(), "the handle is there, of what was never made");
                ok(ncclCommAbort(child));
            }
        });
    }
    expect_clean();
}

#[test]
fn an_abort_of_a_parent_that_shares_waits_for_earlier_work_of_its_childs_stream() {
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| {
        let parent = rank.join_later(id, control(true));
        let child = split(&parent);
        let buffer = child.upload(&[1; 8]);
        let gate = simgpu::Gate::close(child.stream());
        ok(all_reduce(&child, child.at(&buffer)));
        let comm = parent.comm as usize;
        let aborting = std::thread::spawn(move || ok(ncclCommAbort(comm as Comm)));
        while simgpu::nccl::calls("ncclCommAbort") == 0 {
            std::thread::yield_now();
        }
        assert!((0..1000).all(|_| {
            std::thread::yield_now();
            !aborting.is_finished()
        }));
        gate.open();
        aborting.join().unwrap();
        ok(ncclCommAbort(child.comm));
    });
    expect_clean();
}

#[test]
fn shrinking_shares_flags_unless_it_aborts() {
    let _alone = alone();
    for (flags, shared) in [(0, true), (1, false)] {
        let id = new_id();
        on_threads(3, move |rank| {
            let parent = rank.join_later(id, control(true));
            if parent.rank > 0 {
                let (mut child, mut config) = (null_mut(), blocking(true));
                ok(ncclCommShrink(parent.comm, [0].as_mut_ptr(), 1, &raw mut child, &raw mut config, flags));
                assert_eq!(parent.settle().0, 0);
                let child = seen_from(&parent, child);
                abort(&parent);
                let buffer = child.upload(&[1; 8]);
                ok(all_reduce(&child, child.at(&buffer)));
                assert_eq!(child.download(&buffer), [if shared { 1 } else { 2 }; 8]);
                return ok(ncclCommAbort(child.comm));
            }
            abort(&parent);
        });
    }
    expect_clean();
}

#[test]
fn an_abort_of_a_child_that_shares_reaches_its_parent_and_its_siblings() {
    let _alone = alone();
    let id = new_id();
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, control(true));
        let (first, second) = (split(&parent), split(&parent));
        abort(&first);
        let buffer = second.upload(&[1; 8]);
        ok(all_reduce(&second, second.at(&buffer)));
        assert_eq!(second.download(&buffer), [1; 8]);
        ok(ncclCommAbort(second.comm));
        ok(ncclCommAbort(parent.comm));
    });
    expect_clean();
}
