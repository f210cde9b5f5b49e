//! The primitives of lock-free code: those of std and of the kernel, or those of loom in a model check
//! (`COLLECTIVES_LOOM`).
//!
//! Used by the flags, abort reasons and sleepers of shared memory, the rings of bytes and of the flight recorder, and
//! the ticket lock.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Condvar, Mutex, MutexGuard},
};

use std::time::Duration;

/// std's cell with loom's interface, through which loom can track how long the cell is used.
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

/// Returns a number that no other living thread has, and that is not 0: the address of a thread-local variable.
#[inline]
pub(crate) fn thread_key() -> usize {
    #[cfg(not(loom))]
    std::thread_local! { static KEY: u8 = const { 0 } }
    // loom runs all threads on one system thread.
    #[cfg(loom)]
    loom::thread_local! { static KEY: Box<u8> = Box::new(0) }
    #[cfg(not(loom))]
    let address = |key: &u8| std::ptr::from_ref(key).addr();
    #[cfg(loom)]
    let address = |key: &Box<u8>| std::ptr::from_ref::<u8>(key).addr();
    KEY.with(address)
}

/// Sleeps until notified, for at most `limit`.
#[cfg(not(loom))]
pub(crate) fn doze<'a, T>(condition: &Condvar, _: &'a Mutex<T>, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
    condition.wait_timeout(guard, limit).unwrap_or_else(std::sync::PoisonError::into_inner).0
}

/// loom has no time, so here every sleep ends before a notification.
#[cfg(loom)]
pub(crate) fn doze<'a, T>(_: &Condvar, mutex: &'a Mutex<T>, guard: MutexGuard<'a, T>, _: Duration) -> MutexGuard<'a, T> {
    drop(guard);
    loom::thread::yield_now();
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A word on which ranks can sleep until it changes. 0 at first.
#[cfg(not(loom))]
#[repr(transparent)]
pub(crate) struct Futex(AtomicU32);

#[cfg(not(loom))]
impl Futex {
    /// Returns the current value of the word.
    pub(crate) fn read(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Changes the word and wakes every thread that sleeps on it.
    pub(crate) fn change(&self) {
        use rustix::thread::futex;
        self.0.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Sleeps until the word differs from `read`, for at most `limit`.
    pub(crate) fn wait(&self, read: u32, limit: Duration) {
        use rustix::thread::futex;
        let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Woken, interrupted, timed out or too late: the caller checks again in any case.
        let _ = futex::wait(&self.0, futex::Flags::empty(), read, Some(&limit));
    }
}

/// The same behaviour as the kernel's: it compares and falls asleep atomically.
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

    /// Waits without a limit. A thread that is not woken sleeps forever, and loom reports that.
    pub(crate) fn wait(&self, read: u32, _limit: Duration) {
        let queue = self.queue.0.lock().expect("no thread of the model has panicked");
        if self.word.load(Ordering::SeqCst) == read {
            drop(self.queue.1.wait(queue));
        }
    }
}
