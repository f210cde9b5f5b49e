//! What the hand-off is made of: std's, or loom's where it is model-checked.

#[cfg(loom)]
pub(super) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicUsize, Ordering},
    sync::{Condvar, Mutex},
    thread::{ThreadId, current},
};
#[cfg(not(loom))]
pub(super) use std::{
    sync::atomic::{AtomicUsize, Ordering},
    sync::{Condvar, Mutex},
    thread::{ThreadId, current},
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
