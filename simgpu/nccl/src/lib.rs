//! An NCCL over host memory: NCCL's C interface for tests without a GPU. Ranks are threads of one process or processes
//! of one host.
//!
//! It is written from NCCL's documented interface, with its own types, so that it checks the bindings that call it.
//! Ranks meet in the process that made the unique id (`hub`, `clique`). The work of streams goes to the loaded driver
//! as host functions (`job`), so device memory has to be host memory. It checks what NCCL only asks for: that ranks
//! agree, that one thread at a time is inside, that handles are alive. `control_calls` plants faults and reads
//! reports.
//!
//! NCCL's behaviour that causes trouble is reproduced as of 2.28.9, or of the release that a test requests:
//!
//! - Every group of a communicator that does not block runs on its own thread from 2.23.4 on; before that, only groups
//!   that make, end or connect communicators (`group`). Up to 2.26 the group is part of the calling thread
//!   (`progress`).
//! - The first message from one rank to another connects the two, and waits inside the call (`connection`). From 2.22
//!   on, the first collective may do so as well (`connect_lazily`).
//! - Children share abort flags if configured to, and a raised flag ends kernels and calls of all communicators that
//!   hold it (`flags`).
//! - Finalize, destroy and abort wait in any case for earlier work of the streams, and for graphs that hold launches
//!   (`job`). So does a shrink that aborts, inside the call, except for graphs.
//! - A destroy that fails leaves its group open, from 2.24.3 on. A communicator that could not be made reports that
//!   when it is ended (`comm_calls`).
//! - Revoking while a group runs is reported for 2.28.7 to 2.30.7; two launches at a time on one device are reported
//!   for all (`inside`).
//! - A window over memory whose allocation has no handle ends the communicator, if there is symmetric memory
//!   (`other_calls`).
//! - A child that could not be made leaves a handle, which can only be ended (`init`). Buffers are not checked; a
//!   wrong one is reported (`collective_calls`). The environment overrides configurations (`config`).
//!
//! It does not model: a full work FIFO (the driver has a full launch queue), residency of blocks, a context that a
//! lost peer has broken, ranks of one process that are freed together, and the duration of anything.

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
