//! Incoming long messages, which this rank has cleared and which arrive in pieces. No I/O.
//!
//! A message continues to arrive even after its receive has given up, because its sender may already be done with it.
//! The part that has arrived moves into the message's own memory, and the rest follows it there. The next receive takes
//! the message over, whether all of it has arrived or only a part.

use std::ops::Range;

use super::Envelope;
use super::frame::CHUNK_BYTES;
use crate::base::tuning::point_to_point::KEPT_BYTES;

/// The destination of a long message.
#[derive(Debug)]
pub(super) enum Place {
    /// The memory of this receive.
    Receive(u32),
    /// The message's own memory, because its receive gave up. The next receive will take the message.
    Kept(Vec<u8>),
    /// Nowhere, because there was no memory for the message, or a receive refused it.
    Nowhere,
}

/// An incoming long message.
#[derive(Debug)]
pub(super) struct LongMessage {
    pub(super) link: usize,
    /// The sender's number for it.
    pub(super) message: u32,
    pub(super) envelope: Envelope,
    /// Its position among the messages of its source.
    pub(super) order: u64,
    /// How many bytes of complete pieces have arrived.
    pub(super) filled: usize,
    pub(super) place: Place,
}

impl LongMessage {
    /// Creates a message that has been matched with this receive.
    pub(super) fn new(link: usize, message: u32, envelope: Envelope, order: u64, receive: u32) -> Self {
        Self { link, message, envelope, order, filled: 0, place: Place::Receive(receive) }
    }

    /// Whether all of it has arrived.
    pub(super) fn is_whole(&self) -> bool {
        self.filled == self.envelope.bytes
    }

    /// Returns the range that may have arrived: the next piece may have arrived in part.
    pub(super) fn begun(&self) -> Range<usize> {
        0..self.envelope.bytes.min(self.filled + CHUNK_BYTES)
    }
}

/// The incoming long messages of one rank, by the number that it gave them.
#[derive(Debug, Default)]
pub(super) struct LongMessages {
    slots: Vec<Option<LongMessage>>,
    free: Vec<u32>,
    /// The total length of the kept messages, including bytes that have not arrived yet.
    kept: usize,
}

impl LongMessages {
    /// Adds a message and returns its number.
    pub(super) fn insert(&mut self, message: LongMessage) -> u32 {
        if let Some(number) = self.free.pop() {
            self.slots[number as usize] = Some(message);
            return number;
        }
        self.slots.push(Some(message));
        (self.slots.len() - 1) as u32
    }

    pub(super) fn get(&self, number: u32) -> Option<&LongMessage> {
        self.slots.get(number as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut LongMessage> {
        self.slots.get_mut(number as usize)?.as_mut()
    }

    /// Removes a message, with the memory that it was kept in.
    pub(super) fn remove(&mut self, number: u32) {
        self.put(number, Place::Nowhere);
        if self.slots.get_mut(number as usize).is_some_and(|slot| slot.take().is_some()) {
            self.free.push(number);
        }
    }

    /// Removes a message once all of it has arrived; until then its bytes are discarded.
    pub(super) fn drain(&mut self, number: u32) {
        self.put(number, Place::Nowhere);
        if self.get(number).is_some_and(LongMessage::is_whole) {
            self.remove(number);
        }
    }

    /// Returns the numbers of the messages that satisfy `fits`.
    pub(super) fn find(&self, fits: impl Fn(&LongMessage) -> bool) -> Vec<u32> {
        let such = |number: &u32| self.get(*number).is_some_and(&fits);
        (0..self.slots.len() as u32).filter(such).collect()
    }

    /// Whether one of the messages satisfies `fits`.
    pub(super) fn any(&self, fits: impl Fn(&LongMessage) -> bool) -> bool {
        self.slots.iter().flatten().any(fits)
    }

    /// Changes the destination of a message. Returns the previous one.
    pub(super) fn put(&mut self, number: u32, place: Place) -> Option<Place> {
        let message = self.slots.get_mut(number as usize)?.as_mut()?;
        let kept = |place: &Place| if matches!(place, Place::Kept(_)) { message.envelope.bytes } else { 0 };
        self.kept = self.kept - kept(&message.place) + kept(&place);
        Some(std::mem::replace(&mut message.place, place))
    }

    /// Behaves as if the limit on kept messages had been reached.
    #[cfg(test)]
    pub(super) fn keep_no_more(&mut self) {
        self.kept = KEPT_BYTES;
    }

    /// Returns memory to keep a message of `bytes` bytes in; `None` beyond the limit, or if there is no memory.
    pub(super) fn room(&self, bytes: usize) -> Option<Vec<u8>> {
        let mut room = Vec::new();
        self.kept.checked_add(bytes).filter(|kept| *kept <= KEPT_BYTES)?;
        room.try_reserve_exact(bytes).ok()?;
        Some(room)
    }
}

/// Returns a part of a kept message. Its memory is reserved, and first touched as the message arrives.
pub(super) fn part_of(kept: &mut Vec<u8>, part: Range<usize>) -> &mut [u8] {
    kept.resize(kept.len().max(part.end), 0);
    &mut kept[part]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::element::{DType, TypeTag};

    fn message(bytes: usize) -> LongMessage {
        let envelope = Envelope { source: 1, tag: 2, element: TypeTag::Scalar(DType::U8), bytes };
        LongMessage::new(0, 0, envelope, 0, 7)
    }

    #[test]
    fn messages_are_kept_within_the_limit() {
        let mut messages = LongMessages::default();
        assert!(messages.room(usize::MAX).is_none() && messages.room(KEPT_BYTES + 1).is_none());
        let room = messages.room(KEPT_BYTES).expect("nothing is kept yet");
        let number = messages.insert(message(KEPT_BYTES));
        messages.put(number, Place::Kept(room));
        assert!(messages.room(1).is_none());
        messages.remove(number);
        let number = messages.insert(message(10));
        messages.put(number, Place::Kept(Vec::new()));
        assert!(messages.room(KEPT_BYTES - 10).is_some() && messages.room(KEPT_BYTES - 9).is_none());
        messages.drain(number);
        assert!(messages.get(number).is_some(), "its bytes still come");
        assert_eq!(messages.kept, 0);
        messages.get_mut(number).expect("it is there").filled = 10;
        messages.drain(number);
        assert!(messages.get(number).is_none());
        assert_eq!(messages.insert(message(1)), number, "numbers are used again");
    }

    #[test]
    fn a_piece_that_came_in_part_counts_as_begun() {
        let mut long = message(CHUNK_BYTES * 3);
        assert_eq!(long.begun(), 0..CHUNK_BYTES);
        long.filled = CHUNK_BYTES * 3 - 5;
        assert_eq!(long.begun(), 0..CHUNK_BYTES * 3);
        assert!(!long.is_whole());
    }
}
