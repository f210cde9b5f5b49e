//! Stream capture: submitted work becomes nodes of a graph instead of running.

use std::cell::Cell;
use std::collections::HashMap;
use std::thread::ThreadId;

use crate::code::{Code, Outcome};
use crate::graph::{Body, Node};
use crate::job::Task;
use crate::state::{Handle, State};
use crate::user_object;

/// `CU_STREAM_CAPTURE_MODE_*`: the threads that must not make calls that cannot be captured during a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Every thread.
    Global,
    /// The thread that captures.
    ThreadLocal,
    /// No thread.
    Relaxed,
}

impl Mode {
    pub(crate) fn from_number(number: u32) -> Outcome<Mode> {
        match number {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Sets the mode of this thread, and returns the previous one.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

pub(crate) struct Capture {
    origin: Handle,
    mode: Mode,
    thread: ThreadId,
    pub(crate) number: u64,
    pub(crate) body: Body,
    /// The streams that take part: the position and the lane of each.
    streams: HashMap<Handle, Place>,
    pub(crate) invalid: bool,
}

struct Place {
    lane: usize,
    after: Vec<usize>,
}

/// Begins a capture. Its handle becomes that of the graph.
pub(crate) fn begin(state: &mut State, stream: Handle, mode: Mode) -> Outcome {
    let of = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
    if of.capture.is_some() {
        return Err(Code::ILLEGAL_STATE);
    }
    if state.contexts.get(&of.context).is_some_and(|context| context.default == Some(stream)) {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let (handle, number) = (state.handle(), state.next_number());
    let streams = HashMap::from([(stream, Place { lane: 0, after: Vec::new() })]);
    let thread = std::thread::current().id();
    let body = Body { lanes: 1, ..Body::default() };
    let capture = Capture { origin: stream, mode, thread, number, body, streams, invalid: false };
    state.captures.insert(handle, capture);
    state.streams.entry(stream).and_modify(|stream| stream.capture = Some(handle));
    Ok(())
}

fn valid(state: &mut State, capture: Handle) -> Outcome<&mut Capture> {
    let capture = state.captures.get_mut(&capture).ok_or(Code::STREAM_CAPTURE_INVALIDATED)?;
    if capture.invalid { Err(Code::STREAM_CAPTURE_INVALIDATED) } else { Ok(capture) }
}

/// Adds a node after everything that its stream has captured.
pub(crate) fn add(state: &mut State, capture: Handle, stream: Handle, task: Task) -> Outcome {
    let capture = valid(state, capture)?;
    let next = capture.body.nodes.len();
    let place = capture.streams.get_mut(&stream).ok_or(Code::UNKNOWN)?;
    let after = std::mem::replace(&mut place.after, vec![next]);
    let lane = place.lane;
    capture.body.nodes.push(Node { task, after, lane, added: false });
    Ok(())
}

/// Returns the last nodes of a stream.
pub(crate) fn tips(state: &mut State, capture: Handle, stream: Handle) -> Outcome<Vec<usize>> {
    let capture = valid(state, capture)?;
    Ok(capture.streams.get(&stream).map(|place| place.after.clone()).unwrap_or_default())
}

/// Makes a stream wait for nodes of a capture, and so part of it.
pub(crate) fn join(state: &mut State, capture: Handle, stream: Handle, after: &[usize]) -> Outcome {
    if !state.captures.contains_key(&capture) {
        return Err(Code::CAPTURED_EVENT);
    }
    match state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.capture {
        Some(own) if own != capture => {
            invalidate(state, own);
            invalidate(state, capture);
            return Err(Code::STREAM_CAPTURE_MERGE);
        }
        _ => state.streams.entry(stream).and_modify(|stream| stream.capture = Some(capture)),
    };
    let capture = valid(state, capture)?;
    let (body, streams) = (&mut capture.body, &mut capture.streams);
    let place = streams.entry(stream).or_insert_with(|| Place { lane: body.new_lane(), after: Vec::new() });
    after.iter().for_each(|node| {
        if !place.after.contains(node) {
            place.after.push(*node)
        }
    });
    Ok(())
}

/// Records that something was done that cannot be captured: the end of the capture reports it.
pub(crate) fn invalidate(state: &mut State, capture: Handle) {
    if let Some(capture) = state.captures.get_mut(&capture) {
        capture.invalid = true;
    }
}

/// Sets the nodes that the next node of a stream comes after, or adds to them.
pub(crate) fn depend(state: &mut State, stream: Handle, nodes: &[(Handle, usize)], set: bool) -> Outcome {
    let handle = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.capture.ok_or(Code::ILLEGAL_STATE)?;
    let capture = valid(state, handle)?;
    if nodes.iter().any(|&(graph, node)| graph != handle || node >= capture.body.nodes.len()) {
        return Err(Code::INVALID_VALUE);
    }
    let place = capture.streams.get_mut(&stream).ok_or(Code::UNKNOWN)?;
    if set {
        place.after.clear();
    }
    for (_, node) in nodes {
        if !place.after.contains(node) {
            place.after.push(*node);
        }
    }
    Ok(())
}

/// Handles the end of a stream that takes part: its nodes stay, and have to be joined. The stream that began the
/// capture is required.
pub(crate) fn leave(state: &mut State, capture: Handle, stream: Handle) {
    if let Some(capture) = state.captures.get_mut(&capture).filter(|capture| capture.origin == stream) {
        capture.invalid = true;
    }
}

/// Ends the capture that was begun on `stream`; returns the graph.
pub(crate) fn end(state: &mut State, stream: Handle) -> Outcome<Handle> {
    let handle = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.capture.ok_or(Code::ILLEGAL_STATE)?;
    let capture = state.captures.get(&handle).ok_or(Code::ILLEGAL_STATE)?;
    if capture.origin != stream {
        invalidate(state, handle);
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    let capture = state.captures.remove(&handle).ok_or(Code::ILLEGAL_STATE)?;
    for stream in state.streams.values_mut().filter(|stream| stream.capture == Some(handle)) {
        stream.capture = None;
    }
    let outcome = finished(&capture, stream);
    match outcome {
        Ok(()) => drop(state.graphs.insert(handle, capture.body)),
        Err(_) => capture.body.objects.into_iter().for_each(|object| user_object::release(state, object, 1)),
    }
    outcome.map(|()| handle)
}

/// Checks that everything captured comes before the end of the stream that began it. Nodes added by hand are exempt.
fn finished(capture: &Capture, stream: Handle) -> Outcome {
    if capture.invalid {
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    let own = &capture.streams[&stream].after;
    let joined = |place: &Place| place.after.iter().all(|&node| capture.body.nodes[node].added || capture.body.reaches(own, node));
    if !capture.streams.values().all(joined) {
        return Err(Code::STREAM_CAPTURE_UNJOINED);
    }
    Ok(())
}

/// Refuses, as the modes require, calls that cannot be captured and might break a capture that goes on.
pub(crate) fn unsafe_call(state: &mut State) -> Outcome {
    let (thread, mode) = (std::thread::current().id(), MODE.get());
    let forbids = |capture: &Capture| match mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == thread && capture.mode != Mode::Relaxed,
        Mode::Global => capture.mode == Mode::Global || capture.thread == thread && capture.mode != Mode::Relaxed,
    };
    let mut outcome = Ok(());
    for capture in state.captures.values_mut().filter(|capture| forbids(capture)) {
        capture.invalid = true;
        outcome = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    outcome
}

/// Refuses calls that wait for a stream if it captures.
pub(crate) fn refuse(state: &mut State, stream: Handle) -> Outcome {
    let Some(capture) = state.streams.get(&stream).and_then(|stream| stream.capture) else { return unsafe_call(state) };
    invalidate(state, capture);
    Err(Code::STREAM_CAPTURE_UNSUPPORTED)
}

/// Refuses calls that wait for a whole context if one of its streams captures.
pub(crate) fn refuse_context(state: &mut State, context: Handle) -> Outcome {
    let capturing = |stream: &crate::stream::Stream| stream.capture.filter(|_| stream.context == context);
    match state.streams.values().find_map(capturing) {
        Some(capture) => {
            invalidate(state, capture);
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        }
        None => unsafe_call(state),
    }
}
