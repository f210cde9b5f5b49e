//! Capture into graphs, and calls that are not allowed meanwhile.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUresult, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaStream};

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

fn streams(device: usize) -> (Arc<CudaContext>, Arc<CudaStream>, Arc<CudaStream>) {
    let context = CudaContext::new(device).unwrap();
    // SAFETY: the tests order their streams themselves; the events of cudarc would be recorded outside of captures.
    unsafe { context.disable_event_tracking() };
    let (a, b) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    (context, a, b)
}

fn failed<T>(outcome: Result<T, DriverError>) -> Option<CUresult> {
    outcome.err().map(|error| error.0)
}

#[test]
fn copies_fills_and_host_functions_are_replayed() {
    let _alone = simgpu::alone();
    let (context, stream, _) = streams(0);
    let source = stream.clone_htod(&[5u8; 32]).unwrap();
    let mut target = stream.alloc_zeros::<u8>(64).unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    stream.synchronize().unwrap();
    stream.begin_capture(GLOBAL).unwrap();
    assert_eq!(stream.capture_status().unwrap(), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    stream.memset_zeros(&mut target).unwrap();
    stream.memcpy_dtod(&source, &mut target.slice_mut(16..48)).unwrap();
    let counted = calls.clone();
    extern "C" fn count(calls: *mut std::ffi::c_void) {
        // SAFETY: the test keeps the counter until the graph is destroyed.
        unsafe { &*calls.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), count, Arc::as_ptr(&counted).cast_mut().cast()) }.unwrap();
    let graph = stream.end_capture(Flags(0)).unwrap().unwrap();
    assert_eq!((calls.load(Ordering::Relaxed), simgpu::counts().graphs), (0, 2));
    let expected: Vec<u8> = (0..64).map(|at| if (16..48).contains(&at) { 5 } else { 0 }).collect();
    for round in 1..=3 {
        stream.memcpy_htod(&[9u8; 64], &mut target).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&target).unwrap(), expected);
        assert_eq!(calls.load(Ordering::Relaxed), round);
    }
    drop(graph);
    assert_eq!(simgpu::counts().graphs, 0);
    drop((source, target));
    context.synchronize().unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn a_second_stream_joins_through_events() {
    let _alone = simgpu::alone();
    let (context, a, b) = streams(0);
    let mut slice = a.alloc_zeros::<u8>(64).unwrap();
    context.synchronize().unwrap();
    a.begin_capture(THREAD_LOCAL).unwrap();
    b.wait(&a.record_event(None).unwrap()).unwrap();
    b.memset_zeros(&mut slice).unwrap();
    a.wait(&b.record_event(None).unwrap()).unwrap();
    a.memset_zeros(&mut slice).unwrap();
    let graph = a.end_capture(Flags(0)).unwrap().unwrap();
    assert_eq!(b.capture_status().unwrap(), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    graph.launch().unwrap();
    graph.launch().unwrap();
    context.synchronize().unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn branches_that_do_not_wait_for_each_other_are_found_at_launch() {
    let _alone = simgpu::alone();
    let (context, a, b) = streams(0);
    let mut slice = a.alloc_zeros::<u8>(64).unwrap();
    context.synchronize().unwrap();
    a.begin_capture(THREAD_LOCAL).unwrap();
    b.wait(&a.record_event(None).unwrap()).unwrap();
    b.memset_zeros(&mut slice).unwrap();
    a.memset_zeros(&mut slice).unwrap();
    a.wait(&b.record_event(None).unwrap()).unwrap();
    let graph = a.end_capture(Flags(0)).unwrap().unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
    graph.launch().unwrap();
    context.synchronize().unwrap();
    let reports = simgpu::reports();
    assert_eq!(reports.len(), 1, "{reports:#?}");
    assert!(reports[0].contains("written by cuMemsetD8Async of a graph on stream"), "{reports:#?}");
}

#[test]
fn a_graph_is_ordered_like_any_other_job() {
    let _alone = simgpu::alone();
    let (context, a, b) = streams(0);
    let mut slice = a.alloc_zeros::<u8>(64).unwrap();
    context.synchronize().unwrap();
    a.begin_capture(THREAD_LOCAL).unwrap();
    a.memset_zeros(&mut slice).unwrap();
    let graph = a.end_capture(Flags(0)).unwrap().unwrap();
    graph.launch().unwrap();
    b.wait(&a.record_event(None).unwrap()).unwrap();
    b.memset_zeros(&mut slice).unwrap();
    assert_eq!(simgpu::reports(), [""; 0]);
    graph.launch().unwrap();
    let reports = simgpu::reports();
    assert!(reports.len() == 1 && reports[0].contains("of a graph on stream"), "{reports:#?}");
    context.synchronize().unwrap();
}

#[test]
fn a_stream_that_is_not_joined_again_spoils_the_capture() {
    let _alone = simgpu::alone();
    let (context, a, b) = streams(0);
    let mut slice = b.alloc_zeros::<u8>(64).unwrap();
    context.synchronize().unwrap();
    a.begin_capture(THREAD_LOCAL).unwrap();
    b.wait(&a.record_event(None).unwrap()).unwrap();
    b.memset_zeros(&mut slice).unwrap();
    assert_eq!(failed(a.end_capture(Flags(0))), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    // Both streams can be used again.
    b.memset_zeros(&mut slice).unwrap();
    context.synchronize().unwrap();
}

#[test]
fn waiting_while_capturing_spoils_the_capture() {
    let _alone = simgpu::alone();
    let (context, a, _) = streams(0);
    let unsupported = Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    let waits: [&dyn Fn() -> Result<(), DriverError>; 2] = [&|| a.synchronize(), &|| context.synchronize()];
    for wait in waits {
        a.begin_capture(RELAXED).unwrap();
        assert_eq!(failed(wait()), unsupported);
        assert_eq!(a.capture_status().unwrap(), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        assert_eq!(failed(a.end_capture(Flags(0))), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    }
    a.synchronize().unwrap();
}

#[test]
fn the_mode_says_who_may_allocate_meanwhile() {
    let _alone = simgpu::alone();
    let (context, a, _) = streams(0);
    let allocate = || {
        context.bind_to_thread()?;
        // SAFETY: the allocation is freed.
        unsafe { result::malloc_sync(1).and_then(|start| result::free_sync(start)) }
    };
    let allocate_elsewhere = || std::thread::scope(|scope| scope.spawn(allocate).join().unwrap());
    for (mode, here, elsewhere) in [(GLOBAL, false, false), (THREAD_LOCAL, false, true), (RELAXED, true, true)] {
        a.begin_capture(mode).unwrap();
        assert_eq!(allocate_elsewhere().is_ok(), elsewhere, "{mode:?}");
        assert_eq!(a.end_capture(Flags(0)).is_ok(), elsewhere, "{mode:?}");
        a.begin_capture(mode).unwrap();
        assert_eq!(allocate().is_ok(), here, "{mode:?}");
        assert_eq!(a.end_capture(Flags(0)).is_ok(), here, "{mode:?}");
    }
}

#[test]
fn an_event_from_outside_does_not_get_into_a_capture_nor_one_from_inside_out() {
    let _alone = simgpu::alone();
    let (_context, a, b) = streams(0);
    let outside = b.record_event(None).unwrap();
    a.begin_capture(THREAD_LOCAL).unwrap();
    assert_eq!(failed(a.wait(&outside)), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
    assert!(a.end_capture(Flags(0)).is_err());
    a.begin_capture(RELAXED).unwrap();
    let inside = a.record_event(None).unwrap();
    assert_eq!(failed(inside.synchronize()), Some(CUresult::CUDA_ERROR_CAPTURED_EVENT));
    assert!(a.end_capture(Flags(0)).is_err());
    a.begin_capture(THREAD_LOCAL).unwrap();
    let inside = a.record_event(None).unwrap();
    assert_eq!(failed(inside.try_is_complete()), Some(CUresult::CUDA_ERROR_CAPTURED_EVENT));
    assert!(a.end_capture(Flags(0)).is_err());
}

#[test]
fn captures_are_not_merged_and_end_where_they_began() {
    let _alone = simgpu::alone();
    let (_context, a, b) = streams(0);
    a.begin_capture(THREAD_LOCAL).unwrap();
    assert_eq!(failed(a.begin_capture(THREAD_LOCAL)), Some(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    b.begin_capture(THREAD_LOCAL).unwrap();
    assert_eq!(failed(b.wait(&a.record_event(None).unwrap())), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE));
    assert!(a.end_capture(Flags(0)).is_err() && b.end_capture(Flags(0)).is_err());
    a.begin_capture(THREAD_LOCAL).unwrap();
    b.wait(&a.record_event(None).unwrap()).unwrap();
    assert_eq!(failed(b.end_capture(Flags(0))), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    assert!(a.end_capture(Flags(0)).is_err());
    a.begin_capture(THREAD_LOCAL).unwrap();
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| failed(a.end_capture(Flags(0)))).join().unwrap());
    assert_eq!(elsewhere, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
    a.end_capture(Flags(0)).unwrap();
}

#[test]
fn the_default_stream_is_closed_while_a_blocking_stream_captures() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
    // SAFETY: the stream lives until the end of this test.
    unsafe {
        let blocking = context.wrap_borrowed_stream(blocking);
        let event = context.new_event(None).unwrap();
        blocking.begin_capture(RELAXED).unwrap();
        assert_eq!(failed(event.record(&context.default_stream())), Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT));
        assert!(blocking.end_capture(Flags(0)).is_err());
        event.record(&context.default_stream()).unwrap();
        result::stream::destroy(blocking.cu_stream()).unwrap();
    }
}

#[test]
fn flags_that_exclude_each_other_are_refused() {
    let _alone = simgpu::alone();
    let (_context, a, _) = streams(0);
    a.begin_capture(THREAD_LOCAL).unwrap();
    let both = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | Flags::CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
    assert_eq!(failed(a.end_capture(both)), Some(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(simgpu::counts().graphs, 0);
}
