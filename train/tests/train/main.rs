//! Training compared with means and models computed directly by one process; checkpoints, which must be whole after
//! every kill; and damaged files.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../tests/common/mod.rs"]
mod common;
#[cfg(feature = "checkpoint")]
#[path = "../../../tests/failures/processes.rs"]
mod processes;

mod averages;
#[cfg(feature = "checkpoint")]
mod checkpoint;
mod checks;
mod edges;
#[cfg(feature = "checkpoint")]
mod elastic_training;
mod example;
mod fully_sharded;
mod fully_sharded_trouble;
mod given;
mod hooks;
mod loss_scaler;
#[cfg(feature = "checkpoint")]
mod membership;
mod mesh;
mod mesh_deaths;
mod metrics;
mod model;
mod modes;
mod network;
mod sampler;
mod seed;
mod sharded;
#[cfg(feature = "checkpoint")]
mod state_transfer;
mod stop_flag;
mod trouble;
