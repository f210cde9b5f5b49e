//! Sends one message and receives one, for example to swap data with a peer. Neither message waits until the other is
//! posted.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller keeps alive")]

use std::sync::Arc;
use std::time::Duration;

use super::ProgressEngine;
use crate::communicator::work::message::{MessageBuffer, MessageContext, Received};
use crate::error::{Error, Result};
use crate::host::point_to_point::Attempt;

type Message = (MessageContext, MessageBuffer);

impl ProgressEngine {
    /// Sends one message and receives another. If nothing blocks the send, it is done at once; if something does, both
    /// messages are posted as requests. Returns the results of both.
    ///
    /// # Safety
    ///
    /// Both places stay valid, and untouched by others, during the call.
    pub(super) unsafe fn exchange(self: &Arc<Self>, sending: &Message, receiving: &Message, limit: Duration) -> Result<[Received; 2]> {
        let mut inner = self.lock_to_post(&sending.0, &sending.1)?;
        // SAFETY: the place is valid during the call (this function's contract), in which `transfer_posted` takes over
        // what has begun.
        let begun = match unsafe { Self::attempt(&mut inner, &sending.0, sending.1) } {
            Attempt::Done(envelope) => {
                self.recorder.note_message(&sending.1.recorded(&sending.0));
                // SAFETY: the place is valid during the call (this function's contract).
                let received = unsafe { self.transfer_locked(inner, receiving, limit) };
                return Ok([sending.0.received(envelope), received.map_err(after_the_send)?]);
            }
            Attempt::Begun(ticket) => Some(ticket),
            Attempt::Wait => None,
        };
        // SAFETY: both places are valid during the call (this function's contract).
        let ended = unsafe { self.transfer_posted(inner, &[*sending, *receiving], begun, limit, || Ok(())) }?;
        ended.try_into().map_err(|_| Error::argument("message", "nothing was posted"))
    }
}

/// Adds to the error of a late receive that the other message of the call was sent.
fn after_the_send(mut error: Error) -> Error {
    if let Error::Timeout { doing, .. } = &mut error {
        doing.push_str("; 1 of the 2 messages of this call had ended");
    }
    error
}
