//! The handles of background calls on devices. They query the stream to learn whether the call has ended. Until then
//! they keep the memory that the device may use.

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
    /// The error, if it was not queued completely.
    failure: Option<Error>,
}

/// Completes a background call's handle once the event reports the end of the call.
struct Watcher {
    queued: Queued,
    state: Arc<State>,
    /// The buffers of the call, until it has ended.
    buffers: Mutex<Option<Box<dyn ErasedBuffer>>>,
    received: Option<Received>,
}

impl Queued {
    /// Marks the end of the work that is now on the stream. The device may take `limit` for it.
    pub(super) fn new(comm: &Arc<NcclComm>, stream: &Arc<CudaStream>, doing: String, limit: Duration, failure: Option<Error>) -> Self {
        let deadline = Deadline::after(limit);
        Self { end: Arc::new(comm.position(stream)), comm: Arc::clone(comm), doing, deadline, failure }
    }

    /// Returns the handle of the call, which owns its buffers.
    pub(in crate::communicator) fn into_work<B: Send + 'static>(self, buffers: PinnedBuffer<B>) -> Work<B> {
        let (state, watcher) = self.watched(buffers, None);
        Work::new(state, Some(watcher))
    }

    /// Returns the handle of a receive.
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

    /// Returns the outcome of the call; `None` if it has not ended.
    fn look(&self) -> Option<Result<()>> {
        if let Some(error) = &self.failure {
            return Some(Err(error.clone()));
        }
        let ended = self.comm.look(&self.end, &|| self.doing.clone(), &self.deadline)?;
        // The handle belongs to this one call, so it reports the original error.
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
    /// Reports the outcome of the call. After an error the device may still use the buffers.
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
    /// Keeps the buffers until the call, which continues, has ended.
    fn drop(&mut self) {
        if let Some(buffers) = self.take() {
            keep(&self.queued.end, buffers);
        }
    }
}

/// The buffers of a call that no thread waits for any more.
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
    // Without a thread the buffers are never dropped, which does no harm.
    let _ = poller.wake();
}

/// Drops a value that may be the program's, and catches its panics.
fn drop_caught<T>(value: T) {
    event::caught("the destructor of a buffer", || drop(value));
}

/// Polls the ends of calls that are awaited, that have callbacks, or whose buffers are kept. One thread of the
/// process does so, as long as there are any.
struct CompletionPoller {
    awaited: Vec<Arc<Watcher>>,
    kept: Vec<Kept>,
    /// Whether calls were added since the last look.
    has_news: bool,
    is_running: bool,
    /// The thread that was started last.
    thread: Option<OwnThread>,
}

static COMPLETION_POLLER: Mutex<CompletionPoller> =
    Mutex::new(CompletionPoller { awaited: Vec::new(), kept: Vec::new(), has_news: false, is_running: false, thread: None });
/// Signals that a call was added.
static CAME: Condvar = Condvar::new();

impl CompletionPoller {
    /// Adds a call that is polled until it has ended. If no thread can be started for that, the call ends at once with
    /// the error of starting it.
    fn add(watcher: Arc<Watcher>) {
        let mut poller = event::lock(&COMPLETION_POLLER);
        if poller.awaited.iter().any(|known| Arc::ptr_eq(known, &watcher)) {
            return;
        }
        poller.awaited.push(Arc::clone(&watcher));
        let Err(error) = poller.wake() else { return };
        poller.awaited.retain(|known| !Arc::ptr_eq(known, &watcher));
        drop(poller);
        let doing = format!(
            "awaiting {}: starting the thread that checks whether the call has ended (raise the limit on threads, or call wait)",
            watcher.queued.doing
        );
        watcher.end(Err(Error::io(doing, error)));
    }

    /// Wakes the polling thread, or starts it.
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
            // Without the lock: polling runs the program's callbacks, and the driver may block the polling thread.
            awaited.retain(|watcher| watcher.poll());
            let (passed, mut kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| kept.end.is_passed());
            {
                let mut poller = event::lock(&COMPLETION_POLLER);
                poller.awaited.retain(|watcher| !awaited.iter().any(|ended| Arc::ptr_eq(ended, watcher)));
                poller.kept.append(&mut kept);
            }
            // Dropping these may run drop code of the program.
            drop_caught(awaited);
            passed.into_iter().for_each(|kept| drop_caught(kept.buffers));
            back_off.rest_on(|nap| {
                let poller = COMPLETION_POLLER.lock().unwrap_or_else(PoisonError::into_inner);
                drop(CAME.wait_timeout_while(poller, nap, |poller| !poller.has_news));
            });
        }
    }
}
