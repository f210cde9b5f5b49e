//! Groups of NCCL 2.22.3, which starts threads only for groups that make, end and connect communicators.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Barrier;

use nccl_common::*;
use simgpu::nccl::Config;

const VERSION: i32 = 22203;
const U8: c_int = 1;
const SUM: c_int = 0;

#[test]
fn collectives_of_a_communicator_that_does_not_block_start_no_thread() {
    let _alone = alone_with(VERSION);
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let before = simgpu::nccl::threads_started();
        let buffer = rank.upload(&[1; 8]);
        for _ in 0..20 {
            ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()));
        }
        assert_eq!(simgpu::nccl::threads_started(), before);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn the_first_message_to_a_peer_starts_a_thread() {
    let _alone = alone_with(VERSION);
    let id = new_id();
    let before = simgpu::nccl::threads_started();
    on_threads(2, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[rank.rank as u8; 8]);
        for first in [true, false] {
            let code = match rank.rank {
                0 => ncclSend(rank.at(&buffer), 8, U8, 1, rank.comm, rank.stream()),
                _ => ncclRecv(rank.at(&buffer), 8, U8, 0, rank.comm, rank.stream()),
            };
            assert_eq!(code, if first { 7 } else { 0 });
            rank.complete(code);
        }
        assert_eq!(rank.download(&buffer), [0; 8]);
        ok(ncclCommDestroy(rank.comm));
    });
    assert_eq!(simgpu::nccl::threads_started(), before + 4, "one to join and one to connect, for each rank");
    expect_clean();
}

#[test]
fn the_first_collective_connects_inside_the_call() {
    let _alone = alone_with(VERSION);
    simgpu::nccl::connect_lazily();
    let (id, aborted) = (new_id(), Barrier::new(2));
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, Config { split_share: 1, ..blocking(false) });
        let mut child = null_mut();
        ok(ncclCommSplit(parent.comm, 0, 0, &raw mut child, null_mut()));
        assert_eq!(parent.settle().0, 0);
        if parent.rank == 0 {
            // The other rank never comes: the call returns only when it is aborted, whatever the configuration.
            let buffer = parent.upload(&[1; 8]);
            let (comm, stream, at) = (child as usize, parent.stream() as usize, parent.at(&buffer));
            let call = move || ncclAllReduce(at, at, 8, U8, SUM, comm as Comm, stream as *mut _);
            let inside = std::thread::spawn(call);
            while simgpu::nccl::calls("ncclAllReduce") == 0 {
                std::thread::yield_now();
            }
            ok(ncclCommAbort(parent.comm));
            assert_eq!(inside.join().unwrap(), 3);
            aborted.wait();
        } else {
            aborted.wait();
            ok(ncclCommAbort(parent.comm));
        }
        ok(ncclCommAbort(child));
    });
    expect_clean();
}
