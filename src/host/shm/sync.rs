//! What the step protocol, abort reasons and sleepers are made of: std's and the kernel's, or loom's where they are model-checked.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use std::time::Duration;

/// A word that the kernel lets ranks sleep on until it changes. 0 at first.
#[cfg(not(loom))]
#[repr(transparent)]
pub(super) struct Futex(AtomicU32);

#[cfg(not(loom))]
impl Futex {
    /// The word as it is now.
    pub(super) fn read(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Changes the word and wakes everyone who sleeps on it.
    pub(super) fn change(&self) {
        use rustix::thread::futex;
        self.0.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Sleeps until the word changes, or has changed from what was read, at most for `limit`.
    pub(super) fn wait(&self, read: u32, limit: Duration) {
        use rustix::thread::futex;
        let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Woken, interrupted, timed out or too late: the caller looks again in any case.
        let _ = futex::wait(&self.0, futex::Flags::empty(), read, Some(&limit));
    }
}

/// The same as the kernel does it: it compares and falls asleep in one go.
#[cfg(loom)]
pub(super) struct Futex {
    word: AtomicU32,
    queue: (loom::sync::Mutex<()>, loom::sync::Condvar),
}

#[cfg(loom)]
impl Futex {
    pub(super) fn new() -> Self {
        Self { word: AtomicU32::new(0), queue: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()) }
    }

    pub(super) fn read(&self) -> u32 {
        self.word.load(Ordering::SeqCst)
    }

    pub(super) fn change(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
        let _queue = self.queue.0.lock();
        self.queue.1.notify_all();
    }

    /// Without a limit: whoever is not woken sleeps for ever, which loom reports.
    pub(super) fn wait(&self, read: u32, _limit: Duration) {
        let queue = self.queue.0.lock().expect("no thread of the model has panicked");
        if self.word.load(Ordering::SeqCst) == read {
            drop(self.queue.1.wait(queue));
        }
    }
}
