//! What lock-free code is made of: std's and the kernel's, or loom's where it is model-checked (`COLLECTIVES_LOOM`).
//!
//! The flags, abort reasons and sleepers of shared memory use it, the rings of bytes and of the flight recorder, and the hand-off between
//! caller and worker.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex},
    thread::{ThreadId, current},
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex},
    thread::{ThreadId, current},
};

use std::time::Duration;

/// std's cell with loom's way in, which sees how long it is used.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(crate) fn with_mut<R>(&self, work: impl FnOnce(*mut T) -> R) -> R {
        work(self.0.get())
    }
}

/// A word that the kernel lets ranks sleep on until it changes. 0 at first.
#[cfg(not(loom))]
#[repr(transparent)]
pub(crate) struct Futex(AtomicU32);

#[cfg(not(loom))]
impl Futex {
    /// The word as it is now.
    pub(crate) fn read(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Changes the word and wakes everyone who sleeps on it.
    pub(crate) fn change(&self) {
        use rustix::thread::futex;
        self.0.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Sleeps until the word changes, or has changed from what was read, at most for `limit`.
    pub(crate) fn wait(&self, read: u32, limit: Duration) {
        use rustix::thread::futex;
        let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Woken, interrupted, timed out or too late: the caller looks again in any case.
        let _ = futex::wait(&self.0, futex::Flags::empty(), read, Some(&limit));
    }
}

/// The same as the kernel does it: it compares and falls asleep in one go.
#[cfg(loom)]
pub(crate) struct Futex {
    word: AtomicU32,
    queue: (Mutex<()>, Condvar),
}

#[cfg(loom)]
impl Futex {
    pub(crate) fn new() -> Self {
        Self { word: AtomicU32::new(0), queue: (Mutex::new(()), Condvar::new()) }
    }

    pub(crate) fn read(&self) -> u32 {
        self.word.load(Ordering::SeqCst)
    }

    pub(crate) fn change(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
        let _queue = self.queue.0.lock();
        self.queue.1.notify_all();
    }

    /// Without a limit: whoever is not woken sleeps for ever, which loom reports.
    pub(crate) fn wait(&self, read: u32, _limit: Duration) {
        let queue = self.queue.0.lock().expect("no thread of the model has panicked");
        if self.word.load(Ordering::SeqCst) == read {
            drop(self.queue.1.wait(queue));
        }
    }
}
