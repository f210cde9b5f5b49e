//! Messages that go on in the background, and the thread that moves them on while nobody waits.

use std::sync::{Arc, Mutex, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use super::pending::PendingMessage;
use super::{Inner, MessageBuffer, MessageContext, ProgressEngine, TURN, Ticket};
use crate::communicator::messages::Received;
use crate::communicator::pinned::ErasedBuffer;
use crate::communicator::work::{Drive, Finished, State};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::event;

/// How long the background thread naps where nothing moves.
const NAP: Duration = Duration::from_millis(1);

/// A message that goes on in the background.
pub(super) struct Outstanding {
    ticket: Ticket,
    request: PendingMessage,
    has_warned: bool,
    buffer: Box<dyn ErasedBuffer>,
    state: Arc<State>,
}

impl Outstanding {
    /// Whether this rank sends it.
    pub(super) fn sends(&self) -> bool {
        self.request.sends
    }

    /// `send to rank 3, tag 7`.
    pub(super) fn doing(&self) -> String {
        self.request.doing()
    }
}

/// Counts a caller as away; also one that a panic takes away for good.
struct Away<'a>(&'a ProgressEngine);

impl Drop for Away<'_> {
    fn drop(&mut self) {
        self.0.lock().away -= 1;
    }
}

/// The thread of background messages.
pub(super) struct Background {
    thread: Thread,
    /// Taken by whoever waits for its end.
    handle: Mutex<Option<JoinHandle<()>>>,
}

impl ProgressEngine {
    /// Posts a message whose buffer the progress engine keeps until it has ended.
    ///
    /// # Safety
    ///
    /// `memory` lies in `buffer`.
    pub(in crate::communicator) unsafe fn post_background(
        self: &Arc<Self>,
        context: MessageContext,
        memory: MessageBuffer,
        buffer: Box<dyn ErasedBuffer>,
        limit: Duration,
    ) -> Result<Arc<State>> {
        self.refuse_if_ended(&context, &memory)?;
        let deadline = Deadline::after(limit);
        let state = State::new();
        let mut inner = self.lock();
        inner.outstanding.reserve(1);
        let request = self.begin(&context, &memory, &deadline);
        // SAFETY: the place lies in the buffer (the caller's promise), which is next kept in `outstanding`, in a place that is reserved, so
        // that nothing can unwind in between; it is taken out of there by `finish` alone, which cancels the ticket.
        let ticket = unsafe { Self::post(&mut inner, &context, memory, &deadline) };
        let ticket = ticket.map_err(|stop| self.not_posted(&stop, &request))?;
        inner.outstanding.push(Outstanding { ticket, request, has_warned: false, buffer, state: Arc::clone(&state) });
        self.advance(&mut inner);
        let left = !inner.outstanding.is_empty();
        drop(inner);
        if left {
            self.wake_background()?;
        }
        Ok(state)
    }

    /// Lets the background thread move messages on while `busy` runs.
    pub(in crate::communicator) fn while_away<R>(self: &Arc<Self>, busy: impl FnOnce() -> Result<R>) -> Result<R> {
        self.lock().away += 1;
        let _away = Away(self);
        self.wake_background()?;
        busy()
    }

    /// How a background message ended, where it has; of one that takes long listeners are told.
    pub(super) fn ended(&self, inner: &mut Inner, at: usize) -> Option<Result<Received>> {
        let Outstanding { ticket, request, has_warned, .. } = &mut inner.outstanding[at];
        if let Some(outcome) = inner.messages.poll(*ticket) {
            return Some(self.outcome(outcome, request));
        }
        if let Err(error) = self.check_health(request) {
            return Some(Err(error));
        }
        let (elapsed, limit) = (request.deadline.elapsed(), request.deadline.limit());
        if elapsed >= limit {
            return Some(Err(self.late(request)));
        }
        if !*has_warned && elapsed >= self.health.flight().stall_after(limit) {
            *has_warned = true;
            self.warn(request);
        }
        None
    }

    /// Ends a background message: whoever waits for it gets its buffer back, or the error.
    pub(super) fn finish(&self, inner: &mut Inner, at: usize, result: Result<Received>) {
        // First, as long as the buffer is kept.
        inner.messages.cancel(inner.outstanding[at].ticket);
        let Outstanding { request, buffer, state, .. } = inner.outstanding.swap_remove(at);
        match &result {
            Ok(_) => self.health.flight().end_message(request.number),
            Err(error) => self.health.flight().fail_message(request.number, error),
        }
        let elapsed = request.deadline.elapsed();
        let (result, failed) = match result {
            Ok(received) => (Ok(Finished { buffer: buffer.release(), received: Some(received) }), None),
            Err(error) => (Err(error.clone()), Some((error, buffer))),
        };
        state.end(result);
        self.tell_over(request, elapsed, failed, state);
    }

    /// Starts the background thread, or wakes it.
    pub(in crate::communicator) fn wake_background(self: &Arc<Self>) -> Result<()> {
        if let Some(background) = self.background.get() {
            background.thread.unpark();
            return Ok(());
        }
        let progress = Arc::downgrade(self);
        let handle = std::thread::Builder::new()
            .name(format!("messages {}", self.rank))
            .spawn(move || background(&progress))
            .map_err(|error| Error::io("starting the message thread of a communicator", error))?;
        let _ = self.background.set(Background { thread: handle.thread().clone(), handle: Mutex::new(Some(handle)) });
        Ok(())
    }

    /// Waits until the background thread has seen that it is over; unless this is that thread, where a listener drops the communicator.
    pub(super) fn join_background(&self) {
        let Some(background) = self.background.get() else { return };
        background.thread.unpark();
        let handle = event::lock(&background.handle).take();
        if let Some(handle) = handle.filter(|_| background.thread.id() != std::thread::current().id()) {
            let _ = handle.join();
        }
    }
}

impl Drive for ProgressEngine {
    fn drive(&self, limit: Duration) {
        let mut inner = self.lock();
        if !self.advance(&mut inner) && !inner.outstanding.is_empty() {
            inner.messages.wait_step(TURN.min(limit));
        }
    }
}

/// Moves background messages on while nobody waits for them. Ends with the communicator.
fn background(progress: &Weak<ProgressEngine>) {
    while let Some(progress) = progress.upgrade() {
        let idle = match progress.try_lock() {
            Some(mut inner) => {
                if inner.closed {
                    return;
                }
                let moved = progress.advance(&mut inner);
                inner.is_busy().then_some(!moved)
            }
            // Somebody is waiting, and moves everything on.
            None => Some(true),
        };
        drop(progress);
        match idle {
            None => std::thread::park_timeout(Duration::from_secs(1)),
            Some(true) => std::thread::park_timeout(NAP),
            Some(false) => {}
        }
    }
}
