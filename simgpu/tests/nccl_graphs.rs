//! Launches in streams and in graphs: work that is pending when a call returns, and what the end of a communicator
//! waits for.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "NCCL is C")]

mod nccl_common;

use std::ffi::c_int;
use std::sync::mpsc;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode};
use nccl_common::*;

const U8: c_int = 1;
const SUM: c_int = 0;

fn all_reduce(rank: &Rank, buffer: u64) -> c_int {
    ncclAllReduce(buffer, buffer, 8, U8, SUM, rank.comm, rank.stream())
}

fn begin_capture(rank: &Rank) {
    rank.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
}

/// Captures a graph of one all-reduce.
fn capture(rank: &Rank, buffer: u64) -> CudaGraph {
    begin_capture(rank);
    rank.complete(all_reduce(rank, buffer));
    rank.stream.end_capture(Flags(0)).unwrap().unwrap()
}

type End = fn(Comm) -> c_int;

/// Makes the call on another thread; its result comes through the channel.
fn elsewhere(call: End, rank: &Rank) -> mpsc::Receiver<c_int> {
    let (tell, told) = mpsc::channel();
    let comm = rank.comm as usize;
    std::thread::spawn(move || tell.send(call(comm as Comm)));
    told
}

/// Whether no result comes while other threads get their turns.
fn stays_away(told: &mpsc::Receiver<c_int>) -> bool {
    (0..1000).all(|_| {
        std::thread::yield_now();
        told.try_recv().is_err()
    })
}

/// Waits until a function was called once more.
fn await_call(function: &str, before: u64) {
    while simgpu::nccl::calls(function) == before {
        std::thread::yield_now();
    }
}

#[test]
fn a_collective_is_not_done_when_its_call_returns() {
    let _alone = alone();
    in_ranks(2, |rank| {
        let buffer = rank.upload(&[1; 8]);
        let gate = simgpu::Gate::close(rank.stream());
        ok(all_reduce(rank, rank.at(&buffer)));
        let done = rank.stream.record_event(None).unwrap();
        assert!(!done.is_complete());
        gate.open();
        assert_eq!(rank.download(&buffer), [2; 8]);
    });
    expect_clean();
}

#[test]
fn a_graph_runs_its_collective_as_often_as_it_is_launched() {
    let _alone = alone();
    let id = new_id();
    for blocks in [true, false] {
        let id = if blocks { id } else { new_id() };
        on_threads(2, move |rank| {
            let rank = if blocks { rank.join(id) } else { rank.join_later(id, blocking(false)) };
            let buffer = rank.upload(&[1; 8]);
            let graph = capture(&rank, rank.at(&buffer));
            assert_eq!(rank.download(&buffer), [1; 8], "a captured launch does nothing");
            (0..3).for_each(|_| graph.launch().unwrap());
            assert_eq!(rank.download(&buffer), [8; 8]);
            assert!(simgpu::nccl::counts().captured >= 1);
            drop(graph);
            ok(ncclCommDestroy(rank.comm));
        });
        expect_clean();
    }
}

#[test]
fn ends_wait_until_the_last_graph_is_dropped() {
    let _alone = alone();
    let ends: [(&str, End); 3] =
        [("ncclCommFinalize", ncclCommFinalize), ("ncclCommDestroy", ncclCommDestroy), ("ncclCommAbort", ncclCommAbort)];
    for (name, end) in ends {
        let id = new_id();
        on_threads(1, move |rank| {
            let rank = rank.join(id);
            let buffer = rank.upload(&[1; 8]);
            let graphs = [capture(&rank, rank.at(&buffer)), capture(&rank, rank.at(&buffer))];
            assert_eq!(simgpu::nccl::counts().captured, 2);
            let before = simgpu::nccl::calls(name);
            let ended = elsewhere(end, &rank);
            await_call(name, before);
            let [first, second] = graphs;
            drop(first);
            assert!(stays_away(&ended), "{name} returned while a graph was there");
            second.launch().unwrap();
            rank.wait();
            drop(second);
            ok(ended.recv().unwrap());
            if name == "ncclCommFinalize" {
                ok(ncclCommDestroy(rank.comm));
            }
        });
        expect_clean();
    }
}

#[test]
fn finalizing_stays_in_progress_while_there_are_graphs() {
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join_later(id, blocking(false));
        let buffer = rank.upload(&[1; 8]);
        let graph = capture(&rank, rank.at(&buffer));
        assert_eq!(ncclCommFinalize(rank.comm), 7);
        assert!((0..100).all(|_| rank.async_error() == 7));
        drop(graph);
        rank.complete(7);
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn a_capture_that_failed_holds_nothing() {
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join(id);
        let buffer = rank.upload(&[1; 8]);
        begin_capture(&rank);
        ok(all_reduce(&rank, rank.at(&buffer)));
        rank.stream.synchronize().unwrap_err();
        assert!(rank.stream.end_capture(Flags(0)).is_err());
        ok(ncclCommDestroy(rank.comm));
    });
    expect_clean();
}

#[test]
fn an_abort_waits_for_earlier_work_of_the_stream() {
    let _alone = alone();
    let id = new_id();
    on_threads(1, move |rank| {
        let rank = rank.join(id);
        let buffer = rank.upload(&[1; 8]);
        let gate = simgpu::Gate::close(rank.stream());
        ok(all_reduce(&rank, rank.at(&buffer)));
        let ended = elsewhere(ncclCommAbort, &rank);
        await_call("ncclCommAbort", 0);
        assert!(stays_away(&ended), "the abort returned while the stream had not come to the launch");
        gate.open();
        ok(ended.recv().unwrap());
    });
    expect_clean();
}
