//! The input of one link.
//!
//! A small amount is read ahead, so that a header and a short message take one read. Anything longer goes directly from
//! the link to its destination.

use std::io;
use std::time::Duration;

use crate::base::tuning::point_to_point::{AHEAD_BYTES, DIRECT_BYTES, DRAIN_READS, PASS_BYTES, PASS_FRAMES, PAST_CACHE_BYTES};
use crate::call::element::TypeTag;
use crate::host::link::ByteLink;

use super::frame::{Frame, HEADER_BYTES, IN_HEAD_BYTES};
use super::matching_state::{MatchingState, PayloadTarget};
use super::outgoing::Outgoing;
use super::{Envelope, MessageError};

/// The reason why nothing more will arrive.
#[derive(Debug)]
pub(super) enum ReadEnd {
    /// The peer left normally. The peer had opened this many links to this rank before it left.
    Left { opened: u32 },
    /// The link failed.
    Failed(io::Error),
    /// The peer sent bytes that no rank sends.
    Malformed(String),
}

impl From<io::Error> for ReadEnd {
    fn from(error: io::Error) -> Self {
        ReadEnd::Failed(error)
    }
}

impl From<String> for ReadEnd {
    fn from(reason: String) -> Self {
        ReadEnd::Malformed(reason)
    }
}

/// The message that the bytes belong to.
#[derive(Debug, Clone, Copy)]
enum Of {
    /// A short message.
    Short(Envelope),
    /// A piece of the long message with this number. `past` is true if the message is too long for the cache.
    Long { long: u32, past: bool },
}

/// Incoming bytes of a message: `bytes` of them, starting at byte `at` of the destination.
#[derive(Debug)]
struct Payload {
    of: Of,
    place: PayloadTarget,
    at: usize,
    bytes: usize,
    filled: usize,
}

/// Bytes that were read before their destination was known.
#[derive(Debug)]
struct Ahead {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether the last read of the link returned all that had arrived.
    is_link_empty: bool,
}

impl Ahead {
    fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Reads more bytes.
    fn fill<L: ByteLink>(&mut self, link: &mut L) -> io::Result<usize> {
        if self.start < self.end {
            self.bytes.copy_within(self.start..self.end, 0);
        }
        self.end -= self.start;
        self.start = 0;
        let read = read_some(link, &mut self.bytes[self.end..])?;
        self.end += read;
        self.is_link_empty = self.end < self.bytes.len();
        Ok(read)
    }

    /// Moves bytes to their destination: those that were read ahead, otherwise directly from the link if that is
    /// worthwhile.
    fn take<L: ByteLink>(&mut self, link: &mut L, into: &mut [u8], past: bool) -> io::Result<usize> {
        if self.start == self.end && past {
            return sensible(link.try_read_past(into)?, into.len());
        }
        if self.start == self.end && into.len() >= DIRECT_BYTES {
            let read = read_some(link, into)?;
            self.is_link_empty = read < into.len();
            return Ok(read);
        }
        if self.start == self.end {
            self.fill(link)?;
        }
        let bytes = into.len().min(self.end - self.start);
        into[..bytes].copy_from_slice(&self.as_slice()[..bytes]);
        self.consume(bytes);
        Ok(bytes)
    }

    /// Reads and discards up to `most` bytes.
    fn skip<L: ByteLink>(&mut self, link: &mut L, most: usize) -> io::Result<usize> {
        if self.start == self.end {
            self.fill(link)?;
        }
        let bytes = most.min(self.end - self.start);
        self.consume(bytes);
        Ok(bytes)
    }
}

/// Reads, and treats a read of zero bytes as the end of the stream.
#[inline]
fn read_some<L: ByteLink>(link: &mut L, into: &mut [u8]) -> io::Result<usize> {
    sensible(link.try_read(into)?, into.len())
}

/// Returns the length of a read, if it is valid. Zero means the end of the stream.
#[inline]
fn sensible(read: usize, most: usize) -> io::Result<usize> {
    if read == 0 || read > most { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
}

/// The reading state of one link.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Number of the link.
    link: usize,
    peer: usize,
    ahead: Ahead,
    payload: Option<Payload>,
}

impl Incoming {
    pub(super) fn new(link: usize, peer: usize) -> Self {
        let ahead = Ahead { bytes: vec![0; AHEAD_BYTES].into_boxed_slice(), start: 0, end: 0, is_link_empty: false };
        Self { link, peer, ahead, payload: None }
    }

    /// Returns the length and the first bytes of the next message, if its frame is all that has arrived and it has this
    /// tag and element. The message remains the next one until [`Incoming::take_message`]. Returns `Ok(None)` in all
    /// other cases.
    #[inline]
    pub(super) fn peek_message<L: ByteLink>(
        &self,
        link: &mut L,
        tag: u64,
        element: TypeTag,
        looks: u32,
    ) -> io::Result<Option<(usize, [u8; IN_HEAD_BYTES])>> {
        if self.payload.is_some() || !self.ahead.as_slice().is_empty() {
            return Ok(None);
        }
        Ok(link.peek_frame(looks)?.and_then(|head| Frame::message_of(&head, tag, element)))
    }

    /// Takes the message that [`Incoming::peek_message`] found.
    #[inline]
    pub(super) fn take_message<L: ByteLink>(link: &mut L, begin: &[u8; IN_HEAD_BYTES], into: &mut [u8]) {
        if into.len() <= IN_HEAD_BYTES {
            into.copy_from_slice(&begin[..into.len()]);
            link.take_frame(HEADER_BYTES, &mut []);
        } else {
            link.take_frame(HEADER_BYTES, into);
        }
    }

    /// Returns the envelope of the next message, if it is a short one with this tag. Reads once if nothing was read
    /// ahead. Returns `Ok(None)` for anything else, which remains the next frame.
    #[inline]
    pub(super) fn front<L: ByteLink>(&mut self, link: &mut L, tag: u64) -> io::Result<Option<Envelope>> {
        if self.payload.is_some() {
            return Ok(None);
        }
        if self.ahead.as_slice().is_empty() {
            self.ahead.fill(link)?;
        }
        Ok(match Frame::decode(self.ahead.as_slice()) {
            Ok(Some((Frame::Eager { tag: sent, element, bytes }, _))) if sent == tag => {
                Some(Envelope { source: self.peer, tag, element, bytes })
            }
            _ => None,
        })
    }

    /// Takes the header of the message that [`Incoming::front`] found, and the bytes of this message that were read
    /// ahead. Returns the number of these bytes.
    #[inline]
    pub(super) fn take_front(&mut self, into: &mut [u8]) -> usize {
        self.ahead.consume(HEADER_BYTES);
        let bytes = self.ahead.as_slice().len().min(into.len());
        into[..bytes].copy_from_slice(&self.ahead.as_slice()[..bytes]);
        self.ahead.consume(bytes);
        bytes
    }

    /// Reads more of a message that [`Incoming::take_front`] began.
    #[inline]
    pub(super) fn read_on<L: ByteLink>(&mut self, link: &mut L, into: &mut [u8]) -> io::Result<usize> {
        self.ahead.take(link, into, false)
    }

    /// Directs the rest of a message that [`Incoming::take_front`] began to this receive.
    pub(super) fn go_on(&mut self, message: Envelope, receive: u32, filled: usize) {
        let place = PayloadTarget::Request(receive);
        self.payload = Some(Payload { of: Of::Short(message), place, at: 0, bytes: message.bytes, filled });
    }

    /// Handles a receive that gives up while its short message is arriving. No more of it is written to the caller's
    /// memory, and it is kept for the next receive. Returns its length if it arrives on this link.
    pub(super) fn forget(&mut self, receive: u32, matching_state: &mut MatchingState) -> Option<usize> {
        let is_it = |payload: &&mut Payload| matches!(payload.place, PayloadTarget::Request(of) if of == receive);
        let payload = self.payload.as_mut().filter(is_it)?;
        payload.place = match matching_state.requests.destination(receive, 0..payload.bytes) {
            Some(filled) => PayloadTarget::Buffer(filled.to_vec()),
            None => PayloadTarget::Nowhere,
        };
        Some(payload.bytes)
    }

    /// Whether a short message that no receive takes has arrived in part.
    pub(super) fn has_rest(&self) -> bool {
        self.payload.as_ref().is_some_and(|payload| matches!(payload.place, PayloadTarget::Buffer(_) | PayloadTarget::Nowhere))
    }

    /// Reads what has arrived. Returns whether anything had. If the stream has ended, the frames that were complete
    /// before have been handled.
    pub(super) fn read<L: ByteLink>(
        &mut self,
        link: &mut L,
        matching_state: &mut MatchingState,
        outgoing: &mut Outgoing,
    ) -> Result<bool, ReadEnd> {
        let (mut total, mut frames) = (0, 0);
        self.ahead.is_link_empty = false;
        while total < PASS_BYTES && frames < PASS_FRAMES && !(self.ahead.is_link_empty && self.ahead.as_slice().is_empty()) {
            let step = if self.payload.is_some() {
                self.read_payload(link, matching_state).map_err(ReadEnd::from)
            } else {
                frames += 1;
                self.read_frame(link, matching_state, outgoing)
            };
            match step {
                Ok(read) => total += read,
                Err(ReadEnd::Failed(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(ReadEnd::Failed(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(end) => return Err(end),
            }
        }
        Ok(total > 0)
    }

    /// Handles the next frame, or reads more of it.
    fn read_frame<L: ByteLink>(
        &mut self,
        link: &mut L,
        matching_state: &mut MatchingState,
        outgoing: &mut Outgoing,
    ) -> Result<usize, ReadEnd> {
        let Some((frame, length)) = Frame::decode(self.ahead.as_slice())? else { return Ok(self.ahead.fill(link)?) };
        self.ahead.consume(length);
        match frame {
            Frame::Eager { tag, element, bytes } => {
                let envelope = Envelope { source: self.peer, tag, element, bytes };
                matching_state.charge(self.peer, self.link, bytes)?;
                let place = matching_state.place_short(envelope);
                self.begin_payload(Payload { of: Of::Short(envelope), place, at: 0, bytes, filled: 0 }, matching_state);
            }
            Frame::RequestToSend { message, tag, element, bytes } => {
                let envelope = Envelope { source: self.peer, tag, element, bytes };
                matching_state.charge(self.peer, self.link, bytes)?;
                matching_state.announced(envelope, self.link, message).into_iter().for_each(|frame| outgoing.answer(frame));
            }
            Frame::ClearToSend { message, reply } => {
                if matching_state.cleared(self.link, message, reply)? {
                    outgoing.pieces_of(message);
                }
            }
            Frame::Refuse { message, element, capacity } => matching_state.refused(self.link, message, element, capacity)?,
            Frame::Data { reply: long, bytes } => {
                let (at, of) = matching_state.place_piece(self.link, long, bytes)?;
                let of = Of::Long { long, past: of >= PAST_CACHE_BYTES };
                self.begin_payload(Payload { of, place: PayloadTarget::Long(long), at, bytes, filled: 0 }, matching_state);
            }
            Frame::Withdraw { message, after } => {
                let answer = matching_state.withdrawn(self.peer, self.link, message, Duration::from_millis(after));
                answer.into_iter().for_each(|frame| outgoing.answer(frame));
            }
            Frame::GaveUp { tag, after } => {
                matching_state.charge(self.peer, self.link, 0)?;
                matching_state.gave_up(self.peer, tag, Duration::from_millis(after));
            }
            Frame::Abandon { message, reply } => {
                if matching_state.is_abandoned(self.link, message, reply) {
                    outgoing.forget(message, matching_state);
                    outgoing.answer(Frame::Withdraw { message, after: 0 });
                    matching_state.requests.finish(message, Err(MessageError::Abandoned { peer: self.peer }));
                }
            }
            Frame::AbortReason(abort_reason) => {
                matching_state.heard.get_or_insert(abort_reason);
            }
            Frame::Credit { cost } => outgoing.add_credit(cost, matching_state.limit())?,
            Frame::Leave { opened } => return Err(ReadEnd::Left { opened }),
        }
        Ok(length)
    }

    fn begin_payload(&mut self, payload: Payload, matching_state: &mut MatchingState) {
        self.payload = Some(payload);
        self.finish_payload(matching_state);
    }

    /// Reads some of the bytes that follow a header.
    fn read_payload<L: ByteLink>(&mut self, link: &mut L, matching_state: &mut MatchingState) -> io::Result<usize> {
        let Some(payload) = &mut self.payload else { return Ok(0) };
        let range = payload.at + payload.filled..payload.at + payload.bytes;
        let past = matches!(payload.of, Of::Long { past: true, .. });
        let read = match &mut payload.place {
            PayloadTarget::Nowhere => self.ahead.skip(link, range.len())?,
            PayloadTarget::Buffer(buffer) => self.ahead.take(link, &mut buffer[range], past)?,
            PayloadTarget::Request(receive) => match matching_state.requests.destination(*receive, range.clone()) {
                Some(into) => self.ahead.take(link, into, past)?,
                None => self.ahead.skip(link, range.len())?,
            },
            PayloadTarget::Long(long) => match matching_state.long_part(*long, range.clone()) {
                Some(into) => self.ahead.take(link, into, past)?,
                None => self.ahead.skip(link, range.len())?,
            },
        };
        payload.filled += read;
        self.finish_payload(matching_state);
        Ok(read)
    }

    /// Notifies the matching state if all bytes have arrived.
    fn finish_payload(&mut self, matching_state: &mut MatchingState) {
        if let Some(Payload { of, place, bytes, .. }) = self.payload.take_if(|payload| payload.filled == payload.bytes) {
            match of {
                Of::Short(envelope) => matching_state.short_complete(envelope, place),
                Of::Long { long, .. } => matching_state.piece_complete(long, bytes),
            }
        }
    }

    /// Reads and discards what has arrived, so that closing the link does not look like a failure to the peer.
    pub(super) fn drain<L: ByteLink>(&mut self, link: &mut L) {
        // Bounded: a peer that keeps sending is not waited for.
        for _ in 0..DRAIN_READS {
            if link.try_read(&mut self.ahead.bytes).is_err() {
                return;
            }
        }
    }
}
