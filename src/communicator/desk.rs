//! Where messages are posted and finished: one engine behind a lock, moved on by whoever waits, and by a thread of its own while
//! background messages are outstanding.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller or the desk keeps alive")]

mod news;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::keep::Kept;
use super::messages::Received;
use super::work::{Drive, Finished, State};
use crate::deadline::Deadline;
use crate::element::TypeTag;
use crate::error::{Error, Peer, Result};
use crate::flight::{FlightPlane, Message};
use crate::host::health::Health;
use crate::host::notice::Stop;
use crate::host::plane::MessageConnector;
use crate::host::point_to_point::{Attempt, Envelope, MessageError, Messages, Outcome, Ticket};
use crate::observe::{CallReport, Lane, Watch};
use news::{Held, News};

/// Tags with this bit are the crate's own.
pub(super) const INTERNAL_TAG: u64 = 1 << 63;

/// How long one turn of a waiter may hold the lock, so that others can post and wait too.
const TURN: Duration = Duration::from_micros(200);

/// How long the background thread naps where nothing moves.
const NAP: Duration = Duration::from_millis(1);

/// The how-manieth message does not try the short way, so that everything else gets a turn.
const DIRECT: u32 = 16;

/// For how long after the end of a communicator peers are heard that want to know of it: a link that they open takes a moment.
const TELLING: Duration = Duration::from_secs(2);

/// What is sent or received: with whom, under which tag, of which type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// `None`: from any rank.
    pub(super) peer: Option<usize>,
    pub(super) tag: u64,
    pub(super) element: TypeTag,
    pub(super) element_bytes: usize,
}

impl Terms {
    /// The message as it is put on record.
    #[inline]
    fn recorded(&self, sends: bool, bytes: usize) -> Message {
        let Terms { peer, tag, element, element_bytes } = *self;
        Message { sends, peer, tag, count: (bytes / element_bytes) as u64, element }
    }
}

/// A message that goes on in the background.
struct Outstanding {
    ticket: Ticket,
    /// Its number in the flight recorder.
    number: u64,
    terms: Terms,
    sending: bool,
    /// How many bytes.
    moved: usize,
    deadline: Deadline,
    has_warned: bool,
    buffer: Box<dyn Kept>,
    state: Arc<State>,
}

/// A message that its caller waits for.
struct Posted {
    ticket: Ticket,
    /// Its number in the flight recorder.
    number: u64,
    terms: Terms,
    sending: bool,
    received: Option<Received>,
}

/// Cancels what has not ended when its caller leaves, by whichever way: its buffers are borrowed no longer then.
struct Cancel<'a, P: AsRef<[Posted]>> {
    desk: &'a Desk,
    posted: P,
}

impl<P: AsRef<[Posted]>> Drop for Cancel<'_, P> {
    fn drop(&mut self) {
        let posted = self.posted.as_ref();
        if posted.iter().any(|posted| posted.received.is_none()) {
            let mut inner = self.desk.lock();
            for posted in posted.iter().filter(|posted| posted.received.is_none()) {
                inner.messages.cancel(posted.ticket);
            }
        }
    }
}

/// The engine and what is outstanding in it.
struct Inner {
    messages: Messages<MessageConnector>,
    outstanding: Vec<Outstanding>,
    /// Since when the peers are told of the end of the communicator.
    telling: Option<Instant>,
    /// Callers that are busy with something else while their messages are on their way.
    away: usize,
    /// Nothing is posted any more: the communicator is gone.
    closed: bool,
    /// Messages that went the short way since everything was last moved on.
    direct: u32,
    /// What listeners have yet to be told.
    news: Vec<News>,
}

/// Counts a caller as away; also one that a panic takes away for good.
struct Away<'a>(&'a Desk);

impl Drop for Away<'_> {
    fn drop(&mut self) {
        self.0.lock().away -= 1;
    }
}

impl Inner {
    /// Whether the next message may go the short way: nothing else is under way, and it is not everybody's turn.
    #[inline]
    fn may_go_direct(&mut self) -> bool {
        self.direct += 1;
        self.direct < DIRECT && self.outstanding.is_empty() && self.telling.is_none()
    }

    /// Whether there is something to move on while nobody waits.
    fn is_busy(&self) -> bool {
        !self.outstanding.is_empty() || self.away > 0 || self.telling.is_some_and(|since| since.elapsed() < TELLING)
    }
}

/// The thread of background messages.
struct Background {
    thread: Thread,
    /// Taken by whoever waits for its end.
    handle: Mutex<Option<JoinHandle<()>>>,
}

/// One communicator's messages.
pub(crate) struct Desk {
    rank: usize,
    peers: Arc<[Peer]>,
    health: Arc<Health>,
    inner: Mutex<Inner>,
    background: OnceLock<Background>,
}

/// Where a posted message's bytes are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    Send { data: *const u8, bytes: usize },
    Receive { into: *mut u8, bytes: usize },
}

impl Place {
    #[inline]
    fn bytes(&self) -> usize {
        let (Place::Send { bytes, .. } | Place::Receive { bytes, .. }) = self;
        *bytes
    }

    /// The message as it is put on record.
    #[inline]
    fn recorded(&self, terms: &Terms) -> Message {
        terms.recorded(matches!(self, Place::Send { .. }), self.bytes())
    }

    /// The message, for those who listen.
    fn report<'a>(&self, watch: &'a Watch, terms: &Terms) -> CallReport<'a> {
        watch.message(&self.recorded(terms), FlightPlane::Host, self.bytes())
    }
}

impl Desk {
    /// The desk of a new communicator.
    pub(super) fn new(rank: usize, peers: Arc<[Peer]>, health: Arc<Health>, connector: MessageConnector) -> Self {
        let messages = Messages::new(rank, peers.len(), connector);
        let (outstanding, news) = (Vec::new(), Vec::new());
        let inner = Mutex::new(Inner { messages, outstanding, telling: None, away: 0, closed: false, direct: 0, news });
        Self { rank, peers, health, inner, background: OnceLock::new() }
    }

    #[inline]
    fn lock(&self) -> Held<'_> {
        Held::new(self, self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`Desk::lock`]; `None` where somebody has it.
    fn try_lock(&self) -> Option<Held<'_>> {
        match self.inner.try_lock() {
            Ok(inner) => Some(Held::new(self, inner)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Held::new(self, poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Refuses a message once the communicator is ended.
    fn refuse_if_ended(&self, terms: &Terms, sending: bool) -> Result<()> {
        self.health.refusal(|| doing(terms, sending), &self.peers).map_or(Ok(()), Err)
    }

    /// What a message gets that was under way when the communicator ended.
    fn check_health(&self, terms: &Terms, sending: bool, deadline: &Deadline) -> Result<()> {
        let Some(notice) = self.health.notice() else { return Ok(()) };
        let error = notice.to_error(&doing(terms, sending), deadline, &self.peers);
        self.health.keep_cause(&error);
        Err(error)
    }

    /// Posts a message.
    ///
    /// # Safety
    ///
    /// The bytes stay valid, and untouched by others, until the ticket has ended or was cancelled.
    unsafe fn post(inner: &mut Inner, terms: &Terms, place: Place, deadline: &Deadline) -> std::result::Result<Ticket, Stop> {
        match place {
            // SAFETY: passed on from this function's contract.
            Place::Send { data, bytes } => unsafe {
                inner.messages.post_send(terms.peer.unwrap_or_default(), terms.tag, terms.element, data, bytes, deadline)
            },
            // SAFETY: as above.
            Place::Receive { into, bytes } => unsafe {
                inner.messages.post_receive(terms.peer, Some(terms.tag), terms.element, into, bytes, deadline)
            },
        }
    }

    /// Posts messages and waits for all of them. On an error the rest is cancelled, so no buffer is touched after the return.
    ///
    /// # Safety
    ///
    /// Every place stays valid, and untouched by others, during the call.
    pub(super) unsafe fn transfer(&self, messages: &[(Terms, Place)], limit: Duration) -> Result<Vec<Received>> {
        // SAFETY: passed on.
        unsafe { self.transfer_while(messages, limit, || Ok(())) }
    }

    /// Sends or receives one message: the short way where that is open, else as [`Desk::transfer`].
    ///
    /// # Safety
    ///
    /// As [`Desk::transfer`].
    pub(super) unsafe fn transfer_one(&self, terms: &Terms, place: Place, limit: Duration) -> Result<Received> {
        // SAFETY: passed on.
        let transfer = || unsafe { self.transfer_one_or_fail(terms, place, limit) };
        let result = match self.health.watch() {
            None => transfer(),
            Some(watch) => watch.around(place.report(watch, terms), Lane::Messages, transfer),
        };
        result.inspect_err(|error| self.health.flight().after_error(error))
    }

    /// The same, without what an error has for consequences.
    ///
    /// # Safety
    ///
    /// As [`Desk::transfer`].
    unsafe fn transfer_one_or_fail(&self, terms: &Terms, place: Place, limit: Duration) -> Result<Received> {
        let sending = matches!(place, Place::Send { .. });
        // Before the lock, which in a forked process nobody may be there to let go.
        self.refuse_if_ended(terms, sending)?;
        let mut inner = self.lock();
        // SAFETY: passed on; a ticket is waited for or cancelled below.
        let begun = match unsafe { Self::attempt(&mut inner, terms, place) } {
            Attempt::Done(envelope) => {
                self.health.flight().note_message(&place.recorded(terms));
                return Ok(received(envelope, terms));
            }
            Attempt::Begun(ticket) => Some(ticket),
            Attempt::Wait => None,
        };
        if begun.is_none() && (inner.direct >= DIRECT || !inner.outstanding.is_empty()) {
            self.advance(&mut inner);
        }
        let deadline = Deadline::after(limit);
        let number = self.health.flight().begin_message(&place.recorded(terms));
        let ticket = match begun {
            Some(ticket) => Ok(ticket),
            // SAFETY: passed on; as above.
            None => unsafe { Self::post(&mut inner, terms, place, &deadline) },
        };
        let ticket = ticket.map_err(|stop| self.not_posted(number, &stop, terms, sending, &deadline))?;
        let mut cancel = Cancel { desk: self, posted: [Posted { ticket, number, terms: *terms, sending, received: None }] };
        self.wait_all(inner, &mut cancel.posted, &deadline)?;
        let received = cancel.posted[0].received;
        received.ok_or_else(|| Error::argument("message", "nothing was posted"))
    }

    /// Tries the short way.
    ///
    /// # Safety
    ///
    /// As [`Desk::post`].
    unsafe fn attempt(inner: &mut Inner, terms: &Terms, place: Place) -> Attempt {
        let may = inner.may_go_direct();
        let Terms { peer: Some(peer), tag, element, .. } = *terms else { return Attempt::Wait };
        if !may {
            return Attempt::Wait;
        }
        match place {
            // SAFETY: passed on from this function's contract.
            Place::Send { data, bytes } => unsafe { inner.messages.try_send(peer, tag, element, data, bytes) },
            // SAFETY: as above.
            Place::Receive { into, bytes } => unsafe { inner.messages.try_receive(peer, tag, element, into, bytes) },
        }
    }

    /// As [`Desk::transfer`], and runs `meanwhile` between posting and waiting.
    ///
    /// # Safety
    ///
    /// As [`Desk::transfer`].
    pub(super) unsafe fn transfer_while(
        &self,
        messages: &[(Terms, Place)],
        limit: Duration,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Received>> {
        let watched = self.health.watch().map(|watch| (watch, Instant::now()));
        // SAFETY: passed on.
        let result = unsafe { self.transfer_or_fail(messages, limit, meanwhile) };
        if let Some((watch, began)) = watched {
            let (elapsed, error) = (began.elapsed(), result.as_ref().err());
            messages.iter().for_each(|(terms, place)| watch.ended(place.report(watch, terms), elapsed, error, Lane::Messages));
        }
        result.inspect_err(|error| self.health.flight().after_error(error))
    }

    /// The same, without what an error has for consequences.
    ///
    /// # Safety
    ///
    /// As [`Desk::transfer`].
    unsafe fn transfer_or_fail(
        &self,
        messages: &[(Terms, Place)],
        limit: Duration,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Received>> {
        let deadline = Deadline::after(limit);
        let mut posted = Vec::with_capacity(messages.len());
        let Some((terms, place)) = messages.first() else { return meanwhile().map(|()| Vec::new()) };
        // As above.
        self.refuse_if_ended(terms, matches!(place, Place::Send { .. }))?;
        let mut inner = self.lock();
        let mut failure = None;
        for (terms, place) in messages {
            let sending = matches!(place, Place::Send { .. });
            let number = self.health.flight().begin_message(&place.recorded(terms));
            // SAFETY: each ticket is waited for or cancelled below, before this function returns.
            match unsafe { Self::post(&mut inner, terms, *place, &deadline) } {
                Ok(ticket) => posted.push(Posted { ticket, number, terms: *terms, sending, received: None }),
                Err(stop) => {
                    failure = Some(self.not_posted(number, &stop, terms, sending, &deadline));
                    break;
                }
            }
        }
        drop(inner);
        let mut cancel = Cancel { desk: self, posted };
        let failed = match failure {
            Some(error) => Err(error),
            None => meanwhile(),
        };
        if let Err(error) = failed {
            let _inner = self.lock();
            cancel.posted.iter().for_each(|posted| self.health.flight().fail_message(posted.number, &error));
            return Err(error);
        }
        let mut inner = self.lock();
        self.advance(&mut inner);
        self.wait_all(inner, &mut cancel.posted, &deadline)?;
        Ok(cancel.posted.iter().filter_map(|posted| posted.received).collect())
    }

    /// Moves messages on until every posted one has ended, and puts on record how.
    fn wait_all<'a>(&'a self, inner: Held<'a>, posted: &mut [Posted], deadline: &Deadline) -> Result<()> {
        let ended = self.wait_each(inner, posted, deadline);
        if let Err(error) = &ended {
            let _inner = self.lock();
            let unfinished = posted.iter().filter(|posted| posted.received.is_none());
            unfinished.for_each(|posted| self.health.flight().fail_message(posted.number, error));
        }
        ended
    }

    fn wait_each<'a>(&'a self, mut inner: Held<'a>, posted: &mut [Posted], deadline: &Deadline) -> Result<()> {
        let flight = self.health.flight();
        let mut warn_at = flight.stall_after(deadline.limit());
        loop {
            let mut pending = None;
            for Posted { ticket, number, terms, sending, received } in posted.iter_mut().filter(|posted| posted.received.is_none()) {
                match inner.messages.poll(*ticket) {
                    Some(outcome) => {
                        *received = Some(self.outcome(outcome, terms, *sending, deadline)?);
                        flight.end_message(*number);
                    }
                    None => pending = Some((*terms, *sending)),
                }
            }
            let Some((terms, sending)) = pending else { return Ok(()) };
            self.check_health(&terms, sending, deadline)?;
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(self.late(&terms, sending, deadline));
            }
            if deadline.limit() - left >= warn_at {
                warn_at = Duration::MAX;
                inner.news.push(News::stalled(&terms, sending, deadline));
            }
            inner.messages.wait_step(TURN.min(left));
            self.attend(&mut inner);
            // Others may want to post, or wait as well, and listeners to be told.
            drop(inner);
            inner = self.lock();
        }
    }

    /// Posts a message whose buffer the desk keeps until it has ended.
    ///
    /// # Safety
    ///
    /// `place` lies in `buffer`.
    pub(super) unsafe fn post_background(
        self: &Arc<Self>,
        terms: Terms,
        place: Place,
        buffer: Box<dyn Kept>,
        limit: Duration,
    ) -> Result<Arc<State>> {
        let deadline = Deadline::after(limit);
        let sending = matches!(place, Place::Send { .. });
        self.refuse_if_ended(&terms, sending)?;
        let mut inner = self.lock();
        let number = self.health.flight().begin_message(&place.recorded(&terms));
        // SAFETY: the buffer is kept in `outstanding` until the ticket has ended.
        let ticket = unsafe { Self::post(&mut inner, &terms, place, &deadline) };
        let ticket = ticket.map_err(|stop| self.not_posted(number, &stop, &terms, sending, &deadline))?;
        let state = State::new();
        let has_warned = false;
        let (moved, kept) = (place.bytes(), Arc::clone(&state));
        inner.outstanding.push(Outstanding { ticket, number, terms, sending, moved, deadline, has_warned, buffer, state: kept });
        self.advance(&mut inner);
        let left = !inner.outstanding.is_empty();
        drop(inner);
        if left {
            self.wake_background()?;
        }
        Ok(state)
    }

    /// Lets the background thread move messages on while `busy` runs.
    pub(super) fn while_away<R>(self: &Arc<Self>, busy: impl FnOnce() -> Result<R>) -> Result<R> {
        self.lock().away += 1;
        let _away = Away(self);
        self.wake_background()?;
        busy()
    }

    /// Tells the peers that the communicator has ended; those that wait for a message of this rank would not learn of it otherwise.
    /// Never waits for the lock, which its caller may hold: a subscriber to the crate's events that aborts in one.
    pub(super) fn announce_end(self: &Arc<Self>) {
        if self.health.is_foreign() {
            return;
        }
        if let Some(mut inner) = self.try_lock() {
            self.advance(&mut inner);
        }
        if let Err(error) = self.wake_background() {
            tracing::warn!(rank = self.rank, %error, "peers may hear of the end late");
        }
    }

    /// Moves what can move, and ends the background messages that are done.
    fn advance(&self, inner: &mut Inner) -> bool {
        inner.direct = 0;
        let moved = inner.messages.progress();
        self.attend(inner);
        moved
    }

    /// Draws the consequences of what has moved.
    fn attend(&self, inner: &mut Inner) {
        if let Some(notice) = inner.messages.heard() {
            self.health.end(notice);
        }
        if let (None, Some(notice)) = (inner.telling, self.health.notice()) {
            inner.telling = Some(Instant::now());
            inner.messages.tell(*notice);
        }
        let mut at = 0;
        while at < inner.outstanding.len() {
            let Outstanding { ticket, terms, sending, deadline, has_warned, .. } = &mut inner.outstanding[at];
            let result = match inner.messages.poll(*ticket) {
                Some(outcome) => self.outcome(outcome, terms, *sending, deadline),
                None => match self.check_health(terms, *sending, deadline) {
                    Err(error) => Err(error),
                    Ok(()) => {
                        let elapsed = deadline.elapsed();
                        if elapsed < deadline.limit() {
                            if !*has_warned && elapsed >= self.health.flight().stall_after(deadline.limit()) {
                                *has_warned = true;
                                inner.news.push(News::stalled(terms, *sending, deadline));
                            }
                            at += 1;
                            continue;
                        }
                        Err(self.late(terms, *sending, deadline))
                    }
                },
            };
            inner.messages.cancel(*ticket);
            let Outstanding { number, buffer, state, moved, terms, sending, deadline, .. } = inner.outstanding.swap_remove(at);
            match &result {
                Ok(_) => self.health.flight().end_message(number),
                Err(error) => self.health.flight().fail_message(number, error),
            }
            let elapsed = deadline.elapsed();
            let (result, failed) = match result {
                Ok(received) => (Ok(Finished { buffer: buffer.release(), received: Some(received) }), None),
                Err(error) => (Err(error.clone()), Some((error, buffer))),
            };
            state.end(result);
            inner.news.push(News::Over { terms, sending, moved, elapsed, failed, state });
        }
    }

    /// Starts the background thread, or wakes it.
    fn wake_background(self: &Arc<Self>) -> Result<()> {
        if let Some(background) = self.background.get() {
            background.thread.unpark();
            return Ok(());
        }
        let desk = Arc::downgrade(self);
        let handle = std::thread::Builder::new()
            .name(format!("messages {}", self.rank))
            .spawn(move || background(&desk))
            .map_err(|error| Error::io("starting the message thread of a communicator", error))?;
        let _ = self.background.set(Background { thread: handle.thread().clone(), handle: Mutex::new(Some(handle)) });
        Ok(())
    }

    /// Sends what is still on its way, for a bounded time, and tells the peers that this rank leaves. Listeners have been told of
    /// everything when it returns.
    pub(super) fn close(&self) {
        let deadline = Deadline::after(Duration::from_secs(5));
        let mut inner = self.lock();
        self.advance(&mut inner);
        while inner.outstanding.iter().any(|message| message.sending) && !deadline.has_passed() && self.health.notice().is_none() {
            if !self.advance(&mut inner) {
                inner.messages.wait_step(TURN);
            }
        }
        let _ = inner.messages.leave(&Deadline::after(Duration::from_secs(1)));
        inner.closed = true;
        for Outstanding { ticket, number, terms, sending, moved, deadline, buffer, state, .. } in std::mem::take(&mut inner.outstanding) {
            inner.messages.cancel(ticket);
            let by = self.peers[self.rank].clone();
            let error = Error::Aborted { doing: doing(&terms, sending), by };
            self.health.flight().fail_message(number, &error);
            state.end(Err(error.clone()));
            let failed = Some((error, buffer));
            inner.news.push(News::Over { terms, sending, moved, elapsed: deadline.elapsed(), failed, state });
        }
        drop(inner);
        self.join_background();
    }

    /// Waits until the background thread has seen that it is over; unless this is that thread, where a listener drops the communicator.
    fn join_background(&self) {
        let Some(background) = self.background.get() else { return };
        background.thread.unpark();
        let handle = background.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(handle) = handle.filter(|_| background.thread.id() != std::thread::current().id()) {
            let _ = handle.join();
        }
    }

    /// How a message ended, in the caller's terms.
    fn outcome(&self, outcome: Outcome, terms: &Terms, sending: bool, deadline: &Deadline) -> Result<Received> {
        match outcome {
            Ok(envelope) => Ok(received(envelope, terms)),
            Err(error) => Err(self.message_error(error, terms, sending, deadline)),
        }
    }

    /// What went wrong with one message, in the caller's terms.
    fn message_error(&self, error: MessageError, terms: &Terms, sending: bool, deadline: &Deadline) -> Error {
        match error {
            MessageError::Ended(notice) => self.stopped(&notice.into(), terms, sending, deadline),
            other => Error::Message { doing: doing(terms, sending), reason: other.to_string() },
        }
    }

    /// A stop, in the caller's terms.
    fn stopped(&self, stop: &Stop, terms: &Terms, sending: bool, deadline: &Deadline) -> Error {
        stop.to_error(&doing(terms, sending), deadline, &self.peers)
    }

    /// A message that could not be posted.
    #[cold]
    fn not_posted(&self, number: u64, stop: &Stop, terms: &Terms, sending: bool, deadline: &Deadline) -> Error {
        let error = self.stopped(stop, terms, sending, deadline);
        self.health.flight().fail_message(number, &error);
        error
    }

    /// A deadline that passed.
    fn late(&self, terms: &Terms, sending: bool, deadline: &Deadline) -> Error {
        let is_missing = |peer: &Peer| terms.peer.map_or(peer.rank != self.rank, |missing| peer.rank == missing);
        let missing: Vec<Peer> = self.peers.iter().filter(|peer| is_missing(peer)).cloned().collect();
        let arrived = self.peers.iter().filter(|peer| peer.rank == self.rank && !is_missing(peer)).cloned().collect();
        Error::Timeout { doing: doing(terms, sending), elapsed: deadline.elapsed(), missing, arrived }
    }
}

impl Drive for Desk {
    fn drive(&self, limit: Duration) {
        let mut inner = self.lock();
        if !self.advance(&mut inner) && !inner.outstanding.is_empty() {
            inner.messages.wait_step(TURN.min(limit));
        }
    }
}

/// Moves background messages on while nobody waits for them. Ends with the communicator.
fn background(desk: &Weak<Desk>) {
    while let Some(desk) = desk.upgrade() {
        let idle = match desk.try_lock() {
            Some(mut inner) => {
                if inner.closed {
                    return;
                }
                let moved = desk.advance(&mut inner);
                inner.is_busy().then_some(!moved)
            }
            // Somebody is waiting, and moves everything on.
            None => Some(true),
        };
        drop(desk);
        match idle {
            None => std::thread::park_timeout(Duration::from_secs(1)),
            Some(true) => std::thread::park_timeout(NAP),
            Some(false) => {}
        }
    }
}

/// What came, in the caller's terms.
#[inline]
fn received(envelope: Envelope, terms: &Terms) -> Received {
    Received { source: envelope.source, tag: envelope.tag, count: envelope.bytes / terms.element_bytes }
}

/// `send to rank 3, tag 7`.
fn doing(terms: &Terms, sending: bool) -> String {
    let whom = match (sending, terms.peer) {
        (true, Some(peer)) => format!("send to rank {peer}"),
        (false, Some(peer)) => format!("recv from rank {peer}"),
        (_, None) => "recv from any rank".to_owned(),
    };
    match terms.tag {
        0 => whom,
        tag if tag & INTERNAL_TAG != 0 => format!("{whom} (internal)"),
        tag => format!("{whom}, tag {tag}"),
    }
}
