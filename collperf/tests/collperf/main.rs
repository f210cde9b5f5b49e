//! Tests of collperf from a user's view: command lines, tables, files, reports, recordings.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/common/interrupts.rs"]
#[allow(dead_code, unreachable_pub, reason = "programs of several packages share it")]
mod interrupts;
#[path = "../../../tests/interop/peer.rs"]
#[allow(dead_code, reason = "what is absent is said there")]
mod peer;
#[path = "../../../tests/common/processors.rs"]
#[allow(dead_code, unreachable_pub, reason = "programs of several packages share it")]
mod processors;
#[path = "../../../tests/common/trace_files.rs"]
mod trace_files;

mod binding;
mod broken_pipe;
#[cfg(feature = "cuda")]
mod devices;
#[cfg(feature = "cuda")]
mod doctor;
#[cfg(feature = "cuda")]
mod flags;
mod hang;
mod launched;
mod links;
mod osu;
mod pairs;
mod ps;
mod replay;
mod report;
mod trace;
