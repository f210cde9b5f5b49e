//! Notifies Python when calls end. One thread does this for all calls; if a callback takes long, another thread
//! continues.
//!
//! A call ends on a communicator thread. That thread must wait neither for Python's lock, which a long computation may
//! hold, nor for a callback of the program. So the ends of calls are queued here. A callback may itself wait for the
//! end of another call: if it takes long, the next thread continues. No end is reported once the interpreter is ending,
//! and a forked child drops the ends that its parent had queued.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// The function that runs, with Python's lock held, when a call has ended.
type Finish = Box<dyn FnOnce(Python<'_>) + Send>;

/// How long a callback may take before the next thread continues.
const PATIENCE: Duration = Duration::from_millis(5);
/// How long the interpreter's exit waits for callbacks.
const LAST_WAIT: Duration = Duration::from_secs(60);

struct Queue {
    process: u32,
    waiting: VecDeque<Finish>,
    threads: usize,
    /// The number of threads in a callback, and when the latest callback began.
    busy: usize,
    began: Option<Instant>,
    is_stopped: bool,
}

static QUEUE: Mutex<Queue> =
    Mutex::new(Queue { process: 0, waiting: VecDeque::new(), threads: 0, busy: 0, began: None, is_stopped: false });
/// Notified when an end was queued, a thread has ended, or the queue was stopped.
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues `finish` for the notification thread. It never runs if no thread can be started or the interpreter is ending.
pub(crate) fn tell(finish: Finish) {
    let mut queue = lock();
    let process = std::process::id();
    if queue.process != process {
        // Ends that the parent had queued refer to the parent's objects.
        std::mem::forget(std::mem::take(&mut queue.waiting));
        (queue.process, queue.threads, queue.busy, queue.is_stopped) = (process, 0, 0, false);
    }
    if queue.is_stopped || (queue.threads == 0 && !start(&mut queue)) {
        // `finish` holds references that may be dropped only with Python's lock held.
        std::mem::forget(finish);
        return;
    }
    queue.waiting.push_back(finish);
    drop(queue);
    CHANGED.notify_all();
}

fn start(queue: &mut Queue) -> bool {
    let started = std::thread::Builder::new().name("collectives-torch".to_owned()).spawn(run).is_ok();
    queue.threads += usize::from(started);
    started
}

impl Queue {
    /// Returns the next queued end, if no thread is in a callback or the latest callback has run for `PATIENCE`.
    fn take(&mut self) -> Option<Finish> {
        let is_free = self.busy == 0 || self.began.is_none_or(|began| began.elapsed() >= PATIENCE);
        if is_free { self.waiting.pop_front() } else { None }
    }
}

fn run() {
    while let Some(finish) = next() {
        let mut finish = Some(finish);
        let told = Python::try_attach(|py| finish.take().into_iter().for_each(|finish| finish(py)));
        lock().busy -= 1;
        if told.is_none() {
            // The interpreter is ending: references to its objects can no longer be dropped.
            std::mem::forget(finish);
            break;
        }
    }
    lock().threads -= 1;
    CHANGED.notify_all();
}

/// Waits for the next queued end. Returns `None` if the queue is stopped or enough other threads are waiting.
fn next() -> Option<Finish> {
    let mut queue = lock();
    loop {
        if queue.is_stopped || queue.threads - queue.busy > 2 {
            return None;
        }
        if let Some(finish) = queue.take() {
            queue.busy += 1;
            queue.began = Some(Instant::now());
            if queue.busy == queue.threads {
                // The new thread continues if the callback takes long.
                start(&mut queue);
            }
            return Some(finish);
        }
        queue = if queue.waiting.is_empty() {
            CHANGED.wait(queue).unwrap_or_else(PoisonError::into_inner)
        } else {
            CHANGED.wait_timeout(queue, PATIENCE).unwrap_or_else(PoisonError::into_inner).0
        };
    }
}

/// Stops all notifications and waits for running callbacks. The interpreter's exit calls this: no thread may be inside
/// the interpreter then.
#[pyfunction]
pub(crate) fn stop_telling(py: Python<'_>) {
    py.detach(|| {
        let mut queue = lock();
        queue.is_stopped = true;
        std::mem::forget(std::mem::take(&mut queue.waiting));
        CHANGED.notify_all();
        let own = queue.process == std::process::id();
        drop(CHANGED.wait_timeout_while(queue, LAST_WAIT, |queue| own && queue.threads > 0));
    });
}
