//! The message engine of one rank: posts requests, makes progress on them, waits for them, polls them and cancels them.

#![expect(unsafe_code, reason = "posting a request takes the caller's memory for longer than the call")]

use std::hint;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::base::tuning::point_to_point::{ACCEPT_EVERY, UNEXPECTED_BYTES, UNEXPECTED_LEAST_BYTES};
use crate::base::tuning::waiting::MESSAGES;
use crate::call::element::TypeTag;
use crate::config::Waiting;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::link::{Bell, ByteLink};
use crate::host::waiting::{Patience, Pause, Sleep};

use super::channel::{Channel, PeerState};
use super::frame::Frame;
use super::matching_state::MatchingState;
use super::requests::{Destination, ReceivePhase, Receiving, Request, SendPhase, Sending, Source};
use super::{Connector, Envelope, GivenUp, Outcome, Ticket};

/// A request whose caller has no ticket yet. If posting ends early, by an error or a panic, no caller could cancel the
/// request, although its memory is the caller's again. So dropping this value cancels the request.
struct Posting<'a, C: Connector> {
    messages: &'a mut Messages<C>,
    ticket: Ticket,
}

impl<C: Connector> Posting<'_, C> {
    /// Returns the ticket: from now on the caller owns the request.
    fn posted(self) -> Ticket {
        let ticket = self.ticket;
        std::mem::forget(self);
        ticket
    }
}

impl<C: Connector> Drop for Posting<'_, C> {
    fn drop(&mut self) {
        self.messages.cancel(self.ticket);
    }
}

/// What a sleep has shown about the links.
enum Awakening {
    /// Only these links have something to read or to write.
    Links(Vec<usize>),
    /// No peer has opened a link. Any of the known links may have something to read or to write.
    NoNewLink,
    /// Nothing.
    Unknown,
}

/// The point-to-point engine of one rank.
pub(crate) struct Messages<C: Connector> {
    pub(super) rank: usize,
    pub(super) connector: C,
    /// By number of the link; `None` for those of peers that are gone.
    pub(super) channels: Vec<Option<Channel<C::Link>>>,
    /// By rank; this rank's own is unused.
    pub(super) peers: Vec<PeerState>,
    pub(super) matching_state: MatchingState,
    /// The reason why the communicator ended, once the peers have been notified. It is also sent on links that are
    /// opened later.
    told: Option<AbortReason>,
    rounds: u64,
    pub(super) patience: Patience,
}

impl<C: Connector> Messages<C> {
    /// Creates the engine of `rank`, without any link. `is_crowded`: its host has more ranks than processors for them.
    pub(crate) fn new(rank: usize, world_size: usize, is_crowded: bool, connector: C) -> Self {
        let limit = (UNEXPECTED_BYTES / world_size.max(1)).max(UNEXPECTED_LEAST_BYTES);
        Self {
            rank,
            connector,
            channels: Vec::new(),
            peers: (0..world_size).map(|_| PeerState::default()).collect(),
            matching_state: MatchingState::new(rank, world_size, limit),
            told: None,
            rounds: 0,
            patience: Patience::new(&MESSAGES, is_crowded),
        }
    }

    /// Sets how this engine waits.
    pub(crate) fn waiting(mut self, waiting: Waiting) -> Self {
        self.patience.set_waiting(waiting);
        self
    }

    /// Begins to send a message to `to`, which must be less than the world size. Fails if that peer is known to be gone
    /// or no link to it can be opened; the request reports later failures.
    ///
    /// # Safety
    ///
    /// The `bytes` bytes at `data` are initialised, and nothing writes them before the request is finished
    /// ([`Messages::poll`] returns its outcome), cancelled, or the engine dropped.
    pub(crate) unsafe fn post_send(
        &mut self,
        to: usize,
        tag: u64,
        element: TypeTag,
        data: *const u8,
        bytes: usize,
    ) -> Result<Ticket, Interrupted> {
        let link = if to == self.rank { None } else { Some(self.chosen_link(to)?) };
        // SAFETY: promised by the caller for as long as the request is pending, and the source is dropped with the
        // request.
        let data = Some(unsafe { Source::new(data, bytes) });
        let send = self.matching_state.requests.insert(Request::Send(Sending { to, tag, element, bytes, data, phase: SendPhase::Queued }));
        let posting = Posting { ticket: self.matching_state.requests.ticket(send), messages: self };
        let Self { patience, matching_state, channels, .. } = &mut *posting.messages;
        patience.reset();
        match link {
            None => matching_state.send_to_self(send),
            Some(link) => {
                if let Some(channel) = &mut channels[link] {
                    channel.outgoing.message(send);
                }
                posting.messages.write(link);
            }
        }
        Ok(posting.posted())
    }

    /// Begins to receive a message: from one peer, which must be less than the world size, or from any rank; with one
    /// tag, or with any. Fails if that peer (or, for any rank, every peer) is known to be gone and no message of it is
    /// left, or if no link to it can be opened. The request reports later failures.
    ///
    /// # Safety
    ///
    /// The `capacity_bytes` bytes at `into` are initialised and may be written, and nothing else reads or writes them
    /// before the request is finished ([`Messages::poll`] returns its outcome), cancelled, or the engine dropped.
    pub(crate) unsafe fn post_receive(
        &mut self,
        from: Option<usize>,
        tag: Option<u64>,
        element: TypeTag,
        into: *mut u8,
        capacity_bytes: usize,
    ) -> Result<Ticket, Interrupted> {
        // SAFETY: promised by the caller for as long as the request is pending, and the destination is dropped with the
        // request.
        let into = unsafe { Destination::new(element, into, capacity_bytes) };
        self.post_destination(from, tag, element, into)
    }

    /// Begins to receive an object of any length up to `most`, into memory that is allocated once the length is known.
    /// Otherwise like [`Messages::post_receive`].
    pub(crate) fn post_object_receive(&mut self, from: Option<usize>, tag: u64, most: usize) -> Result<Ticket, Interrupted> {
        self.post_destination(from, Some(tag), TypeTag::Object, Destination::own(most))
    }

    fn post_destination(
        &mut self,
        from: Option<usize>,
        tag: Option<u64>,
        element: TypeTag,
        into: Destination,
    ) -> Result<Ticket, Interrupted> {
        let (receive, answer) = self.matching_state.receive(from, tag, element, into);
        let posting = Posting { ticket: self.matching_state.requests.ticket(receive), messages: self };
        let messages = &mut *posting.messages;
        messages.patience.reset();
        if let Some((link, frame)) = answer {
            if let Some(channel) = &mut messages.channels[link] {
                channel.outgoing.answer(frame);
            }
            messages.write(link);
        }
        if !messages.waits_for_message(receive) {
            messages.tell_credit(from);
        }
        // A message that has already arrived counts even if its sender is gone.
        if messages.waits_for_message(receive) {
            messages.watch(from)?;
        }
        Ok(posting.posted())
    }

    /// Sends credit to peers whose messages were received, if there is enough to be worth a frame. Those peers may be
    /// waiting for credit, and it may take long until another frame goes to them.
    fn tell_credit(&mut self, from: Option<usize>) {
        for peer in from.map_or(0..self.peers.len(), |peer| peer..peer + 1) {
            if let Some(link) = self.matching_state.link_of(peer).filter(|_| self.matching_state.owes(peer)) {
                self.write(link);
            }
        }
    }

    /// Sends all outstanding credit: a peer may have exhausted its credit, and this rank is about to sleep.
    pub(super) fn tell_all_credit(&mut self) {
        for peer in 0..self.peers.len() {
            let Some((link, frame)) = self.matching_state.take_any_owed(peer) else { continue };
            if let Some(channel) = self.channels.get_mut(link).and_then(Option::as_mut) {
                channel.outgoing.answer(frame);
                self.write(link);
            }
        }
    }

    /// Whether this is a receive that has not been matched.
    fn waits_for_message(&mut self, request: u32) -> bool {
        self.matching_state.requests.receive(request).is_some_and(|receiving| receiving.phase == ReceivePhase::Posted)
    }

    /// Ensures that the death of the peer that a receive waits for will be noticed.
    fn watch(&mut self, from: Option<usize>) -> Result<(), Interrupted> {
        match from {
            Some(peer) if peer == self.rank => Ok(()),
            Some(peer) => match self.peers[peer].gone {
                Some(abort_reason) => Err(abort_reason.into()),
                None => self.any_link(peer).map(|_| ()),
            },
            None => self.all_gone().map_or(Ok(()), |abort_reason| Err(abort_reason.into())),
        }
    }

    /// Moves whatever can move now, on all links, and takes links that peers have opened. Returns whether anything
    /// moved.
    pub(crate) fn progress(&mut self) -> bool {
        let moved = self.drive() | self.take_links();
        if moved {
            self.patience.reset();
        }
        moved
    }

    /// Makes progress as one of many rounds. New links are taken only now and then, because looking for them costs more
    /// than everything else.
    pub(super) fn round(&mut self) -> bool {
        self.rounds += 1;
        if self.rounds.is_multiple_of(ACCEPT_EVERY) {
            return self.progress();
        }
        self.drive_on()
    }

    /// Moves whatever can move now on the existing links. Returns whether anything moved.
    fn drive_on(&mut self) -> bool {
        let moved = self.drive();
        if moved {
            self.patience.reset();
        }
        moved
    }

    /// Moves whatever can move now on all links. Returns whether anything moved.
    fn drive(&mut self) -> bool {
        (0..self.channels.len()).fold(false, |moved, link| self.drive_link(link) | moved)
    }

    /// Moves whatever can move now on one link. Returns whether anything moved.
    fn drive_link(&mut self, link: usize) -> bool {
        let moved = self.channels[link].as_mut().is_some_and(|channel| channel.drive(&mut self.matching_state));
        if moved {
            self.normalise(link);
        }
        moved
    }

    /// Moves what can move after a sleep. Each look at a link and each search for new ones is a system call, so only the
    /// links that woke this rank are looked at, if it is known which. Returns whether anything moved.
    fn go_on(&mut self, awakening: Awakening) -> bool {
        match awakening {
            Awakening::Links(links) => {
                let moved = links.into_iter().fold(false, |moved, link| self.drive_link(link) | moved);
                if moved {
                    self.patience.reset();
                }
                moved
            }
            Awakening::NoNewLink => self.drive_on(),
            Awakening::Unknown => self.progress(),
        }
    }

    /// Makes progress until something moves, or until one sleep of at most `budget` is over. Returns whether anything
    /// moved. It is meant for a thread that shares the engine and must release it in between.
    pub(crate) fn wait_step(&mut self, budget: Duration) -> bool {
        loop {
            // If this rank is about to sleep anyway, anything already there will wake it: the caller has polled.
            if !self.patience.is_hasty() && self.round() {
                return true;
            }
            let Pause::Sleep(sleep) = self.pause() else { continue };
            // Not before the first sleep: otherwise a peer that takes turns with this rank would be woken every time.
            if self.patience.sleeps() > 1 {
                self.tell_all_credit();
            }
            return match self.bell() {
                Some(bell) => self.sleep_on(&*bell, sleep, budget),
                None => {
                    let awakening = self.sleep(budget.min(sleep.limit), sleep.nap);
                    self.go_on(awakening)
                }
            };
        }
    }

    /// Decides what to do after a round without progress, and does it, unless it is to sleep.
    fn pause(&mut self) -> Pause {
        let pause = self.patience.next();
        match pause {
            Pause::Spin => hint::spin_loop(),
            Pause::Yield => self.patience.yield_now(),
            Pause::Sleep(_) => {}
        }
        pause
    }

    /// Returns the bell that every link of this rank rings; `None` if there is no such bell.
    fn bell(&self) -> Option<Arc<dyn Bell>> {
        let mut bell = self.connector.is_complete().then_some(None)?;
        for channel in self.channels.iter().flatten().filter(|channel| channel.end().is_none()) {
            bell = Some(channel.link.bell()?);
        }
        bell
    }

    /// Sleeps until a link moves, at most for `budget`. Returns whether anything moved.
    fn sleep_on(&mut self, bell: &dyn Bell, sleep: Sleep, budget: Duration) -> bool {
        let heard = bell.listen();
        let has_moved = self.progress();
        if !has_moved {
            bell.sleep(heard, budget.min(if heard.is_new { sleep.nap } else { sleep.limit }));
        }
        bell.leave();
        has_moved || self.drive_on()
    }

    /// Waits after a round without progress, at most for `limit`.
    pub(super) fn rest(&mut self, limit: Duration) {
        if let Pause::Sleep(sleep) = self.pause() {
            self.sleep(limit.min(sleep.limit), sleep.nap);
        }
    }

    /// Sleeps until a link or the connector is ready, at most for `limit`, or for `nap` if not all have a descriptor.
    fn sleep<'a>(&'a self, limit: Duration, nap: Duration) -> Awakening {
        let mut descriptors = Vec::with_capacity(self.channels.len() + 1);
        let mut links = Vec::with_capacity(self.channels.len());
        let mut all = true;
        let mut add = |descriptor: Option<BorrowedFd<'a>>, events| match descriptor {
            Some(descriptor) => descriptors.push(PollFd::from_borrowed_fd(descriptor, events)),
            None => all = false,
        };
        for (link, channel) in self.channels.iter().enumerate() {
            let Some(channel) = channel.as_ref().filter(|channel| channel.end().is_none()) else { continue };
            links.push(link);
            let write = if channel.outgoing.is_stuck() { PollFlags::OUT } else { PollFlags::empty() };
            add(channel.link.descriptor(), PollFlags::IN | write);
        }
        add(self.connector.descriptor(), PollFlags::IN);
        let limit = if all { limit } else { limit.min(nap) };
        let mut sleep = |limit| if cfg!(miri) { Err(rustix::io::Errno::NOSYS) } else { poll(&mut descriptors, Some(&limit)) };
        let result = Timespec::try_from(limit).map(&mut sleep);
        if !matches!(result, Ok(Ok(_) | Err(rustix::io::Errno::INTR))) {
            // There is no descriptor to sleep on, for whatever reason, so sleep by time only.
            thread::sleep(limit.min(nap));
        }
        // The connector's descriptor, if it has one, is the last.
        let is_ready = |descriptor: &PollFd<'_>| !descriptor.revents().is_empty();
        if self.connector.descriptor().is_none() || !matches!(result, Ok(Ok(_))) || descriptors.last().is_some_and(is_ready) {
            return Awakening::Unknown;
        }
        if !all || descriptors.iter().all(|descriptor| !is_ready(descriptor)) {
            return Awakening::NoNewLink;
        }
        Awakening::Links(links.into_iter().zip(&descriptors).filter(|(_, descriptor)| is_ready(descriptor)).map(|(link, _)| link).collect())
    }

    /// Takes the outcome of a request; `None` while it is pending, and for a void ticket.
    pub(crate) fn poll(&mut self, ticket: Ticket) -> Option<Outcome> {
        self.poll_object(ticket).map(|(outcome, _)| outcome)
    }

    /// Takes the outcome like [`Messages::poll`], with the bytes of a received object.
    pub(crate) fn poll_object(&mut self, ticket: Ticket) -> Option<(Outcome, Vec<u8>)> {
        let requests = &mut self.matching_state.requests;
        let index = requests.index(ticket)?;
        if !matches!(requests.request(index), Some(Request::Done(..))) {
            return None;
        }
        let Some(Request::Done(outcome, message)) = requests.remove(index) else { return None };
        Some((outcome, message))
    }

    /// Returns the source of a message with this tag that has arrived and has not been received.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_arrived(&self, tag: u64) -> Option<usize> {
        self.matching_state.has_arrived(tag)
    }

    /// Cancels a request like [`Messages::give_up`], for a caller that has not waited and does not need the result.
    pub(crate) fn cancel(&mut self, ticket: Ticket) {
        self.give_up(ticket, Duration::ZERO);
    }

    /// Gives up a request after waiting for `after`: its memory is not touched again, and its ticket is void. Returns
    /// what it leaves behind.
    pub(crate) fn give_up(&mut self, ticket: Ticket, after: Duration) -> GivenUp {
        let Some(index) = self.matching_state.requests.index(ticket) else { return GivenUp::Nothing };
        match self.matching_state.requests.request(index) {
            Some(&Request::Send(Sending { to, phase, .. })) => self.give_up_send(index, to, phase, after),
            Some(&Request::Receive(Receiving { phase, .. })) => self.give_up_receive(index, phase),
            Some(Request::Done(..)) | None => {
                self.matching_state.requests.remove(index);
                GivenUp::Nothing
            }
        }
    }

    /// Whether output is left that a link has not taken, including messages that wait for credit.
    pub(crate) fn has_unwritten(&self) -> bool {
        self.channels.iter().flatten().any(|channel| !channel.outgoing.is_empty())
    }

    /// Whether a frame was begun that its link has not taken completely.
    pub(crate) fn is_stuck(&self) -> bool {
        self.channels.iter().flatten().any(|channel| channel.outgoing.is_stuck())
    }

    /// Whether the rest of a message that no receive takes is still to arrive. Until then it blocks everything else
    /// that its sender sends. Always `false` after the communicator has ended.
    pub(crate) fn has_incoming_rest(&self) -> bool {
        let in_part = |channel: &Channel<C::Link>| channel.end().is_none() && channel.incoming.has_rest();
        self.told.is_none() && (self.matching_state.has_rest() || self.channels.iter().flatten().any(in_part))
    }

    fn give_up_send(&mut self, send: u32, to: usize, phase: SendPhase, after: Duration) -> GivenUp {
        let milliseconds = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        let link = match phase {
            SendPhase::Queued if to == self.rank => {
                self.matching_state.give_up_own(send, after);
                return GivenUp::Withdrawn;
            }
            SendPhase::Queued => return self.give_up_queued(send, to, milliseconds),
            SendPhase::Announced { link } | SendPhase::Cleared { link, .. } => link,
        };
        if let Some(channel) = &mut self.channels[link] {
            channel.outgoing.forget(send, &self.matching_state);
            // It comes after the part of the message that was begun, and before any other message with the same number.
            channel.outgoing.answer(Frame::Withdraw { message: send, after: milliseconds });
        }
        if let (SendPhase::Announced { .. }, Some(sending)) = (phase, self.matching_state.requests.send(send)) {
            // The peer's answer may be in transit: the slot is not reused before it has arrived.
            sending.data = None;
            self.matching_state.requests.disown(send);
        } else {
            self.matching_state.requests.remove(send);
        }
        self.write(link);
        GivenUp::Withdrawn
    }

    /// Gives up a send whose turn on its link has not come, or whose short message is being written.
    fn give_up_queued(&mut self, send: u32, to: usize, after: u64) -> GivenUp {
        let tag = self.matching_state.requests.send(send).map_or(0, |sending| sending.tag);
        let mut given_up = GivenUp::Nothing;
        if let Some(channel) = self.peers[to].chosen.and_then(|link| self.channels[link].as_mut()) {
            if channel.outgoing.give_up(send, Frame::GaveUp { tag, after }) {
                given_up = GivenUp::Withdrawn;
            } else if channel.outgoing.forget(send, &self.matching_state)
                && let Some(sending) = self.matching_state.requests.send(send)
            {
                given_up = GivenUp::Sent(Envelope { source: self.rank, tag, element: sending.element, bytes: sending.bytes });
            }
        }
        self.matching_state.requests.remove(send);
        given_up
    }

    fn give_up_receive(&mut self, receive: u32, phase: ReceivePhase) -> GivenUp {
        match phase {
            ReceivePhase::Posted => {
                self.matching_state.unpost(receive);
                GivenUp::Nothing
            }
            ReceivePhase::Reading { source } => {
                let state = &self.peers[source];
                let mut given_up = GivenUp::Nothing;
                for link in [state.opened, state.accepted].into_iter().flatten() {
                    let channel = self.channels[link].as_mut();
                    if let Some(bytes) = channel.and_then(|channel| channel.incoming.forget(receive, &mut self.matching_state)) {
                        given_up = GivenUp::Kept { source, bytes };
                    }
                }
                self.matching_state.requests.remove(receive);
                given_up
            }
            // No rank receives any more.
            ReceivePhase::Filling { long } if self.told.is_some() => {
                self.matching_state.drop_receive(receive, long);
                GivenUp::Nothing
            }
            ReceivePhase::Filling { long } => {
                let (given_up, word) = self.matching_state.give_up_long(receive, long);
                if let Some((link, frame)) = word {
                    self.channels[link].iter_mut().for_each(|channel| channel.outgoing.answer(frame));
                    self.write(link);
                }
                given_up
            }
        }
    }

    /// Sends the reason why the communicator ended on every link, including links that are opened later. A link takes
    /// it now or in a later round. The first reason counts.
    pub(crate) fn propagate(&mut self, abort_reason: AbortReason) {
        if self.told.is_some() {
            return;
        }
        self.told = Some(abort_reason);
        (0..self.channels.len()).for_each(|link| self.tell_on(link));
    }

    /// Sends the reason, if there is one, on one link.
    pub(super) fn tell_on(&mut self, link: usize) {
        if let (Some(abort_reason), Some(channel)) = (self.told, &mut self.channels[link]) {
            channel.outgoing.answer(Frame::AbortReason(abort_reason));
            self.write(link);
        }
    }

    /// Returns the reason for the end of the communicator that a peer has sent.
    pub(crate) fn heard(&self) -> Option<AbortReason> {
        self.matching_state.heard
    }

    /// Writes to a link what it accepts now.
    pub(super) fn write(&mut self, link: usize) {
        if let Some(channel) = &mut self.channels[link]
            && channel.write(&mut self.matching_state)
        {
            self.normalise(link);
        }
    }
}
