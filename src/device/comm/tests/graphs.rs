//! Graphs that hold calls are counted, and their launches are watched.

use std::sync::atomic::Ordering;
use std::time::Instant;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
use simgpu::nccl;

use super::*;
use crate::call::Collective;
use crate::device::comm::graph_memory::Page;
use crate::device::comm::live_graphs::LiveGraphs;

const SHORT: Duration = Duration::from_millis(100);

/// Captures the calls that `calls` puts on the rank's stream.
fn captured(rank: &Rank, calls: impl FnOnce()) -> CudaGraph {
    rank.stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    calls();
    rank.stream.end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap().unwrap()
}

/// Returns a vector without events, so that its uses can be captured. One stream at a time uses it.
fn untracked(rank: &Rank, len: usize) -> CudaSlice<f32> {
    // SAFETY: the tests use it on the rank's stream alone and wait for that before they drop it.
    unsafe { rank.gpu.context.disable_event_tracking() };
    rank.vector(len)
}

fn none_are_left(comm: &NcclComm) -> bool {
    comm.inner.live_graphs_within(&Deadline::after(LONG)) == 0
}

#[test]
fn graphs_are_counted_until_they_are_gone() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let mut vector = untracked(&rank, 100);
        rank.all_reduce(&mut vector, LONG).unwrap();
        rank.stream.synchronize().unwrap();
        assert_eq!(rank.comm.inner.live_graphs(), 0);
        let first = captured(&rank, || {
            rank.all_reduce(&mut vector, LONG).unwrap();
            rank.all_reduce(&mut vector, LONG).unwrap();
            assert_eq!(rank.comm.inner.live_graphs(), 1, "from the first call on");
        });
        let second = captured(&rank, || rank.all_reduce(&mut vector, LONG).unwrap());
        let without_calls = captured(&rank, || ());
        assert_eq!(rank.comm.inner.live_graphs(), 2);
        first.launch().unwrap();
        // A launch that is under way keeps what it runs.
        drop(first);
        second.launch().unwrap();
        rank.stream.synchronize().unwrap();
        until_one(&rank.comm);
        let refused = rank.comm.finalize(&Deadline::after(LONG)).unwrap_err();
        assert!(refused.to_string().contains("1 CUDA graphs hold calls of this communicator"), "{refused}");
        assert!(rank.comm.failure().is_none(), "a refusal ends nothing");
        drop((second, without_calls));
        assert!(none_are_left(&rank.comm));
        assert_eq!(read(&rank.stream, &vector), (0..100).map(|index| 8.0 * (2.0 * (index % 97) as f32 + 1.0)).collect::<Vec<_>>());
        rank.comm.finalize(&Deadline::after(LONG)).unwrap();
    });
    sim.finish();
}

#[test]
fn calls_are_captured_even_if_the_driver_refuses_to_mark_them() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let mut vector = untracked(&rank, 100);
        rank.all_reduce(&mut vector, LONG).unwrap();
        rank.stream.synchronize().unwrap();
        simgpu::fail_call_of_this_thread("cuMemsetD32Async", 1, 1);
        let before = simgpu::driver_calls_of_this_thread(|| ()).of("cuMemsetD32Async");
        let mut graph = None;
        let marks = simgpu::driver_calls_of_this_thread(|| {
            graph = Some(captured(&rank, || {
                rank.all_reduce(&mut vector, LONG).unwrap();
                rank.all_reduce(&mut vector, LONG).unwrap();
            }));
        });
        assert_eq!((before, marks.of("cuMemsetD32Async")), (0, 1), "it is asked once");
        assert_eq!(rank.comm.inner.live_graphs(), 1, "the graph still counts");
        graph.as_ref().unwrap().launch().unwrap();
        rank.stream.synchronize().unwrap();
        assert_eq!(read(&rank.stream, &vector), (0..100).map(|index| 4.0 * (2.0 * (index % 97) as f32 + 1.0)).collect::<Vec<_>>());
        drop(graph);
        assert!(none_are_left(&rank.comm));
        rank.comm.finalize(&Deadline::after(LONG)).unwrap();
    });
    sim.finish();
}

#[test]
fn a_communicator_that_is_dropped_before_its_graphs_closes_behind_them() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = untracked(&rank, 10);
        rank.all_reduce(&mut vector, LONG).unwrap();
        let graph = captured(&rank, || rank.all_reduce(&mut vector, LONG).unwrap());
        let inner = Arc::downgrade(&rank.comm.inner);
        let Rank { comm, stream, .. } = rank;
        drop(comm);
        assert_eq!(nccl::calls("ncclCommFinalize"), 0, "NCCL would wait for the graph");
        graph.launch().unwrap();
        assert_eq!(read(&stream, &vector), total(10, &[0]));
        drop(graph);
        wait_until("the communicator is closed", || inner.strong_count() == 0);
        assert_eq!(nccl::calls("ncclCommDestroy"), 2);
    });
    sim.finish();
}

/// Waits until one graph is left.
fn until_one(comm: &NcclComm) {
    wait_until("one graph is left", || comm.inner.live_graphs() == 1);
}

#[test]
fn branches_of_one_graph_are_one_graph_and_outlive_the_communicator() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = untracked(&rank, 10);
        let other = rank.gpu.context.new_stream().unwrap();
        rank.all_reduce(&mut vector, LONG).unwrap();
        rank.stream.synchronize().unwrap();
        let graph = captured(&rank, || {
            rank.all_reduce(&mut vector, LONG).unwrap();
            other.join(&rank.stream).unwrap();
            sum(&rank.comm, &other, &mut vector, LONG).unwrap();
            rank.stream.join(&other).unwrap();
        });
        assert_eq!(rank.comm.inner.live_graphs(), 1);
        graph.launch().unwrap();
        rank.stream.synchronize().unwrap();
        // Dropped and not closed, so it is aborted. The memory that its nodes write to exists as long as they do.
        drop(rank.comm);
        drop(graph);
    });
    sim.finish();
}

#[test]
fn a_launch_that_waits_in_vain_ends_the_communicator() {
    let sim = Sim::new();
    ranks(2, |rank| {
        let mut vector = untracked(&rank, 100);
        rank.all_reduce(&mut vector, LONG).unwrap();
        rank.stream.synchronize().unwrap();
        let call = Call {
            kind: Collective::AllReduce,
            op: 1,
            element: crate::call::element::TypeTag::Scalar(crate::call::element::DType::F32),
            count: 100,
            root: None,
            counts_hash: 0,
            sequence: 7,
        };
        rank.comm.label(&call);
        let graph = captured(&rank, || rank.all_reduce(&mut vector, SHORT).unwrap());
        rank.comm.label(&Call { sequence: 9, ..call });
        graph.launch().unwrap();
        rank.stream.synchronize().unwrap();
        if rank.comm.rank() == 1 {
            leave_late(&rank.comm);
        } else {
            graph.launch().unwrap();
            // Returns because the communicator is aborted.
            let _ = rank.stream.synchronize();
            let failure = rank.comm.failure().unwrap();
            assert!(matches!(&failure, Error::Timeout { elapsed, .. } if (SHORT..LONG).contains(elapsed)), "{failure}");
            let text = failure.to_string();
            assert!(text.contains("a launch of a captured graph, in rank 0 of 2: all_reduce(sum, f32, count 100) number 7"), "{text}");
        }
        drop(graph);
        assert!(none_are_left(&rank.comm));
    });
    sim.finish();
}

#[test]
fn launches_that_follow_each_other_are_not_taken_for_one() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let graphs = LiveGraphs::default();
        let call =
            |seconds| crate::device::comm::live_graphs::CapturedCall { label: [seconds, 0, 0, 0], limit: Duration::from_secs(seconds) };
        let graph = captured(&rank, || {
            for seconds in [5, 6] {
                let open = graphs.begin(&rank.gpu.context, &rank.stream, call(seconds)).unwrap().unwrap();
                open.end(&rank.stream).unwrap();
            }
        });
        let write = |value| {
            graphs.first_word(Some(value));
        };
        let begin = Instant::now();
        let look =
            |seconds| graphs.launched(begin + Duration::from_secs(seconds)).map(|found| (found.label[0], (found.since - begin).as_secs()));
        assert_eq!(look(0), None);
        write(1);
        assert_eq!(look(1), Some((5, 1)));
        assert_eq!(look(3), Some((5, 1)), "nothing was written since");
        write(2);
        assert_eq!(look(4), Some((6, 4)), "the second call has begun");
        write(2);
        assert_eq!(look(9), Some((6, 9)), "the graph was launched again");
        write(0);
        assert_eq!(look(10), None);
        write(2);
        assert_eq!(look(11), Some((6, 11)));
        // A launch writes the same.
        graph.launch().unwrap();
        rank.stream.synchronize().unwrap();
        assert_eq!((graphs.first_word(None), look(12)), (0, None));
    });
    sim.finish();
}

#[test]
fn a_page_gives_each_word_away_once() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let page = Page::new(&rank.gpu.context).unwrap();
        let words: Vec<_> = std::iter::from_fn(|| page.word()).collect();
        assert_eq!(words.len(), crate::base::tuning::device::GRAPH_WORDS);
        words.iter().zip(1..).for_each(|(word, number)| word.value().store(number, Ordering::Release));
        assert!(words.iter().zip(1..).all(|(word, number)| word.value().load(Ordering::Acquire) == number));
        assert_eq!(simgpu::counts().host_allocations, 1);
    });
    sim.finish();
}

#[test]
fn a_graph_that_cannot_be_counted_is_an_error_and_leaves_nothing() {
    let sim = Sim::new();
    for function in ["cuStreamGetCaptureInfo_v2", "cuMemHostAlloc", "cuUserObjectCreate", "cuGraphRetainUserObject", "cuMemsetD32Async"] {
        ranks(1, |rank| {
            let mut vector = untracked(&rank, 10);
            rank.all_reduce(&mut vector, LONG).unwrap();
            rank.stream.synchronize().unwrap();
            let graph = captured(&rank, || {
                simgpu::fail_call_of_this_thread(function, 1, 2);
                let error = rank.all_reduce(&mut vector, LONG).unwrap_err();
                assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{function}: {error}");
            });
            assert!(rank.comm.failure().is_some());
            drop(graph);
            assert!(none_are_left(&rank.comm), "{function}");
        });
        sim.wait_until_none_is_left();
    }
    sim.finish();
}
