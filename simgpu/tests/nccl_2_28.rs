//! Behaviour of NCCL 2.28.9 that later releases do not have.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use nccl_common::*;

#[test]
fn revoking_with_a_group_in_flight_is_reported() {
    let _alone = alone_with(22809);
    simgpu::nccl::in_progress("ncclAllReduce", u32::MAX);
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[1; 8]);
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, 1, 0, rank.comm, rank.stream()), 7);
        assert_eq!(ncclCommRevoke(rank.comm, 0), 7);
        assert_eq!(rank.settle().0, 0);
        ok(ncclCommDestroy(rank.comm));
    });
    let reports = simgpu::nccl::reports();
    assert!(reports.len() == 1 && reports[0].starts_with("ncclCommRevoke while a group"), "{reports:#?}");
    expect_clean();
}
