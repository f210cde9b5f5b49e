//! Posts and finishes messages, with one engine behind a lock. Every thread that waits advances the engine, and so does
//! a separate thread while background messages are outstanding.

#![expect(unsafe_code, reason = "posted messages point into buffers that their caller or the progress engine keeps alive")]

mod background;
mod blocking;
mod bytes;
mod exchange;
mod outcome;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::base::deadline::Deadline;
use crate::base::event::{self, Locked};
use crate::base::own_thread::OwnThread;
use crate::base::tuning::progress::{HAND_OVER, LONE_TURN, TELLING, TURN};
use crate::communicator::work::completion::State;
use crate::communicator::work::message::{MessageBuffer, MessageContext};
use crate::communicator::work::pinned::ErasedBuffer;
use crate::error::{Error, Peer, Result};
use crate::flight::{Flight, Message};
use crate::host::abort_reason::Interrupted;
use crate::host::backend::{HostBackend, MessageConnector};
use crate::host::health::Health;
use crate::host::point_to_point::{Messages, Ticket};
use crate::observe::Observers;

/// A requested message.
#[derive(Debug, Clone)]
struct PendingMessage {
    context: MessageContext,
    sends: bool,
    bytes: usize,
    deadline: Deadline,
    /// The message's number in the flight recorder.
    number: u64,
}

impl PendingMessage {
    /// Returns the message as the flight recorder stores it.
    fn message(&self) -> Message {
        self.context.recorded(self.sends, self.bytes)
    }

    /// Describes the message: `send to rank 3, tag 7`.
    fn doing(&self) -> String {
        self.context.doing(self.sends)
    }
}

/// A message in the background.
struct Outstanding {
    ticket: Ticket,
    request: PendingMessage,
    /// How long it had waited at the last warning, if there was one.
    warned: Option<Duration>,
    buffer: Box<dyn ErasedBuffer>,
    state: Arc<State>,
}

/// The engine, and the messages that are outstanding in it.
struct Inner {
    messages: Messages<MessageConnector>,
    outstanding: Vec<Outstanding>,
    /// The time at which this rank began to notify the peers that the communicator has ended.
    telling: Option<Instant>,
    /// The number of callers that do something else while their messages are on their way.
    away: usize,
    /// Whether the communicator is closed: no message is posted any more.
    closed: bool,
    /// The number of messages that have tried the short path since everything was last advanced.
    direct: u32,
}

impl Inner {
    /// Returns whether there is something to advance while no thread waits.
    fn is_busy(&self) -> bool {
        !self.outstanding.is_empty()
            || self.away > 0
            || self.messages.is_stuck()
            || self.messages.has_incoming_rest()
            || self.telling.is_some_and(|since| since.elapsed() < TELLING)
    }
}

/// The messages of one communicator.
pub(super) struct ProgressEngine {
    rank: usize,
    peers: Arc<[Peer]>,
    health: Arc<Health>,
    recorder: Arc<Flight>,
    observers: Observers,
    inner: Mutex<Inner>,
    /// The number of threads that wait for the lock.
    wanted: AtomicUsize,
    /// Whether a thread has ever waited for the lock.
    is_shared: AtomicBool,
    background: OnceLock<OwnThread>,
    /// Held while the background thread is started, so that there is only one.
    starting: Mutex<()>,
}

impl ProgressEngine {
    /// Makes the progress engine of the communicator that `backend` belongs to.
    pub(super) fn new(backend: &HostBackend, connector: MessageConnector) -> Self {
        let (rank, peers) = (backend.rank(), backend.peers());
        let waiting = connector.waiting;
        let messages = Messages::new(rank, peers.len(), backend.is_crowded(), connector).waiting(waiting);
        let inner = Mutex::new(Inner { messages, outstanding: Vec::new(), telling: None, away: 0, closed: false, direct: 0 });
        Self {
            rank,
            peers,
            health: backend.health(),
            recorder: backend.recorder(),
            observers: backend.observers(),
            inner,
            wanted: AtomicUsize::new(0),
            is_shared: AtomicBool::new(false),
            background: OnceLock::new(),
            starting: Mutex::new(()),
        }
    }

    /// Locks the engine. Listeners are notified once the lock is released.
    #[inline]
    fn lock(&self) -> Locked<'_, Inner> {
        self.try_lock().unwrap_or_else(|| self.lock_after_others())
    }

    #[cold]
    fn lock_after_others(&self) -> Locked<'_, Inner> {
        self.is_shared.store(true, Ordering::Relaxed);
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let inner = event::lock(&self.inner);
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        inner
    }

    /// Returns how long one turn may hold the lock.
    fn turn(&self) -> Duration {
        if self.is_shared.load(Ordering::Relaxed) { TURN } else { LONE_TURN }
    }

    /// Gives the threads that wait for the lock time to wake up and take it. Call it between two turns: a thread that
    /// releases the lock and takes it again at once would keep all others from it, past their deadlines.
    fn let_others_in(&self) {
        if self.wanted.load(Ordering::Relaxed) != 0 {
            std::thread::sleep(HAND_OVER);
        }
    }

    /// Locks the engine like [`ProgressEngine::lock`]. Returns `None` if another thread holds the lock.
    #[inline]
    fn try_lock(&self) -> Option<Locked<'_, Inner>> {
        event::try_lock(&self.inner)
    }

    /// Refuses a message once the communicator has ended, or in a forked process. Called before taking the lock: in a
    /// forked process the lock's holder may not exist.
    fn refuse_if_ended(&self, context: &MessageContext, memory: &MessageBuffer) -> Result<()> {
        self.health.refusal(|| context.doing(memory.sends()), &self.peers).map_or(Ok(()), Err)
    }

    /// Locks the engine to post a message. Refuses it once the communicator has ended or is closed.
    #[inline]
    fn lock_to_post(&self, context: &MessageContext, memory: &MessageBuffer) -> Result<Locked<'_, Inner>> {
        self.refuse_if_ended(context, memory)?;
        let inner = self.lock();
        // The engine may have been closed while this thread waited for the lock. No thread advances messages any more.
        if inner.closed { Err(Error::Closed { call: context.doing(memory.sends()) }) } else { Ok(inner) }
    }

    /// Returns the source of a message that has arrived with `tag` and was not received, as far as this rank knows.
    /// Also returns `None` while the engine is in use.
    #[cfg(feature = "cuda")]
    pub(in crate::communicator) fn has_arrived(&self, tag: u64) -> Option<usize> {
        self.try_lock().and_then(|inner| inner.messages.has_arrived(tag))
    }

    /// Posts a message. No code of the program runs meanwhile. If this fails or panics, nothing is posted.
    ///
    /// # Safety
    ///
    /// The bytes are initialised and stay valid until the ticket has ended or was cancelled. Until then, the bytes of a
    /// send stay unwritten, and those of a receive untouched by others. So the code that gets the ticket must have its
    /// cancellation in place before anything else can unwind.
    unsafe fn post(inner: &mut Inner, context: &MessageContext, memory: MessageBuffer) -> std::result::Result<Ticket, Interrupted> {
        match memory {
            // SAFETY: `bytes` bytes at `data`, initialised and unwritten until the ticket has ended or was cancelled (this function's contract).
            MessageBuffer::Send { data, bytes } => unsafe {
                inner.messages.post_send(context.peer.unwrap_or_default(), context.tag, context.element, data, bytes)
            },
            // SAFETY: `bytes` initialised bytes at `into`, the request's alone until the ticket has ended or was cancelled (this function's
            // contract).
            MessageBuffer::Receive { into, bytes } => unsafe {
                inner.messages.post_receive(context.peer, Some(context.tag), context.element, into, bytes)
            },
            MessageBuffer::Object { most } => inner.messages.post_object_receive(context.peer, context.tag, most),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::communicator::Communicator;
    use crate::error::Result;
    use crate::meeting::Meeting;

    #[test]
    fn whoever_has_the_lock_can_abort_and_the_peers_hear_of_it() -> Result<()> {
        let has_heard = Meeting::new(2);
        let heard = Communicator::builder().configure(|config| config.timeout = Duration::from_secs(30)).run_local(2, |comm| {
            if comm.rank() == 0 {
                // No callback runs under the lock, but another thread may hold it.
                let held = comm.core.shared.progress.lock();
                comm.abort_handle().abort();
                drop(held);
                has_heard.meet();
                return Ok("aborted".to_owned());
            }
            // The abort arrives before this call, or during it.
            let error = comm.recv(&mut [0_u8], 0).expect_err("nothing was sent");
            has_heard.meet();
            Ok(error.to_string())
        })?;
        assert!(heard.iter().all(|words| words.contains("aborted")), "{heard:?}");
        Ok(())
    }
}
