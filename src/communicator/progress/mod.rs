//! Where messages are posted and finished: one engine behind a lock, moved on by whoever waits, and by a thread of its own while
//! background messages are outstanding.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller or the progress engine keeps alive")]

mod background;
mod blocking;
mod deferred;
mod pending;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::element::TypeTag;
use crate::error::{Error, Peer, Result};
use crate::event::{self, Locked};
use crate::flight::{FlightPlane, Message};
use crate::host::abort_reason::Interrupted;
use crate::host::health::Health;
use crate::host::plane::{HostPlane, MessageConnector};
use crate::host::point_to_point::{Messages, Ticket};
use crate::observe::{CallReport, Watch};
use background::{Background, Outstanding};

/// Tags with this bit are the crate's own.
pub(super) const INTERNAL_TAG: u64 = 1 << 63;

/// How long one turn of a waiter may hold the lock, so that others can post and wait too.
const TURN: Duration = Duration::from_micros(200);

/// For how long after the end of a communicator peers are heard that want to know of it: a link that they open takes a moment.
const TELLING: Duration = Duration::from_secs(2);

/// What is sent or received: with whom, under which tag, of which type.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageContext {
    /// `None`: from any rank.
    pub(super) peer: Option<usize>,
    pub(super) tag: u64,
    pub(super) element: TypeTag,
    pub(super) element_bytes: usize,
}

impl MessageContext {
    /// The message as it is put on record.
    #[inline]
    fn recorded(&self, sends: bool, bytes: usize) -> Message {
        let MessageContext { peer, tag, element, element_bytes } = *self;
        Message { sends, peer, tag, count: (bytes / element_bytes) as u64, element }
    }

    /// `send to rank 3, tag 7`.
    fn doing(&self, sends: bool) -> String {
        let whom = match (sends, self.peer) {
            (true, Some(peer)) => format!("send to rank {peer}"),
            (false, Some(peer)) => format!("recv from rank {peer}"),
            (_, None) => "recv from any rank".to_owned(),
        };
        match self.tag {
            0 => whom,
            tag if tag & INTERNAL_TAG != 0 => format!("{whom} (internal)"),
            tag => format!("{whom}, tag {tag}"),
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
}

impl Inner {
    /// Whether there is something to move on while nobody waits.
    fn is_busy(&self) -> bool {
        !self.outstanding.is_empty() || self.away > 0 || self.telling.is_some_and(|since| since.elapsed() < TELLING)
    }
}

/// One communicator's messages.
pub(crate) struct ProgressEngine {
    rank: usize,
    peers: Arc<[Peer]>,
    health: Arc<Health>,
    inner: Mutex<Inner>,
    background: OnceLock<Background>,
}

/// Where a posted message's bytes are.
#[derive(Debug, Clone, Copy)]
pub(super) enum MessageBuffer {
    Send { data: *const u8, bytes: usize },
    Receive { into: *mut u8, bytes: usize },
}

impl MessageBuffer {
    #[inline]
    fn bytes(&self) -> usize {
        let (MessageBuffer::Send { bytes, .. } | MessageBuffer::Receive { bytes, .. }) = self;
        *bytes
    }

    #[inline]
    fn sends(&self) -> bool {
        matches!(self, MessageBuffer::Send { .. })
    }

    /// The message as it is put on record.
    #[inline]
    fn recorded(&self, context: &MessageContext) -> Message {
        context.recorded(self.sends(), self.bytes())
    }

    /// The message, for those who listen.
    fn report<'a>(&self, watch: &'a Watch, context: &MessageContext) -> CallReport<'a> {
        watch.message(&self.recorded(context), FlightPlane::Host, self.bytes())
    }
}

impl ProgressEngine {
    /// The progress engine of the communicator whose plane this is.
    pub(super) fn new(plane: &HostPlane, connector: MessageConnector) -> Self {
        let (rank, peers, health) = (plane.rank(), plane.peers(), plane.health());
        let messages = Messages::new(rank, peers.len(), plane.local().1, connector);
        let inner = Mutex::new(Inner { messages, outstanding: Vec::new(), telling: None, away: 0, closed: false, direct: 0 });
        Self { rank, peers, health, inner, background: OnceLock::new() }
    }

    /// The engine, for as long as this is held. Whoever listens is told afterwards.
    #[inline]
    fn lock(&self) -> Locked<'_, Inner> {
        event::lock(&self.inner)
    }

    /// As [`ProgressEngine::lock`]; `None` where somebody has it.
    fn try_lock(&self) -> Option<Locked<'_, Inner>> {
        event::try_lock(&self.inner)
    }

    /// Refuses a message once the communicator is ended, or in a forked process: before the lock, which nobody may be there to let go of.
    fn refuse_if_ended(&self, context: &MessageContext, memory: &MessageBuffer) -> Result<()> {
        self.health.refusal(|| context.doing(memory.sends()), &self.peers).map_or(Ok(()), Err)
    }

    /// Posts a message. Nothing of the program's is called meanwhile, and where it breaks off, by an error or a panic, nothing is posted.
    ///
    /// # Safety
    ///
    /// The bytes are initialised, and stay valid, those of a send unwritten and those of a receive untouched by others, until the ticket has
    /// ended or was cancelled; so whoever gets the ticket has what cancels it in place before anything else can unwind.
    unsafe fn post(
        inner: &mut Inner,
        context: &MessageContext,
        memory: MessageBuffer,
        deadline: &Deadline,
    ) -> std::result::Result<Ticket, Interrupted> {
        match memory {
            // SAFETY: `bytes` bytes at `data`, initialised and unwritten until the ticket has ended or was cancelled (this function's contract).
            MessageBuffer::Send { data, bytes } => unsafe {
                inner.messages.post_send(context.peer.unwrap_or_default(), context.tag, context.element, data, bytes, deadline)
            },
            // SAFETY: `bytes` initialised bytes at `into`, the request's alone until the ticket has ended or was cancelled (this function's
            // contract).
            MessageBuffer::Receive { into, bytes } => unsafe {
                inner.messages.post_receive(context.peer, Some(context.tag), context.element, into, bytes, deadline)
            },
        }
    }

    /// Tells the peers that the communicator has ended; those that wait for a message of this rank would not learn of it otherwise.
    /// Never waits for the lock: whoever holds it looks after that too.
    pub(super) fn announce_end(self: &Arc<Self>) {
        if self.health.is_foreign() {
            return;
        }
        if let Some(mut inner) = self.try_lock() {
            self.advance(&mut inner);
        }
        if let Err(error) = self.wake_background() {
            crate::event::warn!(rank = self.rank, %error, "peers may hear of the end late");
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
        if let Some(abort_reason) = inner.messages.heard() {
            self.health.end(abort_reason);
        }
        if let (None, Some(abort_reason)) = (inner.telling, self.health.abort_reason()) {
            inner.telling = Some(Instant::now());
            inner.messages.propagate(*abort_reason);
        }
        let mut at = 0;
        while at < inner.outstanding.len() {
            match self.ended(inner, at) {
                Some(result) => self.finish(inner, at, result),
                None => at += 1,
            }
        }
    }

    /// Sends what is still on its way, for a bounded time, and tells the peers that this rank leaves. Listeners have been told of
    /// everything when it returns.
    pub(super) fn close(&self) {
        let deadline = Deadline::after(Duration::from_secs(5));
        let mut inner = self.lock();
        self.advance(&mut inner);
        while inner.outstanding.iter().any(Outstanding::sends) && !deadline.has_passed() && self.health.abort_reason().is_none() {
            if !self.advance(&mut inner) {
                inner.messages.wait_step(TURN);
            }
        }
        let _ = inner.messages.leave(&Deadline::after(Duration::from_secs(1)));
        inner.closed = true;
        while let Some(last) = inner.outstanding.len().checked_sub(1) {
            let doing = inner.outstanding[last].doing();
            self.finish(&mut inner, last, Err(Error::Aborted { doing, by: self.peers[self.rank].clone() }));
        }
        drop(inner);
        self.join_background();
    }
}
