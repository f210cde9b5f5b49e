//! Executes PTX on the processor: the kernels of this crate, and simple ones that NVRTC 11 to 13 makes of CUDA C++.
//!
//! A text is decoded once ([`Module::parse`]) and launched many times ([`launch()`]), on memory of the host that a
//! [`Memory`] finds by device address. Results are bit for bit what the PTX manual defines; approximate instructions
//! (`.approx`) are rounded correctly here, and where the manual leaves a choice, as in dividing by zero, the sources say
//! which one was made. They were not compared with a GPU's. Every access is checked against its allocation and its alignment;
//! registers that were never written, barriers that not all threads reach, and threads that never end are faults.
//!
//! Blocks run one after another, the threads of a block in turns: each until it waits for others, ends, or has had its
//! share of instructions. A kernel whose blocks wait for one another does not end, and is a fault. There is no model of
//! time, of caches, or of races between threads; accesses to global memory are at least acquire and release.
//!
//! Addresses: those of global memory are what [`Memory`] knows; shared, local and parameter memory have windows of their
//! own at `0x7f00_…`, `0x7e00_…` and `0x7d00_…`, where generic addresses lead. Fresh shared and local memory holds `0xA5`.

mod access;
mod block;
mod convert;
mod fault;
mod float;
mod format;
mod integer;
mod launch;
mod link;
mod lower;
mod machine;
mod memory;
mod module;
mod operand;
mod parser;
mod poison;
mod program;
mod syntax;
mod token;
mod types;
mod variables;
mod warp;

pub use fault::{Fault, FaultKind, FaultPlace, ParseError};
pub use launch::{INSTRUCTIONS_PER_THREAD, Launch, launch, launch_within};
pub use memory::{Memory, Region, Touched};
pub use module::{Module, Options, Unset};
pub use program::{Kernel, Parameter};
