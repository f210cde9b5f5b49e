//! One message out and one in, as of two ranks that swap: neither waits for the other to be posted.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller keeps alive")]

use std::sync::Arc;
use std::time::Duration;

use super::blocking::Posteds;
use super::{Inner, ProgressEngine};
use crate::communicator::message::{MessageBuffer, MessageContext, Received};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::event::Locked;
use crate::host::point_to_point::{Attempt, Ticket};

type Message = (MessageContext, MessageBuffer);

impl ProgressEngine {
    /// Sends one message and receives another: at once if nothing is in the way of the first, else both as requests. What came of each.
    ///
    /// # Safety
    ///
    /// Both places stay valid, and untouched by others, during the call.
    pub(super) unsafe fn exchange(self: &Arc<Self>, sending: &Message, receiving: &Message, limit: Duration) -> Result<[Received; 2]> {
        let mut inner = self.lock_to_post(&sending.0, &sending.1)?;
        // SAFETY: the place is valid during the call (this function's contract), in which `exchange_posted` takes in what has begun.
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
        unsafe { self.exchange_posted(inner, sending, begun, receiving, limit) }
    }

    /// Posts both messages, of which the first may have begun, and waits for them.
    ///
    /// # Safety
    ///
    /// Both places stay valid, and untouched by others, during the call.
    unsafe fn exchange_posted<'a>(
        self: &'a Arc<Self>,
        inner: Locked<'a, Inner>,
        sending: &Message,
        begun: Option<Ticket>,
        receiving: &Message,
        limit: Duration,
    ) -> Result<[Received; 2]> {
        let deadline = Deadline::after(limit);
        let mut posted = Posteds::new(self, 2);
        // Declared after `posted`, which takes the lock when it is dropped.
        let mut inner = inner;
        // SAFETY: the places are valid during the call (this function's contract), and `posted`, with room for two, lives less long.
        let posting = unsafe {
            posted.post(&mut inner, sending, begun, &deadline).and_then(|()| posted.post(&mut inner, receiving, None, &deadline))
        };
        if let Err(error) = posting {
            drop(inner);
            self.give_up_unfinished(&mut posted, error.clone(), false)?;
            return Err(error);
        }
        self.advance(&mut inner);
        self.wait_all(inner, &mut posted)?;
        let mut received = posted.received();
        received
            .next()
            .zip(received.next())
            .map(|(sent, received)| [sent, received])
            .ok_or_else(|| Error::argument("message", "nothing was posted"))
    }
}

/// Has the error of a receive that was late say that the message of the same call is sent: that effect is there.
fn after_the_send(mut error: Error) -> Error {
    if let Error::Timeout { doing, .. } = &mut error {
        doing.push_str("; 1 of the 2 messages of this call had ended");
    }
    error
}
