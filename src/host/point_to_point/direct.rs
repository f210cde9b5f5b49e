//! Moves short messages without turning the send or the receive into a request. This is the usual case if two ranks
//! take turns.
//!
//! A send is written at once if nothing is queued before it. A receive that names its source and tag polls the front of
//! that source's stream for a while. If the link shows the beginning of the next frame, the message goes directly to
//! its destination. Everything else becomes a request.

#![expect(unsafe_code, reason = "reads and writes the caller's memory, like the requests that it stands in for")]

use std::hint;
use std::io;

use crate::base::tuning::point_to_point::{LOOKS, READS};
use crate::call::element::TypeTag;

use super::frame::EAGER_BYTES;
use super::incoming::Incoming;
use super::requests::{Destination, ReceivePhase, Receiving, Request, SendPhase, Sending, Source};
use super::{Connector, Envelope, Messages, Ticket};

/// The outcome of an attempt to transfer a message without a request.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// The message is complete.
    Done(Envelope),
    /// A part of the message has been transferred. A request transfers the rest.
    Begun(Ticket),
    /// Nothing was done. The message must be posted.
    Wait,
}

impl<C: Connector> Messages<C> {
    /// Sends a short message to `to`, which must be less than the world size, if nothing is queued before it.
    ///
    /// # Safety
    ///
    /// As for [`Messages::post_send`].
    pub(crate) unsafe fn try_send(&mut self, to: usize, tag: u64, element: TypeTag, data: *const u8, bytes: usize) -> Attempt {
        let state = &self.peers[to];
        let Some(link) = state.chosen.filter(|_| bytes <= EAGER_BYTES && state.gone.is_none()) else { return Attempt::Wait };
        let Some(channel) = self.channels[link].as_mut().filter(|channel| channel.end().is_none()) else { return Attempt::Wait };
        // SAFETY: promised by the caller; the source is dropped at the end, or with the request.
        let source = unsafe { Source::new(data, bytes) };
        let Some(begun) = channel.outgoing.write_at_once(&mut channel.link, tag, element, source.as_slice()) else { return Attempt::Wait };
        if begun.is_whole {
            return Attempt::Done(Envelope { source: self.rank, tag, element, bytes });
        }
        let request = Request::Send(Sending { to, tag, element, bytes, data: Some(source), phase: SendPhase::Queued });
        let send = self.matching_state.requests.insert(request);
        channel.outgoing.go_on(begun, send);
        self.patience.reset();
        Attempt::Begun(self.matching_state.requests.ticket(send))
    }

    /// Receives a short message from `from`, which must be less than the world size, if it arrives within a few polls
    /// and no other message is before it.
    ///
    /// # Safety
    ///
    /// As for [`Messages::post_receive`].
    pub(crate) unsafe fn try_receive(&mut self, from: usize, tag: u64, element: TypeTag, into: *mut u8, capacity: usize) -> Attempt {
        // SAFETY: promised by the caller; the destination is dropped at the end, or with the request.
        let into = unsafe { Destination::new(element, into, capacity) };
        self.receive_front(from, tag, element, into).unwrap_or(Attempt::Wait)
    }

    /// Returns how often to poll one stream again before anything else is done.
    #[inline]
    pub(super) fn looks(&self) -> u32 {
        if self.patience.is_crowded() { 0 } else { self.patience.looks(LOOKS) }
    }

    fn receive_front(&mut self, from: usize, tag: u64, element: TypeTag, mut into: Destination) -> Option<Attempt> {
        let link = self.matching_state.direct_link(from)?;
        let looks = self.looks();
        let channel = self.channels.get_mut(link)?.as_mut().filter(|channel| channel.peer == from && channel.end().is_none())?;
        // A broken stream is detected again once the receive is posted. So is a message that does not fit.
        if let Some((bytes, begin)) = channel.incoming.peek_message(&mut channel.link, tag, element, looks).ok()? {
            let into = into.part(0..bytes)?;
            self.matching_state.charge(from, link, bytes).ok()?;
            Incoming::take_message(&mut channel.link, &begin, into);
            return Some(self.received(link, Envelope { source: from, tag, element, bytes }));
        }
        let looks = if looks < LOOKS { 0 } else { READS };
        let message = look(looks, || channel.incoming.front(&mut channel.link, tag)).ok()??;
        if message.element != element || message.bytes > into.capacity() {
            return None;
        }
        self.matching_state.charge(from, link, message.bytes).ok()?;
        let bytes = into.part(0..message.bytes)?;
        let mut filled = channel.incoming.take_front(bytes);
        while let rest = &mut bytes[filled..]
            && !rest.is_empty()
        {
            let Ok(read) = look(looks, || channel.incoming.read_on(&mut channel.link, rest)) else {
                return Some(self.receive_rest(link, message, into, filled));
            };
            filled += read;
        }
        Some(self.received(link, message))
    }

    /// Accounts for a charged message that has been received.
    #[inline]
    fn received(&mut self, link: usize, message: Envelope) -> Attempt {
        self.matching_state.release(message.source, message.bytes);
        if self.matching_state.owes(message.source) {
            self.write(link);
        }
        Attempt::Done(message)
    }

    /// Makes a request for a receive whose message arrives slowly.
    fn receive_rest(&mut self, link: usize, message: Envelope, into: Destination, filled: usize) -> Attempt {
        let Envelope { source, element, .. } = message;
        let receiving = Receiving { from: Some(source), element, into, phase: ReceivePhase::Reading { source } };
        let receive = self.matching_state.requests.insert(Request::Receive(receiving));
        if let Some(channel) = &mut self.channels[link] {
            channel.incoming.go_on(message, receive, filled);
        }
        self.patience.reset();
        Attempt::Begun(self.matching_state.requests.ticket(receive))
    }
}

/// Repeats a call until it returns something: at most `looks` more times after the first.
#[inline]
fn look<T>(mut looks: u32, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && looks > 0 => hint::spin_loop(),
            other => return other,
        }
        looks -= 1;
    }
}
