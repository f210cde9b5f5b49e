//! Messages that their callers wait for.

use std::time::{Duration, Instant};

use super::news::{Held, News};
use super::request::Request;
use super::{Desk, Inner, Place, TURN, Terms, Ticket};
use crate::communicator::messages::Received;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::host::point_to_point::Attempt;
use crate::observe::Lane;

/// The how-manieth message does not try the short way, so that everything else gets a turn.
const DIRECT: u32 = 16;

/// A message that its caller waits for.
struct Posted {
    ticket: Ticket,
    request: Request,
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

impl Inner {
    /// Whether the next message may go the short way: nothing else is under way, and it is not everybody's turn.
    #[inline]
    fn may_go_direct(&mut self) -> bool {
        self.direct += 1;
        self.direct < DIRECT && self.outstanding.is_empty() && self.telling.is_none()
    }
}

impl Desk {
    /// Posts messages and waits for all of them. On an error the rest is cancelled, so no buffer is touched after the return.
    ///
    /// # Safety
    ///
    /// Every place stays valid, and untouched by others, during the call.
    pub(in crate::communicator) unsafe fn transfer(&self, messages: &[(Terms, Place)], limit: Duration) -> Result<Vec<Received>> {
        // SAFETY: passed on.
        unsafe { self.transfer_while(messages, limit, || Ok(())) }
    }

    /// Sends or receives one message: the short way where that is open, else as [`Desk::transfer`].
    ///
    /// # Safety
    ///
    /// As [`Desk::transfer`].
    pub(in crate::communicator) unsafe fn transfer_one(&self, terms: &Terms, place: Place, limit: Duration) -> Result<Received> {
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
        self.refuse_if_ended(terms, &place)?;
        let mut inner = self.lock();
        // SAFETY: passed on; a ticket is waited for or cancelled below.
        let begun = match unsafe { Self::attempt(&mut inner, terms, place) } {
            Attempt::Done(envelope) => {
                self.health.flight().note_message(&place.recorded(terms));
                return Ok(terms.received(envelope));
            }
            Attempt::Begun(ticket) => Some(ticket),
            Attempt::Wait => None,
        };
        if begun.is_none() && (inner.direct >= DIRECT || !inner.outstanding.is_empty()) {
            self.advance(&mut inner);
        }
        let deadline = Deadline::after(limit);
        let request = self.begin(terms, &place, &deadline);
        let ticket = match begun {
            Some(ticket) => Ok(ticket),
            // SAFETY: passed on; as above.
            None => unsafe { Self::post(&mut inner, terms, place, &deadline) },
        };
        let ticket = ticket.map_err(|stop| self.not_posted(&stop, &request))?;
        let mut cancel = Cancel { desk: self, posted: [Posted { ticket, request, received: None }] };
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
    pub(in crate::communicator) unsafe fn transfer_while(
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
        self.refuse_if_ended(terms, place)?;
        let mut inner = self.lock();
        let mut failure = None;
        for (terms, place) in messages {
            let request = self.begin(terms, place, &deadline);
            // SAFETY: each ticket is waited for or cancelled below, before this function returns.
            match unsafe { Self::post(&mut inner, terms, *place, &deadline) } {
                Ok(ticket) => posted.push(Posted { ticket, request, received: None }),
                Err(stop) => {
                    failure = Some(self.not_posted(&stop, &request));
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
            self.fail_unfinished(&cancel.posted, &error);
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
            self.fail_unfinished(posted, error);
        }
        ended
    }

    /// Puts on record what the messages that have not ended end with. Records are written under the lock.
    fn fail_unfinished(&self, posted: &[Posted], error: &Error) {
        let _inner = self.lock();
        let unfinished = posted.iter().filter(|posted| posted.received.is_none());
        unfinished.for_each(|posted| self.health.flight().fail_message(posted.request.number, error));
    }

    fn wait_each<'a>(&'a self, mut inner: Held<'a>, posted: &mut [Posted], deadline: &Deadline) -> Result<()> {
        let flight = self.health.flight();
        let mut warn_at = flight.stall_after(deadline.limit());
        loop {
            let mut pending = None;
            for Posted { ticket, request, received } in posted.iter_mut().filter(|posted| posted.received.is_none()) {
                match inner.messages.poll(*ticket) {
                    Some(outcome) => {
                        *received = Some(self.outcome(outcome, request)?);
                        flight.end_message(request.number);
                    }
                    None => pending = Some(&*request),
                }
            }
            let Some(request) = pending else { return Ok(()) };
            self.check_health(request)?;
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(self.late(request));
            }
            if deadline.limit() - left >= warn_at {
                warn_at = Duration::MAX;
                inner.news.push(News::stalled(request));
            }
            inner.messages.wait_step(TURN.min(left));
            self.attend(&mut inner);
            // Others may want to post, or wait as well, and listeners to be told.
            drop(inner);
            inner = self.lock();
        }
    }
}
