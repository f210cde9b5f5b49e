//! The engine: posts requests, moves them on, waits for them, polls and cancels them.

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

/// A request whose caller has no ticket yet. Where posting breaks off, by an error or a panic, nobody else could cancel the request, and its
/// memory is the caller's again: so the drop cancels it.
struct Posting<'a, C: Connector> {
    messages: &'a mut Messages<C>,
    ticket: Ticket,
}

impl<C: Connector> Posting<'_, C> {
    /// The caller has it from now on.
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

/// The point-to-point engine of one rank.
pub(crate) struct Messages<C: Connector> {
    pub(super) rank: usize,
    pub(super) connector: C,
    /// By number of the link; `None` for those of peers that are gone.
    pub(super) channels: Vec<Option<Channel<C::Link>>>,
    /// By rank; this rank's own is unused.
    pub(super) peers: Vec<PeerState>,
    pub(super) matching_state: MatchingState,
    /// Why the communicator ended, once the peers are told: those too whose links come later.
    told: Option<AbortReason>,
    rounds: u64,
    pub(super) patience: Patience,
}

impl<C: Connector> Messages<C> {
    /// The engine of `rank`, without any link yet; `is_crowded` where the ranks of its host are more than the processors that they have.
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

    /// The same, which waits so.
    pub(crate) fn waiting(mut self, waiting: Waiting) -> Self {
        self.patience.set_waiting(waiting);
        self
    }

    /// Begins to send a message to `to`, which must be less than the world size. Fails where that peer is known to be gone or no
    /// link to it can be opened; later failures are the request's.
    ///
    /// # Safety
    ///
    /// The `bytes` bytes at `data` are initialised, and nobody writes them before the request is finished ([`Messages::poll`]
    /// gives its outcome), cancelled, or the engine dropped.
    pub(crate) unsafe fn post_send(
        &mut self,
        to: usize,
        tag: u64,
        element: TypeTag,
        data: *const u8,
        bytes: usize,
    ) -> Result<Ticket, Interrupted> {
        let link = if to == self.rank { None } else { Some(self.chosen_link(to)?) };
        // SAFETY: promised by the caller for as long as the request is under way, and the source is dropped with the request.
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

    /// Begins to receive a message: from a peer, which must be less than the world size, or from any rank; with a tag, or with
    /// any. Fails where that peer (or, from any, every peer) is known to be gone and no message of it is left, or where no link
    /// to it can be opened; later failures are the request's.
    ///
    /// # Safety
    ///
    /// The `capacity_bytes` bytes at `into` are initialised, may be written, and nobody else reads or writes them before the
    /// request is finished ([`Messages::poll`] gives its outcome), cancelled, or the
    /// engine dropped.
    pub(crate) unsafe fn post_receive(
        &mut self,
        from: Option<usize>,
        tag: Option<u64>,
        element: TypeTag,
        into: *mut u8,
        capacity_bytes: usize,
    ) -> Result<Ticket, Interrupted> {
        // SAFETY: promised by the caller for as long as the request is under way, and the destination is dropped with the request.
        let into = unsafe { Destination::new(element, into, capacity_bytes) };
        self.post_destination(from, tag, element, into)
    }

    /// Begins to receive an object of any length up to `most`, into memory that is made once the length is known. The rest as
    /// [`Messages::post_receive`].
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
        // A message that was there already counts even if its sender is gone by now.
        if messages.waits_for_message(receive) {
            messages.watch(from)?;
        }
        Ok(posting.posted())
    }

    /// Tells those whose messages were taken of it, where that is worth a frame: they may wait for it, and no other frame may go to them soon.
    fn tell_credit(&mut self, from: Option<usize>) {
        for peer in from.map_or(0..self.peers.len(), |peer| peer..peer + 1) {
            if self.matching_state.owes(peer) {
                self.write(self.matching_state.link_of(peer));
            }
        }
    }

    /// Tells everyone whose messages were taken of it: a peer may have used up what it may send, and this rank is about to sleep.
    pub(super) fn tell_all_credit(&mut self) {
        for peer in 0..self.peers.len() {
            let Some((link, frame)) = self.matching_state.take_any_owed(peer) else { continue };
            if let Some(channel) = self.channels.get_mut(link).and_then(Option::as_mut) {
                channel.outgoing.answer(frame);
                self.write(link);
            }
        }
    }

    /// Whether this is a receive that has met no message yet.
    fn waits_for_message(&mut self, request: u32) -> bool {
        self.matching_state.requests.receive(request).is_some_and(|receiving| receiving.phase == ReceivePhase::Posted)
    }

    /// Makes sure that the death of the peer that a receive waits for will be noticed.
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

    /// Moves whatever can move now, on all links, and takes new ones; whether anything did.
    pub(crate) fn progress(&mut self) -> bool {
        let moved = self.drive() | self.take_links();
        if moved {
            self.patience.reset();
        }
        moved
    }

    /// The same as one of many rounds: takes new links only every now and then, since looking for them costs more than everything else.
    pub(super) fn round(&mut self) -> bool {
        self.rounds += 1;
        if self.rounds.is_multiple_of(ACCEPT_EVERY) {
            return self.progress();
        }
        self.drive_on()
    }

    /// Moves whatever can move now on the links that are there; whether anything did.
    fn drive_on(&mut self) -> bool {
        let moved = self.drive();
        if moved {
            self.patience.reset();
        }
        moved
    }

    /// Moves whatever can move now on all links; whether anything did.
    fn drive(&mut self) -> bool {
        let mut moved = false;
        for link in 0..self.channels.len() {
            let Some(channel) = &mut self.channels[link] else { continue };
            if channel.drive(&mut self.matching_state) {
                moved = true;
                self.normalise(link);
            }
        }
        moved
    }

    /// Goes on until something moves, or until one sleep of at most `budget` is over; whether anything moved. For a thread that shares the
    /// engine and must let go of it in between.
    pub(crate) fn wait_step(&mut self, budget: Duration) -> bool {
        loop {
            // Who is about to sleep anyhow is woken by what is there: the caller has looked.
            if !self.patience.is_hasty() && self.round() {
                return true;
            }
            let Pause::Sleep(sleep) = self.pause() else { continue };
            // Not before the first sleep: a peer that takes turns with this rank would be woken for it each time.
            if self.patience.sleeps() > 1 {
                self.tell_all_credit();
            }
            return match self.bell() {
                Some(bell) => self.sleep_on(&*bell, sleep, budget),
                None if self.sleep(budget.min(sleep.limit), sleep.nap) => self.progress(),
                // No link is there to be taken, which is dear to look for.
                None => self.drive_on(),
            };
        }
    }

    /// What to do after a fruitless round; does it, unless that is to sleep.
    fn pause(&mut self) -> Pause {
        let pause = self.patience.next();
        match pause {
            Pause::Spin => hint::spin_loop(),
            Pause::Yield => self.patience.yield_now(),
            Pause::Sleep(_) => {}
        }
        pause
    }

    /// What wakes this rank whichever of its links moves; `None` where there is nothing that all of them ring.
    fn bell(&self) -> Option<Arc<dyn Bell>> {
        let mut bell = self.connector.is_complete().then_some(None)?;
        for channel in self.channels.iter().flatten().filter(|channel| channel.end().is_none()) {
            bell = Some(channel.link.bell()?);
        }
        bell
    }

    /// Sleeps until a link moves, at most for `budget`; whether anything moved.
    fn sleep_on(&mut self, bell: &dyn Bell, sleep: Sleep, budget: Duration) -> bool {
        let heard = bell.listen();
        let has_moved = self.progress();
        if !has_moved {
            bell.sleep(heard, budget.min(if heard.is_new { sleep.nap } else { sleep.limit }));
        }
        bell.leave();
        has_moved || self.drive_on()
    }

    /// Passes the time after a fruitless round, at most `limit` of it.
    pub(super) fn rest(&mut self, limit: Duration) {
        if let Pause::Sleep(sleep) = self.pause() {
            self.sleep(limit.min(sleep.limit), sleep.nap);
        }
    }

    /// Sleeps until a link or the connector has something, at most `limit`; at most `nap` where not all can be slept on. Whether the connector may have something.
    fn sleep<'a>(&'a self, limit: Duration, nap: Duration) -> bool {
        let mut descriptors = Vec::with_capacity(self.channels.len() + 1);
        let mut all = true;
        let mut add = |descriptor: Option<BorrowedFd<'a>>, events| match descriptor {
            Some(descriptor) => descriptors.push(PollFd::from_borrowed_fd(descriptor, events)),
            None => all = false,
        };
        for channel in self.channels.iter().flatten().filter(|channel| channel.end().is_none()) {
            let write = if channel.outgoing.is_stuck() { PollFlags::OUT } else { PollFlags::empty() };
            add(channel.link.descriptor(), PollFlags::IN | write);
        }
        add(self.connector.descriptor(), PollFlags::IN);
        let limit = if all { limit } else { limit.min(nap) };
        let mut sleep = |limit| if cfg!(miri) { Err(rustix::io::Errno::NOSYS) } else { poll(&mut descriptors, Some(&limit)) };
        let result = Timespec::try_from(limit).map(&mut sleep);
        if !matches!(result, Ok(Ok(_) | Err(rustix::io::Errno::INTR))) {
            // No descriptor to sleep on, for whatever reason: the clock remains.
            thread::sleep(limit.min(nap));
        }
        // Its descriptor, if it has one, is the last.
        self.connector.descriptor().is_none()
            || !matches!(result, Ok(Ok(_)))
            || descriptors.last().is_some_and(|last| !last.revents().is_empty())
    }

    /// Takes the outcome of a request; `None` while it is under way, and for a void ticket.
    pub(crate) fn poll(&mut self, ticket: Ticket) -> Option<Outcome> {
        self.poll_object(ticket).map(|(outcome, _)| outcome)
    }

    /// As [`Messages::poll`], with the bytes of an object that was received.
    pub(crate) fn poll_object(&mut self, ticket: Ticket) -> Option<(Outcome, Vec<u8>)> {
        let requests = &mut self.matching_state.requests;
        let index = requests.index(ticket)?;
        if !matches!(requests.request(index), Some(Request::Done(..))) {
            return None;
        }
        let Some(Request::Done(outcome, message)) = requests.remove(index) else { return None };
        Some((outcome, message))
    }

    /// From whom a message has come under a tag that nobody has received.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_arrived(&self, tag: u64) -> Option<usize> {
        self.matching_state.has_arrived(tag)
    }

    /// As [`Messages::give_up`], for whoever has waited for no time and need not know what is left.
    pub(crate) fn cancel(&mut self, ticket: Ticket) {
        self.give_up(ticket, Duration::ZERO);
    }

    /// Gives up a request after so long: its memory is not touched again, and its ticket is void. What it leaves behind.
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

    /// Whether a link has yet to take something, be it that the peer has to make room for it first.
    pub(crate) fn has_unwritten(&self) -> bool {
        self.channels.iter().flatten().any(|channel| !channel.outgoing.is_empty())
    }

    /// Whether a frame was begun that its link has not taken whole.
    pub(crate) fn is_stuck(&self) -> bool {
        self.channels.iter().flatten().any(|channel| channel.outgoing.is_stuck())
    }

    /// Whether the rest of a message is still to come in that no receive has: until it has come, it is in the way of all that its sender sends. Not once
    /// the communicator has ended.
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
            // After the part of it that was begun, before any other message of the same number.
            channel.outgoing.answer(Frame::Withdraw { message: send, after: milliseconds });
        }
        if let (SendPhase::Announced { .. }, Some(sending)) = (phase, self.matching_state.requests.send(send)) {
            // The peer's answer may be on its way: the slot is not used again before it is here.
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
            // Nobody receives any more.
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

    /// Tells every peer with a link, now or later, why the communicator ended, as far as the links take it now or in later rounds. The first
    /// reason counts.
    pub(crate) fn propagate(&mut self, abort_reason: AbortReason) {
        if self.told.is_some() {
            return;
        }
        self.told = Some(abort_reason);
        (0..self.channels.len()).for_each(|link| self.tell_on(link));
    }

    /// Passes on, on one link, what the peers have been told.
    pub(super) fn tell_on(&mut self, link: usize) {
        if let (Some(abort_reason), Some(channel)) = (self.told, &mut self.channels[link]) {
            channel.outgoing.answer(Frame::AbortReason(abort_reason));
            self.write(link);
        }
    }

    /// What a peer has told about the end of the communicator.
    pub(crate) fn heard(&self) -> Option<AbortReason> {
        self.matching_state.heard
    }

    /// Writes to a link what it takes now.
    pub(super) fn write(&mut self, link: usize) {
        if let Some(channel) = &mut self.channels[link]
            && channel.write(&mut self.matching_state)
        {
            self.normalise(link);
        }
    }
}
