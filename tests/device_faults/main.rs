//! Faults on the device backend, planted in the simulated GPU: each becomes a typed error on every rank, or is found by the simulation. Those that
//! are not planted in NCCL are tried on a real one, too, where `COLLECTIVES_TEST_NCCL` names one (`simgpu::real`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../device/gpu.rs"]
mod gpu;
#[path = "../failures/processes.rs"]
mod processes;

mod arguments;
mod endings;
mod forks;
mod graphs;
mod kills;
mod mismatches;
mod misuse;
mod records;
mod refusals;
mod start;
mod started;
mod turns;
mod typed_nccl;
