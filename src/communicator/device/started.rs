//! The handles of started calls on devices. They ask the stream whether the call has ended, and keep what the device may use until it has.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::CudaStream;

use crate::base::deadline::Deadline;
use crate::base::event;
use crate::base::own_thread::OwnThread;
use crate::communicator::work::completion::{Finished, State};
use crate::communicator::work::message::Received;
use crate::communicator::work::pinned::{ErasedBuffer, PinnedBuffer};
use crate::communicator::work::{Drive, Work};
use crate::device::{BackOff, NcclComm, StreamPosition};
use crate::error::{Error, Result};

/// A call that was queued, and its end on the stream.
pub(in crate::communicator) struct Queued {
    end: Arc<StreamPosition>,
    comm: Arc<NcclComm>,
    doing: String,
    deadline: Deadline,
    /// Why it was not queued in whole, where it was not.
    failure: Option<Error>,
}

/// Completes a started call's handle, once the event says that the call has ended.
struct Watcher {
    queued: Queued,
    state: Arc<State>,
    /// What the call works on, until it has ended.
    buffers: Mutex<Option<Box<dyn ErasedBuffer>>>,
    received: Option<Received>,
}

impl Queued {
    /// What was put on the stream last, for which the device may take `limit`.
    pub(super) fn new(comm: &Arc<NcclComm>, stream: &Arc<CudaStream>, doing: String, limit: Duration, failure: Option<Error>) -> Self {
        let deadline = Deadline::after(limit);
        Self { end: Arc::new(comm.position(stream)), comm: Arc::clone(comm), doing, deadline, failure }
    }

    /// The handle of the call, which owns its buffers.
    pub(in crate::communicator) fn into_work<B: Send + 'static>(self, buffers: PinnedBuffer<B>) -> Work<B> {
        let (state, watcher) = self.watched(buffers, None);
        Work::new(state, Some(watcher))
    }

    /// The handle of a receive.
    pub(in crate::communicator) fn into_receiving_work<B: Send + 'static>(
        self,
        buffers: PinnedBuffer<B>,
        received: Received,
    ) -> Work<(B, Received)> {
        let (state, watcher) = self.watched(buffers, Some(received));
        Work::<B>::receiving(state, Some(watcher))
    }

    fn watched<B: Send + 'static>(self, buffers: PinnedBuffer<B>, received: Option<Received>) -> (Arc<State>, Arc<dyn Drive>) {
        let state = State::new();
        let watcher = Watcher { queued: self, state: Arc::clone(&state), buffers: Mutex::new(Some(Box::new(buffers))), received };
        (state, Arc::new(watcher))
    }

    /// How it has ended; `None` where it has not.
    fn look(&self) -> Option<Result<()>> {
        if let Some(error) = &self.failure {
            return Some(Err(error.clone()));
        }
        let ended = self.comm.look(&self.end, &|| self.doing.clone(), &self.deadline)?;
        // The handle is of this one call, which is to say itself why it failed.
        Some(ended.map_err(|error| match error {
            Error::Poisoned { cause, .. } => (*cause).clone(),
            error => error,
        }))
    }
}

impl Drive for Watcher {
    fn drive(&self, limit: Duration) -> bool {
        let until = Deadline::after(limit);
        let mut back_off = BackOff::default();
        while !self.poll() && !until.has_passed() {
            back_off.rest_within(until.remaining());
        }
        true
    }

    fn poll(&self) -> bool {
        let ended = self.queued.look();
        ended.map(|ended| self.end(ended)).is_some()
    }

    fn attend(self: Arc<Self>) {
        CompletionPoller::add(self);
    }

    fn is_noticed_here(&self) -> bool {
        event::lock(&COMPLETION_POLLER).thread.as_ref().is_some_and(OwnThread::is_current)
    }
}

impl Watcher {
    /// Tells how the call has ended. After an error the device may still be at work on the buffers.
    fn end(&self, ended: Result<()>) {
        let Some(buffers) = self.take() else { return };
        match ended {
            Ok(()) => self.state.end(Ok(Finished { buffer: buffers.release(), received: self.received })),
            Err(error) => {
                keep(&self.queued.end, buffers);
                self.state.end(Err(error));
            }
        }
    }

    fn take(&self) -> Option<Box<dyn ErasedBuffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Watcher {
    /// The call goes on, and its buffers stay as long.
    fn drop(&mut self) {
        if let Some(buffers) = self.take() {
            keep(&self.queued.end, buffers);
        }
    }
}

/// The buffers of a call that nobody waits for any more.
struct Kept {
    end: Arc<StreamPosition>,
    buffers: Box<dyn ErasedBuffer>,
}

/// Drops buffers once the stream has passed the call that may use them.
fn keep(end: &Arc<StreamPosition>, buffers: Box<dyn ErasedBuffer>) {
    if end.is_passed() {
        drop_caught(buffers);
        return;
    }
    let mut poller = event::lock(&COMPLETION_POLLER);
    poller.kept.push(Kept { end: Arc::clone(end), buffers });
    // Without a thread they stay, which harms nobody.
    let _ = poller.wake();
}

/// Drops what may be the program's, whose panics end nothing here.
fn drop_caught<T>(value: T) {
    event::caught("the drop of a buffer", || drop(value));
}

/// Looks at the ends of calls that are awaited, that call back, or whose buffers are kept: one thread of the process, as long as there are any.
struct CompletionPoller {
    awaited: Vec<Arc<Watcher>>,
    kept: Vec<Kept>,
    /// Whether others are awaited since the last look.
    has_news: bool,
    is_running: bool,
    /// The last one that was started.
    thread: Option<OwnThread>,
}

static COMPLETION_POLLER: Mutex<CompletionPoller> =
    Mutex::new(CompletionPoller { awaited: Vec::new(), kept: Vec::new(), has_news: false, is_running: false, thread: None });
/// Somebody is awaited.
static CAME: Condvar = Condvar::new();

impl CompletionPoller {
    /// Has a call looked at until it has ended. Where there is no thread for that, whoever awaits it hears that at once.
    fn add(watcher: Arc<Watcher>) {
        let mut poller = event::lock(&COMPLETION_POLLER);
        if poller.awaited.iter().any(|known| Arc::ptr_eq(known, &watcher)) {
            return;
        }
        poller.awaited.push(Arc::clone(&watcher));
        let Err(error) = poller.wake() else { return };
        poller.awaited.retain(|known| !Arc::ptr_eq(known, &watcher));
        drop(poller);
        let doing =
            format!("awaiting {}: starting the thread that looks at it (raise the limit of threads, or call wait)", watcher.queued.doing);
        watcher.end(Err(Error::io(doing, error)));
    }

    /// Sees to it that a thread looks.
    fn wake(&mut self) -> io::Result<()> {
        self.has_news = true;
        CAME.notify_one();
        if !self.is_running {
            self.thread = Some(OwnThread::spawn("awaited calls".to_owned(), Self::run)?);
            self.is_running = true;
        }
        Ok(())
    }

    fn run() {
        let mut back_off = BackOff::default();
        loop {
            let (mut awaited, kept) = {
                let mut poller = event::lock(&COMPLETION_POLLER);
                poller.is_running = !(poller.awaited.is_empty() && poller.kept.is_empty());
                if !poller.is_running {
                    return;
                }
                if std::mem::take(&mut poller.has_news) {
                    back_off = BackOff::default();
                }
                (poller.awaited.clone(), std::mem::take(&mut poller.kept))
            };
            // Without the lock: the end is told to the program, and the driver may hold up whoever asks.
            awaited.retain(|watcher| watcher.poll());
            let (passed, mut kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| kept.end.is_passed());
            {
                let mut poller = event::lock(&COMPLETION_POLLER);
                poller.awaited.retain(|watcher| !awaited.iter().any(|ended| Arc::ptr_eq(ended, watcher)));
                poller.kept.append(&mut kept);
            }
            // Buffers may be freed with these, which is the program's.
            drop_caught(awaited);
            passed.into_iter().for_each(|kept| drop_caught(kept.buffers));
            back_off.rest_on(|nap| {
                let poller = COMPLETION_POLLER.lock().unwrap_or_else(PoisonError::into_inner);
                drop(CAME.wait_timeout_while(poller, nap, |poller| !poller.has_news));
            });
        }
    }
}
