//! Tests of collrun from a user's view: how jobs start, on this host and on others, and how they end.

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

mod binding;
mod elastic;
mod flags;
mod hosts;
mod jobs;
mod remote;
mod replace;
mod sshd;
mod waiting;
