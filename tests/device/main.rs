//! The device backend on the simulated GPU, or on the real ones with `COLLECTIVES_TEST_GPU=real`. With
//! `COLLECTIVES_TEST_NCCL`, a real NCCL runs on the simulated GPU (`simgpu::real`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/allocations.rs"]
mod allocations;
#[path = "../common/mod.rs"]
mod common;

mod allocating;
mod costs;
mod gpu;
mod graphs;
mod groups;
mod many;
mod matrix;
mod membership;
mod messages;
mod ordering;
mod other_crates;
mod patterns;
mod runtime_types;
mod split;
mod threads;
mod typed_nccl;
mod user_kernels;
mod versions;
mod work;
