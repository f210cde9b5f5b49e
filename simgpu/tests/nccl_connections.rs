//! Messages of the simulated NCCL connect their ranks inside the first call, which waits there for the other end.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_common::*;
use simgpu::nccl::Config;

const U8: c_int = 1;

fn send(rank: &Rank, buffer: u64, to: usize) -> c_int {
    ncclSend(buffer, 8, U8, to as c_int, rank.comm, rank.stream())
}

fn receive(rank: &Rank, buffer: u64, from: usize) -> c_int {
    ncclRecv(buffer, 8, U8, from as c_int, rank.comm, rank.stream())
}

fn until_called(function: &str, times: u64) {
    while simgpu::nccl::calls(function) < times {
        std::thread::yield_now();
    }
}

#[test]
fn the_first_message_of_each_direction_waits_for_its_other_end() {
    let _alone = alone();
    let (sent, has_sent) = (Barrier::new(2), AtomicBool::new(false));
    in_ranks(2, move |rank| {
        let buffer = rank.upload(&[rank.rank as u8; 8]);
        let at = rank.at(&buffer);
        if rank.rank == 0 {
            ok(send(rank, at, 1));
            has_sent.store(true, Ordering::SeqCst);
            // The connection exists: the peer has not called the receives yet.
            (0..3).for_each(|_| ok(send(rank, at, 1)));
            sent.wait();
            ok(receive(rank, at, 1));
        } else {
            until_called("ncclSend", 1);
            assert!(!has_sent.load(Ordering::SeqCst));
            ok(receive(rank, at, 0));
            sent.wait();
            (0..3).for_each(|_| ok(receive(rank, at, 0)));
            assert_eq!(rank.download(&buffer), [0; 8]);
            // The other direction is another connection.
            ok(send(rank, at, 0));
        }
    });
    expect_clean();
}

#[test]
fn a_ring_connects_in_one_group_and_a_message_to_oneself_waits_for_nobody() {
    let _alone = alone();
    in_ranks(3, |rank| {
        let (mine, theirs) = (rank.upload(&[rank.rank as u8; 8]), rank.room(8));
        let group = |to: usize, from: usize| {
            ok(ncclGroupStart());
            ok(send(rank, rank.at(&mine), to));
            ok(receive(rank, rank.at(&theirs), from));
            ok(ncclGroupEnd());
            assert_eq!(rank.download(&theirs), [from as u8; 8]);
        };
        group(rank.rank, rank.rank);
        group((rank.rank + 1) % 3, (rank.rank + 2) % 3);
        group((rank.rank + 2) % 3, (rank.rank + 1) % 3);
    });
    expect_clean();
}

#[test]
fn an_abort_frees_whoever_waits_for_the_other_end() {
    let _alone = alone();
    let (id, aborted) = (new_id(), Barrier::new(2));
    on_threads(2, move |rank| {
        let parent = rank.join_later(id, Config { split_share: 1, ..blocking(false) });
        let (mut child, mut config) = (std::ptr::null_mut(), blocking(true));
        ok(ncclCommSplit(parent.comm, 0, 0, &raw mut child, &raw mut config));
        assert_eq!(parent.settle().0, 0);
        if parent.rank == 0 {
            let buffer = parent.upload(&[1; 8]);
            let (comm, stream, at) = (child as usize, parent.stream() as usize, parent.at(&buffer));
            let inside = std::thread::spawn(move || ncclSend(at, 8, U8, 1, comm as Comm, stream as *mut _));
            until_called("ncclSend", 1);
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

#[test]
fn whoever_waits_hears_of_a_death() {
    let _alone = alone();
    let (id, gone) = (new_id(), Barrier::new(2));
    on_threads(2, move |rank| {
        let rank = rank.join(id);
        let buffer = rank.upload(&[1; 8]);
        if rank.rank == 0 {
            assert_eq!(receive(&rank, rank.at(&buffer), 1), 6);
            gone.wait();
        } else {
            until_called("ncclRecv", 1);
            simgpu::nccl::lose(1);
            gone.wait();
        }
        ok(ncclCommAbort(rank.comm));
        rank.wait();
    });
    expect_clean();
}
