//! The simulated CUDA runtime: captures, graphs that are changed explicitly, and user objects.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the runtime is C")]

mod runtime_common;

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::ThreadId;

use cudarc::driver::sys;
use runtime_common::*;
use simgpu::Gate;

const EXTERNAL: u32 = 1;
const SET: u32 = 1;
const ADD: u32 = 0;

/// Returns the state of a stream's capture: its graph, and the nodes that the next one comes after.
fn tips(stream: usize) -> (usize, Vec<usize>) {
    let (mut status, mut id, mut graph, mut nodes, mut edges, mut count) = (9, 0, 0, null(), std::ptr::dangling::<c_void>(), 0);
    let code =
        cudaStreamGetCaptureInfo(stream, &raw mut status, &raw mut id, &raw mut graph, &raw mut nodes, &raw mut edges, &raw mut count);
    assert_eq!((code, edges), (0, null()));
    assert_eq!(status, u32::from(graph != 0));
    // SAFETY: the list belongs to the driver, and is valid until the next query.
    let list = if count == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec() };
    (graph, list)
}

fn begin(stream: usize) {
    // SAFETY: the stream was made by the tests.
    let code = unsafe { sys::cuStreamBeginCapture_v2(stream as sys::CUstream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// A captured graph, and its executable form.
struct Captured {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl Captured {
    fn end(stream: usize) -> Captured {
        let (mut graph, mut executable) = (null_mut(), null_mut());
        // SAFETY: the stream captures, and the variables are on the stack here.
        unsafe {
            assert_eq!(sys::cuStreamEndCapture(stream as sys::CUstream, &raw mut graph), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0), sys::CUresult::CUDA_SUCCESS);
        }
        Captured { graph, executable }
    }

    fn launch(&self, stream: usize) {
        // SAFETY: both are alive.
        assert_eq!(unsafe { sys::cuGraphLaunch(self.executable, stream as sys::CUstream) }, sys::CUresult::CUDA_SUCCESS);
    }

    fn drop_graph(&self) {
        // SAFETY: it is destroyed once.
        assert_eq!(unsafe { sys::cuGraphDestroy(self.graph) }, sys::CUresult::CUDA_SUCCESS);
    }

    fn drop_executable(&self) {
        // SAFETY: it is destroyed once.
        assert_eq!(unsafe { sys::cuGraphExecDestroy(self.executable) }, sys::CUresult::CUDA_SUCCESS);
    }
}

#[test]
fn a_capture_says_how_it_stands() {
    let _alone = simgpu::alone();
    let (stream, other, event) = (stream(), stream(), event());
    let start = memory(8, 0);
    assert_eq!(tips(stream), (0, vec![]));
    assert_eq!(cudaStreamUpdateCaptureDependencies(stream, null(), null(), 0, SET), 401);
    begin(stream);
    assert_eq!(got::<u32>(|place| cudaStreamIsCapturing(stream, place)), 1);
    let (graph, none) = tips(stream);
    assert!(graph != 0 && none.is_empty());
    assert_eq!(cudaMemsetAsync(start, 1, 8, stream), 0);
    let (_, first) = tips(stream);
    assert_eq!((cudaEventRecord(event, stream), cudaStreamWaitEvent(other, event, 0)), (0, 0));
    assert_eq!(tips(other), (graph, first.clone()));
    assert_eq!(cudaMemsetAsync(start, 2, 8, other), 0);
    let (_, second) = tips(other);
    // A stream that joined the capture is merged by naming its node, and may then be destroyed.
    assert_eq!(cudaStreamUpdateCaptureDependencies(stream, second.as_ptr(), null(), 1, ADD), 0);
    assert_eq!(tips(stream), (graph, [first.clone(), second.clone()].concat()));
    assert_eq!(cudaStreamUpdateCaptureDependencies(stream, second.as_ptr(), null(), 1, SET), 0);
    assert_eq!(tips(stream), (graph, second));
    assert_eq!(cudaStreamUpdateCaptureDependencies(stream, &(first[0] + 77), null(), 1, SET), 1);
    assert_eq!(cudaStreamUpdateCaptureDependencies(stream, null(), null(), 0, 5), 1);
    assert_eq!(cudaStreamDestroy(other), 0);
    let captured = Captured::end(stream);
    captured.launch(stream);
    assert_eq!(cudaStreamSynchronize(stream), 0);
    assert_eq!(read(start, 8), [2; 8]);
    captured.drop_graph();
    captured.drop_executable();
    assert_eq!((cudaFree(start), cudaStreamDestroy(stream), cudaEventDestroy(event)), (0, 0, 0));
    no_reports();
}

/// Captures what NCCL does: its own stream joins the capture without dependencies, waits for an event from outside of
/// the graph, does the work, and records that event at its end.
fn capture_like_nccl(stream: usize, own: usize, serial: usize, start: u64) -> Captured {
    let scratch = event();
    begin(stream);
    assert_eq!((cudaEventRecord(scratch, stream), cudaStreamWaitEvent(own, scratch, 0)), (0, 0));
    assert_eq!(cudaStreamUpdateCaptureDependencies(own, null(), null(), 0, SET), 0);
    assert_eq!(cudaStreamWaitEvent(own, serial, EXTERNAL), 0);
    assert_eq!(cudaMemsetAsync(start, 5, 8, own), 0);
    assert_eq!((cudaEventRecord(scratch, own), cudaStreamWaitEvent(stream, scratch, 0)), (0, 0));
    let (graph, before) = tips(own);
    let node: usize = got(|place| cudaGraphAddEventRecordNode(place, graph, null(), 0, serial));
    assert_eq!(cudaGraphAddDependencies(graph, before.as_ptr(), &raw const node, null(), 1), 0);
    // A duplicate, a cycle, an unknown node.
    assert_eq!(cudaGraphAddDependencies(graph, before.as_ptr(), &raw const node, null(), 1), 1);
    assert_eq!(cudaGraphAddDependencies(graph, &raw const node, before.as_ptr(), null(), 1), 1);
    assert_eq!(cudaGraphAddDependencies(graph, &raw const node, &(node + 1), null(), 1), 1);
    assert_eq!(cudaStreamUpdateCaptureDependencies(own, &raw const node, null(), 1, SET), 0);
    assert_eq!(cudaEventDestroy(scratch), 0);
    Captured::end(stream)
}

#[test]
fn graphs_and_live_streams_are_ordered_by_events_from_outside() {
    let _alone = simgpu::alone();
    let (user, own, live, serial) = (stream(), stream(), stream(), event());
    let start = memory(8, 0);
    let captured = capture_like_nccl(user, own, serial, start);
    // First the live stream, then the graph, then the live stream again: only the event orders them.
    let gate = Gate::close(live as *mut c_void);
    assert_eq!((cudaMemsetAsync(start, 1, 8, live), cudaEventRecord(serial, live)), (0, 0));
    captured.launch(user);
    assert_eq!(cudaStreamQuery(user), 600);
    gate.open();
    assert_eq!((cudaStreamWaitEvent(live, serial, 0), cudaMemsetAsync(start, 6, 4, live)), (0, 0));
    assert_eq!(cudaStreamSynchronize(live), 0);
    assert_eq!(read(start, 8), [6, 6, 6, 6, 5, 5, 5, 5]);
    no_reports();
    // The same without a wait.
    captured.launch(user);
    assert_eq!(cudaMemsetAsync(start, 7, 8, live), 0);
    assert_eq!(simgpu::reports().len(), 1);
    assert_eq!(cudaDeviceSynchronize(), 0);
    captured.drop_graph();
    captured.drop_executable();
    assert_eq!((cudaFree(start), cudaEventDestroy(serial)), (0, 0));
    for stream in [user, own, live] {
        assert_eq!(cudaStreamDestroy(stream), 0);
    }
}

/// Reports the thread on which it was called.
unsafe extern "C" fn destructor(data: *mut c_void) {
    // SAFETY: the sender was boxed for this, and it is called once.
    let sender = unsafe { Box::from_raw(data.cast::<Sender<ThreadId>>()) };
    sender.send(std::thread::current().id()).unwrap();
}

/// Moves a user object into the graph that a stream captures.
fn give_object(stream: usize) -> Receiver<ThreadId> {
    let (sender, receiver) = channel();
    let data = Box::into_raw(Box::new(sender)).cast();
    let object: usize = got(|place| cudaUserObjectCreate(place, data, destructor, 1, 1));
    assert_eq!(cudaGraphRetainUserObject(tips(stream).0, object, 1, 1), 0);
    receiver
}

#[test]
fn user_objects_live_as_long_as_what_may_still_run() {
    let _alone = simgpu::alone();
    let (stream, start) = (stream(), memory(8, 0));
    begin(stream);
    let gone = give_object(stream);
    assert_eq!(cudaMemsetAsync(start, 1, 8, stream), 0);
    let captured = Captured::end(stream);
    captured.drop_graph();
    assert_eq!(gone.try_recv(), Err(TryRecvError::Empty));
    let gate = Gate::close(stream as *mut c_void);
    captured.launch(stream);
    captured.drop_executable();
    // The destructors of all objects run on one thread, one after the other: earlier ones are over when a later one
    // is.
    fence();
    assert_eq!(gone.try_recv(), Err(TryRecvError::Empty));
    gate.open();
    assert_ne!(gone.recv().unwrap(), std::thread::current().id());
    assert_eq!((cudaStreamSynchronize(stream), cudaFree(start), cudaStreamDestroy(stream)), (0, 0, 0));
    no_reports();
}

/// Waits until all pending destructors have run.
fn fence() {
    let stream = stream();
    begin(stream);
    let gone = give_object(stream);
    let captured = Captured::end(stream);
    captured.drop_graph();
    captured.drop_executable();
    gone.recv().unwrap();
    assert_eq!(cudaStreamDestroy(stream), 0);
}

#[test]
fn a_capture_that_fails_gives_its_objects_back() {
    let _alone = simgpu::alone();
    let stream = stream();
    begin(stream);
    let gone = give_object(stream);
    // A wait for a stream that captures invalidates the capture.
    assert_eq!(cudaStreamSynchronize(stream), 900);
    let mut graph = null_mut();
    // SAFETY: the variable is on the stack here.
    let code = unsafe { sys::cuStreamEndCapture(stream as sys::CUstream, &raw mut graph) };
    assert_eq!((code, graph), (sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, null_mut()));
    gone.recv().unwrap();
    assert_eq!(cudaGraphRetainUserObject(12345, 1, 1, 0), 1);
    let mut place = 0usize;
    assert_eq!(cudaUserObjectCreate(&raw mut place, null_mut(), destructor, 1, 0), 1);
    assert_eq!(cudaStreamDestroy(stream), 0);
    no_reports();
}

#[test]
fn the_mode_of_a_thread_is_exchanged() {
    let _alone = simgpu::alone();
    let mut mode = 2;
    assert_eq!((cudaThreadExchangeStreamCaptureMode(&raw mut mode), mode), (0, 0));
    let stream = stream();
    begin(stream);
    // A relaxed thread may allocate while another stream captures; the capture goes on.
    let start: u64 = got(|place| cudaMalloc(place, 8));
    assert_eq!((cudaThreadExchangeStreamCaptureMode(&raw mut mode), mode), (0, 2));
    let captured = Captured::end(stream);
    captured.drop_graph();
    captured.drop_executable();
    mode = 7;
    assert_eq!(cudaThreadExchangeStreamCaptureMode(&raw mut mode), 1);
    assert_eq!((cudaFree(start), cudaStreamDestroy(stream)), (0, 0));
}
