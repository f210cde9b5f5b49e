//! What the ticket lock is made of: std's, or loom's where it is model-checked.

use std::time::Duration;

#[cfg(loom)]
pub(super) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicUsize, Ordering},
    sync::{Condvar, Mutex, MutexGuard},
};
#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicUsize, Ordering},
    sync::{Condvar, Mutex, MutexGuard},
};

/// std's cell with loom's way in, which sees how long it is used.
#[cfg(not(loom))]
#[derive(Debug)]
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub(super) fn with_mut<R>(&self, work: impl FnOnce(*mut T) -> R) -> R {
        work(self.0.get())
    }
}

/// A number that no other living thread has, and that is not 0: the address of a variable of its own.
#[inline]
pub(super) fn thread_key() -> usize {
    #[cfg(not(loom))]
    std::thread_local! { static KEY: u8 = const { 0 } }
    // loom runs all threads on one of the system's.
    #[cfg(loom)]
    loom::thread_local! { static KEY: Box<u8> = Box::new(0) }
    #[cfg(not(loom))]
    let address = |key: &u8| std::ptr::from_ref(key).addr();
    #[cfg(loom)]
    let address = |key: &Box<u8>| std::ptr::from_ref::<u8>(key).addr();
    KEY.with(address)
}

/// Sleeps until it is notified, at most for `limit`.
#[cfg(not(loom))]
pub(super) fn doze<'a, T>(condition: &Condvar, _: &'a Mutex<T>, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
    condition.wait_timeout(guard, limit).unwrap_or_else(std::sync::PoisonError::into_inner).0
}

/// loom knows no time: here every sleep is over before it is notified.
#[cfg(loom)]
pub(super) fn doze<'a, T>(_: &Condvar, mutex: &'a Mutex<T>, guard: MutexGuard<'a, T>, _: Duration) -> MutexGuard<'a, T> {
    drop(guard);
    loom::thread::yield_now();
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
