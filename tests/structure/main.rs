//! The repository itself: the structure of the sources, the guide, the examples, how errors are worded, and the English of all texts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrows;
#[path = "../common/mod.rs"]
mod common;
mod dashboard;
mod drivers;
mod errors;
mod examples;
mod guide;
mod layers;
mod sanitize;
mod sources;
mod words;
