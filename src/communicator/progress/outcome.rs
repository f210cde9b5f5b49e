//! The beginning and the end of a message: its flight record, its result for the caller, and the notification of
//! listeners. `event` notifies listeners after the lock is released, because they may take the lock themselves.

use std::sync::Arc;
use std::time::Duration;

use super::{PendingMessage, ProgressEngine};
use crate::base::deadline::Deadline;
use crate::base::event;
use crate::communicator::work::completion::State;
use crate::communicator::work::message::{MessageBuffer, MessageContext, Received};
use crate::communicator::work::pinned::ErasedBuffer;
use crate::error::{Error, Peer, Result};
use crate::flight;
use crate::host::abort_reason::Interrupted;
use crate::host::point_to_point::{GivenUp, MessageError, Outcome};
use crate::observe::Track;

impl ProgressEngine {
    /// Records that a message was requested.
    pub(super) fn begin(&self, context: &MessageContext, memory: &MessageBuffer, deadline: &Deadline) -> PendingMessage {
        let number = self.recorder.begin_message(&memory.recorded(context));
        PendingMessage { context: *context, sends: memory.sends(), bytes: memory.bytes(), deadline: deadline.clone(), number }
    }

    /// Returns how long a message that has not ended may still take, or an error if the communicator has ended or the
    /// deadline has passed. Listeners are notified from time to time of a message that takes long.
    pub(super) fn check_pending(&self, request: &PendingMessage, warned: &mut Option<Duration>) -> Result<Duration> {
        if let Some(abort_reason) = self.health.abort_reason() {
            let error = self.stopped(&(*abort_reason).into(), request);
            self.health.keep_cause(&error);
            return Err(error);
        }
        if self.health.is_closed() {
            return Err(Error::Closed { call: request.doing() });
        }
        let (elapsed, limit) = (request.deadline.elapsed(), request.deadline.limit());
        if elapsed >= limit {
            return Err(self.late(request));
        }
        if self.recorder.warns_after(elapsed, limit, *warned) {
            *warned = Some(elapsed);
            self.warn(request);
        }
        Ok(limit - elapsed)
    }

    /// Returns the outcome of a message, in the caller's terms.
    pub(super) fn outcome(&self, outcome: Outcome, request: &PendingMessage) -> Result<Received> {
        outcome.map(|envelope| request.context.received(envelope)).map_err(|error| match error {
            MessageError::Ended(abort_reason) => self.stopped(&abort_reason.into(), request),
            other => Error::Message { doing: request.doing(), reason: other.to_string() },
        })
    }

    /// Records that a message could not be posted, and returns its error.
    #[cold]
    pub(super) fn not_posted(&self, stop: &Interrupted, request: &PendingMessage) -> Error {
        let error = self.stopped(stop, request);
        self.recorder.fail_message(request.number, &error);
        error
    }

    /// Returns the error of a stop, in the caller's terms.
    fn stopped(&self, stop: &Interrupted, request: &PendingMessage) -> Error {
        let seen = stop.clone().seen_by(self.rank as u32, request.context.peer.map(|peer| peer as u32));
        let told = || self.recorder.with_meanwhile(seen.to_error(&request.doing(), &request.deadline, self.rank, &self.peers));
        self.health.own_failure(&stop.abort_reason, self.rank).unwrap_or_else(told)
    }

    /// Returns the error for a deadline that has passed.
    pub(super) fn late(&self, request: &PendingMessage) -> Error {
        let is_missing = |peer: &Peer| request.context.peer.map_or(peer.rank != self.rank, |missing| peer.rank == missing);
        let missing: Vec<Peer> = self.peers.iter().filter(|peer| is_missing(peer)).cloned().collect();
        let arrived = self.peers.iter().filter(|peer| peer.rank == self.rank && !is_missing(peer)).cloned().collect();
        let (doing, elapsed) = (request.doing(), request.deadline.elapsed());
        self.recorder.with_meanwhile(Error::Timeout { doing, elapsed, missing, arrived, meanwhile: Vec::new() })
    }

    /// Returns whether a message failed because its own deadline passed, and not because the communicator ended.
    pub(super) fn is_late(&self, error: &Error) -> bool {
        matches!(error, Error::Timeout { .. }) && self.health.abort_reason().is_none()
    }

    /// Returns the outcome of a message that was given up because of an error, depending on what it leaves behind. A
    /// message whose sending continues has not failed: a short message is done when it is on its way.
    pub(super) fn given_up(&self, left: GivenUp, mut error: Error, is_late: bool, request: &PendingMessage) -> Result<Received> {
        match left {
            GivenUp::Sent(envelope) if is_late => return Ok(request.context.received(envelope)),
            GivenUp::Lost { source, bytes } => {
                crate::base::event::warn!(
                    rank = self.rank,
                    source,
                    bytes,
                    "a message was lost: its receive was given up while the message arrived"
                );
            }
            _ => {}
        }
        if let (true, Error::Timeout { doing, .. }, Some(left)) = (is_late, &mut error, in_words(left)) {
            doing.push_str(&left);
        }
        Err(error)
    }

    /// Notifies listeners that a background message is over. If it failed, or if its `Work` was dropped, this also
    /// drops its buffer, which may also run the program's code.
    pub(super) fn tell_over(
        &self,
        request: PendingMessage,
        elapsed: Duration,
        failed: Option<(Error, Box<dyn ErasedBuffer>)>,
        state: Arc<State>,
    ) {
        let (recorder, observers) = (Arc::clone(&self.recorder), self.observers.clone());
        let (error, buffer) = failed.unzip();
        event::tell("a listener", move || {
            if let Some(watch) = observers.watch() {
                let report = watch.message(&request.message(), flight::Backend::Host, request.bytes);
                watch.ended(report, elapsed, error.as_ref(), Track::Background);
            }
            if let Some(error) = &error {
                recorder.after_error(error);
            }
        });
        event::tell("the destructor of a buffer", move || drop(buffer));
        event::tell("the destructor of a buffer", move || drop(state));
    }

    /// Warns that a message has not ended for a long time.
    #[cold]
    fn warn(&self, request: &PendingMessage) {
        let missing: Vec<u32> = match request.context.peer {
            Some(peer) => vec![peer as u32],
            None => (0..self.peers.len()).filter(|peer| *peer != self.rank).map(|peer| peer as u32).collect(),
        };
        self.recorder.warn(&request.doing(), request.deadline.elapsed(), request.deadline.limit(), &missing);
    }
}

/// Describes the remains of a message that was given up. In an error, the text follows the message's name.
fn in_words(left: GivenUp) -> Option<String> {
    match left {
        GivenUp::Nothing | GivenUp::Sent(_) => None,
        GivenUp::Withdrawn => Some(" (the message was not sent: the matching receive gets an error)".to_owned()),
        GivenUp::Kept { source, bytes } => {
            Some(format!(" (a message of {bytes} B from rank {source} had begun to arrive: it is kept for the next receive)"))
        }
        GivenUp::Lost { source, bytes } => Some(format!(
            " (a message of {bytes} B from rank {source} had begun to arrive, and is lost: it could not be kept, or \
             the next receive could not take it)"
        )),
    }
}
