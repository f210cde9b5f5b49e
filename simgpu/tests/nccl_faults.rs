//! Misuse that the simulated NCCL detects, and faults that tests can plant.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::ptr::null_mut;

use nccl_common::*;

const U8: c_int = 1;
const F32: c_int = 7;
const SUM: c_int = 0;

/// Runs two ranks whose calls do not match; both get an error, and abort.
fn disagree(call: impl Fn(&Rank, u64) -> c_int + Send + Sync + 'static) -> String {
    let id = new_id();
    on_threads(2, move |rank| {
        let rank = rank.join(id);
        let buffer = rank.room(64);
        ok(call(&rank, rank.at(&buffer)));
        assert_eq!(rank.await_error(), 5);
        ok(ncclCommAbort(rank.comm));
        rank.wait();
        assert_eq!(rank.download(&buffer), [0xee; 64]);
    });
    let reports = simgpu::nccl::reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    expect_clean();
    reports.into_iter().next().unwrap()
}

#[test]
fn ranks_that_disagree_are_told_so() {
    let _alone = alone();
    let text = disagree(|rank, buffer| ncclAllReduce(buffer, buffer, 8 + rank.rank, U8, SUM, rank.comm, rank.stream()));
    assert!(text.contains("AllReduce of 8 U8 by Sum") && text.contains("AllReduce of 9 U8 by Sum"), "{text}");
    let text = disagree(|rank, buffer| ncclAllReduce(buffer, buffer, 8, rank.rank as c_int, SUM, rank.comm, rank.stream()));
    assert!(text.contains("I8") && text.contains("U8"), "{text}");
    let text = disagree(|rank, buffer| ncclAllReduce(buffer, buffer, 8, U8, rank.rank as c_int, rank.comm, rank.stream()));
    assert!(text.contains("Sum") && text.contains("Prod"), "{text}");
    let text = disagree(|rank, buffer| ncclBcast(buffer, 8, U8, rank.rank as c_int, rank.comm, rank.stream()));
    assert!(text.contains("root 0") && text.contains("root 1"), "{text}");
    let text = disagree(|rank, buffer| match rank.rank {
        0 => ncclSend(buffer, 8, U8, 1, rank.comm, rank.stream()),
        _ => ncclRecv(buffer, 9, U8, 0, rank.comm, rank.stream()),
    });
    assert_eq!(text, "rank 0 sends 8 bytes to rank 1, which receives 9");
    let text = disagree(|rank, buffer| match rank.rank {
        0 => ncclAllReduce(buffer, buffer, 8, U8, SUM, rank.comm, rank.stream()),
        _ => ncclAllGather(buffer, buffer + 8, 8, U8, rank.comm, rank.stream()),
    });
    assert!(text.contains("AllReduce") && text.contains("AllGather"), "{text}");
}

#[test]
fn the_call_that_shall_fail_fails() {
    let _alone = alone();
    in_ranks(1, |rank| {
        let buffer = rank.upload(&[1; 4]);
        let call = || ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 4, U8, SUM, rank.comm, rank.stream());
        simgpu::nccl::fail_call("ncclAllReduce", 2, 2);
        simgpu::nccl::fail_call_of_this_thread("ncclAllReduce", 3, 1);
        std::thread::spawn(|| simgpu::nccl::fail_call_of_this_thread("ncclAllReduce", 1, 6)).join().unwrap();
        assert_eq!([call(), call(), call(), call()], [0, 2, 1, 0]);
        assert!(last_error().contains("planted"), "{}", last_error());
    });
    expect_clean();
}

#[test]
fn an_error_inside_a_group_comes_back_at_its_end() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let buffer = rank.upload(&[1; 4]);
        let call = |kind| ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 4, kind, SUM, rank.comm, rank.stream());
        let turn = my_turn();
        ok(ncclGroupStart());
        ok(ncclGroupStart());
        ok(call(U8));
        assert_eq!(call(99), 4);
        ok(ncclGroupEnd());
        ok(call(U8));
        assert_eq!(ncclGroupEnd(), 4);
        assert_eq!(ncclGroupEnd(), 5);
        assert!(last_error().contains("not in a group call"), "{}", last_error());
        drop(turn);
        assert_eq!(rank.download(&buffer), [1; 4], "nothing of the group was done");
        ok(call(U8));
        assert_eq!(rank.download(&buffer), [2; 4]);
    });
    expect_clean();
}

#[test]
fn a_wrong_argument_spoils_a_communicator_only_if_it_does_not_block() {
    let _alone = alone();
    for blocks in [true, false] {
        let id = new_id();
        on_threads(1, move |mut rank| {
            let mut config = blocking(blocks);
            ncclCommInitRankConfig(&raw mut rank.comm, 1, id, 0, &raw mut config);
            rank.settle();
            let buffer = rank.room(4);
            assert_eq!(ncclBroadcast(rank.at(&buffer), rank.at(&buffer), 4, U8, 1, rank.comm, rank.stream()), 4);
            assert!(last_error().contains("invalid root 1"), "{}", last_error());
            assert_eq!(rank.async_error(), if blocks { 0 } else { 4 });
            ok(ncclCommAbort(rank.comm));
        });
    }
    expect_clean();
}

#[test]
fn buffers_that_are_no_memory_of_the_device_are_taken_and_reported() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let (buffer, comm, stream) = (rank.room(64), rank.comm, rank.stream());
        let host = [0u8; 64];
        let call = |pointer: u64, count: usize| ncclAllReduce(pointer, pointer, count, U8, SUM, comm, stream);
        ok(call(0, 64));
        ok(call(host.as_ptr() as u64, 64));
        ok(call(rank.at(&buffer), 65));
        rank.wait();
        assert_eq!(rank.download(&buffer), [0xee; 64]);
        let turn = my_turn();
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), usize::MAX, U8, SUM, comm, stream), 4);
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer) + 3, 32, U8, 7, comm, stream), 4);
        let elsewhere = Rank::on(5, 0, 1);
        let foreign = elsewhere.room(64);
        rank.context.bind_to_thread().unwrap();
        ok(call(elsewhere.at(&foreign), 64));
        assert_eq!(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, comm, elsewhere.stream()), 1);
        drop(turn);
        rank.wait();
        ok(ncclAllReduce(0, 0, 0, U8, SUM, comm, stream));
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer) + 3, 32, U8, SUM, comm, stream));
    });
    let reports = simgpu::nccl::reports();
    for text in [
        "sendbuff 0x0 is not a valid pointer",
        "runs past its allocation, which has 64",
        "sendbuff allocated on device 5 mismatchs",
        "the buffers of rank 1 overlap",
    ] {
        assert!(reports.iter().any(|report| report.contains(text)), "{text} is not in {reports:#?}");
    }
    expect_clean();
}

#[test]
fn sends_to_oneself_need_a_receive() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let buffer = rank.room(8);
        assert_eq!(ncclSend(rank.at(&buffer), 8, U8, rank.rank as c_int, rank.comm, rank.stream()), 5);
        assert_eq!(ncclRecv(rank.at(&buffer), 8, U8, rank.rank as c_int, rank.comm, rank.stream()), 5);
    });
    expect_clean();
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let _alone = alone();
    for (size, expected) in [(3, vec![5, 6, 5]), (4, vec![5; 4])] {
        let id = new_id();
        let codes = on_threads(size, move |rank| {
            let mut rank = Rank::on(rank.rank % 2, rank.rank, size);
            let code = ncclCommInitRank(&raw mut rank.comm, size as c_int, id, rank.rank as c_int);
            assert_eq!(rank.async_error(), 0, "what blocks says it once");
            let _turn = my_turn();
            ok(ncclCommFinalize(rank.comm));
            ok(ncclCommDestroy(rank.comm));
            code
        });
        assert_eq!(codes, expected);
    }
    assert!(last_error().starts_with("Duplicate GPU detected : rank "), "{}", last_error());
    assert_eq!(ncclCommInitAll([null_mut(); 2].as_mut_ptr(), 2, [1, 1].as_ptr()), 5);
    expect_clean();
}

#[test]
fn what_fails_to_become_a_communicator_says_so_again_when_it_is_ended() {
    let _alone = alone();
    let id = new_id();
    on_threads(2, move |rank| {
        let mut rank = Rank::on(0, rank.rank, 2);
        let mut config = blocking(false);
        assert_eq!(ncclCommInitRankConfig(&raw mut rank.comm, 2, id, rank.rank as c_int, &raw mut config), 7);
        assert_eq!(rank.await_error(), 5);
        let _turn = my_turn();
        assert_eq!(ncclCommFinalize(rank.comm), 5);
        assert_eq!(ncclCommDestroy(rank.comm), 5);
        assert_eq!(simgpu::nccl::group_depth(), 1, "it leaves its group open");
        ok(ncclGroupEnd());
        ok(ncclCommAbort(rank.comm));
    });
    expect_clean();
}

#[test]
fn a_destroy_that_fails_lets_later_calls_of_its_thread_wait_for_an_end_of_the_group() {
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join(id);
        assert_eq!(simgpu::nccl::lose(0), 1);
        assert_eq!(ncclCommDestroy(rank.comm), 6);
        assert_eq!(simgpu::nccl::group_depth(), 1);
        ok(ncclGroupEnd());
        ok(ncclCommAbort(rank.comm));
    });
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join(id);
        let (buffer, into) = (rank.upload(&[1; 8]), rank.room(8));
        let mut unready = Rank::on(1, 0, 2);
        let mut config = blocking(false);
        assert_eq!(ncclCommInitRankConfig(&raw mut unready.comm, 2, new_id(), 0, &raw mut config), 7);
        assert_eq!(ncclCommDestroy(unready.comm), 4);
        rank.context.bind_to_thread().unwrap();
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&into), 8, U8, SUM, rank.comm, rank.stream()));
        assert_eq!(rank.download(&into), [0xee; 8], "the call said that it went well, and did nothing");
        ok(ncclGroupEnd());
        assert_eq!(rank.download(&into), [1; 8]);
        ok(ncclCommAbort(unready.comm));
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn a_thread_may_end_after_a_destroy_that_failed_but_not_with_calls_behind_it() {
    let _alone = alone();
    in_ranks(1, |rank| {
        let (buffer, into) = (rank.upload(&[1; 8]), rank.room(8));
        let (comm, stream, from, to) = (rank.comm as usize, rank.stream() as usize, rank.at(&buffer), rank.at(&into));
        for calls in [0, 1] {
            simgpu::nccl::fail_call("ncclCommDestroy", 1, 3);
            let destroy = move || {
                assert_eq!(ncclCommDestroy(comm as Comm), 3);
                (0..calls).for_each(|_| ok(ncclAllReduce(from, to, 8, U8, SUM, comm as Comm, stream as *mut _)));
            };
            std::thread::spawn(destroy).join().unwrap();
            assert_eq!(simgpu::nccl::reports().len(), calls);
        }
        assert_eq!(rank.download(&into), [0xee; 8]);
    });
    expect_clean();
}

#[test]
fn the_text_of_the_last_error_is_never_cleared() {
    let _alone = alone();
    in_ranks(1, |rank| {
        let buffer = rank.upload(&[1; 4]);
        let call = |root| ncclBroadcast(rank.at(&buffer), rank.at(&buffer), 4, U8, root, rank.comm, rank.stream());
        let _turn = my_turn();
        assert_eq!(call(1), 4);
        ok(call(0));
        assert!(last_error().contains("invalid root 1"), "{}", last_error());
    });
    expect_clean();
}

#[test]
fn unique_ids_are_good_for_one_communicator() {
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| ok(ncclCommDestroy(rank.join(id).comm)));
    on_threads(1, move |mut rank| {
        assert_eq!(ncclCommInitRank(&raw mut rank.comm, 1, id, 0), 5);
        ok(ncclCommAbort(rank.comm));
    });
    assert_eq!(simgpu::nccl::reports().len(), 1);
    expect_clean();
}

#[test]
fn two_threads_inside_on_one_device_are_reported() {
    let _alone = alone();
    let (a, b) = (new_id(), new_id());
    let barrier = std::sync::Barrier::new(2);
    on_threads(2, move |rank| {
        let rank = Rank::on(0, 0, 1).join(if rank.rank == 0 { a } else { b });
        let buffer = rank.room(8);
        let call = || ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()));
        if barrier.wait().is_leader() {
            call();
            assert_eq!(simgpu::nccl::reports(), [""; 0], "one after the other is fine");
            simgpu::nccl::linger(200_000);
        }
        barrier.wait();
        call();
        rank.wait();
        barrier.wait();
        ok(ncclCommAbort(rank.comm));
    });
    let reports = simgpu::nccl::reports();
    assert!(reports.iter().any(|text| text.starts_with("two threads inside NCCL on device 0")), "{reports:#?}");
    expect_clean();
}

#[test]
fn a_thread_that_leaves_its_group_open_is_reported() {
    let _alone = alone();
    std::thread::spawn(|| ok(ncclGroupStart())).join().unwrap();
    assert_eq!(simgpu::nccl::reports(), ["a thread ended inside a group: 1 ncclGroupEnd missing"]);
}

#[test]
fn a_rank_that_destroys_too_early_is_reported() {
    let _alone = alone();
    let id = new_id();
    on_threads(2, move |rank| {
        let rank = rank.join(id);
        if rank.rank == 1 {
            return ok(ncclCommDestroy(rank.comm));
        }
        let buffer = rank.room(8);
        ok(ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, U8, SUM, rank.comm, rank.stream()));
        assert_eq!(rank.await_error(), 6);
        assert_eq!(ncclCommDestroy(rank.comm), 6, "an error has to end in an abort");
        ok(ncclGroupEnd());
        ok(ncclCommAbort(rank.comm));
        rank.wait();
    });
    let reports = simgpu::nccl::reports();
    assert!(reports.len() == 1 && reports[0].contains("rank 1 destroyed its communicator"), "{reports:#?}");
    expect_clean();
}

#[test]
fn blocking_and_other_communicators_do_not_mix_in_a_group() {
    let _alone = alone();
    let _rank = Rank::on(0, 0, 1);
    let (mut first, mut second, mut config) = (null_mut(), null_mut(), blocking(false));
    ok(ncclGroupStart());
    ok(ncclCommInitRank(&raw mut first, 1, new_id(), 0));
    assert_eq!(ncclCommInitRankConfig(&raw mut second, 1, new_id(), 0, &raw mut config), 7);
    assert_eq!(ncclGroupEnd(), 4);
    [first, second].into_iter().for_each(|comm| ok(ncclCommAbort(comm)));
    expect_clean();
}

#[test]
fn short_floats_need_a_device_that_knows_them() {
    let _alone = alone();
    in_ranks(1, |rank| {
        let buffer = rank.room(8);
        let call = |op| ncclAllReduce(rank.at(&buffer), rank.at(&buffer), 8, 10, op, rank.comm, rank.stream());
        ok(call(SUM));
        assert_eq!(call(4), 4, "one rank alone cannot average them");
        ok(ncclBcast(rank.at(&buffer), 2, F32, 0, rank.comm, rank.stream()));
    });
    expect_clean();
}

#[test]
fn the_driver_learns_which_buffers_a_collective_uses() {
    let _alone = alone();
    in_ranks(1, |rank| {
        let other = rank.context.new_stream().unwrap();
        let (from, mut into) = (rank.upload(&[1; 64]), rank.room(64));
        rank.wait();
        let call = || ok(ncclAllReduce(rank.at(&from), rank.at(&into), 64, U8, SUM, rank.comm, rank.stream()));
        call();
        other.clone_dtoh(&from).unwrap();
        assert_eq!(simgpu::reports(), [""; 0], "both only read it");
        other.memset_zeros(&mut into).unwrap();
        other.synchronize().unwrap();
        let reports = simgpu::reports();
        assert!(reports.len() == 1 && reports[0].contains("written by"), "{reports:#?}");
        rank.wait();
    });
    expect_clean();
}

#[test]
fn a_group_on_two_streams_is_ordered_with_both() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let other = rank.context.new_stream().unwrap();
        let (first, mut second) = (rank.upload(&[1; 64]), rank.room(64));
        let gate = simgpu::Gate::close(other.cu_stream().cast());
        other.memcpy_htod(&[3u8; 64], &mut second).unwrap();
        ok(ncclGroupStart());
        ok(ncclAllReduce(rank.at(&first), rank.at(&first), 64, U8, SUM, rank.comm, rank.stream()));
        ok(ncclAllReduce(rank.at(&second), rank.at(&second), 64, U8, SUM, rank.comm, other.cu_stream().cast()));
        ok(ncclGroupEnd());
        gate.open();
        let mut found = [0u8; 64];
        other.memcpy_dtoh(&second, &mut found).unwrap();
        other.synchronize().unwrap();
        assert_eq!((rank.download(&first), found), (vec![2; 64], [6; 64]));
    });
    expect_clean();
}
