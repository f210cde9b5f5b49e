//! Groups of NCCL 2.26.5, which live in the local storage of the threads that began them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;

use nccl_common::*;

const VERSION: i32 = 22605;
const U8: c_int = 1;
const SUM: c_int = 0;

fn all_reduce(rank: &Rank, buffer: u64) -> c_int {
    ncclAllReduce(buffer, buffer, 8, U8, SUM, rank.comm, rank.stream())
}

#[test]
fn a_thread_may_begin_a_group_when_its_last_is_joined() {
    let _alone = alone_with(VERSION);
    let ids = [new_id(), new_id()];
    on_threads(1, move |rank| {
        let second = Rank::on(1, 0, 1).join_later(ids[1], blocking(false));
        rank.context.bind_to_thread().unwrap();
        let first = rank.join_later(ids[0], blocking(false));
        let buffers = (first.upload(&[1; 8]), second.upload(&[1; 8]));
        for _ in 0..3 {
            first.complete(all_reduce(&first, first.at(&buffers.0)));
            second.complete(all_reduce(&second, second.at(&buffers.1)));
        }
        assert_eq!(simgpu::nccl::reports(), [""; 0]);
        assert_eq!(all_reduce(&first, first.at(&buffers.0)), 7);
        assert_eq!(all_reduce(&second, second.at(&buffers.1)), 7);
        let reports = simgpu::nccl::reports();
        assert!(reports.len() == 1 && reports[0].starts_with("a thread began a group before its last one was joined"), "{reports:#?}");
        first.complete(7);
        second.complete(7);
        ok(ncclCommDestroy(first.comm));
        ok(ncclCommDestroy(second.comm));
    });
    expect_clean();
}

#[test]
fn a_thread_may_not_end_before_its_group() {
    let _alone = alone_with(VERSION);
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[1; 8]);
        std::thread::scope(|scope| {
            let (comm, stream, at) = (rank.comm as usize, rank.stream() as usize, rank.at(&buffer));
            let call = move || assert_eq!(ncclAllReduce(at, at, 8, U8, SUM, comm as Comm, stream as *mut _), 7);
            scope.spawn(call).join().unwrap();
        });
        rank.complete(7);
        let reports = simgpu::nccl::reports();
        assert!(reports.len() == 1 && reports[0].starts_with("a thread ended before the group"), "{reports:#?}");
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}
