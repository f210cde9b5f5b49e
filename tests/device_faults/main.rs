//! Faults on the device backend, injected into the simulated GPU. Each becomes a typed error on every rank, or is found
//! by the simulation. Faults outside of NCCL are also tested with a real one if `COLLECTIVES_TEST_NCCL` names it
//! (`simgpu::real`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../device/gpu.rs"]
mod gpu;
#[path = "../failures/processes.rs"]
mod processes;

mod arguments;
mod drivers;
mod endings;
mod forks;
mod graphs;
mod kills;
mod membership;
mod mismatches;
mod misuse;
mod records;
mod refusals;
mod start;
mod started;
mod turns;
mod typed_nccl;
