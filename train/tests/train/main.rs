//! Gradients averaged in buckets, against means that one process computes plainly.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../tests/common/mod.rs"]
mod common;

mod averages;
mod edges;
mod fully_sharded;
mod fully_sharded_trouble;
mod given;
mod hooks;
mod loss_scaler;
mod mesh;
mod mesh_deaths;
mod model;
mod modes;
mod network;
mod sampler;
mod sharded;
mod trouble;
