//! Contexts: one primary context for each device, and those made explicitly.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;

use crate::clock::{Clock, Stamp};
use crate::code::{Code, Outcome};
use crate::memory::Freed;
use crate::state::{Guard, Handle, State};
use crate::stream;

thread_local! {
    /// The contexts of this thread; the last is the current one. 0 is none.
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// The error of the first job that failed; from then on every call returns it.
    pub(crate) poison: Option<Code>,
    pub(crate) flags: u32,
    /// The devices whose memory the kernels of this context may use.
    pub(crate) peers: Vec<usize>,
    /// The legacy default stream, made at its first use.
    pub(crate) default: Option<Handle>,
    pub(crate) per_thread: HashMap<ThreadId, Handle>,
    /// The work of streams that have ended: a wait for the context waits for it, too.
    pub(crate) ended: Clock,
}

impl Context {
    pub(crate) fn new(device: usize, flags: u32) -> Context {
        Context { device, poison: None, flags, peers: Vec::new(), default: None, per_thread: HashMap::new(), ended: Clock::default() }
    }
}

/// The primary context of a device.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    pub(crate) context: Option<Handle>,
    pub(crate) count: usize,
    pub(crate) flags: u32,
}

/// Returns the handle of the current context, whatever its state; 0 if there is none.
pub(crate) fn raw_current() -> Handle {
    STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

pub(crate) fn set_current(context: Handle) {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
}

pub(crate) fn push(context: Handle) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

pub(crate) fn pop() -> Option<Handle> {
    STACK.with_borrow_mut(Vec::pop)
}

impl State {
    /// Returns the current context of this thread, broken or not.
    pub(crate) fn current_at_all(&self) -> Outcome<Handle> {
        match raw_current() {
            0 => Err(Code::INVALID_CONTEXT),
            handle if self.contexts.contains_key(&handle) => Ok(handle),
            _ => Err(Code::CONTEXT_IS_DESTROYED),
        }
    }

    /// Returns the current context of this thread, or the error of the job that broke it.
    pub(crate) fn current(&self) -> Outcome<Handle> {
        let handle = self.current_at_all()?;
        self.healthy(handle)?;
        Ok(handle)
    }

    /// Returns an error if a job of this context failed.
    pub(crate) fn healthy(&self, context: Handle) -> Outcome {
        self.contexts.get(&context).and_then(|context| context.poison).map_or(Ok(()), Err)
    }

    pub(crate) fn new_context(&mut self, device: usize, flags: u32) -> Handle {
        let handle = self.handle();
        self.contexts.insert(handle, Context::new(device, flags));
        handle
    }

    /// Retains the primary context of a device.
    pub(crate) fn retain(&mut self, device: usize) -> Handle {
        let flags = self.primaries[device].flags;
        let context = match self.primaries[device].context {
            Some(context) => context,
            None => self.new_context(device, flags),
        };
        let primary = &mut self.primaries[device];
        primary.context = Some(context);
        primary.count += 1;
        context
    }
}

/// Ends a context with everything that belongs to it, once its streams are empty. Opens their gates for that.
pub(crate) fn destroy(mut state: Guard<'_>, context: Handle) {
    let streams: Vec<Handle> = state.streams.iter().filter(|(_, stream)| stream.context == context).map(|(&handle, _)| handle).collect();
    for &handle in &streams {
        stream::set_gate(&mut state, handle, false);
    }
    state = stream::drain_all(state, context);
    for &handle in &streams {
        stream::destroy(&mut state, handle);
    }
    let what: Arc<str> = "the end of its context".into();
    let starts: Vec<u64> =
        state.memory.all().filter(|found| found.context == context && found.freed.is_none()).map(|found| found.start).collect();
    for start in starts {
        let stamp: Stamp = state.host_stamp();
        let number = state.next_number();
        state.free(start, Freed { stamp, what: what.clone(), number });
        state.release(start);
    }
    state.events.retain(|_, event| event.context != context);
    state.modules.retain(|_, module| module.context != context);
    state.functions.retain(|_, function| function.context != context);
    state.contexts.remove(&context);
}
