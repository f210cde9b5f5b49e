//! Controls the simulated GPU: installs it, plants faults, reads its reports.
//!
//! A test calls [`install`] before any code looks for a driver. From then on the process has a CUDA driver and an NCCL
//! over host memory, and the real ones are not found. [`alone`] installs the driver without NCCL, for one test at a
//! time. The simulation says nothing about speed, and does not prove that the real libraries behave like it. It tests
//! the code that calls them.

#![allow(unsafe_code, reason = "calls C functions of the simulated libraries")]

mod calls;
mod cuda;
mod hold_up;
mod library;
pub mod nccl;
pub mod real;

pub use calls::{DriverCalls, driver_calls, driver_calls_of_this_thread};
pub use cuda::{
    Alone, Gate, alone, clear_faults, configure, counts, fail_call, fail_call_of_this_thread, fail_stream, launch_host_function,
    limit_memory, load_library_kernels, report, reports,
};
pub use fakecuda::{Access, Configuration, Counts};
pub use hold_up::{HeldUp, waits_for_context, waits_for_room};
pub use library::{environment, install, install_cuda_only, management, preload_runtime, runtime};
