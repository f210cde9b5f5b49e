//! The state of one peer in the engine: the data in transit to it and from it.

#![expect(unsafe_code, reason = "payload goes straight from and to the spans of the plan")]

use std::io::{self, IoSlice};

use super::memory::Context;
use super::schedule::{NONE, Schedule};
use super::stream::{Filled, Input, RunState, moved};
use super::wire::{self, Malformed, Message};
use crate::base::tuning::engine::{INPUT_BYTES, TURN_BYTES};
use crate::call::Call;
use crate::host::abort_reason::AbortReason;
use crate::host::link::ByteLink;
use crate::host::plan::Span;

/// The reason why a peer can no longer be served.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The link broke.
    Link(io::Error),
    /// The peer reported that the communicator ended.
    Aborted(AbortReason),
    /// The peer sent something that ends the communicator.
    Found(AbortReason),
}

/// One peer. The input buffer lives as long as the link; the run state is new for each run.
#[derive(Debug)]
pub(super) struct PeerState {
    rank: u32,
    input: Input,
    /// Whether the peer closed its communicator normally.
    has_left: bool,
    run_state: RunState,
    /// How many bytes of the final message have been written.
    said: usize,
    /// Whether nothing more is sent to the peer, because its link broke or it already has the reason.
    is_write_closed: bool,
}

impl PeerState {
    pub(super) fn new(rank: u32) -> Self {
        Self { rank, input: Input::default(), has_left: false, run_state: RunState::new(), said: 0, is_write_closed: false }
    }

    /// Begins a run and discards the state of the previous one.
    pub(super) fn begin(&mut self) {
        self.run_state = RunState::new();
    }

    /// Queues a send before all other sends of this run. Returns the step that was first until then.
    pub(super) fn queue_send(&mut self, step: u32, len: usize) -> u32 {
        self.run_state.send_total += len as u64;
        std::mem::replace(&mut self.run_state.send, step)
    }

    /// Queues a receive before all other receives of this run. Returns the step that was first until then.
    pub(super) fn queue_receive(&mut self, step: u32, len: usize) -> u32 {
        self.run_state.receive_total += len as u64;
        std::mem::replace(&mut self.run_state.receive, step)
    }

    /// Whether this run still needs the peer.
    pub(super) fn is_needed(&self) -> bool {
        self.run_state.send != NONE || self.run_state.receive != NONE
    }

    /// Whether there are bytes that can be sent to the peer.
    pub(super) fn wants_to_write(&self, schedule: &Schedule) -> bool {
        schedule.is_ready(self.run_state.send)
    }

    /// Whether bytes from the peer can be stored.
    pub(super) fn wants_to_read(&self, schedule: &Schedule) -> bool {
        schedule.is_ready(self.run_state.receive)
    }

    /// Sends what the link accepts. Returns whether any byte moved.
    pub(super) fn send(&mut self, link: &mut impl ByteLink, schedule: &mut Schedule, context: &Context<'_>) -> Result<bool, Trouble> {
        let mut total = 0;
        while total < TURN_BYTES && schedule.is_ready(self.run_state.send) {
            let len = context.span(self.run_state.send).len;
            if self.has_left {
                return Err(self.left());
            }
            if !self.run_state.outgoing.is_open {
                self.run_state.open_message(len, context);
            }
            let Some((count, all)) = self.run_state.write_all(link, schedule, context).map_err(Trouble::Link)? else { break };
            total += count;
            if !all {
                break;
            }
        }
        Ok(total > 0)
    }

    /// Receives what the link has, as far as it can be stored. Returns whether any byte moved.
    pub(super) fn receive(&mut self, link: &mut impl ByteLink, schedule: &mut Schedule, context: &Context<'_>) -> Result<bool, Trouble> {
        let (mut total, mut is_drained) = (0, false);
        while total < TURN_BYTES && schedule.is_ready(self.run_state.receive) {
            let span = context.span(self.run_state.receive);
            let Some(left) = self.run_state.incoming else {
                if let Some((message, used)) = self.input.front().map_err(|malformed| self.garbled(malformed))? {
                    self.input.consume(used);
                    self.run_state.incoming = Some(self.accept(message, span, context)?);
                    total += used;
                    self.finish_message(0, span, schedule);
                } else if is_drained {
                    break;
                } else {
                    match self.input.fill(link).map_err(Trouble::Link)? {
                        Filled::Nothing => break,
                        filled => is_drained = filled == Filled::Drained,
                    }
                    total += 1;
                }
                continue;
            };
            let count = if !self.input.is_empty() {
                self.take_input(left, span, context)
            } else if is_drained {
                break;
            } else if left >= INPUT_BYTES {
                // SAFETY: the plan was checked; `accept` lets no message be longer than what is left of its span;
                // nothing else touches the plan's memory during the call of the link.
                let into = unsafe { context.spaces.bytes_mut(span, self.run_state.received, left) };
                let Some(count) = moved(link.try_read(into)).map_err(Trouble::Link)? else { break };
                is_drained = count < left;
                count.min(left)
            } else {
                // The rest of a message is read together with the next header.
                match self.input.fill(link).map_err(Trouble::Link)? {
                    Filled::Nothing => break,
                    filled => is_drained = filled == Filled::Drained,
                }
                continue;
            };
            total += count;
            self.finish_message(count, span, schedule);
        }
        Ok(total > 0)
    }

    /// Copies payload from the input buffer to its span. Returns how many bytes.
    fn take_input(&mut self, left: usize, span: Span, context: &Context<'_>) -> usize {
        let count = left.min(self.input.bytes().len());
        // SAFETY: the plan was checked; `accept` lets no message be longer than what is left of its span, and `count`
        // is at most what is left of the message; the input buffer that is copied from is separate memory.
        let into = unsafe { context.spaces.bytes_mut(span, self.run_state.received, count) };
        into.copy_from_slice(&self.input.bytes()[..count]);
        self.input.consume(count);
        count
    }

    /// Counts received payload. Ends the message if this was its last byte, and the step if this was the step's last
    /// message.
    fn finish_message(&mut self, count: usize, span: Span, schedule: &mut Schedule) {
        let run_state = &mut self.run_state;
        run_state.received += count;
        run_state.incoming = run_state.incoming.map(|left| left - count).filter(|left| *left > 0);
        if run_state.incoming.is_none() && run_state.received == span.len {
            run_state.received = 0;
            run_state.receive = schedule.finish(run_state.receive);
        }
    }

    /// Checks that a message is the one that this run expects. Returns the length of its payload.
    fn accept(&mut self, message: Message, span: Span, context: &Context<'_>) -> Result<usize, Trouble> {
        match message {
            Message::AbortReason(abort_reason) => return Err(Trouble::Aborted(abort_reason)),
            Message::Leave => {
                self.has_left = true;
                return Err(self.left());
            }
            Message::First { call, total, .. } if !self.run_state.has_received => self.agree(&call, total, context)?,
            Message::Next { .. } if self.run_state.has_received => {}
            Message::First { payload, .. } | Message::Next { payload } => {
                return Err(self.unexpected(message, payload, "it is out of order"));
            }
        }
        self.run_state.has_received = true;
        let (payload, left) = (message.payload(), span.len - self.run_state.received);
        if payload > left || (payload == 0 && left > 0) {
            return Err(self.unexpected(message, payload, "the length of the payload does not fit this call"));
        }
        Ok(payload)
    }

    /// Checks that the peer makes the same call, with as many bytes for this rank.
    fn agree(&self, theirs: &[u8; Call::FINGERPRINT_BYTES], total: u64, context: &Context<'_>) -> Result<(), Trouble> {
        if *theirs != context.fingerprint {
            return Err(self.disagree(theirs, context));
        }
        if total == self.run_state.receive_total {
            return Ok(());
        }
        // The calls agree in everything that every rank knows, so the difference is reported as their counts.
        let element_bytes = context.call.element.size_bytes().max(1) as u64;
        let count_of = |bytes: u64| Call { count: bytes / element_bytes, ..*context.call };
        let (sent, expected) = ((self.rank, count_of(total)), (context.rank as u32, count_of(self.run_state.receive_total)));
        Err(Trouble::Found(AbortReason::Mismatch { first: sent, second: expected }))
    }

    fn disagree(&self, theirs: &[u8; Call::FINGERPRINT_BYTES], context: &Context<'_>) -> Trouble {
        let reason = "its fingerprint is not that of a call";
        match (Call::from_bytes(theirs), *theirs) {
            (Some(theirs), _) => self.mismatch(*context.call, theirs, context),
            (None, [.., a, b, c, d, e, f, g, h]) => self.garbled(Malformed { header: [a, b, c, d, e, f, g, h], reason }),
        }
    }

    fn mismatch(&self, mine: Call, theirs: Call, context: &Context<'_>) -> Trouble {
        Trouble::Found(AbortReason::Mismatch { first: (context.rank as u32, mine), second: (self.rank, theirs) })
    }

    fn left(&self) -> Trouble {
        Trouble::Found(AbortReason::Left { rank: self.rank })
    }

    fn unexpected(&self, message: Message, payload: usize, reason: &'static str) -> Trouble {
        let mut header = wire::encode_next(payload);
        header[0] = if matches!(message, Message::First { .. }) { 1 } else { 2 };
        self.garbled(Malformed { header, reason })
    }

    fn garbled(&self, malformed: Malformed) -> Trouble {
        crate::base::event::error!(rank = self.rank, "a peer sent {malformed}");
        Trouble::Found(AbortReason::Garbled { rank: self.rank, header: u64::from_be_bytes(malformed.header) })
    }

    /// Looks for an abort reason in the input from a peer that this run does not read from at the moment, and consumes
    /// nothing. Returns whether to read more: `false` if the next message cannot be reached, or if the peer has left.
    pub(super) fn scan(&mut self, context: &Context<'_>) -> Result<bool, Trouble> {
        let mut at = 0;
        while at < self.input.bytes().len() {
            let Some((message, used)) = wire::parse(&self.input.bytes()[at..]).map_err(|malformed| self.garbled(malformed))? else {
                break;
            };
            match message {
                Message::AbortReason(abort_reason) => return Err(Trouble::Aborted(abort_reason)),
                Message::Leave => {
                    self.has_left |= at == 0;
                    return if self.has_left && self.is_needed() { Err(self.left()) } else { Ok(false) };
                }
                // The message may belong to a later call, if the peer has run ahead. If it belongs to any other call,
                // the two ranks can never agree.
                Message::First { call, .. } if call != context.fingerprint && !is_later(&call, context.call) => {
                    return Err(self.disagree(&call, context));
                }
                Message::First { .. } | Message::Next { .. } => {}
            }
            at += used + message.payload();
        }
        Ok(at < INPUT_BYTES && !self.input.is_full())
    }

    /// Reads what has arrived since, and checks it like [`PeerState::scan`].
    pub(super) fn watch(&mut self, link: &mut impl ByteLink, context: &Context<'_>) -> Result<(), Trouble> {
        while self.scan(context)? {
            match self.input.fill(link).map_err(Trouble::Link)? {
                Filled::Nothing => break,
                Filled::Full | Filled::Drained => {}
            }
        }
        Ok(())
    }

    /// Returns the abort reason that a peer sent before its link broke. It may come after payload that is no longer
    /// needed.
    pub(super) fn last_words(&mut self, link: &mut impl ByteLink) -> Option<AbortReason> {
        const ROUNDS: usize = 4096;
        let mut skip = self.run_state.incoming.take().unwrap_or(0);
        for _ in 0..ROUNDS {
            let count = skip.min(self.input.bytes().len());
            self.input.consume(count);
            skip -= count;
            let front = if skip == 0 { self.input.front().ok()? } else { None };
            match front {
                Some((Message::AbortReason(abort_reason), _)) => return Some(abort_reason),
                Some((Message::Leave, _)) => return Some(AbortReason::Left { rank: self.rank }),
                Some((message, used)) => {
                    self.input.consume(used);
                    skip = message.payload();
                }
                None => match self.input.fill(link) {
                    Ok(Filled::Nothing) | Err(_) => return None,
                    Ok(Filled::Full | Filled::Drained) => {}
                },
            }
        }
        None
    }

    /// Whether the run waits for this peer: the peer does not accept this rank's bytes, or it still owes bytes and none
    /// that it has sent are unread.
    pub(super) fn is_missing(&mut self, link: Option<&mut impl ByteLink>, schedule: &Schedule) -> bool {
        if self.wants_to_write(schedule) || self.wants_to_read(schedule) {
            return true;
        }
        let has_bytes = |input: &mut Input| link.is_some_and(|link| matches!(input.fill(link), Ok(Filled::Full | Filled::Drained)));
        self.run_state.receive != NONE && self.input.is_empty() && !has_bytes(&mut self.input)
    }

    /// Whether any bytes of this run have arrived from the peer, or any have arrived early.
    pub(super) fn has_come(&self) -> bool {
        self.run_state.has_received || !self.input.is_empty()
    }

    /// Writes as much of the final message as the link accepts, after finishing a partly sent message (which needs the
    /// run's context). Returns whether there is more to write.
    pub(super) fn say(&mut self, message: &[u8], link: &mut impl ByteLink, context: Option<&Context<'_>>) -> bool {
        if self.is_write_closed || self.has_left {
            return false;
        }
        let outgoing = &mut self.run_state.outgoing;
        outgoing.is_open &= outgoing.head_sent > 0;
        let result = self.try_say(message, link, context);
        self.is_write_closed = result.is_err();
        result.unwrap_or(false)
    }

    fn try_say(&mut self, message: &[u8], link: &mut impl ByteLink, context: Option<&Context<'_>>) -> io::Result<bool> {
        while self.run_state.outgoing.is_open {
            let Some(context) = context else { return Ok(false) };
            if self.run_state.write(link, context)?.is_none() {
                return Ok(true);
            }
        }
        while self.said < message.len() {
            let Some(count) = moved(link.try_write(&[IoSlice::new(&message[self.said..])]))? else { return Ok(true) };
            self.said += count;
        }
        Ok(false)
    }

    /// Reads and discards input, because the peer may have to finish a write before it reads.
    pub(super) fn drain(&mut self, link: &mut impl ByteLink) {
        const ROUNDS: usize = 64;
        for _ in 0..ROUNDS {
            self.input.consume(INPUT_BYTES);
            match self.input.fill(link) {
                Ok(Filled::Full) => {}
                Ok(Filled::Nothing | Filled::Drained) => return,
                Err(_) => {
                    self.is_write_closed = true;
                    return;
                }
            }
        }
    }

    /// Whether the final message, whose length is `len`, or the message before it was cut off.
    pub(super) fn is_cut_off(&self, len: usize) -> bool {
        let is_last_cut = self.said > 0 && self.said < len;
        !self.is_write_closed && !self.has_left && (self.run_state.outgoing.is_open || is_last_cut)
    }

    /// Stops all further sends to this peer.
    pub(super) fn close_writes(&mut self) {
        self.is_write_closed = true;
    }
}

/// Whether a fingerprint belongs to a call after `mine`.
fn is_later(theirs: &[u8; Call::FINGERPRINT_BYTES], mine: &Call) -> bool {
    Call::from_bytes(theirs).is_some_and(|theirs| theirs.sequence > mine.sequence)
}
