//! An NCCL over host memory: NCCL's C interface for tests that have no GPU. Ranks are threads of one process or processes of one host.
//!
//! It is written from NCCL's documented interface, with types of its own, so that it checks the bindings it is used through. Ranks meet in
//! the process that made the unique id (`hub`, `clique`); what a stream shall do goes to the loaded driver as a host function (`job`), so
//! device memory has to be host memory. It asserts what NCCL only asks for: that ranks agree, that one thread at a time is inside, that
//! handles are alive. `control_calls` plants faults and reads what was seen.
//!
//! Where NCCL's own behaviour is what hurts, this behaves as 2.28.9 does, or as the release that a test asks for:
//!
//! - Every group of a communicator that does not block runs on a thread of its own from 2.23.4 on; before, only what makes, ends or connects
//!   (`group`). Up to 2.26 the group is part of the calling thread (`progress`).
//! - The first message from one rank to another connects the two, and waits, inside the call (`connection`). So may the first collective
//!   (`connect_lazily`): from 2.22 on.
//! - Children share abort flags where they are told to, and a raised flag ends kernels and calls of all that hold it (`flags`).
//! - Finalize, destroy and abort wait for earlier work of the streams, and for graphs that hold launches (`job`), whatever comes. So does a
//!   shrink that aborts, inside the call, but for graphs.
//! - A destroy that fails leaves its group open, from 2.24.3 on; what failed while it was made says so when it is ended (`comm_calls`).
//! - Revoking with a group in flight is reported for 2.28.7 to 2.30.7, two launches at a time on one device for all (`inside`).
//! - A window over memory whose allocation has no handle ends the communicator, where there is symmetric memory (`other_calls`).
//! - A child that could not be made leaves a handle, which can only be ended (`init`). Buffers are not looked at; a wrong one is reported
//!   (`collective_calls`). The environment overrides configurations (`config`).
//!
//! It does not model: a full work FIFO (the driver has a full launch queue), residency of blocks, a context that a dead peer has broken, ranks of one process
//! that are freed together, and the time that anything takes.

pub mod abi;
mod call;
mod clique;
mod collective_calls;
mod comm;
mod comm_calls;
mod config;
mod connection;
mod control;
mod control_calls;
mod driver;
mod exchange;
mod fault;
mod flags;
mod float8;
mod fold;
mod group;
mod hub;
mod init;
mod inside;
mod job;
mod link;
mod mail;
mod operation;
mod other_calls;
mod progress;
mod report;
mod round;
mod symbols;
mod threads;
mod wire;

pub use collective_calls::*;
pub use comm_calls::*;
pub use config::unset;
pub use control_calls::*;
pub use other_calls::*;
pub use symbols::SYMBOLS;
