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

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use common::ranks::patience;

/// Long enough for anything that is not stuck.
const PATIENCE: Duration = patience(60);

/// What `work` returns, or panics with. Ends the process where it is stuck, since its threads cannot be ended.
fn within<R: Send + 'static>(what: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, ended) = channel();
    let thread = std::thread::spawn(move || {
        let _done = done;
        work()
    });
    if ended.recv_timeout(PATIENCE) == Err::<(), _>(RecvTimeoutError::Timeout) {
        eprintln!("{what}: stuck for {PATIENCE:?}");
        std::process::abort();
    }
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

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
