//! The engine of a communicator's messages, behind a lock, and how a message is posted to it.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller or the progress engine keeps alive")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::pending::Outstanding;
use crate::communicator::message::{MessageBuffer, MessageContext};
use crate::deadline::Deadline;
use crate::error::{Peer, Result};
use crate::event::{self, Locked};
use crate::flight::Flight;
use crate::host::abort_reason::Interrupted;
use crate::host::health::Health;
use crate::host::plane::{HostPlane, MessageConnector};
use crate::host::point_to_point::{Messages, Ticket};
use crate::observe::Observers;

/// How long a thread between two turns stays away from the lock where others wait for it: a sleeper needs about as long to wake up.
const HAND_OVER: Duration = Duration::from_micros(50);
/// How long one turn of a waiter may hold the lock, so that others can post and wait too.
pub(super) const TURN: Duration = Duration::from_micros(200);

/// For how long after the end of a communicator peers are heard that want to know of it: a link that they open takes a moment.
const TELLING: Duration = Duration::from_secs(2);

/// The thread of background messages.
pub(super) struct Background {
    pub(super) thread: Thread,
    /// Taken by whoever waits for its end.
    pub(super) handle: Mutex<Option<JoinHandle<()>>>,
}

/// The engine and what is outstanding in it.
pub(super) struct Inner {
    pub(super) messages: Messages<MessageConnector>,
    pub(super) outstanding: Vec<Outstanding>,
    /// Since when the peers are told of the end of the communicator.
    pub(super) telling: Option<Instant>,
    /// Callers that are busy with something else while their messages are on their way.
    pub(super) away: usize,
    /// Nothing is posted any more: the communicator is gone.
    pub(super) closed: bool,
    /// Messages that went the short way since everything was last moved on.
    pub(super) direct: u32,
}

impl Inner {
    /// Whether there is something to move on while nobody waits.
    pub(super) fn is_busy(&self) -> bool {
        !self.outstanding.is_empty() || self.away > 0 || self.telling.is_some_and(|since| since.elapsed() < TELLING)
    }
}

/// One communicator's messages.
pub(in crate::communicator) struct ProgressEngine {
    pub(super) rank: usize,
    pub(super) peers: Arc<[Peer]>,
    pub(super) health: Arc<Health>,
    pub(super) recorder: Arc<Flight>,
    pub(super) observers: Observers,
    inner: Mutex<Inner>,
    /// How many wait for the lock.
    wanted: AtomicUsize,
    pub(super) background: OnceLock<Background>,
}

impl ProgressEngine {
    /// The progress engine of the communicator whose plane this is.
    pub(in crate::communicator) fn new(plane: &HostPlane, connector: MessageConnector) -> Self {
        let (rank, peers) = (plane.rank(), plane.peers());
        let messages = Messages::new(rank, peers.len(), plane.local().1, connector);
        let inner = Mutex::new(Inner { messages, outstanding: Vec::new(), telling: None, away: 0, closed: false, direct: 0 });
        Self {
            rank,
            peers,
            health: plane.health(),
            recorder: plane.recorder(),
            observers: plane.observers(),
            inner,
            wanted: AtomicUsize::new(0),
            background: OnceLock::new(),
        }
    }

    /// The engine, for as long as this is held. Whoever listens is told afterwards.
    #[inline]
    pub(super) fn lock(&self) -> Locked<'_, Inner> {
        self.try_lock().unwrap_or_else(|| self.lock_after_others())
    }

    #[cold]
    fn lock_after_others(&self) -> Locked<'_, Inner> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let inner = event::lock(&self.inner);
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        inner
    }

    /// Gives whoever waits for the lock the time to wake up and take it. To be called between two turns: a thread that lets go of the lock
    /// and takes it again at once would keep all others from it, past their deadlines.
    pub(super) fn let_others_in(&self) {
        if self.wanted.load(Ordering::Relaxed) != 0 {
            std::thread::sleep(HAND_OVER);
        }
    }

    /// As [`ProgressEngine::lock`]; `None` where somebody has it.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<Locked<'_, Inner>> {
        event::try_lock(&self.inner)
    }

    /// Refuses a message once the communicator is ended, or in a forked process: before the lock, which nobody may be there to let go of.
    pub(super) fn refuse_if_ended(&self, context: &MessageContext, memory: &MessageBuffer) -> Result<()> {
        self.health.refusal(|| context.doing(memory.sends()), &self.peers).map_or(Ok(()), Err)
    }

    /// Posts a message. Nothing of the program's is called meanwhile, and where it breaks off, by an error or a panic, nothing is posted.
    ///
    /// # Safety
    ///
    /// The bytes are initialised, and stay valid, those of a send unwritten and those of a receive untouched by others, until the ticket has
    /// ended or was cancelled; so whoever gets the ticket has what cancels it in place before anything else can unwind.
    pub(super) unsafe fn post(
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
}
