//! Messages of bytes: the crate's own messages, and objects. A receive of an object allocates memory once it has
//! matched a message.

#![expect(unsafe_code, reason = "posted messages point into bytes that their caller lends")]

use std::sync::Arc;
use std::time::Duration;
#[cfg(feature = "serde")]
use std::time::Instant;

use super::ProgressEngine;
#[cfg(feature = "serde")]
use crate::communicator::work::message::{MessageBuffer, send_place};
use crate::communicator::work::message::{MessageContext, Received, receive_place};
use crate::error::Result;
#[cfg(feature = "serde")]
use crate::flight;
#[cfg(feature = "serde")]
use crate::observe::Track;

impl ProgressEngine {
    /// Receives as many bytes as `into` holds, or fewer.
    pub(in crate::communicator) fn receive_bytes(
        self: &Arc<Self>,
        context: &MessageContext,
        into: &mut [u8],
        limit: Duration,
    ) -> Result<Received> {
        // SAFETY: the bytes are borrowed mutably for the whole call.
        unsafe { self.transfer_one(context, receive_place(into.into()), limit) }
    }

    /// Sends the bytes of an object.
    #[cfg(feature = "serde")]
    pub(in crate::communicator) fn send_object(self: &Arc<Self>, context: &MessageContext, bytes: &[u8], limit: Duration) -> Result<()> {
        // SAFETY: the bytes are borrowed for the whole call.
        unsafe { self.transfer_one(context, send_place(bytes.into()), limit) }.map(drop)
    }

    /// Receives the bytes of an object, at most `most` of them, in one message. Their memory is allocated once their
    /// number is known.
    #[cfg(feature = "serde")]
    pub(in crate::communicator) fn receive_object(
        self: &Arc<Self>,
        context: &MessageContext,
        most: usize,
        limit: Duration,
    ) -> Result<(Received, Vec<u8>)> {
        let watched = self.observers.watch().map(|watch| (watch, Instant::now()));
        let memory = MessageBuffer::Object { most };
        let result = self.lock_to_post(context, &memory).and_then(|inner| {
            // SAFETY: the message uses no memory of the caller.
            unsafe { self.wait_one(inner, &(*context, memory), None, limit) }
        });
        if let Some((watch, began)) = watched {
            let bytes = result.as_ref().map_or(0, |(_, object)| object.len());
            let report = watch.message(&context.recorded(false, bytes), flight::Backend::Host, bytes);
            watch.ended(report, began.elapsed(), result.as_ref().err(), Track::Messages);
        }
        result.inspect_err(|error| self.recorder.after_error(error))
    }
}
