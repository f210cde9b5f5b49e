//! Observers, subscribers, ops, stores and callbacks: code of the program that this crate calls. It may panic and make
//! calls of its own at any point.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/trace_files.rs"]
mod trace_files;

mod aloud;
mod counters;
mod events;
mod listener;
mod metrics;
#[cfg(feature = "cuda")]
mod nvtx;
mod ops;
mod scenarios;
mod signal;
mod status;
mod stores;
mod traces;
mod tracing_events;
mod waits;

use common::limit::{PATIENCE, within};

/// Suppresses the messages of panics that the test asked for.
fn quiet_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref::<&str>() != Some(&WANTED) {
            usual(panic);
        }
    }));
}

/// The payload of panics that the test asked for.
const WANTED: &str = "as the test wants it";
