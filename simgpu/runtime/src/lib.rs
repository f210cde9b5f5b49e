//! A CUDA runtime over the simulated driver.
//!
//! It calls the driver's C functions and has no other connection to it, so calls through the runtime are checked like
//! calls of the driver. Kernels come from PTX, because the machine code inside a library cannot be run. The variable
//! `SIMGPU_KERNELS` names the files, or folders of files, separated by colons, in which the kernels that a library
//! registers are found by their names.
//!
//! A few functions have other parameters in CUDA 13 than in CUDA 12. They are in the packages beside this one, each of
//! which makes a library of one release; all the others are here.

#![allow(unsafe_code, reason = "a library of C functions over C functions")]
#![allow(clippy::macro_metavars_in_unsafe, reason = "what the macro takes is the body of an unsafe C function")]
#![allow(non_snake_case, reason = "the names are CUDA's")]

mod call;
mod copy;
mod device;
mod entry;
mod error;
mod event;
mod function;
mod graph;
mod kernels;
mod memory;
mod properties;
mod register;
mod stream;

pub use call::{enter, put};
pub use copy::batch;
pub use device::ready;
pub use entry::entry_point;
pub use graph::CaptureInfo;
pub use memory::pointer_attributes;
pub use properties::{Release, device_properties};
pub use simgpu_driver as driver;
