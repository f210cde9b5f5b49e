//! Variables that override a program's settings. NCCL reads each once, so every test starts itself again with its own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::process::Command;
use std::ptr::null_mut;

use nccl_common::*;
use simgpu::nccl::Config;

const U8: c_int = 1;
const SUM: c_int = 0;

/// Returns whether this is the process that has the variable set. If not, starts that process, and waits for its
/// success.
fn with(test: &str, variable: &str, value: &str) -> bool {
    if std::env::var_os("STARTED").is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ended = command.args([test, "--exact", "--nocapture"]).env("STARTED", "1").env(variable, value).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    false
}

#[test]
fn all_communicators_can_be_made_to_block() {
    if !with("all_communicators_can_be_made_to_block", "NCCL_COMM_BLOCKING", "1") {
        return;
    }
    let _alone = alone();
    let id = new_id();
    let before = simgpu::nccl::threads_started();
    on_threads(1, move |mut rank| {
        let mut config = blocking(false);
        ok(ncclCommInitRankConfig(&raw mut rank.comm, 1, id, 0, &raw mut config));
        let buffer = rank.upload(&[1; 8]);
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()));
        ok(ncclCommFinalize(rank.comm));
        ok(ncclCommDestroy(rank.comm));
    });
    assert_eq!(simgpu::nccl::threads_started(), before);
    expect_clean();
}

#[test]
fn sharing_can_be_forbidden() {
    if !with("sharing_can_be_forbidden", "NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") {
        return;
    }
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| {
        let parent = rank.join_later(id, Config { split_share: 1, ..blocking(false) });
        let (mut child, mut config) = (null_mut(), blocking(true));
        ok(ncclCommSplit(parent.comm, 0, 0, &raw mut child, &raw mut config));
        assert_eq!(parent.settle().0, 0);
        let child = seen_from(&parent, child);
        ok(ncclCommAbort(parent.comm));
        let (buffer, into) = (child.upload(&[1; 8]), child.room(8));
        ok(ncclAllReduce(child.at(&buffer), child.at(&into), 8, U8, SUM, child.comm, child.stream()));
        assert_eq!(child.download(&into), [1; 8], "the child has flags of its own");
        ok(ncclCommDestroy(child.comm));
    });
    expect_clean();
}

#[test]
fn calls_can_be_made_to_look_at_their_buffers() {
    if !with("calls_can_be_made_to_look_at_their_buffers", "NCCL_CHECK_POINTERS", "1") {
        return;
    }
    let _alone = alone();
    in_ranks(1, |rank| {
        let call = |pointer| ncclAllReduce(pointer, pointer, 64, U8, SUM, rank.comm, rank.stream());
        assert_eq!(call(0), 4);
        assert!(last_error().contains("sendbuff 0x0 is not a valid pointer"), "{}", last_error());
        let short = rank.room(63);
        assert_eq!(call(rank.at(&short)), 4);
    });
    expect_clean();
}
