//! Code of the program's that runs inside this crate's: listeners, ops, stores. Each panics, and each calls back, at every place at which it
//! is called, and nothing comes of it but what the program asked for.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod listener;
mod ops;
mod scenarios;
mod signal;
mod stores;
mod tracing_events;
mod waits;

use common::limit::{PATIENCE, within};

/// Says nothing of panics that the test asked for.
fn quiet_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref::<&str>() != Some(&WANTED) {
            usual(panic);
        }
    }));
}

/// What a panic says that the test asked for.
const WANTED: &str = "as the test wants it";
