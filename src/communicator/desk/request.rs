//! One message as errors, records and listeners speak of it, and how it ends.

use super::{Desk, Place, Terms};
use crate::communicator::messages::Received;
use crate::deadline::Deadline;
use crate::error::{Error, Peer, Result};
use crate::flight::Message;
use crate::host::notice::Stop;
use crate::host::point_to_point::{Envelope, MessageError, Outcome};

/// A message that was asked for.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) terms: Terms,
    pub(super) sends: bool,
    pub(super) bytes: usize,
    pub(super) deadline: Deadline,
    /// Its number in the flight recorder.
    pub(super) number: u64,
}

impl Request {
    /// The message as it is put on record.
    pub(super) fn message(&self) -> Message {
        self.terms.recorded(self.sends, self.bytes)
    }

    /// `send to rank 3, tag 7`.
    pub(super) fn doing(&self) -> String {
        self.terms.doing(self.sends)
    }
}

impl Terms {
    /// What came, in the caller's terms.
    #[inline]
    pub(super) fn received(&self, envelope: Envelope) -> Received {
        Received { source: envelope.source, tag: envelope.tag, count: envelope.bytes / self.element_bytes }
    }
}

impl Desk {
    /// Puts on record that a message is asked for.
    pub(super) fn begin(&self, terms: &Terms, place: &Place, deadline: &Deadline) -> Request {
        let number = self.health.flight().begin_message(&place.recorded(terms));
        Request { terms: *terms, sends: place.sends(), bytes: place.bytes(), deadline: deadline.clone(), number }
    }

    /// What a message gets that was under way when the communicator ended.
    pub(super) fn check_health(&self, request: &Request) -> Result<()> {
        let Some(notice) = self.health.notice() else { return Ok(()) };
        let error = notice.to_error(&request.doing(), &request.deadline, &self.peers);
        self.health.keep_cause(&error);
        Err(error)
    }

    /// How a message ended, in the caller's terms.
    pub(super) fn outcome(&self, outcome: Outcome, request: &Request) -> Result<Received> {
        outcome.map(|envelope| request.terms.received(envelope)).map_err(|error| match error {
            MessageError::Ended(notice) => self.stopped(&notice.into(), request),
            other => Error::Message { doing: request.doing(), reason: other.to_string() },
        })
    }

    /// A message that could not be posted.
    #[cold]
    pub(super) fn not_posted(&self, stop: &Stop, request: &Request) -> Error {
        let error = self.stopped(stop, request);
        self.health.flight().fail_message(request.number, &error);
        error
    }

    /// A stop, in the caller's terms.
    fn stopped(&self, stop: &Stop, request: &Request) -> Error {
        stop.to_error(&request.doing(), &request.deadline, &self.peers)
    }

    /// A deadline that passed.
    pub(super) fn late(&self, request: &Request) -> Error {
        let is_missing = |peer: &Peer| request.terms.peer.map_or(peer.rank != self.rank, |missing| peer.rank == missing);
        let missing: Vec<Peer> = self.peers.iter().filter(|peer| is_missing(peer)).cloned().collect();
        let arrived = self.peers.iter().filter(|peer| peer.rank == self.rank && !is_missing(peer)).cloned().collect();
        Error::Timeout { doing: request.doing(), elapsed: request.deadline.elapsed(), missing, arrived }
    }
}
