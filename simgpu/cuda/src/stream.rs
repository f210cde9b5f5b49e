//! Streams: each is a thread with a queue, so the host really runs ahead of it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, PoisonError};

use crate::capture;
use crate::clock::Clock;
use crate::code::{Code, Outcome};
use crate::context;
use crate::context_lock::{self, ContextLock};
use crate::job::{Job, Ticket};
use crate::run;
use crate::state::{self, Guard, Handle, State};

/// `CU_STREAM_NON_BLOCKING`: this stream and the legacy default stream do not wait for each other.
pub(crate) const NON_BLOCKING: u32 = 1;
/// The lowest and the highest priority; lower numbers go first.
pub(crate) const PRIORITIES: (i32, i32) = (0, -5);

/// The number of jobs that a stream's queue holds before a call that adds another has to wait. NVIDIA does not
/// document it; 1,024 launches were observed.
const ROOM: usize = 1024;
/// The number of calls that found the queue full.
static WAITS: AtomicU64 = AtomicU64::new(0);

const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

pub(crate) struct Stream {
    pub(crate) context: Handle,
    pub(crate) name: Arc<str>,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// Whether every context has it without a call that makes it.
    pub(crate) implicit: bool,
    pub(crate) component: usize,
    /// Everything that comes before the next job.
    pub(crate) clock: Clock,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    pub(crate) queue: VecDeque<Job>,
    /// Whether a test has closed the gate, so that no job is begun.
    pub(crate) gate: bool,
    pub(crate) destroyed: bool,
    /// The capture that takes the work submitted here.
    pub(crate) capture: Option<Handle>,
    /// The last result of `cuStreamGetCaptureInfo`; the caller may read it until its next query.
    pub(crate) nodes: Box<[Handle]>,
    /// Notified when there is new work for the worker.
    bell: Arc<Condvar>,
    /// Notified when a job is over.
    progress: Arc<Condvar>,
}

impl Stream {
    /// Returns the point after everything submitted so far.
    pub(crate) fn last(&self, handle: Handle) -> Ticket {
        Ticket { stream: handle, position: self.submitted }
    }

    pub(crate) fn blocking(&self) -> bool {
        self.flags & NON_BLOCKING == 0
    }

    pub(crate) fn push(&mut self, job: Job) {
        self.queue.push_back(job);
        self.submitted += 1;
        self.bell.notify_all();
    }

    pub(crate) fn finish_job(&mut self) {
        self.completed += 1;
        self.progress.notify_all();
    }
}

pub(crate) fn create(state: &mut State, context: Handle, flags: u32, priority: i32, name: Option<&str>) -> Outcome<Handle> {
    let device = state.contexts.get(&context).ok_or(Code::INVALID_CONTEXT)?.device;
    let implicit = name.is_some();
    let name: Arc<str> = match name {
        Some(name) => format!("the {name} stream of device {device}").into(),
        None => {
            state.devices[device].streams += 1;
            format!("stream {} of device {device}", state.devices[device].streams).into()
        }
    };
    let handle = state.handle();
    std::thread::Builder::new().name(name.to_string()).spawn(move || work(handle)).map_err(|_| Code::OPERATING_SYSTEM)?;
    let component = state.components.take(&state.host);
    let stream = Stream {
        context,
        name,
        flags,
        priority: priority.clamp(PRIORITIES.1, PRIORITIES.0),
        implicit,
        component,
        clock: Clock::default(),
        submitted: 0,
        completed: 0,
        queue: VecDeque::new(),
        gate: false,
        destroyed: false,
        capture: None,
        nodes: Box::default(),
        bell: Arc::default(),
        progress: Arc::default(),
    };
    state.streams.insert(handle, stream);
    Ok(handle)
}

/// Ends a stream: no more work comes, and the worker ends when the queue is empty.
pub(crate) fn destroy(state: &mut State, handle: Handle) {
    if let Some(stream) = state.streams.get_mut(&handle) {
        stream.destroyed = true;
        stream.bell.notify_all();
        if let Some(capture) = stream.capture {
            capture::leave(state, capture, handle);
        }
    }
}

pub(crate) fn set_gate(state: &mut State, handle: Handle, closed: bool) {
    if let Some(stream) = state.streams.get_mut(&handle) {
        stream.gate = closed;
        stream.bell.notify_all();
    }
}

impl State {
    /// Returns the stream a caller names: by its handle, or as one of the default streams of the current context.
    pub(crate) fn stream(&mut self, named: Handle) -> Outcome<Handle> {
        match named {
            0 | LEGACY => self.default_stream(),
            PER_THREAD => self.per_thread_stream(),
            handle => {
                let context = self.streams.get(&handle).filter(|stream| !stream.destroyed).ok_or(Code::INVALID_HANDLE)?.context;
                self.healthy(context)?;
                Ok(handle)
            }
        }
    }

    fn default_stream(&mut self) -> Outcome<Handle> {
        let context = self.current()?;
        if let Some(stream) = self.contexts[&context].default {
            return Ok(stream);
        }
        let stream = create(self, context, 0, 0, Some("default"))?;
        self.contexts.entry(context).and_modify(|context| context.default = Some(stream));
        Ok(stream)
    }

    fn per_thread_stream(&mut self) -> Outcome<Handle> {
        let context = self.current()?;
        let thread = std::thread::current().id();
        if let Some(&stream) = self.contexts[&context].per_thread.get(&thread) {
            return Ok(stream);
        }
        let stream = create(self, context, 0, 0, Some("per-thread"))?;
        self.contexts.entry(context).and_modify(|context| {
            context.per_thread.insert(thread, stream);
        });
        Ok(stream)
    }

    pub(crate) fn passed(&self, ticket: Ticket) -> bool {
        self.streams.get(&ticket.stream).is_none_or(|stream| stream.completed >= ticket.position)
    }

    /// Returns the error that broke the context of a stream, if any.
    pub(crate) fn stream_health(&self, stream: Handle) -> Outcome {
        self.streams.get(&stream).map_or(Ok(()), |stream| self.healthy(stream.context))
    }
}

/// Returns the state, once a stream's queue has a free place. Until then this thread holds the context's lock, and so
/// blocks all calls that need it. If the caller names no valid stream, it does not wait; the caller finds the error.
pub(crate) fn with_room(named: Handle) -> Guard<'static> {
    let lock = context_lock::take();
    let (mut state, mut waits) = (state::lock(), false);
    while let Ok(handle) = state.stream(named)
        && let Some(stream) = state.streams.get(&handle)
        && stream.capture.is_none()
        && stream.queue.len() >= ROOM
    {
        if !std::mem::replace(&mut waits, true) {
            lock.iter().for_each(ContextLock::keep);
            WAITS.fetch_add(1, Ordering::SeqCst);
        }
        let progress = stream.progress.clone();
        state = progress.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state
}

/// Returns the number of calls that have waited for a free place in the queue of a stream.
#[unsafe(no_mangle)]
extern "C" fn simgpu_waits_for_room() -> u64 {
    WAITS.load(Ordering::SeqCst)
}

/// Waits until a stream has reached a point.
pub(crate) fn wait(mut state: Guard<'_>, ticket: Ticket) -> Guard<'_> {
    loop {
        match state.streams.get(&ticket.stream) {
            Some(stream) if stream.completed < ticket.position => {
                let progress = stream.progress.clone();
                state = progress.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            _ => return state,
        }
    }
}

/// Waits for everything submitted to a stream; the host then knows it is over.
pub(crate) fn drain(state: Guard<'_>, handle: Handle) -> Guard<'_> {
    let Some(stream) = state.streams.get(&handle) else { return state };
    let (ticket, clock) = (stream.last(handle), stream.clock.clone());
    let mut state = wait(state, ticket);
    state.host.join(&clock);
    state
}

/// Does the same as [`drain`], and returns the error that broke the context, if any.
pub(crate) fn synchronise(state: Guard<'_>, handle: Handle) -> (Guard<'_>, Outcome) {
    let context = state.streams.get(&handle).map_or(0, |stream| stream.context);
    let state = drain(state, handle);
    let health = state.healthy(context);
    (state, health)
}

/// Waits for everything submitted to the streams of a context, those that have ended included.
pub(crate) fn drain_all(mut state: Guard<'_>, context: Handle) -> Guard<'_> {
    let streams: Vec<Handle> = state.streams.iter().filter(|(_, stream)| stream.context == context).map(|(&handle, _)| handle).collect();
    for handle in streams {
        state = drain(state, handle);
    }
    if let Some(context) = state.contexts.get(&context) {
        let ended = context.ended.clone();
        state.host.join(&ended);
    }
    state
}

/// Waits until the streams of a context are empty, without a record for the host: for calls whose wait the manual does
/// not promise.
pub(crate) fn rest(mut state: Guard<'_>, context: Handle) -> Guard<'_> {
    let last = |(&handle, stream): (&Handle, &Stream)| (stream.context == context).then(|| stream.last(handle));
    let tickets: Vec<Ticket> = state.streams.iter().filter_map(last).collect();
    for ticket in tickets {
        state = wait(state, ticket);
    }
    state
}

/// Does the same as [`drain_all`], and returns the error that broke the context, if any.
pub(crate) fn synchronise_all(state: Guard<'_>, context: Handle) -> Outcome {
    drain_all(state, context).healthy(context)
}

/// Runs the thread of a stream.
fn work(handle: Handle) {
    let mut state = state::lock();
    while let Some(stream) = state.streams.get_mut(&handle) {
        let bell = stream.bell.clone();
        let ready = !stream.gate;
        match stream.queue.front() {
            Some(job) if ready => {
                let waits = job.waits.clone();
                if let Some(&ticket) = waits.iter().find(|&&ticket| !state.passed(ticket)) {
                    state = wait(state, ticket);
                    continue;
                }
                if let Some(job) = state.streams.get_mut(&handle).and_then(|stream| stream.queue.pop_front()) {
                    state = run::execute(state, handle, job);
                }
            }
            None if stream.destroyed => {
                let (component, context, clock) = (stream.component, stream.context, stream.clock.clone());
                state.streams.remove(&handle);
                state.components.give_back(component);
                state.contexts.entry(context).and_modify(|context| context.ended.join(&clock));
            }
            _ => state = bell.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// Checks that the context of a stream is current, for calls that require it.
pub(crate) fn require_current(state: &State, handle: Handle) -> Outcome {
    let context = state.streams.get(&handle).ok_or(Code::INVALID_HANDLE)?.context;
    if context == context::raw_current() { Ok(()) } else { Err(Code::INVALID_HANDLE) }
}
