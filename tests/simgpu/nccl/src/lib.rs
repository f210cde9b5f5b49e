//! An NCCL over host memory: NCCL's C interface for tests that have no GPU. Ranks are threads of one process or processes of one host.
//!
//! It is written from NCCL's documented interface, with types of its own, so that it checks the bindings it is used through. Ranks meet in
//! the process that made the unique id (`hub`, `clique`); what a stream shall do goes to the loaded driver as a host function (`job`), so
//! device memory has to be host memory. It asserts what NCCL only asks for: that ranks agree, that one thread at a time is inside, that
//! handles are alive. `control_calls` plants faults and reads what was seen.

pub mod abi;
mod call;
mod clique;
mod collective_calls;
mod comm;
mod comm_calls;
mod config;
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
