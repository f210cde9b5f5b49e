//! Messages in the background, and the thread that advances them while no other thread waits.

#![expect(unsafe_code, reason = "posted messages point into buffers that the progress engine keeps alive")]

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Inner, Outstanding, ProgressEngine};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::own_thread::{OwnThread, is_own};
use crate::base::tuning::own_thread::LAST;
use crate::base::tuning::progress::{FLUSH, IDLE, LEAVE, NAP, TURN};
use crate::communicator::work::Drive;
use crate::communicator::work::completion::{Finished, State};
use crate::communicator::work::message::{MessageBuffer, MessageContext, Received};
use crate::communicator::work::pinned::ErasedBuffer;
use crate::communicator::work::thread;
use crate::error::{Error, Result};

/// Counts a caller as away until this is dropped, even by a panic.
struct Away<'a>(&'a ProgressEngine);

impl Drop for Away<'_> {
    fn drop(&mut self) {
        self.0.lock().away -= 1;
    }
}

impl ProgressEngine {
    /// Posts a message whose buffer the progress engine keeps until the message has ended. The thread that moves it on
    /// is started first, so that only the message itself can fail once it is posted.
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
        self.start_background()?;
        let deadline = Deadline::after(limit);
        let state = State::new();
        let mut inner = self.lock_to_post(&context, &memory)?;
        inner.outstanding.reserve(1);
        let request = self.begin(&context, &memory, &deadline);
        // SAFETY: the memory lies in the buffer (the caller's promise). The buffer is kept in `outstanding` next, where
        // capacity is reserved, so that nothing can unwind in between. Only `finish` takes it out of there, and it
        // cancels the ticket first.
        let ticket = unsafe { Self::post(&mut inner, &context, memory) };
        let ticket = ticket.map_err(|stop| self.not_posted(&stop, &request))?;
        inner.outstanding.push(Outstanding { ticket, request, warned: None, buffer, state: Arc::clone(&state) });
        self.advance(&mut inner);
        let left = !inner.outstanding.is_empty() || inner.messages.has_incoming_rest();
        drop(inner);
        if left {
            self.unpark_background();
        }
        Ok(state)
    }

    /// Advances all messages that can advance, and ends the background messages that are done.
    pub(super) fn advance(&self, inner: &mut Inner) -> bool {
        inner.direct = 0;
        let moved = inner.messages.progress();
        self.attend(inner);
        moved
    }

    /// Acts after messages have advanced: passes on the end of the communicator, and ends the background messages that
    /// are done.
    pub(super) fn attend(&self, inner: &mut Inner) {
        if let Some(abort_reason) = inner.messages.heard() {
            self.health.end(abort_reason);
        }
        if let (None, Some(abort_reason)) = (inner.telling, self.health.abort_reason()) {
            inner.telling = Some(Instant::now());
            inner.messages.propagate(*abort_reason);
        }
        let mut at = 0;
        while at < inner.outstanding.len() {
            match self.ended(inner, at) {
                Some(result) => self.finish(inner, at, result),
                None => at += 1,
            }
        }
    }

    /// Returns the outcome of a background message that has ended, including by its deadline.
    fn ended(&self, inner: &mut Inner, at: usize) -> Option<Result<Received>> {
        self.outcome_of(inner, at).or_else(|| {
            let Outstanding { request, warned, .. } = &mut inner.outstanding[at];
            self.check_pending(request, warned).err().map(Err)
        })
    }

    /// Returns the outcome of a background message, if it has one.
    fn outcome_of(&self, inner: &mut Inner, at: usize) -> Option<Result<Received>> {
        let Outstanding { ticket, request, .. } = &inner.outstanding[at];
        inner.messages.poll(*ticket).map(|outcome| self.outcome(outcome, request))
    }

    /// Ends a background message: the thread that waits for it gets its buffer back, or the error.
    fn finish(&self, inner: &mut Inner, at: usize, result: Result<Received>) {
        // First, while the buffer is still kept.
        let given_up = inner.messages.give_up(inner.outstanding[at].ticket, inner.outstanding[at].request.deadline.elapsed());
        let Outstanding { request, buffer, state, .. } = inner.outstanding.swap_remove(at);
        let result = result.or_else(|error| {
            let is_late = self.is_late(&error);
            self.given_up(given_up, error, is_late, &request)
        });
        match &result {
            Ok(_) => self.recorder.end_message(request.number),
            Err(error) => self.recorder.fail_message(request.number, error),
        }
        let elapsed = request.deadline.elapsed();
        let (result, failed) = match result {
            Ok(received) => (Ok(Finished { buffer: buffer.release(), received: Some(received) }), None),
            Err(error) => (Err(error.clone()), Some((error, buffer))),
        };
        state.end(result);
        self.tell_over(request, elapsed, failed, state);
    }

    /// Lets the background thread, which [`start_background`](Self::start_background) has started, move messages on
    /// while `busy` runs.
    pub(in crate::communicator) fn while_away<R>(&self, busy: impl FnOnce() -> Result<R>) -> Result<R> {
        self.lock().away += 1;
        let _away = Away(self);
        self.unpark_background();
        busy()
    }

    /// Notifies the peers that the communicator has ended. Without this, peers that wait for a message of this rank
    /// would not learn of the end. Never waits for the lock, because the thread that holds it also notifies the peers.
    pub(in crate::communicator) fn announce_end(self: &Arc<Self>) {
        if self.health.is_foreign() {
            return;
        }
        if let Some(mut inner) = self.try_lock() {
            self.advance(&mut inner);
        }
        if let Err(error) = self.wake_background() {
            crate::base::event::warn!(rank = self.rank, %error, "peers may learn late that the communicator has ended");
        }
    }

    /// Sends the rest of unfinished messages, for a bounded time, and notifies the peers that this rank leaves. Later
    /// messages are refused.
    pub(in crate::communicator) fn close(&self) {
        let deadline = Deadline::after(FLUSH);
        let mut inner = self.lock();
        if inner.closed {
            return;
        }
        self.advance(&mut inner);
        while inner.outstanding.iter().any(|outstanding| outstanding.request.sends)
            && !deadline.has_passed()
            && self.health.abort_reason().is_none()
        {
            if !self.advance(&mut inner) {
                inner.messages.wait_step(TURN);
            }
            drop(inner);
            self.let_others_in();
            inner = self.lock();
        }
        if inner.closed {
            return;
        }
        let _ = inner.messages.leave(&Deadline::after(LEAVE));
        inner.closed = true;
        while let Some(last) = inner.outstanding.len().checked_sub(1) {
            let doing = inner.outstanding[last].request.doing();
            let aborted = Error::Aborted { doing, by: self.peers[self.rank].clone() };
            // It may have ended successfully before this rank left.
            let ended = self.outcome_of(&mut inner, last).and_then(Result::ok);
            self.finish(&mut inner, last, ended.ok_or(aborted));
        }
    }

    /// Starts the background thread, or wakes it.
    pub(in crate::communicator) fn wake_background(self: &Arc<Self>) -> Result<()> {
        self.start_background()?;
        self.unpark_background();
        Ok(())
    }

    fn unpark_background(&self) {
        if let Some(background) = self.background.get() {
            background.unpark();
        }
    }

    /// Makes the background thread finish messages that were given up: the thread notifies their receivers, and sends
    /// or receives the rest of a message that is already partly transferred. If the thread cannot be started, this
    /// rank's next message does this.
    pub(super) fn finish_later(self: &Arc<Self>) {
        let is_left = {
            let inner = self.lock();
            inner.messages.has_unwritten() || inner.messages.has_incoming_rest()
        };
        let woken = if is_left { self.wake_background() } else { Ok(()) };
        if let Err(error) = woken {
            crate::base::event::warn!(rank = self.rank, %error, "peers may learn late that messages were given up, and their messages to this rank may be delayed");
        }
    }

    /// Starts the background thread, unless it exists.
    pub(in crate::communicator) fn start_background(self: &Arc<Self>) -> Result<()> {
        if self.background.get().is_some() {
            return Ok(());
        }
        let _starting = event::lock(&self.starting);
        if self.background.get().is_some() {
            return Ok(());
        }
        let progress = Arc::downgrade(self);
        let started =
            thread::spawn(format!("messages {}", self.rank), "the message thread of a communicator", move || background(&progress))?;
        let _ = self.background.set(started);
        Ok(())
    }

    /// Waits until the background thread ends, except on a thread of the crate: a listener may drop the communicator.
    /// When this returns, listeners have been notified of everything, unless a listener does not return.
    pub(in crate::communicator) fn join_background(&self) {
        let Some(background) = self.background.get() else { return };
        background.unpark();
        if !background.wait(LAST) && !is_own() {
            event::warn!(rank = self.rank, "a message listener has not returned: the thread that runs it is abandoned");
        }
    }
}

impl Drive for ProgressEngine {
    fn drive(&self, limit: Duration) -> bool {
        // The thread that has the lock moves these messages on as well, and may hold it for longer than `limit`.
        let Some(mut inner) = self.try_lock() else { return false };
        if !self.advance(&mut inner) && !inner.outstanding.is_empty() {
            inner.messages.wait_step(TURN.min(limit));
        }
        drop(inner);
        self.let_others_in();
        true
    }

    fn is_noticed_here(&self) -> bool {
        self.background.get().is_some_and(OwnThread::is_current)
    }
}

/// Moves background messages on while no other thread waits for them. Ends with the communicator.
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
            // Another thread is waiting, and moves everything on.
            None => Some(true),
        };
        drop(progress);
        match idle {
            None => std::thread::park_timeout(IDLE),
            Some(true) => std::thread::park_timeout(NAP),
            Some(false) => {}
        }
    }
}
