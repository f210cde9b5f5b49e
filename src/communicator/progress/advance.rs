//! Moves messages on, and ends those of the background that are done.

use std::time::Instant;

use super::engine::{Inner, ProgressEngine};
use super::pending::Outstanding;
use crate::communicator::message::Received;
use crate::communicator::work::Finished;
use crate::error::Result;

impl ProgressEngine {
    /// Moves what can move, and ends the background messages that are done.
    pub(super) fn advance(&self, inner: &mut Inner) -> bool {
        inner.direct = 0;
        let moved = inner.messages.progress();
        self.attend(inner);
        moved
    }

    /// Acts on what has moved.
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

    /// How a background message ended, where it has; of one that takes long listeners are told.
    fn ended(&self, inner: &mut Inner, at: usize) -> Option<Result<Received>> {
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
        if !*has_warned && elapsed >= self.recorder.stall_after(limit) {
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
}
