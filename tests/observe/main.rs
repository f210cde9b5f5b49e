//! What a communicator tells of its calls, and to whom.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod counters;
mod events;
mod lanes;
#[cfg(feature = "cuda")]
mod nvtx;
mod traces;
