//! The atomics of the ring: std's, or loom's where it is model-checked.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};
