//! The device plane: collectives on GPU memory, over NCCL.

mod comm;
mod driver;
mod fold;
mod job;
mod kernels;
mod memory;
mod native;
mod nccl;
mod plane;
mod user;
mod watchdog;
