//! The atomics of the step protocol: std's, or loom's where the protocol is model-checked.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU64, Ordering};
