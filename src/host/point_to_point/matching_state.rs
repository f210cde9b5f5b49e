//! The message state of one rank, independent of links: requests, and messages that no receive has matched yet.

use std::ops::Range;
use std::time::Duration;

use crate::base::tuning::point_to_point::SPARE_BUFFERS;
use crate::call::element::TypeTag;
use crate::host::abort_reason::AbortReason;

use super::frame::{EAGER_BYTES, Frame};
use super::long_messages::{LongMessage, LongMessages, Place, part_of};
use super::matching::Matching;
use super::requests::{Destination, ReceivePhase, Receiving, Request, Requests, SendPhase, Sending};
use super::{Envelope, GivenUp, MessageError};

/// The cost of a waiting message in addition to its bytes, so that empty ones are not free.
const OVERHEAD_BYTES: usize = 128;

/// Returns the share of the limit that a message uses from its sending until a receive has taken it. Both ends use the
/// same figure.
pub(super) const fn cost(message_bytes: usize) -> usize {
    if message_bytes <= EAGER_BYTES { message_bytes + OVERHEAD_BYTES } else { OVERHEAD_BYTES }
}

/// Returns the error for a message that is longer than its receive can take.
fn too_long(peer: usize, element: TypeTag, sent: usize, capacity: usize) -> MessageError {
    match element {
        TypeTag::Object => MessageError::TooLarge { peer, sent, most: capacity },
        _ => MessageError::Truncated { peer, sent, capacity },
    }
}

/// One source's use of the limit.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    /// Cost of messages that have arrived and have not been matched.
    waiting: usize,
    /// Cost of messages that have been received, without the sender having been notified of that yet.
    owed: usize,
    /// The link on which its messages arrive, once one has.
    link: Option<usize>,
}

/// A message that no receive has matched yet.
#[derive(Debug)]
enum Arrival {
    /// A complete short message.
    Short { element: TypeTag, bytes: Vec<u8> },
    /// A long message that is still with its sender.
    Announced { link: usize, message: u32, element: TypeTag, bytes: usize },
    /// A message from this rank to itself, still in the sender's memory.
    Own { request: u32 },
    /// A long message that may still be arriving. Its receive gave up.
    Kept { long: u32 },
    /// The note of a sender that gave up its message. The note costs as much as an announced message, unless the
    /// message had been matched.
    GivenUp { after: Duration, is_charged: bool },
}

/// The destination of a message while it is read.
#[derive(Debug)]
pub(super) enum PayloadTarget {
    /// The memory of a receive.
    Request(u32),
    /// A buffer, until a receive matches.
    Buffer(Vec<u8>),
    /// The destination of the long message with this number.
    Long(u32),
    /// None: the bytes are discarded.
    Nowhere,
}

/// The matching state of one rank.
#[derive(Debug)]
pub(super) struct MatchingState {
    rank: usize,
    pub(super) requests: Requests,
    matching: Matching<Arrival>,
    longs: LongMessages,
    /// By source.
    accounts: Vec<Account>,
    /// The total cost of unreceived messages that one source may have.
    limit: usize,
    spare: Vec<Vec<u8>>,
    /// The reason why the communicator ended, as a peer reported it; the first report counts.
    pub(super) heard: Option<AbortReason>,
}

impl MatchingState {
    pub(super) fn new(rank: usize, world_size: usize, limit: usize) -> Self {
        Self {
            rank,
            requests: Requests::default(),
            matching: Matching::new(world_size),
            longs: LongMessages::default(),
            accounts: vec![Account::default(); world_size],
            limit,
            spare: Vec::new(),
            heard: None,
        }
    }

    /// Returns the source of a message with this tag that has arrived and has not been received.
    #[cfg(feature = "cuda")]
    pub(super) fn has_arrived(&self, tag: u64) -> Option<usize> {
        self.matching.has_arrived(tag)
    }

    /// Returns the total cost that messages to one peer may have before it has received them.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Charges a message that begins to arrive. Senders know the limit and observe it.
    pub(super) fn charge(&mut self, source: usize, link: usize, bytes: usize) -> Result<(), String> {
        let account = &mut self.accounts[source];
        account.link = Some(link);
        account.waiting += cost(bytes);
        let used = account.waiting + account.owed;
        if used > self.limit {
            Err(format!("messages that no receive has taken cost {used} B, but the limit is {} B", self.limit))
        } else {
            Ok(())
        }
    }

    /// Releases the cost of a message that a receive has taken, or that was given up.
    pub(super) fn release(&mut self, source: usize, bytes: usize) {
        let account = &mut self.accounts[source];
        account.waiting -= cost(bytes);
        if source != self.rank {
            account.owed += cost(bytes);
        }
    }

    /// Returns the credit to send to the peer on this link, if it is large enough to be worth a frame.
    pub(super) fn take_owed(&mut self, peer: usize, link: usize) -> Option<Frame> {
        if !self.owes(peer) || self.accounts[peer].link != Some(link) {
            return None;
        }
        let account = &mut self.accounts[peer];
        Some(Frame::Credit { cost: std::mem::take(&mut account.owed) as u64 })
    }

    /// Returns the credit to send to a peer, however small, and on which link.
    pub(super) fn take_any_owed(&mut self, peer: usize) -> Option<(usize, Frame)> {
        let account = &mut self.accounts[peer];
        let cost = std::mem::take(&mut account.owed) as u64;
        account.link.filter(|_| cost > 0).map(|link| (link, Frame::Credit { cost }))
    }

    /// Returns a buffer of this length with arbitrary content.
    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(bytes, 0);
        buffer
    }

    /// Keeps a buffer for the next message.
    pub(super) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffer);
        }
    }

    /// Checks that a receive can take a message from `source`, and makes memory for it.
    fn check(&mut self, receive: u32, source: usize, element: TypeTag, bytes: usize) -> Result<(), MessageError> {
        let Some(Receiving { element: expected, into, .. }) = self.requests.receive(receive) else { return Ok(()) };
        let capacity = into.capacity();
        if *expected != element {
            return Err(MessageError::TypeMismatch { peer: source, sent: element, expected: *expected });
        }
        if bytes > capacity {
            return Err(too_long(source, element, bytes, capacity));
        }
        if !into.make_room(bytes) {
            return Err(MessageError::NoMemory { peer: source, sent: bytes });
        }
        Ok(())
    }

    /// Returns the link on which messages of `source` arrive. `None` if none has arrived yet, or if a message from it must
    /// match another receive before the one that is about to be made.
    #[inline]
    pub(super) fn direct_link(&self, source: usize) -> Option<usize> {
        self.accounts[source].link.filter(|_| self.matching.is_clear(source))
    }

    /// Returns the link on which messages of `source` arrive. `None` if none has arrived yet.
    pub(super) fn link_of(&self, source: usize) -> Option<usize> {
        self.accounts[source].link
    }

    /// Whether enough messages were received to be worth sending credit to the peer.
    #[inline]
    pub(super) fn owes(&self, peer: usize) -> bool {
        self.accounts[peer].owed >= self.limit / 4
    }

    /// Copies a short message to its waiting receive.
    fn deliver(&mut self, receive: u32, envelope: Envelope, bytes: &[u8]) {
        let outcome = self.check(receive, envelope.source, envelope.element, bytes.len());
        if outcome.is_ok()
            && let Some(into) = self.requests.destination(receive, 0..bytes.len())
        {
            into.copy_from_slice(bytes);
        }
        self.requests.finish(receive, outcome.map(|()| envelope));
    }

    /// Returns where to store a short message that begins to arrive.
    pub(super) fn place_short(&mut self, envelope: Envelope) -> PayloadTarget {
        let Envelope { source, tag, element, bytes } = envelope;
        let Some(receive) = self.matching.take_posted(source, tag) else { return PayloadTarget::Buffer(self.buffer(bytes)) };
        if let Err(refusal) = self.check(receive, source, element, bytes) {
            self.requests.finish(receive, Err(refusal));
            return PayloadTarget::Nowhere;
        }
        if let Some(receiving) = self.requests.receive(receive) {
            receiving.phase = ReceivePhase::Reading { source };
        }
        PayloadTarget::Request(receive)
    }

    /// Completes a short message that has arrived.
    pub(super) fn short_complete(&mut self, envelope: Envelope, place: PayloadTarget) {
        match place {
            PayloadTarget::Request(receive) => {
                self.requests.finish(receive, Ok(envelope));
                self.release(envelope.source, envelope.bytes);
            }
            PayloadTarget::Nowhere | PayloadTarget::Long(_) => self.release(envelope.source, envelope.bytes),
            // A receive may have been posted since its first bytes arrived.
            PayloadTarget::Buffer(bytes) => match self.matching.take_posted(envelope.source, envelope.tag) {
                Some(receive) => {
                    self.release(envelope.source, bytes.len());
                    self.deliver(receive, envelope, &bytes);
                    self.recycle(bytes);
                }
                None => self.matching.arrive(envelope.source, envelope.tag, Arrival::Short { element: envelope.element, bytes }),
            },
        }
    }

    /// Handles a long message announced on `link`. Returns the answer, if a receive is waiting for it.
    pub(super) fn announced(&mut self, envelope: Envelope, link: usize, message: u32) -> Option<Frame> {
        let Envelope { source, tag, element, bytes } = envelope;
        if let Some(receive) = self.matching.take_posted(source, tag) {
            self.release(source, bytes);
            let order = self.matching.next_order();
            return Some(self.answer(receive, envelope, order, link, message));
        }
        self.matching.arrive(source, tag, Arrival::Announced { link, message, element, bytes });
        None
    }

    /// Returns the answer of a receive to a long message.
    fn answer(&mut self, receive: u32, envelope: Envelope, order: u64, link: usize, message: u32) -> Frame {
        let Envelope { source, element, bytes, .. } = envelope;
        let refusal = self.check(receive, source, element, bytes).err();
        let Some(receiving) = self.requests.receive(receive) else { return Frame::Refuse { message, element, capacity: 0 } };
        if let Some(refusal) = refusal {
            let (element, capacity) = (receiving.element, receiving.into.capacity() as u64);
            self.requests.finish(receive, Err(refusal));
            return Frame::Refuse { message, element, capacity };
        }
        let long = self.longs.insert(LongMessage::new(link, message, envelope, order, receive));
        receiving.phase = ReceivePhase::Filling { long };
        Frame::ClearToSend { message, reply: long }
    }

    /// Adds a receive. Returns its slot, and the answer to send, if any, with its link.
    pub(super) fn receive(
        &mut self,
        from: Option<usize>,
        tag: Option<u64>,
        element: TypeTag,
        into: Destination,
    ) -> (u32, Option<(usize, Frame)>) {
        let receiving = Receiving { from, element, into, phase: ReceivePhase::Posted };
        let receive = self.requests.insert(Request::Receive(receiving));
        let Some((source, tag, order, arrival)) = self.matching.take_arrived(from, tag) else {
            self.matching.post(from, tag, receive);
            return (receive, None);
        };
        let answer = match arrival {
            Arrival::Short { element, bytes } => {
                self.release(source, bytes.len());
                self.deliver(receive, Envelope { source, tag, element, bytes: bytes.len() }, &bytes);
                self.recycle(bytes);
                None
            }
            Arrival::Announced { link, message, element, bytes } => {
                self.release(source, bytes);
                Some((link, self.answer(receive, Envelope { source, tag, element, bytes }, order, link, message)))
            }
            Arrival::Own { request } => {
                self.meet_own(request, receive);
                None
            }
            Arrival::Kept { long } => self.take_over(receive, long),
            Arrival::GivenUp { after, is_charged } => {
                if is_charged {
                    self.release(source, 0);
                }
                self.requests.finish(receive, Err(MessageError::Withdrawn { peer: source, after }));
                None
            }
        };
        (receive, answer)
    }

    /// Handles a send to this rank itself: it is matched, buffered if it is short, or left waiting for a receive.
    pub(super) fn send_to_self(&mut self, send: u32) {
        let Some(&mut Sending { tag, element, bytes, .. }) = self.requests.send(send) else { return };
        if let Some(receive) = self.matching.take_posted(self.rank, tag) {
            return self.meet_own(send, receive);
        }
        if bytes > EAGER_BYTES || self.accounts[self.rank].waiting + cost(bytes) > self.limit {
            return self.matching.arrive(self.rank, tag, Arrival::Own { request: send });
        }
        self.accounts[self.rank].waiting += cost(bytes);
        let mut buffer = self.buffer(bytes);
        buffer.copy_from_slice(self.requests.source(send));
        self.matching.arrive(self.rank, tag, Arrival::Short { element, bytes: buffer });
        self.requests.finish_send(send, self.rank);
    }

    /// Matches a send and a receive of this rank.
    fn meet_own(&mut self, send: u32, receive: u32) {
        let Some(&mut Sending { element, bytes, tag, .. }) = self.requests.send(send) else { return };
        if let Err(refusal) = self.check(receive, self.rank, element, bytes) {
            self.requests.finish(send, Err(refusal));
            self.requests.finish(receive, Err(refusal));
            return;
        }
        // Both are in the same table, so the destination is moved out for the copy.
        if let Some(receiving) = self.requests.receive(receive) {
            let mut into = std::mem::replace(&mut receiving.into, Destination::own(0));
            if let Some(place) = into.part(0..bytes) {
                place.copy_from_slice(self.requests.source(send));
            }
            if let Some(receiving) = self.requests.receive(receive) {
                receiving.into = into;
            }
        }
        self.requests.finish(receive, Ok(Envelope { source: self.rank, tag, element, bytes }));
        self.requests.finish_send(send, self.rank);
    }

    /// Begins a send whose turn on its link has come. Returns the first frame, and whether the bytes follow it at once.
    pub(super) fn begin_send(&mut self, send: u32, link: usize) -> Option<(Frame, bool)> {
        let sending = self.requests.send(send)?;
        let Sending { tag, element, bytes, .. } = *sending;
        if bytes <= EAGER_BYTES {
            return Some((Frame::Eager { tag, element, bytes }, true));
        }
        sending.phase = SendPhase::Announced { link };
        Some((Frame::RequestToSend { message: send, tag, element, bytes }, false))
    }

    /// Completes a short message that was handed to its link.
    pub(super) fn short_sent(&mut self, send: u32) {
        self.requests.finish_send(send, self.rank);
    }

    /// Counts a piece of a long message that was handed to its link. Returns whether there is more of it.
    pub(super) fn piece_sent(&mut self, send: u32, piece: usize) -> bool {
        let Some(sending) = self.requests.send(send) else { return false };
        let SendPhase::Cleared { sent, .. } = &mut sending.phase else { return false };
        *sent += piece;
        if *sent < sending.bytes {
            return true;
        }
        self.requests.finish_send(send, self.rank);
        false
    }

    /// Returns the send that a peer's answer on `link` refers to, if it awaits one.
    fn answered(&mut self, link: usize, message: u32) -> Result<&mut Sending, String> {
        self.requests
            .send(message)
            .filter(|sending| sending.phase == SendPhase::Announced { link })
            .ok_or_else(|| format!("an answer to message {message}, which was not announced on this link"))
    }

    /// Whether a long message that no receive takes is still arriving.
    pub(super) fn has_rest(&self) -> bool {
        self.longs.any(|long| !long.is_whole() && !matches!(long.place, Place::Receive(_)))
    }

    /// Whether a long message is still being sent after the peer, which had cleared it, gave it up.
    pub(super) fn is_abandoned(&mut self, link: usize, message: u32, reply: u32) -> bool {
        let is_it = |phase| matches!(phase, SendPhase::Cleared { link: l, reply: r, .. } if (l, r) == (link, reply));
        self.requests.send(message).is_some_and(|sending| is_it(sending.phase))
    }

    /// Handles a peer's clearance of a long message. Returns whether its bytes must follow (not if it was cancelled
    /// meanwhile).
    pub(super) fn cleared(&mut self, link: usize, message: u32, reply: u32) -> Result<bool, String> {
        let sending = self.answered(link, message)?;
        sending.phase = SendPhase::Cleared { link, reply, sent: 0 };
        let wanted = sending.data.is_some();
        if !wanted {
            self.requests.remove(message);
        }
        Ok(wanted)
    }

    /// Handles a peer's refusal of a long message, by a receive of this element type and capacity.
    pub(super) fn refused(&mut self, link: usize, message: u32, element: TypeTag, capacity: u64) -> Result<(), String> {
        let &mut Sending { to, element: sent, bytes, .. } = self.answered(link, message)?;
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
        let refusal = if sent == element {
            too_long(to, sent, bytes, capacity)
        } else {
            MessageError::TypeMismatch { peer: to, sent, expected: element }
        };
        self.requests.finish(message, Err(refusal));
        Ok(())
    }

    /// Begins a piece of a long message. Returns its offset in the message, and the length of the message.
    pub(super) fn place_piece(&mut self, link: usize, reply: u32, piece: usize) -> Result<(usize, usize), String> {
        match self.longs.get(reply) {
            Some(LongMessage { link: of, envelope, filled, .. }) if *of == link && piece <= envelope.bytes - filled => {
                Ok((*filled, envelope.bytes))
            }
            _ => Err(format!("{piece} B for message {reply}, which does not expect them")),
        }
    }

    /// Returns the destination of a part of a long message; `None` if it is discarded.
    pub(super) fn long_part(&mut self, long: u32, part: Range<usize>) -> Option<&mut [u8]> {
        match &mut self.longs.get_mut(long)?.place {
            Place::Receive(receive) => self.requests.destination(*receive, part),
            Place::Kept(kept) => Some(part_of(kept, part)),
            Place::Nowhere => None,
        }
    }

    /// Completes a piece of a long message.
    pub(super) fn piece_complete(&mut self, long: u32, piece: usize) {
        let Some(message) = self.longs.get_mut(long) else { return };
        message.filled += piece;
        if !message.is_whole() {
            return;
        }
        match message.place {
            Place::Receive(receive) => {
                self.requests.finish(receive, Ok(message.envelope));
                self.longs.remove(long);
            }
            Place::Nowhere => self.longs.remove(long),
            Place::Kept(_) => {}
        }
    }

    /// Handles a receive that gives up its long message. The message is kept for the next receive, which may already be
    /// waiting. If it cannot be kept, or the waiting receive cannot take it, also returns the frame that notifies its
    /// sender, with its link.
    pub(super) fn give_up_long(&mut self, receive: u32, long: u32) -> (GivenUp, Option<(usize, Frame)>) {
        let Some(message) = self.longs.get(long) else { return (GivenUp::Nothing, None) };
        let (Envelope { source, tag, bytes, .. }, order, begun) = (message.envelope, message.order, message.begun());
        let Some(mut room) = self.longs.room(bytes) else {
            self.requests.remove(receive);
            return (GivenUp::Lost { source, bytes }, self.abandon(long));
        };
        room.extend_from_slice(self.requests.destination(receive, begun).unwrap_or_default());
        self.longs.put(long, Place::Kept(room));
        self.requests.remove(receive);
        let Some(next) = self.matching.take_posted(source, tag) else {
            self.matching.put_back(source, tag, order, Arrival::Kept { long });
            return (GivenUp::Kept { source, bytes }, None);
        };
        match self.take_over(next, long) {
            None => (GivenUp::Kept { source, bytes }, None),
            word => (GivenUp::Lost { source, bytes }, word),
        }
    }

    /// Discards a long message that no receive can take. If more of it must arrive, returns the frame that notifies its
    /// sender, with its link.
    fn abandon(&mut self, long: u32) -> Option<(usize, Frame)> {
        self.longs.drain(long);
        self.longs.get(long).map(|message| (message.link, Frame::Abandon { message: message.message, reply: long }))
    }

    /// Removes a receive; the rest of its long message is discarded.
    pub(super) fn drop_receive(&mut self, receive: u32, long: u32) {
        self.longs.drain(long);
        self.requests.remove(receive);
    }

    /// Gives a kept message to a receive. If the receive cannot take it, returns the frame that notifies the sender,
    /// with its link.
    fn take_over(&mut self, receive: u32, long: u32) -> Option<(usize, Frame)> {
        let message = self.longs.get(long)?;
        let (envelope, begun, is_whole) = (message.envelope, message.begun(), message.is_whole());
        if let Err(refusal) = self.check(receive, envelope.source, envelope.element, envelope.bytes) {
            self.requests.finish(receive, Err(refusal));
            return self.abandon(long);
        }
        if let Some(Place::Kept(mut kept)) = self.longs.put(long, Place::Receive(receive))
            && let Some(into) = self.requests.destination(receive, begun.clone())
        {
            into.copy_from_slice(part_of(&mut kept, begun));
        }
        if is_whole {
            self.longs.remove(long);
            self.requests.finish(receive, Ok(envelope));
        } else if let Some(receiving) = self.requests.receive(receive) {
            receiving.phase = ReceivePhase::Filling { long };
        }
        None
    }

    /// Handles a peer's withdrawal of a message that it announced on `link`. Returns the answer, if none was given yet.
    /// The receive that has matched the message fails; if there is none, the next receive that matches it fails.
    pub(super) fn withdrawn(&mut self, source: usize, link: usize, message: u32, after: Duration) -> Option<Frame> {
        let is_it = |arrival: &Arrival| matches!(arrival, Arrival::Announced { link: l, message: m, .. } if (*l, *m) == (link, message));
        if let Some(arrival) = self.matching.find_arrived(source, is_it) {
            let note = Arrival::GivenUp { after, is_charged: true };
            let Arrival::Announced { element, .. } = std::mem::replace(arrival, note) else { return None };
            return Some(Frame::Refuse { message, element, capacity: 0 });
        }
        for long in self.longs.find(|long| (long.link, long.message) == (link, message) && !long.is_whole()) {
            match self.longs.get(long).map(|long| &long.place) {
                Some(Place::Receive(receive)) => self.requests.finish(*receive, Err(MessageError::Withdrawn { peer: source, after })),
                Some(Place::Kept(_)) => {
                    let is_it = |arrival: &Arrival| matches!(arrival, Arrival::Kept { long: kept } if *kept == long);
                    let note = Arrival::GivenUp { after, is_charged: false };
                    if let Some(arrival) = self.matching.find_arrived(source, is_it) {
                        *arrival = note;
                    }
                }
                Some(Place::Nowhere) | None => {}
            }
            self.longs.remove(long);
        }
        None
    }

    /// Handles a message that a peer gave up before its turn, and for which it sent a note in its place.
    pub(super) fn gave_up(&mut self, source: usize, tag: u64, after: Duration) {
        match self.matching.take_posted(source, tag) {
            Some(receive) => {
                self.release(source, 0);
                self.requests.finish(receive, Err(MessageError::Withdrawn { peer: source, after }));
            }
            None => self.matching.arrive(source, tag, Arrival::GivenUp { after, is_charged: true }),
        }
    }

    /// Handles a send to this rank that gives up before it is matched: the next matching receive fails.
    pub(super) fn give_up_own(&mut self, send: u32, after: Duration) {
        let is_it = |arrival: &Arrival| matches!(arrival, Arrival::Own { request } if *request == send);
        if let Some(arrival) = self.matching.find_arrived(self.rank, is_it) {
            *arrival = Arrival::GivenUp { after, is_charged: false };
        }
        self.requests.remove(send);
    }

    /// Removes a receive that has not been matched.
    pub(super) fn unpost(&mut self, receive: u32) {
        if let Some(Receiving { from, .. }) = self.requests.receive(receive) {
            self.matching.unpost(*from, receive);
        }
        self.requests.remove(receive);
    }

    /// Handles a peer that is gone: everything that waits for it fails. If it was the last peer, so do receives from
    /// any source.
    pub(super) fn end_peer(&mut self, peer: usize, abort_reason: AbortReason, was_last: bool) {
        let announced = |arrival: &Arrival| matches!(arrival, Arrival::Announced { .. });
        let accounts = &mut self.accounts;
        self.matching.take_back(peer, announced, |_| accounts[peer].waiting -= OVERHEAD_BYTES);
        let unfinished = self.longs.find(|long| long.envelope.source == peer && !long.is_whole());
        self.matching.take_back(peer, |arrival| matches!(arrival, Arrival::Kept { long } if unfinished.contains(long)), drop);
        let concerned = self.requests.find(|request| match request {
            Request::Done(..) => false,
            Request::Send(sending) => sending.to == peer,
            Request::Receive(Receiving { from, phase, .. }) => match phase {
                ReceivePhase::Posted => from.map_or(was_last, |from| from == peer),
                ReceivePhase::Reading { source } => *source == peer,
                ReceivePhase::Filling { long } => unfinished.contains(long),
            },
        });
        for request in concerned {
            if let Some(Receiving { from, phase: ReceivePhase::Posted, .. }) = self.requests.receive(request) {
                self.matching.unpost(*from, request);
            }
            self.requests.finish(request, Err(MessageError::Ended(abort_reason)));
        }
        unfinished.into_iter().for_each(|long| self.longs.remove(long));
    }
}

#[cfg(test)]
impl MatchingState {
    /// Whether no request and no message is left.
    pub(super) fn is_idle(&mut self) -> bool {
        self.requests.find(|_| true).is_empty()
            && self.longs.find(|_| true).is_empty()
            && self.accounts.iter().all(|account| account.waiting == 0)
    }

    /// Whether a part of a long message has arrived.
    pub(super) fn has_begun(&self) -> bool {
        !self.longs.find(|long| long.filled > 0).is_empty()
    }

    /// Leaves no room for messages whose receives give up.
    pub(super) fn keep_no_more(&mut self) {
        self.longs.keep_no_more();
    }

    /// Returns the cost of the waiting messages of one source.
    pub(super) fn waiting(&self, source: usize) -> usize {
        self.accounts[source].waiting
    }
}
