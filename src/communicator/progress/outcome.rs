//! How a message begins and ends, on record and in the caller's terms.

use super::engine::ProgressEngine;
use super::pending::PendingMessage;
use crate::communicator::message::{MessageBuffer, MessageContext, Received};
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::host::abort_reason::Interrupted;
use crate::host::point_to_point::{MessageError, Outcome};

impl ProgressEngine {
    /// Puts on record that a message is asked for.
    pub(super) fn begin(&self, context: &MessageContext, memory: &MessageBuffer, deadline: &Deadline) -> PendingMessage {
        let number = self.recorder.begin_message(&memory.recorded(context));
        PendingMessage { context: *context, sends: memory.sends(), bytes: memory.bytes(), deadline: deadline.clone(), number }
    }

    /// What a message gets that was under way when the communicator ended.
    pub(super) fn check_health(&self, request: &PendingMessage) -> Result<()> {
        let Some(abort_reason) = self.health.abort_reason() else { return Ok(()) };
        let error = abort_reason.to_error(&request.doing(), &request.deadline, &self.peers);
        self.health.keep_cause(&error);
        Err(error)
    }

    /// How a message ended, in the caller's terms.
    pub(super) fn outcome(&self, outcome: Outcome, request: &PendingMessage) -> Result<Received> {
        outcome.map(|envelope| request.context.received(envelope)).map_err(|error| match error {
            MessageError::Ended(abort_reason) => self.stopped(&abort_reason.into(), request),
            other => Error::Message { doing: request.doing(), reason: other.to_string() },
        })
    }

    /// A message that could not be posted.
    #[cold]
    pub(super) fn not_posted(&self, stop: &Interrupted, request: &PendingMessage) -> Error {
        let error = self.stopped(stop, request);
        self.recorder.fail_message(request.number, &error);
        error
    }

    /// A stop, in the caller's terms.
    fn stopped(&self, stop: &Interrupted, request: &PendingMessage) -> Error {
        stop.to_error(&request.doing(), &request.deadline, &self.peers)
    }

    /// A deadline that passed.
    pub(super) fn late(&self, request: &PendingMessage) -> Error {
        let is_missing = |peer: &Peer| request.context.peer.map_or(peer.rank != self.rank, |missing| peer.rank == missing);
        let missing: Vec<Peer> = self.peers.iter().filter(|peer| is_missing(peer)).cloned().collect();
        let arrived = self.peers.iter().filter(|peer| peer.rank == self.rank && !is_missing(peer)).cloned().collect();
        Error::Timeout { doing: request.doing(), elapsed: request.deadline.elapsed(), missing, arrived }
    }
}
