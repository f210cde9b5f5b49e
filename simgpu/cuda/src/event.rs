//! Events: a point in a stream, with everything before it.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::capture;
use crate::clock::Clock;
use crate::code::{Code, Outcome};
use crate::job::{Task, Ticket, Work};
use crate::state::{self, Guard, Handle, State};
use crate::stream;
use crate::submit;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_RECORD_EXTERNAL` and `CU_EVENT_WAIT_EXTERNAL`.
pub(crate) const EXTERNAL: u32 = 1;

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Handle,
    pub(crate) flags: u32,
    pub(crate) recorded: Recorded,
}

#[derive(Clone, Debug)]
pub(crate) enum Recorded {
    Never,
    At {
        ticket: Ticket,
        clock: Clock,
        time: Arc<OnceLock<Instant>>,
    },
    /// In a capture, after these nodes.
    Captured {
        capture: Handle,
        after: Vec<usize>,
    },
}

impl State {
    fn event(&self, handle: Handle) -> Outcome<&Event> {
        self.events.get(&handle).ok_or(Code::INVALID_HANDLE)
    }
}

/// Records an event in a stream. While the stream captures, an `external` record becomes a node of the graph; any
/// other record only marks a point that other streams can join.
pub(crate) fn record(state: &mut State, event: Handle, stream: Handle, external: bool) -> Outcome {
    let stream = state.stream(stream)?;
    let of = &state.streams[&stream];
    if state.event(event)?.context != of.context {
        return Err(Code::INVALID_HANDLE);
    }
    let recorded = match of.capture {
        Some(_) if external => return submit::submit(state, stream, record_task(event)).map(drop),
        Some(capture) => Recorded::Captured { capture, after: capture::tips(state, capture, stream)? },
        None => {
            let time = Arc::new(OnceLock::new());
            let task = Task { work: Work::Clock(time.clone()), what: "cuEventRecord".into(), spans: Vec::new() };
            let ticket = submit::submit(state, stream, task)?.ok_or(Code::UNKNOWN)?;
            Recorded::At { ticket, clock: state.streams[&stream].clock.clone(), time }
        }
    };
    state.events.entry(event).and_modify(|event| event.recorded = recorded);
    Ok(())
}

/// Returns a node that records an event.
pub(crate) fn record_task(event: Handle) -> Task {
    Task { work: Work::Record(event), what: "cuEventRecord".into(), spans: Vec::new() }
}

/// Returns the work of a graph that records an event: it is over when the whole launch is, and comes after everything
/// in `clock`.
pub(crate) fn record_by_graph(state: &mut State, event: Handle, ticket: Ticket, clock: &Clock) -> Work {
    let time = Arc::new(OnceLock::new());
    let recorded = Recorded::At { ticket, clock: clock.clone(), time: time.clone() };
    state.events.entry(event).and_modify(|event| event.recorded = recorded);
    Work::Clock(time)
}

/// Returns the tickets that a launch of a graph waits for because of an event, and adds that event to `clock`.
pub(crate) fn awaited_by_graph(state: &State, event: Handle, clock: &mut Clock) -> impl Iterator<Item = Ticket> + use<> {
    let found = match state.events.get(&event).map(|event| &event.recorded) {
        Some(Recorded::At { ticket, clock: before, .. }) => {
            clock.join(before);
            Some(*ticket)
        }
        _ => None,
    };
    found.into_iter()
}

/// Makes a stream wait for an event. Waiting for one that was never recorded has no effect. While the stream captures,
/// an `external` wait becomes a node of the graph.
pub(crate) fn stream_wait(state: &mut State, stream: Handle, event: Handle, external: bool) -> Outcome {
    let stream = state.stream(stream)?;
    let recorded = state.event(event)?.recorded.clone();
    let capturing = state.streams[&stream].capture;
    match (recorded, capturing) {
        (_, Some(_)) if external => {
            let task = Task { work: Work::Await(event), what: "cuStreamWaitEvent".into(), spans: Vec::new() };
            submit::submit(state, stream, task).map(drop)
        }
        (Recorded::Never, _) => Ok(()),
        (Recorded::At { ticket, clock, .. }, None) => submit::wait_for(state, stream, ticket, &clock, "cuStreamWaitEvent"),
        (Recorded::At { .. }, Some(capture)) => {
            capture::invalidate(state, capture);
            Err(Code::STREAM_CAPTURE_ISOLATION)
        }
        (Recorded::Captured { capture, after }, _) => capture::join(state, capture, stream, &after),
    }
}

/// Returns what the host has to wait for: nothing if the event was never recorded.
fn awaited(state: &mut State, event: Handle) -> Outcome<Option<(Ticket, Clock)>> {
    let event = state.event(event)?;
    let (context, recorded) = (event.context, event.recorded.clone());
    state.healthy(context)?;
    match recorded {
        Recorded::Never => Ok(None),
        Recorded::At { ticket, clock, .. } => Ok(Some((ticket, clock))),
        Recorded::Captured { capture, .. } => {
            // Harmless if the capture is over.
            capture::invalidate(state, capture);
            Err(Code::CAPTURED_EVENT)
        }
    }
}

pub(crate) fn query(state: &mut State, event: Handle) -> Outcome {
    // Of an event that was captured, cudarc's tests expect another error than that of a call that captures forbid.
    if !matches!(state.event(event)?.recorded, Recorded::Captured { .. }) {
        capture::unsafe_call(state)?;
    }
    let Some((ticket, clock)) = awaited(state, event)? else { return Ok(()) };
    if !state.passed(ticket) {
        return Err(Code::NOT_READY);
    }
    state.host.join(&clock);
    Ok(())
}

pub(crate) fn synchronise(mut state: Guard<'_>, event: Handle) -> Outcome {
    capture::unsafe_call(&mut state)?;
    let context = state.event(event)?.context;
    let Some((ticket, clock)) = awaited(&mut state, event)? else { return Ok(()) };
    let mut state = stream::wait(state, ticket);
    state.host.join(&clock);
    state.healthy(context)
}

/// Returns the milliseconds from one event to another.
pub(crate) fn elapsed(start: Handle, end: Handle) -> Outcome<f32> {
    let state = state::lock();
    let time = |handle| {
        let event = state.event(handle)?;
        state.healthy(event.context)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        match &event.recorded {
            Recorded::At { time, .. } => time.get().copied().ok_or(Code::NOT_READY),
            _ => Err(Code::INVALID_HANDLE),
        }
    };
    let (start, end) = (time(start)?, time(end)?);
    let earlier = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f32() * 1e3;
    Ok(if end >= start { earlier(start, end) } else { -earlier(end, start) })
}
