//! The requests of one rank that are pending or whose outcome has not been taken, and the caller's memory that they
//! use.

#![expect(unsafe_code, reason = "requests outlive the call that posts them, so they hold addresses instead of borrows")]

use std::ops::Range;
use std::slice;

use crate::call::element::TypeTag;
use crate::host::bools;

use super::{Envelope, Outcome, Ticket};

/// The memory of a receive.
#[derive(Debug)]
enum Room {
    /// The caller's memory.
    Lent { start: *mut u8, bytes: usize },
    /// The request's own memory, allocated when a message has been matched. No longer than `most`.
    Own { bytes: Vec<u8>, most: usize },
}

/// The bytes of a message that is being sent. It exists inside a pending request, until the request finishes or is
/// cancelled. It also exists during a call that tries to do without a request.
#[derive(Debug)]
pub(super) struct Source {
    start: *const u8,
    bytes: usize,
}

// SAFETY: an address of plain bytes; the caller of `Source::new` promises that they may be read as long as the value
// exists, on any thread.
unsafe impl Send for Source {}

impl Source {
    /// # Safety
    ///
    /// As long as the value exists, the bytes at `start` are initialised and nothing writes them.
    pub(super) unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns the bytes.
    pub(super) fn as_slice(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: promised to `new`: initialised and unwritten as long as `self` exists, which the borrow does not outlive.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }
}

/// The destination of a message that is being received. Its lifetime is like that of a [`Source`]. If it holds `bool`s,
/// dropping it makes all of them valid, however the request ended.
#[derive(Debug)]
pub(super) struct Destination {
    memory: Room,
    /// The end of the range in which `bool`s of a message were, or may have been, written.
    unnormalised: usize,
    is_bool: bool,
}

// SAFETY: a vector, or an address of plain bytes; the caller of `Destination::new` promises that they are exclusively
// ours as long as the value exists, on any thread.
unsafe impl Send for Destination {}

impl Destination {
    /// # Safety
    ///
    /// As long as the value exists, the bytes at `start` are initialised and may be written, and nothing else reads or
    /// writes them.
    pub(super) unsafe fn new(element: TypeTag, start: *mut u8, bytes: usize) -> Self {
        Self { memory: Room::Lent { start, bytes }, unnormalised: 0, is_bool: element.is_bool() }
    }

    /// Creates a destination with its own memory, for a message of any length up to `most`.
    pub(super) fn own(most: usize) -> Self {
        Self { memory: Room::Own { bytes: Vec::new(), most }, unnormalised: 0, is_bool: false }
    }

    /// Prepares for a message of this length, which does not exceed the capacity. Returns whether there is memory for
    /// it.
    pub(super) fn make_room(&mut self, length: usize) -> bool {
        let Room::Own { bytes, .. } = &mut self.memory else { return true };
        let mut room = Vec::new();
        if room.try_reserve_exact(length).is_err() {
            return false;
        }
        room.resize(length, 0);
        *bytes = room;
        true
    }

    /// Takes its own memory, with the message; empty if the memory is the caller's.
    fn take_own(&mut self) -> Vec<u8> {
        match &mut self.memory {
            Room::Own { bytes, .. } => std::mem::take(bytes),
            Room::Lent { .. } => Vec::new(),
        }
    }

    /// Returns a range of the bytes for writing; `None` if there are fewer.
    pub(super) fn part(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        if self.is_bool {
            self.unnormalised = self.unnormalised.max(range.end.min(self.capacity()));
        }
        self.as_mut_slice().get_mut(range)
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Room::Lent { bytes: 0, .. } => &mut [],
            // SAFETY: promised to `new`: initialised and exclusively ours as long as `self` exists; the borrow is
            // exclusive.
            Room::Lent { start, bytes } => unsafe { slice::from_raw_parts_mut(*start, *bytes) },
            Room::Own { bytes, .. } => bytes,
        }
    }

    /// Returns the longest possible length of a message.
    pub(super) fn capacity(&self) -> usize {
        match self.memory {
            Room::Lent { bytes, .. } => bytes,
            Room::Own { most, .. } => most,
        }
    }
}

impl Drop for Destination {
    #[inline]
    fn drop(&mut self) {
        if self.unnormalised > 0 {
            let written = self.unnormalised;
            bools::normalise(&mut self.as_mut_slice()[..written]);
        }
    }
}

/// A pending send.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) to: usize,
    pub(super) tag: u64,
    pub(super) element: TypeTag,
    pub(super) bytes: usize,
    /// `None` once it was cancelled and only the peer's answer is awaited.
    pub(super) data: Option<Source>,
    pub(super) phase: SendPhase,
}

/// The progress of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendPhase {
    /// The send waits for its turn on its link, or for a receive on this same rank.
    Queued,
    /// The send was announced on this link.
    Announced { link: usize },
    /// The peer has cleared the send. `reply` is the peer's number for this message. `sent` bytes have been passed to
    /// the link.
    Cleared { link: usize, reply: u32, sent: usize },
}

/// A pending receive.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) from: Option<usize>,
    pub(super) element: TypeTag,
    pub(super) into: Destination,
    pub(super) phase: ReceivePhase,
}

/// The progress of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceivePhase {
    /// The receive has not been matched.
    Posted,
    /// A short message from this peer is being read.
    Reading { source: usize },
    /// The long message with this number was cleared and is arriving.
    Filling { long: u32 },
}

/// A request.
#[derive(Debug)]
pub(super) enum Request {
    Send(Sending),
    Receive(Receiving),
    /// The request has ended. If the request was a receive with its own memory, the vector contains the message.
    Done(Outcome, Vec<u8>),
}

/// A slot. `generation` changes whenever existing tickets become void.
#[derive(Debug)]
struct Slot {
    generation: u32,
    request: Option<Request>,
}

/// All requests, in slots that are reused.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Requests {
    /// Adds a request and returns the number of its slot.
    pub(super) fn insert(&mut self, request: Request) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize].request = Some(request);
            return index;
        }
        self.slots.push(Slot { generation: 0, request: Some(request) });
        (self.slots.len() - 1) as u32
    }

    /// Returns the ticket of the request in a slot.
    pub(super) fn ticket(&self, index: u32) -> Ticket {
        Ticket(u64::from(self.slots[index as usize].generation) << 32 | u64::from(index))
    }

    /// Returns the slot that a ticket names; `None` once its outcome was taken or it was cancelled.
    pub(super) fn index(&self, ticket: Ticket) -> Option<u32> {
        let index = ticket.0 as u32;
        let slot = self.slots.get(index as usize)?;
        (slot.request.is_some() && u64::from(slot.generation) == ticket.0 >> 32).then_some(index)
    }

    /// Returns the request in a slot.
    pub(super) fn request(&self, index: u32) -> Option<&Request> {
        self.slots.get(index as usize)?.request.as_ref()
    }

    /// Returns the send in a slot, if it is one.
    pub(super) fn send(&mut self, index: u32) -> Option<&mut Sending> {
        match self.slots.get_mut(index as usize)?.request.as_mut()? {
            Request::Send(sending) => Some(sending),
            _ => None,
        }
    }

    /// Returns the receive in a slot, if it is one.
    pub(super) fn receive(&mut self, index: u32) -> Option<&mut Receiving> {
        match self.slots.get_mut(index as usize)?.request.as_mut()? {
            Request::Receive(receiving) => Some(receiving),
            _ => None,
        }
    }

    /// Returns the bytes of a pending send; empty for anything else.
    pub(super) fn source(&self, index: u32) -> &[u8] {
        match self.request(index) {
            Some(Request::Send(Sending { data: Some(data), .. })) => data.as_slice(),
            _ => &[],
        }
    }

    /// Returns a part of the memory that a pending receive fills; `None` for anything else, or if the memory is
    /// shorter.
    pub(super) fn destination(&mut self, index: u32, part: Range<usize>) -> Option<&mut [u8]> {
        self.receive(index)?.into.part(part)
    }

    /// Ends a request and releases its memory. Its outcome is kept for the ticket, or discarded if there is none.
    pub(super) fn finish(&mut self, index: u32, outcome: Outcome) {
        let abandoned = match self.request(index) {
            Some(Request::Send(sending)) => sending.data.is_none(),
            Some(Request::Receive(_)) => false,
            Some(Request::Done(..)) | None => return,
        };
        if abandoned {
            self.remove(index);
            return;
        }
        let receiving = self.receive(index).filter(|_| outcome.is_ok());
        let message = receiving.map(|receiving| receiving.into.take_own()).unwrap_or_default();
        self.slots[index as usize].request = Some(Request::Done(outcome, message));
    }

    /// Ends a send successfully. `rank` is this rank.
    pub(super) fn finish_send(&mut self, index: u32, rank: usize) {
        if let Some(Sending { tag, element, bytes, .. }) = self.send(index) {
            let envelope = Envelope { source: rank, tag: *tag, element: *element, bytes: *bytes };
            self.finish(index, Ok(envelope));
        }
    }

    /// Voids the ticket of a request that must itself stay.
    pub(super) fn disown(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
    }

    /// Empties a slot.
    pub(super) fn remove(&mut self, index: u32) -> Option<Request> {
        let request = self.slots.get_mut(index as usize)?.request.take()?;
        self.disown(index);
        self.free.push(index);
        Some(request)
    }

    /// Returns the slots whose request satisfies `fits`.
    pub(super) fn find(&self, fits: impl Fn(&Request) -> bool) -> Vec<u32> {
        let such = |slot: &Slot| slot.request.as_ref().is_some_and(&fits);
        (0..self.slots.len() as u32).filter(|index| such(&self.slots[*index as usize])).collect()
    }
}
