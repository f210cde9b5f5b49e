//! Executes PTX on the processor: the kernels of this crate, and simple ones that NVRTC 11 to 13 makes of CUDA C++.
//!
//! A text is decoded once ([`Module::parse`]) and launched many times ([`launch()`]), on memory of the host that a
//! [`Memory`] finds by device address. Results are bit for bit what the PTX manual defines; approximate instructions
//! (`.approx`) are rounded correctly here, and where the manual leaves a choice, as in dividing by zero, the sources say
//! which one was made. They were not compared with a GPU's. Every access is checked against its allocation and its alignment;
//! registers that were never written, barriers that not all threads reach, and threads that never end are faults.
//!
//! Several texts can be linked ([`Module::link`]): their functions and variables refer to each other, calls go through
//! pointers, and functions are decoded when they are first called. So a library of a hundred megabytes starts at once;
//! what of it is not supported is a fault of the thread that comes to it. Who starts often keeps the outlines of the texts
//! ([`outline`]): linking needs no more ([`Module::link_outlines`]), and bodies are read when they are called.
//!
//! The threads of a block run in turns: each until it waits for others, ends, or has had its share of instructions, so that
//! threads may spin on what others write. Blocks run one after another; while none ends, more begin beside it, so that they
//! may wait for one another ([`Limits`]). There is no model of time, of caches, or of races between threads; accesses to
//! global memory are at least acquire and release, and one of up to 16 bytes is never seen in parts, by no thread of this
//! process and, on x86-64 and aarch64, of no other one that has the memory mapped.
//!
//! Addresses: those of global memory are what [`Memory`] knows; shared, local and parameter memory have windows of their
//! own at `0x7f00_…`, `0x7e00_…` and `0x7d00_…`, where generic addresses lead; pointers to functions are at `0x7c00_…`. Fresh shared and local memory holds `0xA5`.

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
mod short;
mod syntax;
mod token;
mod touched;
mod types;
mod variables;
mod warp;
mod wide;

pub use fault::{Fault, FaultKind, FaultPlace, ParseError};
pub use launch::{INSTRUCTIONS_PER_THREAD, Launch, Limits, launch, launch_within};
pub use memory::{Memory, Region, Touched};
pub use module::{Module, Options, Unset};
pub use program::{Kernel, Parameter, Texts};
pub use short::outline;
