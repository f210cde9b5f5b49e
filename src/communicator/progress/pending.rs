//! One message as errors, records and listeners speak of it, and how it ends.

use super::{MessageBuffer, MessageContext, ProgressEngine};
use crate::communicator::messages::Received;
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::flight::Message;
use crate::host::abort_reason::Interrupted;
use crate::host::point_to_point::{Envelope, MessageError, Outcome};

/// A message that was asked for.
#[derive(Debug, Clone)]
pub(super) struct PendingMessage {
    pub(super) context: MessageContext,
    pub(super) sends: bool,
    pub(super) bytes: usize,
    pub(super) deadline: Deadline,
    /// Its number in the flight recorder.
    pub(super) number: u64,
}

impl PendingMessage {
    /// The message as it is put on record.
    pub(super) fn message(&self) -> Message {
        self.context.recorded(self.sends, self.bytes)
    }

    /// `send to rank 3, tag 7`.
    pub(super) fn doing(&self) -> String {
        self.context.doing(self.sends)
    }
}

impl MessageContext {
    /// What came, in the caller's terms.
    #[inline]
    pub(super) fn received(&self, envelope: Envelope) -> Received {
        Received { source: envelope.source, tag: envelope.tag, count: envelope.bytes / self.element_bytes }
    }
}

impl ProgressEngine {
    /// Puts on record that a message is asked for.
    pub(super) fn begin(&self, context: &MessageContext, memory: &MessageBuffer, deadline: &Deadline) -> PendingMessage {
        let number = self.health.flight().begin_message(&memory.recorded(context));
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
        self.health.flight().fail_message(request.number, &error);
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
