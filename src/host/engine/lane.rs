//! What a run still has to do with one peer, and the message that is on its way to it.

#![expect(unsafe_code, reason = "payload goes straight from the spans of the plan")]

use std::io::{self, IoSlice};

use super::input::moved;
use super::memory::Spaces;
use super::schedule::NONE;
use super::wire::{self, FIRST_BYTES, HEADER_BYTES, PAYLOAD_MAX};
use crate::call::Call;
use crate::host::link::ByteLink;
use crate::host::plan::{Action, Plan, Span};

/// What all parts of a run need to know. The plan has passed [`Spaces::check`] with these spaces.
pub(super) struct Context<'a> {
    pub(super) rank: usize,
    pub(super) plan: &'a Plan,
    pub(super) spaces: Spaces,
    pub(super) call: &'a Call,
    pub(super) fingerprint: [u8; Call::FINGERPRINT_BYTES],
}

impl Context<'_> {
    /// The bytes that a send or receive moves.
    pub(super) fn span(&self, step: u32) -> Span {
        match &self.plan.steps[step as usize].action {
            Action::Send { from: span, .. } | Action::Receive { into: span, .. } | Action::Copy { into: span, .. } => *span,
            Action::Fold { into, .. } => *into,
        }
    }
}

/// A message on its way out.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) head: [u8; FIRST_BYTES],
    pub(super) head_len: usize,
    pub(super) head_sent: usize,
    /// What is left of the payload.
    pub(super) payload: usize,
    /// Whether there is one at all.
    pub(super) is_open: bool,
}

/// What a run still has to do with one peer.
#[derive(Debug)]
pub(super) struct Lane {
    /// The next send and the next receive.
    pub(super) send: u32,
    pub(super) receive: u32,
    pub(super) send_total: u64,
    pub(super) receive_total: u64,
    /// How much of the next send and the next receive has been moved.
    pub(super) sent: usize,
    pub(super) received: usize,
    /// Whether the first message of this call has been sent and received.
    pub(super) has_sent: bool,
    pub(super) has_received: bool,
    pub(super) outgoing: Outgoing,
    /// What is left of the payload of the message that is coming in.
    pub(super) incoming: Option<usize>,
}

impl Lane {
    pub(super) fn new() -> Self {
        let outgoing = Outgoing { head: [0; FIRST_BYTES], head_len: 0, head_sent: 0, payload: 0, is_open: false };
        Self {
            send: NONE,
            receive: NONE,
            send_total: 0,
            receive_total: 0,
            sent: 0,
            received: 0,
            has_sent: false,
            has_received: false,
            outgoing,
            incoming: None,
        }
    }

    /// Begins the next message of a send of `len` bytes.
    pub(super) fn open_message(&mut self, len: usize, context: &Context<'_>) {
        let payload = (len - self.sent).min(PAYLOAD_MAX);
        let head_len = if self.has_sent { HEADER_BYTES } else { FIRST_BYTES };
        let outgoing = &mut self.outgoing;
        if self.has_sent {
            outgoing.head[..HEADER_BYTES].copy_from_slice(&wire::encode_next(payload));
        } else {
            outgoing.head = wire::encode_first(&context.fingerprint, self.send_total, payload);
        }
        (outgoing.head_len, outgoing.head_sent, outgoing.payload, outgoing.is_open) = (head_len, 0, payload, true);
        self.has_sent = true;
    }

    /// Writes what the link takes of the open message: `None` where it takes nothing, else the count, and whether that was all.
    pub(super) fn write(&mut self, link: &mut impl ByteLink, context: &Context<'_>) -> io::Result<Option<(usize, bool)>> {
        let outgoing = &mut self.outgoing;
        let head = &outgoing.head[outgoing.head_sent..outgoing.head_len];
        // SAFETY: the plan was checked; the payload of a message ends with its span at the latest; nothing is written to the
        // plan's memory during the call of the link.
        let payload = unsafe { context.spaces.bytes(context.span(self.send), self.sent, outgoing.payload) };
        let asked = head.len() + payload.len();
        let written = if head.is_empty() {
            link.try_write(&[IoSlice::new(payload)])
        } else {
            link.try_write(&[IoSlice::new(head), IoSlice::new(payload)])
        };
        let Some(count) = moved(written)? else { return Ok(None) };
        let count = count.min(asked);
        let of_head = count.min(head.len());
        outgoing.head_sent += of_head;
        outgoing.payload -= count - of_head;
        self.sent += count - of_head;
        outgoing.is_open = count < asked;
        Ok(Some((count, count == asked)))
    }
}
