//! The two streams of one link: the remaining work of a run with the peer, the outgoing message, and input that has not
//! been consumed.

#![expect(unsafe_code, reason = "payload goes straight from the spans of the plan")]

use std::io::{self, IoSlice};

use super::memory::Context;
use super::schedule::{NONE, Schedule};
use super::wire::{self, FIRST_BYTES, HEADER_BYTES, Malformed, Message, PAYLOAD_MAX};
use crate::base::tuning::engine::{FOLLOWERS, INPUT_BYTES, WRITE_BYTES};
use crate::host::link::ByteLink;

/// An outgoing message.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) head: [u8; FIRST_BYTES],
    pub(super) head_len: usize,
    pub(super) head_sent: usize,
    /// How many bytes of the payload are left.
    pub(super) payload: usize,
    /// Whether there is an outgoing message.
    pub(super) is_open: bool,
}

/// The remaining work of a run with one peer.
#[derive(Debug)]
pub(super) struct RunState {
    /// The next send and the next receive.
    pub(super) send: u32,
    pub(super) receive: u32,
    pub(super) send_total: u64,
    pub(super) receive_total: u64,
    /// How many bytes of the next send and the next receive have moved.
    pub(super) sent: usize,
    pub(super) received: usize,
    /// Whether the first message of this call has been sent, and received.
    pub(super) has_sent: bool,
    pub(super) has_received: bool,
    pub(super) outgoing: Outgoing,
    /// How many payload bytes of the incoming message are left.
    pub(super) incoming: Option<usize>,
}

impl RunState {
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

    /// Writes what the link accepts of the open message. Returns `None` if it accepts nothing, otherwise the count and
    /// whether all was written.
    pub(super) fn write(&mut self, link: &mut impl ByteLink, context: &Context<'_>) -> io::Result<Option<(usize, bool)>> {
        let (head, payload) = self.rest(context);
        let asked = head.len() + payload.len();
        let written = match head {
            [] => link.try_write(&[IoSlice::new(payload)]),
            _ => link.try_write(&[IoSlice::new(head), IoSlice::new(payload)]),
        };
        let Some(count) = moved(written)? else { return Ok(None) };
        let count = count.min(asked);
        self.count_written(count);
        Ok(Some((count, count == asked)))
    }

    /// Writes like [`RunState::write`], together with the following messages that can proceed: one write of a megabyte
    /// takes half the time of sixteen. Finishes the steps that are sent.
    pub(super) fn write_all(
        &mut self,
        link: &mut impl ByteLink,
        schedule: &mut Schedule,
        context: &Context<'_>,
    ) -> io::Result<Option<(usize, bool)>> {
        let ends_step = self.sent + self.outgoing.payload == context.span(self.send).len;
        if self.outgoing.payload >= WRITE_BYTES || (ends_step && !schedule.is_ready(schedule.following(self.send))) {
            let written = self.write(link, context)?;
            if written.is_some() {
                self.finish_written(0, schedule, context);
            }
            return Ok(written);
        }
        self.gather(link, schedule, context)
    }

    /// Writes the open message and the following ones that can proceed.
    fn gather(&mut self, link: &mut impl ByteLink, schedule: &mut Schedule, context: &Context<'_>) -> io::Result<Option<(usize, bool)>> {
        let mut heads = [[0; HEADER_BYTES]; FOLLOWERS];
        let mut parts = [IoSlice::new(&[]); 2 * FOLLOWERS + 2];
        let (head, payload) = self.rest(context);
        (parts[0], parts[1]) = (IoSlice::new(head), IoSlice::new(payload));
        let (mut used, mut asked) = (2, head.len() + payload.len());
        let (mut step, mut done) = (self.send, self.sent + payload.len());
        for head in &mut heads {
            if done == context.span(step).len {
                (step, done) = (schedule.following(step), 0);
            }
            if asked >= WRITE_BYTES || !schedule.is_ready(step) {
                break;
            }
            let len = (context.span(step).len - done).min(PAYLOAD_MAX);
            *head = wire::encode_next(len);
            // SAFETY: the plan was checked; the payload ends with its span (`done + len` is at most its length); the
            // slice is gone after this call of the link, during which nothing is written to the plan's memory.
            let payload = unsafe { context.spaces.bytes(context.span(step), done, len) };
            (parts[used], parts[used + 1]) = (IoSlice::new(head), IoSlice::new(payload));
            (used, asked, done) = (used + 2, asked + HEADER_BYTES + len, done + len);
        }
        let Some(count) = moved(link.try_write(&parts[..used]))? else { return Ok(None) };
        let count = count.min(asked);
        self.finish_written(count, schedule, context);
        Ok(Some((count, count == asked)))
    }

    /// Returns what is left of the open message.
    fn rest(&self, context: &Context<'_>) -> (&[u8], &[u8]) {
        let outgoing = &self.outgoing;
        // SAFETY: the plan was checked; the payload of a message ends with its span at the latest; the returned slices
        // live for one call of the link, during which nothing is written to the plan's memory.
        let payload = unsafe { context.spaces.bytes(context.span(self.send), self.sent, outgoing.payload) };
        (&outgoing.head[outgoing.head_sent..outgoing.head_len], payload)
    }

    /// Counts written bytes of the open message. Returns how many of `count` belong to the following messages.
    fn count_written(&mut self, count: usize) -> usize {
        let outgoing = &mut self.outgoing;
        let of_head = count.min(outgoing.head_len - outgoing.head_sent);
        let of_payload = (count - of_head).min(outgoing.payload);
        outgoing.head_sent += of_head;
        outgoing.payload -= of_payload;
        outgoing.is_open = outgoing.head_sent < outgoing.head_len || outgoing.payload > 0;
        self.sent += of_payload;
        count - of_head - of_payload
    }

    /// Counts written bytes of the open message and the following ones, and finishes the steps that are sent.
    fn finish_written(&mut self, mut count: usize, schedule: &mut Schedule, context: &Context<'_>) {
        loop {
            count = self.count_written(count);
            let len = context.span(self.send).len;
            if !self.outgoing.is_open && self.sent == len {
                self.sent = 0;
                self.send = schedule.finish(self.send);
            }
            if count == 0 {
                return;
            }
            self.open_message(context.span(self.send).len, context);
        }
    }
}

/// A small input buffer that is kept between calls, because a peer that runs ahead may have sent bytes of the next one.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// Empty until something is read.
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// The outcome of a read into the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filled {
    /// Nothing is available now.
    Nothing,
    /// Bytes were read, and there may be more.
    Full,
    /// All bytes that were available were read.
    Drained,
}

impl Input {
    /// Returns the buffered bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Whether the buffer is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Whether no byte can be added before some are consumed.
    pub(super) fn is_full(&self) -> bool {
        self.end - self.start == INPUT_BYTES
    }

    /// Discards the first `count` bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Returns the message at the front, without consuming it.
    pub(super) fn front(&self) -> Result<Option<(Message, usize)>, Malformed> {
        wire::parse(self.bytes())
    }

    /// Adds what the link has, as far as it fits.
    pub(super) fn fill(&mut self, link: &mut impl ByteLink) -> io::Result<Filled> {
        if self.bytes.is_empty() {
            self.bytes = vec![0; INPUT_BYTES].into_boxed_slice();
        }
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.bytes[self.end..];
        let asked = room.len();
        let Some(count) = moved(link.try_read(room))? else { return Ok(Filled::Nothing) };
        self.end += count.min(asked);
        Ok(if count < asked { Filled::Drained } else { Filled::Full })
    }
}

/// Returns how many bytes a link moved, at least one, or `None` if none can move now.
pub(super) fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok((count > 0).then_some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
