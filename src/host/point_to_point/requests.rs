//! The requests of one rank that are under way or whose outcome was not yet taken, and the caller's memory that they use.

#![expect(unsafe_code, reason = "requests outlive the call that posts them, so they hold addresses instead of borrows")]

use std::ops::Range;
use std::slice;

use crate::call::element::TypeTag;
use crate::host::bools;

use super::{Envelope, Outcome, Ticket};

/// The memory of a receive.
#[derive(Debug)]
enum Room {
    /// The caller's.
    Lent { start: *mut u8, bytes: usize },
    /// The request's own, made when a message has met it; none that is longer than `most`.
    Own { bytes: Vec<u8>, most: usize },
}

/// The bytes of a message that is being sent. It exists inside a pending request, until that finishes or is cancelled, and while a call
/// tries to do without a request.
#[derive(Debug)]
pub(super) struct Source {
    start: *const u8,
    bytes: usize,
}

// SAFETY: an address of plain bytes; `Source::new` has the caller promise that they may be read as long as the value exists,
// on whichever thread.
unsafe impl Send for Source {}

impl Source {
    /// # Safety
    ///
    /// As long as the value exists, the bytes at `start` are initialised and nobody writes them.
    pub(super) unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// The bytes.
    pub(super) fn as_slice(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: promised to `new`: initialised and unwritten as long as `self` exists, which the borrow does not outlive.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }
}

/// Where a message is being received. It exists as long as a [`Source`] does. When it is dropped, what should be truth values are truth
/// values, however the request ended.
#[derive(Debug)]
pub(super) struct Destination {
    memory: Room,
    /// Up to where a message that should be truth values was, or may have been, written.
    unnormalised: usize,
    is_bool: bool,
}

// SAFETY: a vector, or an address of plain bytes; `Destination::new` has the caller promise that they are ours alone as long as the
// value exists, on whichever thread.
unsafe impl Send for Destination {}

impl Destination {
    /// # Safety
    ///
    /// As long as the value exists, the bytes at `start` are initialised, may be written, and nobody else reads or writes them.
    pub(super) unsafe fn new(element: TypeTag, start: *mut u8, bytes: usize) -> Self {
        Self { memory: Room::Lent { start, bytes }, unnormalised: 0, is_bool: element.is_bool() }
    }

    /// Memory of its own for a message of any length up to `most`.
    pub(super) fn own(most: usize) -> Self {
        Self { memory: Room::Own { bytes: Vec::new(), most }, unnormalised: 0, is_bool: false }
    }

    /// A message of this length, which is not longer than the capacity, is about to be written. Whether there is memory for it.
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

    /// The memory of its own, with the message; empty where it is the caller's.
    fn take_own(&mut self) -> Vec<u8> {
        match &mut self.memory {
            Room::Own { bytes, .. } => std::mem::take(bytes),
            Room::Lent { .. } => Vec::new(),
        }
    }

    /// Some of the bytes, to be written; `None` where there are not as many.
    pub(super) fn part(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        if self.is_bool {
            self.unnormalised = self.unnormalised.max(range.end.min(self.capacity()));
        }
        self.as_mut_slice().get_mut(range)
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Room::Lent { bytes: 0, .. } => &mut [],
            // SAFETY: promised to `new`: initialised and ours alone as long as `self` exists; the borrow is exclusive.
            Room::Lent { start, bytes } => unsafe { slice::from_raw_parts_mut(*start, *bytes) },
            Room::Own { bytes, .. } => bytes,
        }
    }

    /// How long a message may be.
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

/// A send under way.
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

/// How far a send has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendPhase {
    /// Waits for its turn on its link, or for a receive on this same rank.
    Queued,
    /// Announced on this link.
    Announced { link: usize },
    /// Cleared by the peer, which calls it `reply`; so much has been handed to the link.
    Cleared { link: usize, reply: u32, sent: usize },
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) from: Option<usize>,
    pub(super) element: TypeTag,
    pub(super) into: Destination,
    pub(super) phase: ReceivePhase,
}

/// How far a receive has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceivePhase {
    /// No message yet.
    Posted,
    /// A short message is being read from this peer.
    Reading { source: usize },
    /// The long message of this number was cleared, and comes in.
    Filling { long: u32 },
}

/// A request.
#[derive(Debug)]
pub(super) enum Request {
    Send(Sending),
    Receive(Receiving),
    /// Over; and the message, where the receive had memory of its own.
    Done(Outcome, Vec<u8>),
}

/// A slot. `generation` changes whenever tickets no longer name its request.
#[derive(Debug)]
struct Slot {
    generation: u32,
    request: Option<Request>,
}

/// All requests, in slots that are used again.
#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Requests {
    /// Adds a request; the number of its slot.
    pub(super) fn insert(&mut self, request: Request) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize].request = Some(request);
            return index;
        }
        self.slots.push(Slot { generation: 0, request: Some(request) });
        (self.slots.len() - 1) as u32
    }

    /// The ticket of a request in its slot.
    pub(super) fn ticket(&self, index: u32) -> Ticket {
        Ticket(u64::from(self.slots[index as usize].generation) << 32 | u64::from(index))
    }

    /// The slot that a ticket names; `None` once its outcome was taken or it was cancelled.
    pub(super) fn index(&self, ticket: Ticket) -> Option<u32> {
        let index = ticket.0 as u32;
        let slot = self.slots.get(index as usize)?;
        (slot.request.is_some() && u64::from(slot.generation) == ticket.0 >> 32).then_some(index)
    }

    /// The request in a slot.
    pub(super) fn request(&self, index: u32) -> Option<&Request> {
        self.slots.get(index as usize)?.request.as_ref()
    }

    /// The send in a slot, if it is one.
    pub(super) fn send(&mut self, index: u32) -> Option<&mut Sending> {
        match self.slots.get_mut(index as usize)?.request.as_mut()? {
            Request::Send(sending) => Some(sending),
            _ => None,
        }
    }

    /// The receive in a slot, if it is one.
    pub(super) fn receive(&mut self, index: u32) -> Option<&mut Receiving> {
        match self.slots.get_mut(index as usize)?.request.as_mut()? {
            Request::Receive(receiving) => Some(receiving),
            _ => None,
        }
    }

    /// The bytes that a pending send still has to give; empty for anything else.
    pub(super) fn source(&self, index: u32) -> &[u8] {
        match self.request(index) {
            Some(Request::Send(Sending { data: Some(data), .. })) => data.as_slice(),
            _ => &[],
        }
    }

    /// A part of the memory that a pending receive fills; `None` for anything else, and where there is less.
    pub(super) fn destination(&mut self, index: u32, part: Range<usize>) -> Option<&mut [u8]> {
        self.receive(index)?.into.part(part)
    }

    /// Ends a request: its memory is let go. Its outcome is kept for the ticket, or forgotten where nobody holds one.
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

    /// Ends a send well. `rank` is this rank.
    pub(super) fn finish_send(&mut self, index: u32, rank: usize) {
        if let Some(Sending { tag, element, bytes, .. }) = self.send(index) {
            let envelope = Envelope { source: rank, tag: *tag, element: *element, bytes: *bytes };
            self.finish(index, Ok(envelope));
        }
    }

    /// Makes the ticket of a request void, where the request itself must stay a while longer.
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

    /// The slots whose request fits.
    pub(super) fn find(&self, fits: impl Fn(&Request) -> bool) -> Vec<u32> {
        let such = |slot: &Slot| slot.request.as_ref().is_some_and(&fits);
        (0..self.slots.len() as u32).filter(|index| such(&self.slots[*index as usize])).collect()
    }
}
