//! Messages that their callers wait for.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller keeps alive")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Inner, PendingMessage, ProgressEngine};
use crate::base::deadline::Deadline;
use crate::base::event::Locked;
use crate::base::tuning::progress::DIRECT;
use crate::communicator::work::message::{MessageBuffer, MessageContext, Received};
use crate::error::{Error, Result};
use crate::host::point_to_point::{Attempt, Ticket};
use crate::observe::Track;

/// A message that its caller waits for.
struct Posted {
    ticket: Ticket,
    request: PendingMessage,
    received: Option<Received>,
    /// The bytes of an object that was received.
    object: Vec<u8>,
}

/// Messages that their caller waits for. Once the caller leaves, in whatever way, the buffers are no longer borrowed.
/// So the drop cancels every message that has not ended. This value exists before the first message is posted, and
/// takes each ticket in before anything else can unwind. A caller declares the engine's lock after this value, so that
/// the lock is released first.
struct Posteds<'a> {
    progress: &'a Arc<ProgressEngine>,
    /// The first message. It is usually the only one, so it needs no allocation.
    first: Option<Posted>,
    others: Vec<Posted>,
}

impl<'a> Posteds<'a> {
    /// Makes an empty list with capacity for `most` messages.
    fn new(progress: &'a Arc<ProgressEngine>, most: usize) -> Self {
        Self { progress, first: None, others: Vec::with_capacity(most.saturating_sub(1)) }
    }

    /// Posts a message, unless it has begun already, and records it.
    ///
    /// # Safety
    ///
    /// The place stays valid, and untouched by others, as long as this lives; there is capacity for the message.
    unsafe fn post(
        &mut self,
        inner: &mut Inner,
        (context, memory): &(MessageContext, MessageBuffer),
        begun: Option<Ticket>,
        deadline: &Deadline,
    ) -> Result<()> {
        let request = self.progress.begin(context, memory, deadline);
        let ticket = match begun {
            Some(ticket) => Ok(ticket),
            // SAFETY: the place stays valid as long as this lives (this function's contract). The ticket is taken in
            // next, without anything that could unwind, and the drop cancels it.
            None => unsafe { ProgressEngine::post(inner, context, *memory) },
        };
        let ticket = ticket.map_err(|stop| self.progress.not_posted(&stop, &request))?;
        let posted = Posted { ticket, request, received: None, object: Vec::new() };
        if self.first.is_none() {
            self.first = Some(posted)
        } else {
            self.others.push(posted)
        }
        Ok(())
    }

    /// Returns the results of the messages that have ended, in the order in which they were posted.
    fn received(&self) -> impl Iterator<Item = Received> {
        self.all().filter_map(|posted| posted.received)
    }

    fn all(&self) -> impl Iterator<Item = &Posted> {
        self.first.iter().chain(&self.others)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Posted> {
        self.first.iter_mut().chain(&mut self.others)
    }

    /// Returns the messages that have not ended.
    fn unfinished(&self) -> impl Iterator<Item = &Posted> {
        self.all().filter(|posted| posted.received.is_none())
    }
}

impl Drop for Posteds<'_> {
    fn drop(&mut self) {
        if self.unfinished().next().is_some() {
            let mut inner = self.progress.lock();
            self.unfinished().for_each(|posted| _ = inner.messages.give_up(posted.ticket, posted.request.deadline.elapsed()));
            drop(inner);
            self.progress.finish_later();
        }
    }
}

impl Inner {
    /// Returns whether the next message may take the short path: nothing else is outstanding, and it is not time to
    /// advance everything.
    #[inline]
    fn may_go_direct(&mut self) -> bool {
        self.direct += 1;
        self.direct < DIRECT && self.outstanding.is_empty() && self.telling.is_none()
    }
}

impl ProgressEngine {
    /// Posts messages and waits for all of them. After an error the other messages are cancelled, so no buffer is
    /// touched after the return.
    ///
    /// # Safety
    ///
    /// Every place stays valid, and untouched by others, during the call.
    pub(in crate::communicator) unsafe fn transfer(
        self: &Arc<Self>,
        messages: &[(MessageContext, MessageBuffer)],
        limit: Duration,
    ) -> Result<Vec<Received>> {
        // SAFETY: every place is valid during the call (this function's contract), in which this runs once.
        self.observed(messages, || unsafe {
            match messages {
                [one, other] if one.1.sends() && !other.1.sends() => self.exchange(one, other, limit).map(Vec::from),
                [one, other] if other.1.sends() && !one.1.sends() => {
                    self.exchange(other, one, limit).map(|[sent, received]| vec![received, sent])
                }
                _ => self.transfer_or_fail(messages, limit, || Ok(())),
            }
        })
    }

    /// Sends or receives one message: on the short path if possible, otherwise like [`ProgressEngine::transfer`].
    ///
    /// # Safety
    ///
    /// Same as for [`ProgressEngine::transfer`].
    pub(in crate::communicator) unsafe fn transfer_one(
        self: &Arc<Self>,
        context: &MessageContext,
        memory: MessageBuffer,
        limit: Duration,
    ) -> Result<Received> {
        // SAFETY: the place is valid during the call (this function's contract), in which this runs once.
        let transfer = || unsafe { self.transfer_one_or_fail(context, memory, limit) };
        let result = match self.observers.watch() {
            None => transfer(),
            Some(watch) => watch.around(memory.report(watch, context), Track::Messages, transfer),
        };
        result.inspect_err(|error| self.recorder.after_error(error))
    }

    /// Does the same, without the steps that follow an error.
    ///
    /// # Safety
    ///
    /// The place stays valid, and untouched by others, during the call.
    unsafe fn transfer_one_or_fail(self: &Arc<Self>, context: &MessageContext, memory: MessageBuffer, limit: Duration) -> Result<Received> {
        let inner = self.lock_to_post(context, &memory)?;
        // SAFETY: the place is valid during the call (this function's contract).
        unsafe { self.transfer_locked(inner, &(*context, memory), limit) }
    }

    /// Does the same, under the lock.
    ///
    /// # Safety
    ///
    /// The place stays valid, and untouched by others, during the call.
    #[inline]
    pub(super) unsafe fn transfer_locked(
        self: &Arc<Self>,
        mut inner: Locked<'_, Inner>,
        message: &(MessageContext, MessageBuffer),
        limit: Duration,
    ) -> Result<Received> {
        let (context, memory) = message;
        // SAFETY: the place is valid during the call (this function's contract), in which `wait_one` takes over what
        // has begun.
        let begun = match unsafe { Self::attempt(&mut inner, context, *memory) } {
            Attempt::Done(envelope) => {
                self.recorder.note_message(&memory.recorded(context));
                return Ok(context.received(envelope));
            }
            Attempt::Begun(ticket) => Some(ticket),
            Attempt::Wait => None,
        };
        // SAFETY: the place is valid during the call (this function's contract).
        unsafe { self.wait_one(inner, message, begun, limit) }.map(|(received, _)| received)
    }

    /// Posts one message, unless it has begun, and waits for it. Returns the result, and the bytes of an object that
    /// was received.
    ///
    /// # Safety
    ///
    /// The place stays valid, and untouched by others, during the call.
    pub(super) unsafe fn wait_one<'a>(
        self: &'a Arc<Self>,
        inner: Locked<'a, Inner>,
        message: &(MessageContext, MessageBuffer),
        begun: Option<Ticket>,
        limit: Duration,
    ) -> Result<(Received, Vec<u8>)> {
        let mut posted = Posteds::new(self, 1);
        // Declared after `posted`, which takes the lock when it is dropped.
        let mut inner = inner;
        if begun.is_none() && (inner.direct >= DIRECT || !inner.outstanding.is_empty()) {
            self.advance(&mut inner);
        }
        let deadline = Deadline::after(limit);
        // SAFETY: the place is valid during the call (this function's contract), and `posted` does not outlive the
        // call; it has capacity for one.
        unsafe { posted.post(&mut inner, message, begun, &deadline) }?;
        self.wait_all(inner, &mut posted)?;
        let received = posted.first.as_mut().and_then(|posted| Some((posted.received?, std::mem::take(&mut posted.object))));
        received.ok_or_else(|| Error::argument("message", "nothing was posted"))
    }

    /// Tries the short path.
    ///
    /// # Safety
    ///
    /// The bytes are initialised. The bytes of a send stay unwritten, and those of a receive untouched by others, until
    /// this has returned anything other than a ticket, or the ticket has ended or was cancelled.
    pub(super) unsafe fn attempt(inner: &mut Inner, context: &MessageContext, memory: MessageBuffer) -> Attempt {
        let may = inner.may_go_direct();
        let MessageContext { peer: Some(peer), tag, element, .. } = *context else { return Attempt::Wait };
        if !may {
            return Attempt::Wait;
        }
        match memory {
            // SAFETY: `bytes` bytes at `data`, initialised and unwritten until it is done or the ticket was cancelled (this function's contract).
            MessageBuffer::Send { data, bytes } => unsafe { inner.messages.try_send(peer, tag, element, data, bytes) },
            // SAFETY: `bytes` initialised bytes at `into`, this receive's alone until it is done or the ticket was cancelled (this function's
            // contract).
            MessageBuffer::Receive { into, bytes } => unsafe { inner.messages.try_receive(peer, tag, element, into, bytes) },
            MessageBuffer::Object { .. } => Attempt::Wait,
        }
    }

    /// Does the same as [`ProgressEngine::transfer`], and runs `meanwhile` between posting and waiting.
    ///
    /// # Safety
    ///
    /// Same as for [`ProgressEngine::transfer`].
    pub(in crate::communicator) unsafe fn transfer_while(
        self: &Arc<Self>,
        messages: &[(MessageContext, MessageBuffer)],
        limit: Duration,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Received>> {
        // SAFETY: every place is valid during the call (this function's contract), in which this runs once.
        self.observed(messages, || unsafe { self.transfer_or_fail(messages, limit, meanwhile) })
    }

    /// Runs a call of several messages, and reports its outcome to observers and the flight recorder.
    fn observed(
        &self,
        messages: &[(MessageContext, MessageBuffer)],
        call: impl FnOnce() -> Result<Vec<Received>>,
    ) -> Result<Vec<Received>> {
        let watched = self.observers.watch().map(|watch| (watch, Instant::now()));
        let result = call();
        if let Some((watch, began)) = watched {
            let (elapsed, error) = (began.elapsed(), result.as_ref().err());
            messages.iter().for_each(|(context, memory)| watch.ended(memory.report(watch, context), elapsed, error, Track::Messages));
        }
        result.inspect_err(|error| self.recorder.after_error(error))
    }

    /// Does the same, without the steps that follow an error.
    ///
    /// # Safety
    ///
    /// Same as for [`ProgressEngine::transfer`].
    unsafe fn transfer_or_fail(
        self: &Arc<Self>,
        messages: &[(MessageContext, MessageBuffer)],
        limit: Duration,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Received>> {
        let Some((context, memory)) = messages.first() else { return meanwhile().map(|()| Vec::new()) };
        let inner = self.lock_to_post(context, memory)?;
        // SAFETY: every place is valid during the call (this function's contract).
        unsafe { self.transfer_posted(inner, messages, None, limit, meanwhile) }
    }

    /// Posts messages, of which the first may have begun, runs `meanwhile`, and waits for all of them.
    ///
    /// # Safety
    ///
    /// Same as for [`ProgressEngine::transfer`].
    pub(super) unsafe fn transfer_posted<'a>(
        self: &'a Arc<Self>,
        inner: Locked<'a, Inner>,
        messages: &[(MessageContext, MessageBuffer)],
        mut begun: Option<Ticket>,
        limit: Duration,
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Received>> {
        let deadline = Deadline::after(limit);
        let mut posted = Posteds::new(self, messages.len());
        // Declared after `posted`, which takes the lock when it is dropped.
        let mut inner = inner;
        // SAFETY: every place is valid during the call (this function's contract), and `posted`, which has capacity for
        // all, does not outlive the call.
        let posting = messages.iter().try_for_each(|message| unsafe { posted.post(&mut inner, message, begun.take(), &deadline) });
        drop(inner);
        if let Err(error) = posting.and_then(|()| meanwhile()) {
            self.give_up_unfinished(&mut posted, error.clone(), false)?;
            return Err(error);
        }
        let mut inner = self.lock();
        self.advance(&mut inner);
        self.wait_all(inner, &mut posted)?;
        Ok(posted.received().collect())
    }

    /// Advances messages until every posted one has ended, and records the outcomes.
    fn wait_all<'a>(self: &'a Arc<Self>, inner: Locked<'a, Inner>, posted: &mut Posteds<'_>) -> Result<()> {
        self.wait_each(inner, posted).or_else(|error| {
            let is_late = self.is_late(&error);
            self.give_up_unfinished(posted, error, is_late)
        })
    }

    /// Gives up the messages that have not ended, and records how they end. Some may have ended while the lock was
    /// free. If their deadline has passed, sends that are still under way count as successful, and the error is that of
    /// another message. Records are written under the lock.
    #[cold]
    fn give_up_unfinished(self: &Arc<Self>, posted: &mut Posteds<'_>, error: Error, is_late: bool) -> Result<()> {
        let mut failure = (!is_late).then(|| error.clone());
        let mut inner = self.lock();
        for posted in posted.all_mut().filter(|posted| posted.received.is_none()) {
            let ended = inner.messages.poll_object(posted.ticket).map(|(outcome, bytes)| {
                posted.object = bytes;
                self.outcome(outcome, &posted.request)
            });
            let ended = ended.unwrap_or_else(|| {
                let left = inner.messages.give_up(posted.ticket, posted.request.deadline.elapsed());
                let error = if is_late { self.late(&posted.request) } else { error.clone() };
                self.given_up(left, error, is_late, &posted.request)
            });
            match ended {
                Ok(received) => {
                    posted.received = Some(received);
                    self.recorder.end_message(posted.request.number);
                }
                Err(error) => {
                    self.recorder.fail_message(posted.request.number, &error);
                    failure.get_or_insert(error);
                }
            }
        }
        drop(inner);
        self.finish_later();
        let Some(mut failure) = failure else { return Ok(()) };
        if is_late {
            say_what_ended(&mut failure, posted);
        }
        Err(failure)
    }

    fn wait_each<'a>(&'a self, mut inner: Locked<'a, Inner>, posted: &mut Posteds<'_>) -> Result<()> {
        let mut warned = None;
        loop {
            let mut pending = None;
            for Posted { ticket, request, received, object } in posted.all_mut().filter(|posted| posted.received.is_none()) {
                match inner.messages.poll_object(*ticket) {
                    Some((outcome, bytes)) => {
                        *received = Some(self.outcome(outcome, request)?);
                        *object = bytes;
                        self.recorder.end_message(request.number);
                    }
                    None => pending = Some(&*request),
                }
            }
            let Some(request) = pending else { return Ok(()) };
            let left = self.check_pending(request, &mut warned)?;
            inner.messages.wait_step(self.turn().min(left));
            self.attend(&mut inner);
            // Other threads may want to post or wait, and listeners must be notified.
            drop(inner);
            self.let_others_in();
            inner = self.lock();
        }
    }
}

/// Adds the number of messages that have ended to the error of a call of several messages, because the effect of these
/// remains.
fn say_what_ended(error: &mut Error, posted: &Posteds<'_>) {
    let (all, unfinished) = (posted.all().count(), posted.unfinished().count());
    if let Error::Timeout { doing, .. } = error
        && unfinished < all
    {
        doing.push_str(&format!("; {} of the {all} messages of this call had ended", all - unfinished));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::element::{DType, TypeTag};
    use crate::communicator::work::message::{receive_place, send_place};
    use crate::communicator::{Communicator, Envelope};

    const BYTES: TypeTag = TypeTag::Scalar(DType::U8);
    /// Longer than a message that is sent at once.
    const LONG: usize = 100_000;

    fn context(tag: u64, element: TypeTag) -> MessageContext {
        MessageContext { peer: Some(1), tag, element, element_bytes: 1 }
    }

    /// Posts a message on rank 0, which ends while another call moves everything on. Then the deadline of the first is
    /// found to have passed. Returns how it ended, and the bytes of an object.
    fn late_after_its_end(comm: &Communicator, message: (MessageContext, MessageBuffer)) -> Result<(Option<Received>, Vec<u8>)> {
        let progress = &comm.core.shared.progress;
        let deadline = Deadline::after(Duration::ZERO);
        let mut posted = Posteds::new(progress, 1);
        // SAFETY: the memory outlives this function, in which no other code touches it; there is capacity for one.
        unsafe { posted.post(&mut progress.lock(), &message, None, &deadline) }?;
        // The peer sends this after everything that the message needs.
        comm.recv(&mut [0_u8], Envelope::rank(1).tag(9))?;
        let error = progress.late(&posted.first.as_ref().expect("it is posted").request);
        progress.give_up_unfinished(&mut posted, error, true)?;
        let first = posted.first.as_mut().expect("it is posted");
        Ok((first.received, std::mem::take(&mut first.object)))
    }

    #[test]
    fn a_message_that_has_ended_by_the_time_it_is_given_up_has_ended_well() -> Result<()> {
        let configure = |config: &mut crate::config::Config| config.timeout = Duration::from_secs(30);
        Communicator::builder().configure(configure).run_local(2, |comm| {
            let sent = vec![7_u8; LONG];
            if comm.rank() == 1 {
                comm.send(&[5_u8], Envelope::rank(0).tag(1))?;
                comm.send(&[1_u8], Envelope::rank(0).tag(9))?;
                let mut into = vec![0; LONG];
                comm.recv(&mut into, Envelope::rank(0).tag(2))?;
                assert!(into == sent);
                return comm.send(&[1_u8], Envelope::rank(0).tag(9));
            }
            let mut into = [0_u8];
            let received = late_after_its_end(comm, (context(1, BYTES), receive_place((&mut into[..]).into())))?.0;
            assert_eq!((received, into), (Some(Received { source: 1, tag: 1, count: 1 }), [5]));
            let received = late_after_its_end(comm, (context(2, BYTES), send_place((&sent[..]).into())))?.0;
            assert!(received.is_some());
            Ok(())
        })?;
        Ok(())
    }

    #[test]
    fn one_that_has_failed_by_then_keeps_its_error() -> Result<()> {
        Communicator::run_local(2, |comm| {
            if comm.rank() == 1 {
                comm.send(&[5_u8; 2], Envelope::rank(0).tag(1))?;
                return comm.send(&[1_u8], Envelope::rank(0).tag(9));
            }
            let mut into = [0_u8];
            let error = late_after_its_end(comm, (context(1, BYTES), receive_place((&mut into[..]).into()))).expect_err("it is too long");
            assert!(error.to_string().contains("a message of 2 B does not fit a receive of 1 B"), "{error}");
            Ok(())
        })?;
        Ok(())
    }

    #[cfg(feature = "serde")]
    #[test]
    fn an_object_that_has_come_by_the_time_its_receive_is_given_up_is_received() -> Result<()> {
        Communicator::run_local(2, |comm| {
            if comm.rank() == 1 {
                let object = context(1, TypeTag::Object);
                comm.core.shared.progress.send_object(&MessageContext { peer: Some(0), ..object }, &[1, 2, 3], Duration::from_secs(30))?;
                return comm.send(&[1_u8], Envelope::rank(0).tag(9));
            }
            let (received, object) = late_after_its_end(comm, (context(1, TypeTag::Object), MessageBuffer::Object { most: 10 }))?;
            assert_eq!((received.map(|received| received.count), object), (Some(3), vec![1, 2, 3]));
            Ok(())
        })?;
        Ok(())
    }
}
