//! Executes PTX on the processor: the kernels of this crate, and simple ones that NVRTC 11 to 13 compiles from CUDA
//! C++.
//!
//! A text is decoded once ([`Module::parse`]) and launched many times ([`launch()`]), on host memory that a [`Memory`]
//! finds by device address. Results are bit for bit what the PTX manual defines. Approximate instructions (`.approx`)
//! are rounded correctly here; if the manual leaves a choice, as in division by zero, the sources state which one was
//! made. They were not compared with a GPU's results. Every access is checked against its allocation and its
//! alignment. Registers that were never written, barriers that not all threads reach, and threads that never end are
//! faults.
//!
//! Several texts can be linked ([`Module::link`]): their functions and variables refer to each other, calls go through
//! pointers, and functions are decoded at their first call. So a library of a hundred megabytes starts at once; an
//! unsupported part of it is a fault of the thread that reaches it. A program that starts often caches the outlines of
//! the texts ([`outline`]): linking needs no more ([`Module::link_outlines`]), and bodies are read when they are
//! called.
//!
//! The threads of a block run in turns: each until it waits for others, ends, or has used its share of instructions,
//! so threads may spin on data that others write. Blocks run one after another; while none ends, more begin, so they
//! may wait for each other ([`Limits`]). There is no model of time or of caches. Accesses to global memory are at least
//! acquire and release, unless the [`Memory`] has a [`MemoryModel`]. One of up to 16 bytes is never seen in parts by a
//! thread of this process or, on x86-64 and aarch64, of another process that maps the memory.
//!
//! With a [`MemoryModel`], accesses are as weak as their suffixes say:
//!
//! - A store goes through three store buffers before it reaches memory: that of its thread, that of its block, that of
//!   its device. Each buffer lets any store go next, except that stores to the same bytes keep their order. A thread
//!   sees what its own three buffers hold.
//! - A release moves everything in its way: from the thread's buffer to the block's (`.cta`), on to the device's
//!   (`.gpu`), on to memory (`.sys`).
//! - A load may return an older value, unless the thread has seen a newer one, or has acquired since. For this, each
//!   thread keeps the times up to which it has to see the stores of its block, of its device, and of others.
//! - Atomic operations read the newest value, and change memory at once.
//! - A barrier of the block acquires and releases like a fence of scope `.cta`, and so does `bar.warp.sync`. The end of
//!   a launch empties all buffers.
//! - The length of turns is random, too.
//!
//! All this is drawn from a seed. Not shown are: loads that are delayed past later stores; the difference between
//! `fence.acq_rel` and `fence.sc`; vectors that are seen in parts; older values of shared memory; and, in loads, older
//! values of what the host or another process has written. Loads that are `.volatile` return the newest value: NCCL
//! relies on that, though PTX permits more.
//!
//! Addresses of global memory are those that [`Memory`] knows. Shared, local and parameter memory have their own
//! windows at `0x7f00_…`, `0x7e00_…` and `0x7d00_…`, which generic addresses use; pointers to functions are at
//! `0x7c00_…`. Fresh shared and local memory holds `0xA5`.

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
mod model;
mod module;
mod operand;
mod order;
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
pub use model::MemoryModel;
pub use module::{Module, Options, Unset};
pub use program::{Kernel, Parameter, Texts};
pub use short::outline;
