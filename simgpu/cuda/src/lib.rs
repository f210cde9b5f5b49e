//! A CUDA driver over host memory.
//!
//! Streams are worker threads, so the host really runs ahead. Device memory is host memory behind a map of
//! allocations. Kernels are PTX, interpreted. A checker with vector clocks follows streams, events and the host, and
//! reports a buffer that is used or freed without waiting. A context has a lock, which some calls hold while the
//! device works (`context_lock`), and a stream's queue has a fixed length (`stream`). Programs use the C functions of
//! the driver, as with the real one; tests also use the functions whose names begin with `simgpu_`. The types below
//! are their arguments and results.

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
mod memory_model;
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
