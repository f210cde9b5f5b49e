//! Tells Python of the ends of calls: one thread for all of them, whatever their number, and others only while callbacks wait.
//!
//! A call ends on a thread of the communicator's, which must not wait: neither for Python's lock, which a long computation may hold, nor for what a
//! callback of the program does. So ends are queued here. A callback may itself wait for the end of another call: where one takes long, the next thread
//! goes on. Where the interpreter is ending, or in a forked child, nobody is told any more.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// What is done at the end of a call, with Python's lock.
type Finish = Box<dyn FnOnce(Python<'_>) + Send>;

/// How long a callback may take before the next thread goes on.
const PATIENCE: Duration = Duration::from_millis(5);
/// How long the end of the interpreter waits for callbacks.
const LAST_WAIT: Duration = Duration::from_secs(60);

struct Queue {
    process: u32,
    waiting: VecDeque<Finish>,
    threads: usize,
    /// How many of them are in a callback, and when the last one began.
    busy: usize,
    began: Option<Instant>,
    is_stopped: bool,
}

static QUEUE: Mutex<Queue> =
    Mutex::new(Queue { process: 0, waiting: VecDeque::new(), threads: 0, busy: 0, began: None, is_stopped: false });
/// Something has come, or a thread has ended.
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has `finish` run soon, on a thread that does so. Where none can be started, or the interpreter is ending, it never is.
pub(crate) fn tell(finish: Finish) {
    let mut queue = lock();
    let process = std::process::id();
    if queue.process != process {
        // What a parent had queued refers to what is its own.
        std::mem::forget(std::mem::take(&mut queue.waiting));
        (queue.process, queue.threads, queue.busy, queue.is_stopped) = (process, 0, 0, false);
    }
    if queue.is_stopped || (queue.threads == 0 && !start(&mut queue)) {
        // It holds references that only somebody with Python's lock may let go.
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
    /// The next one to be told of, where nobody is telling, or has not come back for long.
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
            // The interpreter is ending: references to its objects cannot be let go any more.
            std::mem::forget(finish);
            break;
        }
    }
    lock().threads -= 1;
    CHANGED.notify_all();
}

/// Waits for what comes next; nothing where that is over, or others wait already.
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
                // Somebody goes on, should this one take long.
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

/// Tells nobody any more, and waits for callbacks under way: for the end of the interpreter, which threads must not be inside of then.
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
