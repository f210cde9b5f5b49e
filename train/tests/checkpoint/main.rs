//! Checkpoints: saved and loaded by any numbers of ranks, against plain copies; whole after every kill; and files that are not what they
//! should be.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../tests/common/mod.rs"]
mod common;
#[allow(dead_code, unused_imports, reason = "the tests of training use all of it")]
#[path = "../train/network/mod.rs"]
mod network;
#[path = "../../../tests/failures/processes.rs"]
mod processes;

mod corrupt;
mod folders;
mod foreign;
mod killed_training;
mod kills;
mod names;
mod round_trips;
mod tensors;
mod training;
mod trouble;
