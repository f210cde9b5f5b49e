//! Raw bindings to [NCCL](https://docs.nvidia.com/deeplearning/nccl/), opened at run time and never linked.
//!
//! A program that uses this crate builds and starts on machines without NCCL, CUDA or a GPU, and runs with any NCCL 2.
//! Each function is looked up when it is first called. If the loaded library lacks the function, the call returns an
//! error that names the first release with this function.
//!
//! ```no_run
//! use nccl_sys::{Library, ncclComm_t, ncclResult_t, ncclUniqueId};
//!
//! let nccl = Library::open()?;
//! println!("NCCL {} from {}", nccl.version(), nccl.path());
//!
//! let mut id = ncclUniqueId { internal: [0; 128] };
//! let mut comm: ncclComm_t = nccl_sys::NCCL_COMM_NULL;
//! let mut config = nccl_sys::ncclConfig_t::new();
//! config.blocking = 0;
//! // SAFETY: all pointers are to local variables, which outlive the calls.
//! let result = unsafe {
//!     assert_eq!(nccl.ncclGetUniqueId(&mut id)?, ncclResult_t::ncclSuccess);
//!     nccl.ncclCommInitRankConfig(&mut comm, 1, id, 0, &mut config)?
//! };
//! println!("rank 0 of 1: {result:?}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Types, constants and signatures match the newest `nccl.h` that this crate knows. Its version is
//! [`NCCL_VERSION_CODE`]. NCCL only adds fields to its structs, and every struct contains its size and version. So
//! older libraries also accept newer structs. C's enums are integers with named constants, because a newer library may
//! return values for which this crate has no name. Streams and events are opaque pointers: the streams and events of
//! any CUDA crate can be cast to these pointers.

#[cfg(not(target_os = "linux"))]
compile_error!("nccl-sys supports only Linux, as NCCL does");

mod error;
#[macro_use]
mod functions;
mod library;
mod values;
mod version;

#[allow(clippy::too_many_arguments, reason = "NCCL's functions take this many")]
#[expect(unsafe_code, non_camel_case_types, non_snake_case, non_upper_case_globals, missing_docs, reason = "names and calls are C's")]
#[rustfmt::skip]
mod bindings;

pub use bindings::*;
pub use error::{Attempt, LoadError, MissingSymbol, Reason};
pub use functions::{FUNCTIONS, first_version};
pub use library::Library;
pub use values::*;
pub use version::Version;
