//! Threads of this crate on which the program's code runs: custom ops, callbacks, subscribers of `tracing`, drops of
//! buffers.
//!
//! The program's code may run forever, so every wait for the end of such a thread has a limit. Such a thread never
//! waits for another one: two threads would deadlock if each dropped the last handle of the object that the other works
//! for. If no thread waits for it, such a thread ends by itself when its work is done.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, Thread};
use std::time::Duration;

use crate::base::sync::thread_key;

thread_local! {
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the current thread is one of these.
pub(crate) fn is_own() -> bool {
    IS_OWN.get()
}

/// A handle for waiting for a thread's end.
#[derive(Debug)]
pub(crate) struct OwnThread {
    thread: Thread,
    run: Arc<Run>,
}

/// The state of the thread.
#[derive(Debug, Default)]
struct Run {
    /// The thread's key while it runs; 0 before and after.
    key: AtomicUsize,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

/// Reports the end when it is dropped, even by a panic.
struct End(Arc<Run>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.key.store(0, Ordering::Relaxed);
        *self.0.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.ended.notify_all();
    }
}

impl OwnThread {
    /// Starts a thread that runs `work`.
    pub(crate) fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let run = Arc::new(Run::default());
        let end = End(Arc::clone(&run));
        let handle = Builder::new().name(name).spawn(move || {
            // This is dropped after everything that the work has held.
            let end = end;
            end.0.key.store(thread_key(), Ordering::Relaxed);
            IS_OWN.set(true);
            work();
        })?;
        Ok(Self { thread: handle.thread().clone(), run })
    }

    /// Returns whether this is the current thread.
    pub(crate) fn is_current(&self) -> bool {
        // A thread sees what it stored itself. No other thread stores this thread's key.
        self.run.key.load(Ordering::Relaxed) == thread_key()
    }

    /// Wakes the thread if it is parked.
    pub(crate) fn unpark(&self) {
        self.thread.unpark();
    }

    /// Waits at most `limit` for the thread's end, and returns whether it has ended. If called on a thread of this
    /// crate, it does not wait.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let has_ended = self.run.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = if is_own() { Duration::ZERO } else { limit };
        let waited = self.run.ended.wait_timeout_while(has_ended, limit, |has_ended| !*has_ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn the_end_is_waited_for_within_a_limit_also_of_a_panic() {
        let (go, gone) = channel::<()>();
        let thread = OwnThread::spawn("waits".to_owned(), move || assert!(gone.recv().is_err())).unwrap();
        assert!(!thread.wait(Duration::from_millis(1)) && !thread.is_current());
        drop(go);
        assert!(thread.wait(LONG) && thread.wait(Duration::ZERO));
        // Bypasses the hook, which would print it.
        let panics = OwnThread::spawn("panics".to_owned(), || std::panic::resume_unwind(Box::new("as wanted"))).unwrap();
        assert!(panics.wait(LONG));
    }

    #[test]
    fn what_the_work_held_is_gone_when_it_has_ended() {
        let held = Arc::new(());
        let kept = Arc::clone(&held);
        let thread = OwnThread::spawn("holds".to_owned(), move || assert_eq!(Arc::strong_count(&kept), 2)).unwrap();
        assert!(thread.wait(LONG));
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[test]
    fn one_of_them_does_not_wait_for_another() {
        let (go, gone) = channel::<()>();
        let other = OwnThread::spawn("waits".to_owned(), move || assert!(gone.recv().is_err())).unwrap();
        let (say, said) = channel();
        let asks = OwnThread::spawn("asks".to_owned(), move || say.send((is_own(), other.wait(LONG))).unwrap()).unwrap();
        assert_eq!(said.recv_timeout(LONG), Ok((true, false)));
        drop(go);
        assert!(asks.wait(LONG) && !is_own());
    }
}
