//! Messages that have not ended, as errors, records and listeners speak of them.

use std::sync::Arc;

use crate::communicator::completion::State;
use crate::communicator::message::MessageContext;
use crate::communicator::pinned::ErasedBuffer;
use crate::deadline::Deadline;
use crate::flight::Message;
use crate::host::point_to_point::Ticket;

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

/// A message that goes on in the background.
pub(super) struct Outstanding {
    pub(super) ticket: Ticket,
    pub(super) request: PendingMessage,
    pub(super) has_warned: bool,
    pub(super) buffer: Box<dyn ErasedBuffer>,
    pub(super) state: Arc<State>,
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
