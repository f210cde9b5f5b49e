//! The errors that survivors get for every failure, how soon they get them, and what they can do next.

#![allow(clippy::unwrap_used, clippy::type_complexity, reason = "a test fails by panicking, and says what it needs where it needs it")]

#[path = "../common/mod.rs"]
mod common;

mod addresses;
mod held_up_store;
mod kills;
mod membership;
mod membership_on_hosts;
mod network;
mod processes;
mod resources;
mod sandboxes;
mod security;
mod shrink;
mod soak;
mod starts;
