//! Tests of NCCL 2.18 itself, in a separate process, because a library is never unloaded.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "functions are C's")]

mod common;

tests_of!(common::RELEASES[0]);
