//! What a communicator tells of its calls, and to whom.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/trace_files.rs"]
mod trace_files;

mod aloud;
mod counters;
mod events;
#[cfg(feature = "cuda")]
mod nvtx;
mod traces;
