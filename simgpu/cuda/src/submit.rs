//! Submits work to streams, with its position in the order of all.

use std::sync::Arc;

use crate::capture;
use crate::checker::Verb;
use crate::clock::{Clock, Stamp};
use crate::code::{Code, Outcome};
use crate::event;
use crate::job::{Job, Span, Step, Task, Ticket, Work};
use crate::memory::Freed;
use crate::state::{Handle, State};

/// Returns what comes before the next job of `stream` besides its own jobs: everything that the host has waited for,
/// and the mutual waits of the legacy default stream and the blocking ones.
fn order(state: &mut State, stream: Handle) -> Outcome<Vec<Ticket>> {
    let this = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
    let (context, blocking) = (this.context, this.blocking());
    let default = state.contexts.get(&context).and_then(|context| context.default);
    let others: Vec<Handle> = match default {
        Some(default) if default == stream => {
            let blocking = |(&handle, other): (&Handle, &crate::stream::Stream)| {
                (other.context == context && other.blocking() && handle != stream).then_some(handle)
            };
            state.streams.iter().filter_map(blocking).collect()
        }
        Some(default) if blocking => vec![default],
        _ => Vec::new(),
    };
    if let Some(capture) = others.iter().find_map(|other| state.streams[other].capture) {
        capture::invalidate(state, capture);
        return Err(Code::STREAM_CAPTURE_IMPLICIT);
    }
    let mut clock = state.host.clone();
    others.iter().for_each(|other| clock.join(&state.streams[other].clock));
    let waits = others.iter().map(|other| state.streams[other].last(*other)).filter(|&ticket| !state.passed(ticket)).collect();
    if let Some(this) = state.streams.get_mut(&stream) {
        this.clock.join(&clock);
    }
    Ok(waits)
}

/// Checks that memory that has to be known exists in full.
fn check(state: &mut State, task: &Task, stream: Handle) -> Outcome {
    for span in task.spans.iter().filter(|span| span.known) {
        let found = state.memory.at(span.start);
        if let Some(freed) = found.and_then(|found| found.freed.as_ref()) {
            let name = found.map(|found| found.name()).unwrap_or_default();
            let text = format!("{name}: used by {} on {} after it was freed by {}", task.what, state.stream_name(stream), freed.what);
            state.reports.add(text);
            return Err(Code::INVALID_VALUE);
        }
        if found.is_none_or(|found| span.end() > found.end()) {
            return Err(Code::INVALID_VALUE);
        }
    }
    Ok(())
}

/// Submits work to a stream, or adds it to the capture that the stream is part of. Returns the ticket to wait for,
/// unless it was captured.
pub(crate) fn submit(state: &mut State, stream: Handle, task: Task) -> Outcome<Option<Ticket>> {
    check(state, &task, stream)?;
    if let Some(capture) = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.capture {
        capture::add(state, capture, stream, task)?;
        return Ok(None);
    }
    let waits = order(state, stream)?;
    let stamp = tick(state, stream);
    let name = state.stream_name(stream);
    let step = Step { work: task.work, stamp, what: format!("{} on {name}", task.what).into(), spans: task.spans };
    Ok(Some(enqueue(state, stream, waits, vec![step], Vec::new())))
}

/// Returns the stamp of the next job of a stream.
fn tick(state: &mut State, stream: Handle) -> Stamp {
    let mut clock = Clock::default();
    let component = state.streams.get_mut(&stream).map_or(0, |stream| {
        clock = std::mem::take(&mut stream.clock);
        stream.component
    });
    let stamp = state.components.tick(component, &mut clock);
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.clock = clock;
    }
    stamp
}

fn enqueue(state: &mut State, stream: Handle, waits: Vec<Ticket>, steps: Vec<Step>, holds: Vec<Handle>) -> Ticket {
    let number = state.next_number();
    for step in &steps {
        match step.work {
            Work::Free { start } => state.free(start, Freed { stamp: step.stamp.clone(), what: step.what.clone(), number }),
            _ => step.spans.iter().for_each(|span| state.record(step.record(span))),
        }
    }
    state.pending.insert(number);
    let Some(this) = state.streams.get_mut(&stream) else { return Ticket { stream, position: 0 } };
    this.push(Job { number, waits, steps, holds });
    this.last(stream)
}

/// Makes all later jobs of `stream` come after `ticket`, with everything in `clock`.
pub(crate) fn wait_for(state: &mut State, stream: Handle, ticket: Ticket, clock: &Clock, what: &str) -> Outcome {
    let mut waits = order(state, stream)?;
    if let Some(this) = state.streams.get_mut(&stream) {
        this.clock.join(clock);
    }
    waits.push(ticket);
    let stamp = tick(state, stream);
    let step = Step { work: Work::Nothing, stamp, what: what.into(), spans: Vec::new() };
    enqueue(state, stream, waits, vec![step], Vec::new());
    Ok(())
}

/// A node of a graph at a launch: its task, the nodes before it, and the component it runs on.
pub(crate) struct Node<'a> {
    pub(crate) task: &'a Task,
    pub(crate) after: &'a [usize],
    pub(crate) component: usize,
}

/// Submits all nodes of a graph as one job, each with its own position in the order. The nodes come in an order that
/// respects `after`. The job releases the user objects in `holds` when it is over.
pub(crate) fn submit_graph<'a>(
    state: &mut State,
    stream: Handle,
    nodes: impl Iterator<Item = Node<'a>>,
    earlier: Option<(Ticket, Clock)>,
    holds: Vec<Handle>,
) -> Outcome<(Ticket, Clock)> {
    let mut waits = order(state, stream)?;
    if let Some((ticket, clock)) = earlier {
        waits.push(ticket);
        state.streams.entry(stream).and_modify(|stream| stream.clock.join(&clock));
    }
    let begin = tick(state, stream);
    let name = state.stream_name(stream);
    let own = Ticket { stream, position: state.streams.get(&stream).map_or(0, |this| this.submitted) + 1 };
    let mut steps: Vec<Step> = Vec::new();
    let mut all = (*begin.clock).clone();
    for node in nodes {
        let mut clock = (*begin.clock).clone();
        node.after.iter().for_each(|&before| clock.join(&steps[before].stamp.clock));
        if let Work::Await(event) = node.task.work {
            waits.extend(event::awaited_by_graph(state, event, &mut clock).filter(|ticket| !ticket.same(own)));
        }
        let stamp = state.components.tick(node.component, &mut clock);
        all.join(&clock);
        let work = match node.task.work {
            Work::Record(event) => event::record_by_graph(state, event, own, &clock),
            ref work => work.clone(),
        };
        let what: Arc<str> = format!("{} of a graph on {name}", node.task.what).into();
        steps.push(Step { work, stamp, what, spans: node.task.spans.clone() });
    }
    if let Some(this) = state.streams.get_mut(&stream) {
        this.clock.join(&all);
    }
    Ok((enqueue(state, stream, waits, steps, holds), all))
}

/// Frees memory in the order of the stream. Its uses must come before that, by stream order or by waiting.
pub(crate) fn submit_free(state: &mut State, stream: Handle, start: u64, bytes: usize) -> Outcome {
    let task = Task { work: Work::Free { start }, what: "cuMemFreeAsync".into(), spans: vec![known(start, bytes, Verb::Write)] };
    submit(state, stream, task).map(drop)
}

/// Returns a span that the driver has to know.
pub(crate) fn known(start: u64, bytes: usize, verb: Verb) -> Span {
    Span { start, bytes: bytes as u64, verb, known: true }
}
