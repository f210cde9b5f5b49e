use std::ffi::{c_int, c_uint, c_void};

use crate::call::{driver, offer, put};
use crate::capture::{self, Mode};
use crate::code::{Code, Outcome};
use crate::event;
use crate::job::{HostFunction, Task, Work};
use crate::state::{self, Handle, State};
use crate::stream;
use crate::submit;

/// Returns the `CUstreamCaptureStatus` (not capturing, capturing, or invalidated), with the capture's number and
/// graph.
fn status(state: &State, stream: Handle) -> (u32, u64, Handle) {
    let capture = state.streams.get(&stream).and_then(|stream| stream.capture);
    match capture.and_then(|handle| Some((handle, state.captures.get(&handle)?))) {
        None => (0, 0, 0),
        Some((handle, capture)) => (if capture.invalid { 2 } else { 1 }, capture.number, handle),
    }
}

fn create(flags: c_uint, priority: c_int) -> Outcome<Handle> {
    if flags & !stream::NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = state::lock();
    let context = state.current()?;
    stream::create(&mut state, context, flags, priority, None)
}

/// Writes the state of a stream's capture: its status, its graph, and the nodes that the next one would come after.
///
/// # Safety
///
/// Each pointer is null or valid for writes.
unsafe fn capture_info(
    named: Handle,
    status_out: *mut u32,
    id: *mut u64,
    graph: *mut usize,
    nodes: *mut *const usize,
    count: *mut usize,
) -> Outcome {
    let mut state = state::lock();
    let stream = state.stream(named)?;
    let (status, number, capture) = status(&state, stream);
    let after = if status == 1 { capture::tips(&mut state, capture, stream)? } else { Vec::new() };
    let handles: Box<[Handle]> = after.into_iter().map(|node| super::graph::node_handle(capture, node)).collect();
    let of = state.streams.get_mut(&stream).ok_or(Code::INVALID_HANDLE)?;
    of.nodes = handles;
    // SAFETY: guaranteed by the caller.
    unsafe {
        put(status_out, status)?;
        offer(id, number);
        offer(graph, capture);
        offer(nodes, of.nodes.as_ptr());
        offer(count, of.nodes.len());
    }
    Ok(())
}

/// Changes the nodes that the next captured node of a stream comes after: 0 adds, 1 sets.
///
/// # Safety
///
/// `nodes` has `count` handles or is null; `edges` is null or has as many.
unsafe fn update_dependencies(named: Handle, nodes: *const usize, edges: *const [u8; 8], count: usize, flags: c_uint) -> Outcome {
    // SAFETY: guaranteed by the caller.
    let nodes = unsafe {
        super::graph::plain_edges(edges, count)?;
        super::graph::places(nodes, count)?
    };
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let mut state = state::lock();
    let stream = state.stream(named)?;
    capture::depend(&mut state, stream, &nodes, flags == 1)
}

driver! {
    fn cuStreamCreate(place: *mut usize, flags: c_uint) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, create(flags, 0)?)
    }

    fn cuStreamCreateWithPriority(place: *mut usize, flags: c_uint, priority: c_int) {
        if place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, create(flags, priority)?)
    }

    fn cuStreamDestroy_v2(handle: usize) {
        let mut state = state::lock();
        if state.streams.get(&handle).is_none_or(|stream| stream.implicit || stream.destroyed) {
            return Err(Code::INVALID_HANDLE);
        }
        stream::destroy(&mut state, handle);
        state.stream_health(handle)
    }

    fn cuStreamSynchronize(named: usize) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        capture::refuse(&mut state, stream)?;
        stream::synchronise(state, stream).1
    }

    fn cuStreamQuery(named: usize) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        capture::refuse(&mut state, stream)?;
        let (ticket, clock) = (state.streams[&stream].last(stream), state.streams[&stream].clock.clone());
        if !state.passed(ticket) {
            return Err(Code::NOT_READY);
        }
        state.host.join(&clock);
        state.stream_health(stream)
    }

    fn cuStreamWaitEvent(named: usize, event: usize, flags: c_uint) {
        if flags & !event::EXTERNAL != 0 {
            return Err(Code::INVALID_VALUE);
        }
        event::stream_wait(&mut stream::with_room(named), named, event, flags == event::EXTERNAL)
    }

    fn cuStreamGetCtx(named: usize, place: *mut usize) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        put(place, state.streams[&stream].context)
    }

    fn cuStreamGetId(named: usize, place: *mut u64) {
        let mut state = state::lock();
        put(place, state.stream(named)? as u64)
    }

    fn cuStreamGetPriority(named: usize, place: *mut c_int) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        put(place, state.streams[&stream].priority)
    }

    fn cuStreamGetFlags(named: usize, place: *mut c_uint) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        put(place, state.streams[&stream].flags)
    }

    fn cuStreamGetDevice(named: usize, place: *mut c_int) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        let context = state.streams[&stream].context;
        put(place, state.contexts[&context].device as c_int)
    }

    fn cuStreamIsCapturing(named: usize, place: *mut u32) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        put(place, status(&state, stream).0)
    }

    fn cuStreamBeginCapture_v2(named: usize, mode: c_uint) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        capture::begin(&mut state, stream, Mode::from_number(mode)?)
    }

    fn cuStreamEndCapture(named: usize, place: *mut usize) {
        let mut state = state::lock();
        let stream = state.stream(named)?;
        let graph = capture::end(&mut state, stream);
        offer(place, graph.unwrap_or(0));
        graph.map(drop)
    }

    fn cuStreamGetCaptureInfo(named: usize, status: *mut u32, id: *mut u64) {
        capture_info(named, status, id, std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut())
    }

    fn cuStreamGetCaptureInfo_v2(
        named: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize,
    ) {
        capture_info(named, status, id, graph, nodes, count)
    }

    fn cuStreamGetCaptureInfo_v3(
        named: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, edges: *mut *const c_void,
        count: *mut usize,
    ) {
        offer(edges, std::ptr::null());
        capture_info(named, status, id, graph, nodes, count)
    }

    fn cuStreamUpdateCaptureDependencies(named: usize, nodes: *const usize, count: usize, flags: c_uint) {
        update_dependencies(named, nodes, std::ptr::null(), count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2(
        named: usize, nodes: *const usize, edges: *const [u8; 8], count: usize, flags: c_uint,
    ) {
        update_dependencies(named, nodes, edges, count, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        if mode.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(mode, capture::exchange_mode(Mode::from_number(*mode)?) as u32)
    }

    fn cuLaunchHostFunc(named: usize, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let mut state = stream::with_room(named);
        let stream = state.stream(named)?;
        let work = Work::Call(HostFunction { function: function.ok_or(Code::INVALID_VALUE)?, data });
        submit::submit(&mut state, stream, Task { work, what: "cuLaunchHostFunc".into(), spans: Vec::new() }).map(drop)
    }
}
