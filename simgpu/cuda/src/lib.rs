//! A CUDA driver over host memory.
//!
//! Streams are worker threads, so the host really runs ahead; device memory is host memory behind a map of allocations; kernels are
//! PTX, interpreted. A checker with vector clocks follows streams, events and the host, and reports a buffer that is used or freed
//! without waiting. A context has a lock, which some calls keep while the device works (`context_lock`), and a stream room for so many jobs and no
//! more (`stream`). Programs reach all this through the C functions of the driver, as they would reach the real one; tests also through
//! the functions whose names begin with `simgpu_`. The types below are what those take and give.

#![allow(unsafe_code, reason = "a library of C functions over raw memory")]

mod call;
mod calls;
mod capture;
mod checker;
mod clock;
mod code;
mod companions;
mod context;
mod context_lock;
mod device;
mod event;
mod export;
mod fault;
mod graph;
mod hold_up;
mod interface;
mod job;
mod library;
mod mapping;
mod memory;
mod module;
mod outlines;
mod pool;
mod report;
mod run;
mod state;
mod stream;
mod submit;
mod user_object;

pub use interface::{Access, Configuration, Counts};
