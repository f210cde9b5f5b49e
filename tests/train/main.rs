//! Gradients averaged in buckets, against means that one process computes plainly.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod averages;
mod given;
mod hooks;
mod mesh;
mod model;
mod sharded;
mod trouble;
