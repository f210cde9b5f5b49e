//! The requests of one rank that are under way or whose outcome was not yet taken.

use std::ops::Range;

use crate::element::TypeTag;

use super::memory::{Destination, Source};
use super::{Envelope, Outcome, Ticket};

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
    /// `None` once it was cancelled and the rest of the message is only drained.
    pub(super) into: Option<Destination>,
    pub(super) phase: ReceivePhase,
}

/// How far a receive has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceivePhase {
    /// No message yet.
    Posted,
    /// A short message is being read from this peer.
    Reading { source: usize },
    /// A long message was cleared on this link; so much of it has come.
    Filling { link: usize, source: usize, message: u32, tag: u64, bytes: usize, filled: usize },
}

/// A request.
#[derive(Debug)]
pub(super) enum Request {
    Send(Sending),
    Receive(Receiving),
    Done(Outcome),
}

/// A slot; `generation` changes whenever its request is no longer what a ticket names.
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
        self.receive(index)?.into.as_mut()?.part(part)
    }

    /// Ends a request: its memory is let go, and its outcome kept for the ticket, or forgotten where nobody holds one.
    pub(super) fn finish(&mut self, index: u32, outcome: Outcome) {
        let abandoned = match self.request(index) {
            Some(Request::Send(sending)) => sending.data.is_none(),
            Some(Request::Receive(receiving)) => receiving.into.is_none(),
            Some(Request::Done(_)) | None => return,
        };
        if abandoned {
            self.remove(index);
            return;
        }
        self.slots[index as usize].request = Some(Request::Done(outcome));
    }

    /// Ends a send well. `rank` is this rank.
    pub(super) fn finish_send(&mut self, index: u32, rank: usize) {
        if let Some(Sending { tag, element, bytes, .. }) = self.send(index) {
            let envelope = Envelope { source: rank, tag: *tag, element: *element, bytes: *bytes };
            self.finish(index, Ok(envelope));
        }
    }

    /// Makes the ticket of a request that must stay a while longer mean nothing.
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

    /// The slots whose request is such.
    pub(super) fn find(&self, is_such: impl Fn(&Request) -> bool) -> Vec<u32> {
        let such = |slot: &Slot| slot.request.as_ref().is_some_and(&is_such);
        (0..self.slots.len() as u32).filter(|index| such(&self.slots[*index as usize])).collect()
    }
}
