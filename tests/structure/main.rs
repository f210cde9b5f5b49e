//! The repository itself: the structure of the sources, the guide, the examples, and how errors are worded.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrows;
#[path = "../common/mod.rs"]
mod common;
mod errors;
mod examples;
mod guide;
mod layers;
mod sources;
