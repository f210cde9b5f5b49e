//! The C functions. A function that is not here is a missing symbol.

#![allow(non_snake_case, reason = "the driver's names")]

mod context;
mod control;
mod copy;
mod device;
mod error;
mod event;
mod graph;
mod ipc;
mod memory;
mod module;
mod private;
mod stream;
