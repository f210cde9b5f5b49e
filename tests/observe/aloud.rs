//! Warnings of calls that do not end: to the program's `tracing` subscriber, or to standard error if there is none.

use std::process::{Command, Stdio};
use std::time::Duration;

use tracing_subscriber::prelude::*;

use crate::common::limit::Limit;
use crate::common::ranks::{Wiring, communicators_with};

/// The variable that tells a child process what to do.
const CHILD: &str = "COLLECTIVES_TEST_ALOUD";

/// Waits for a message and a barrier that no rank answers, on each wiring.
fn wait_in_vain(stall_warning: Duration) {
    for wiring in [Wiring::Shm, Wiring::Tcp] {
        let builder = |rank| wiring.builder(rank).configure(|config| config.stall_warning = stall_warning);
        let comms = communicators_with(2, builder);
        let comm = comms[0].with_timeout(Duration::from_millis(300));
        // Before the barrier, whose timeout ends the communicator over TCP.
        assert!(comm.recv(&mut [0_u8], 1).unwrap_err().is_timeout());
        assert!(comm.barrier().unwrap_err().is_timeout());
    }
}

/// Returns what a child process writes to standard error.
fn said(mode: &str) -> String {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["aloud::a_call_that_does_not_end_is_warned_of_on_standard_error_where_nobody_listens", "--exact", "--nocapture"])
        .env(CHILD, mode)
        .env("COLLECTIVES_COLOUR", "blue")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let limit = Limit::on(&child);
    let output = child.wait_with_output().unwrap();
    drop(limit);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{mode}: {said}");
    said
}

#[test]
fn a_call_that_does_not_end_is_warned_of_on_standard_error_where_nobody_listens() {
    let soon = Duration::from_millis(20);
    match std::env::var(CHILD).as_deref() {
        Ok("nobody") => return wait_in_vain(soon),
        Ok("off") => return wait_in_vain(Duration::ZERO),
        // Like a program that polls now and then for a message.
        Ok("short") => return wait_in_vain(Duration::from_secs(30)),
        // The subscriber is switched off, so nothing may be printed.
        Ok("deaf") => {
            tracing_subscriber::registry().with(tracing_subscriber::filter::LevelFilter::OFF).init();
            return wait_in_vain(soon);
        }
        _ => {}
    }
    let said_to_nobody = said("nobody");
    let count = |what: &str| said_to_nobody.lines().filter(|line| line.starts_with(what) && line.contains(" for rank 1 (")).count();
    for what in ["barrier() number 1", "recv from rank 1"] {
        let begins = format!("collectives: rank 0 of world: {what}: still waiting after 0.");
        assert_eq!(count(&begins), 2, "one for each wiring of {what}: {said_to_nobody}");
    }
    let unknown =
        "collectives: these environment variables are ignored, because no setting of this crate has their names: COLLECTIVES_COLOUR\n";
    assert_eq!(said_to_nobody.matches(unknown).count(), 1, "once for all communicators: {said_to_nobody}");
    for mode in ["off", "short", "deaf"] {
        let said = said(mode);
        assert!(!said.contains("still waiting"), "{mode}: {said}");
    }
}
