//! The output of one link, and its order.
//!
//! Answers go first. Then come messages in the order in which they were posted, and then pieces of long messages that
//! the peer has cleared, in turn. A frame that was begun is finished before anything else. If the credit for messages
//! is exhausted, further messages wait until the peer reports that it has received more. Answers and pieces do not
//! wait, so the peer can go on receiving.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use crate::base::tuning::point_to_point::PASS_BYTES;
use crate::call::element::TypeTag;
use crate::host::link::ByteLink;

use super::frame::{CHUNK_BYTES, Frame, WHOLE_BYTES};
use super::matching_state::{MatchingState, cost};
use super::requests::{SendPhase, Sending};

/// An entry in the queue of messages, which keeps its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Posting {
    /// The message of this send, or the announcement of that message.
    Message(u32),
    /// A frame that must not overtake the messages before it.
    Frame(Frame),
    /// The note of a message that was given up. The peer keeps the note, so the note has a cost.
    Note(Frame),
}

/// The bytes that follow a header.
#[derive(Debug)]
enum Payload {
    None,
    /// A whole short message.
    Message(u32),
    /// A piece of a long message.
    Piece {
        send: u32,
        from: usize,
        bytes: usize,
    },
    /// Bytes of a send that was cancelled after its frame was begun.
    Owned(Vec<u8>),
}

impl Payload {
    /// Returns the send that it belongs to.
    fn send(&self) -> Option<u32> {
        match self {
            Payload::Message(send) | Payload::Piece { send, .. } => Some(*send),
            Payload::None | Payload::Owned(_) => None,
        }
    }

    fn as_slice<'a>(&'a self, matching_state: &'a MatchingState) -> &'a [u8] {
        match self {
            Payload::None => &[],
            Payload::Message(send) => matching_state.requests.source(*send),
            Payload::Piece { send, from, bytes } => matching_state.requests.source(*send).get(*from..from + bytes).unwrap_or_default(),
            Payload::Owned(bytes) => bytes,
        }
    }
}

/// The frame that is being written.
#[derive(Debug)]
struct Current {
    head: [u8; WHOLE_BYTES],
    head_bytes: usize,
    payload: Payload,
    written: usize,
}

impl Current {
    fn new(frame: Frame, payload: Payload) -> Self {
        let (head, head_bytes) = frame.encode();
        Self { head, head_bytes, payload, written: 0 }
    }

    /// Writes what the link accepts of the rest. Returns how many bytes, and whether all is written.
    fn write<L: ByteLink>(&mut self, link: &mut L, matching_state: &MatchingState) -> io::Result<(usize, bool)> {
        let head = &self.head[self.written.min(self.head_bytes)..self.head_bytes];
        let payload = &self.payload.as_slice(matching_state)[self.written.saturating_sub(self.head_bytes)..];
        let left = head.len() + payload.len();
        let written = if head.is_empty() {
            link.try_write(&[IoSlice::new(payload)])?
        } else {
            link.try_write(&[IoSlice::new(head), IoSlice::new(payload)])?
        };
        if written == 0 || written > left {
            return Err(io::Error::new(io::ErrorKind::WriteZero, format!("a link wrote {written} of {left} B")));
        }
        self.written += written;
        Ok((written, written == left))
    }
}

/// A short message whose first bytes were written before it became a request.
#[derive(Debug)]
pub(super) struct Begun {
    head: [u8; WHOLE_BYTES],
    head_bytes: usize,
    written: usize,
    pub(super) is_whole: bool,
}

/// The queues of one link.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Number of the link.
    link: usize,
    peer: usize,
    /// The remaining credit: the total cost that further messages may have.
    credit: usize,
    answers: VecDeque<Frame>,
    messages: VecDeque<Posting>,
    pieces: VecDeque<u32>,
    current: Option<Current>,
}

impl Outgoing {
    pub(super) fn new(link: usize, peer: usize, credit: usize) -> Self {
        Self { link, peer, credit, answers: VecDeque::new(), messages: VecDeque::new(), pieces: VecDeque::new(), current: None }
    }

    /// Whether nothing is left to write.
    pub(super) fn is_empty(&self) -> bool {
        self.current.is_none() && self.answers.is_empty() && self.messages.is_empty() && self.pieces.is_empty()
    }

    /// Whether a frame was begun that the link has not taken completely.
    pub(super) fn is_stuck(&self) -> bool {
        self.current.is_some()
    }

    /// Adds credit for messages that the peer has received.
    pub(super) fn add_credit(&mut self, cost: u64, limit: usize) -> Result<(), String> {
        let credit = usize::try_from(cost).ok().and_then(|cost| self.credit.checked_add(cost)).filter(|credit| *credit <= limit);
        self.credit = credit.ok_or_else(|| format!("an acknowledgement of {cost} B of messages, which is more than was sent"))?;
        Ok(())
    }

    /// Queues an answer, an abort reason, or a cancellation, before everything that has not begun.
    pub(super) fn answer(&mut self, frame: Frame) {
        self.answers.push_back(frame);
    }

    /// Queues a message in order.
    pub(super) fn message(&mut self, send: u32) {
        self.messages.push_back(Posting::Message(send));
    }

    /// Queues a frame in order with the messages.
    pub(super) fn in_turn(&mut self, frame: Frame) {
        self.messages.push_back(Posting::Frame(frame));
    }

    /// Queues the pieces of a long message that the peer has cleared.
    pub(super) fn pieces_of(&mut self, send: u32) {
        self.pieces.push_back(send);
    }

    /// Removes a send. If a frame of it was begun, the rest of that frame is copied, so that the send's memory is free.
    /// Returns whether the complete message will still be sent, which is the case for a short one.
    pub(super) fn forget(&mut self, send: u32, matching_state: &MatchingState) -> bool {
        self.messages.retain(|posting| *posting != Posting::Message(send));
        self.pieces.retain(|other| *other != send);
        let Some(current) = self.current.as_mut().filter(|current| current.payload.send() == Some(send)) else { return false };
        let is_whole = matches!(current.payload, Payload::Message(_));
        current.payload = Payload::Owned(current.payload.as_slice(matching_state).to_vec());
        is_whole
    }

    /// Replaces a message whose turn has not come with a note. Returns whether the message was there.
    pub(super) fn give_up(&mut self, send: u32, note: Frame) -> bool {
        let place = self.messages.iter_mut().find(|posting| **posting == Posting::Message(send));
        place.map(|posting| *posting = Posting::Note(note)).is_some()
    }

    /// Writes a short message if nothing is queued before it, without making it a request. Returns the beginning of the
    /// frame, and how much of the frame and the message was written; `None` if the message must wait.
    #[inline]
    pub(super) fn write_at_once<L: ByteLink>(&mut self, link: &mut L, tag: u64, element: TypeTag, bytes: &[u8]) -> Option<Begun> {
        let credit = self.credit.checked_sub(cost(bytes.len())).filter(|_| self.is_empty())?;
        if link.try_write_frame(&Frame::head(tag, element, bytes), bytes).ok()? {
            self.credit = credit;
            return Some(Begun { head: [0; _], head_bytes: 0, written: 0, is_whole: true });
        }
        let (head, head_bytes) = Frame::Eager { tag, element, bytes: bytes.len() }.encode();
        let written = link.try_write(&[IoSlice::new(&head[..head_bytes]), IoSlice::new(bytes)]).ok()?;
        self.credit = credit;
        Some(Begun { head, head_bytes, written, is_whole: written == head_bytes + bytes.len() })
    }

    /// Makes the rest of a message that [`Outgoing::write_at_once`] began belong to this send.
    pub(super) fn go_on(&mut self, begun: Begun, send: u32) {
        let Begun { head, head_bytes, written, .. } = begun;
        self.current = Some(Current { head, head_bytes, payload: Payload::Message(send), written });
    }

    /// Writes what can be written now. Returns whether anything was written.
    pub(super) fn write<L: ByteLink>(&mut self, link: &mut L, matching_state: &mut MatchingState) -> io::Result<bool> {
        let mut total = 0;
        while total < PASS_BYTES {
            if self.current.is_none() {
                self.current = self.next(matching_state);
            }
            let Some(current) = &mut self.current else { break };
            match current.write(link, matching_state) {
                Ok((written, is_whole)) => {
                    total += written;
                    if is_whole {
                        self.finish(matching_state);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(total > 0)
    }

    /// Returns the next frame to begin.
    fn next(&mut self, matching_state: &mut MatchingState) -> Option<Current> {
        if let Some(frame) = self.answers.pop_front().or_else(|| matching_state.take_owed(self.peer, self.link)) {
            return Some(Current::new(frame, Payload::None));
        }
        self.next_message(matching_state).or_else(|| self.next_piece(matching_state))
    }

    /// Returns the next frame among the messages, if there is enough credit.
    fn next_message(&mut self, matching_state: &mut MatchingState) -> Option<Current> {
        match *self.messages.front()? {
            Posting::Frame(frame) => {
                self.messages.pop_front();
                Some(Current::new(frame, Payload::None))
            }
            Posting::Note(frame) => {
                self.credit = self.credit.checked_sub(cost(0))?;
                self.messages.pop_front();
                Some(Current::new(frame, Payload::None))
            }
            Posting::Message(send) => {
                let cost = cost(matching_state.requests.source(send).len());
                self.credit = self.credit.checked_sub(cost)?;
                self.messages.pop_front();
                let (frame, is_short) = matching_state.begin_send(send, self.link)?;
                Some(Current::new(frame, if is_short { Payload::Message(send) } else { Payload::None }))
            }
        }
    }

    /// Returns the next piece of a long message.
    fn next_piece(&mut self, matching_state: &mut MatchingState) -> Option<Current> {
        while let Some(send) = self.pieces.pop_front() {
            let Some(Sending { bytes, phase: SendPhase::Cleared { reply, sent, .. }, .. }) = matching_state.requests.send(send) else {
                continue;
            };
            let piece = (*bytes - *sent).min(CHUNK_BYTES);
            let payload = Payload::Piece { send, from: *sent, bytes: piece };
            return Some(Current::new(Frame::Data { reply: *reply, bytes: piece }, payload));
        }
        None
    }

    /// Completes the current frame.
    fn finish(&mut self, matching_state: &mut MatchingState) {
        match self.current.take().map(|current| current.payload) {
            Some(Payload::Message(send)) => matching_state.short_sent(send),
            Some(Payload::Piece { send, bytes, .. }) => {
                if matching_state.piece_sent(send, bytes) {
                    self.pieces.push_back(send);
                }
            }
            Some(Payload::Owned(_) | Payload::None) | None => {}
        }
    }
}
