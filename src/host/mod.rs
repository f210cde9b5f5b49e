//! The host backend: collectives on ordinary memory, over shared memory inside a host and TCP between hosts.
//!
//! # Plans and links
//!
//! A plan is one rank's part of a collective as a pure value: sends, receives, folds and copies, each with the steps
//! that must be done before it. Thousands of plans are tested on simulated links, on which messages progress in random
//! order. The tests check the result, the agreement, and that in-place forms never overwrite what is still to be read.
//! The engine runs a plan over any non-blocking byte stream: a TCP connection, or a ring of bytes in shared memory. All
//! links progress together, so full socket buffers cannot deadlock; folds overlap with transfers.
//!
//! A communicator keeps the plans of its latest calls, looked up by everything that a plan depends on (`plan/shape.rs`,
//! `backend/plans.rs`). Each plan is kept with the lengths and the overlap of the buffers for which it was checked. So
//! a repeated call allocates nothing and goes through its plan once, to queue the steps.
//!
//! Messages between ranks (`send`, `recv`) have links of their own, so that they are independent of collectives. A
//! message of up to 64 KiB is sent at once. A longer one is announced, waits until the receiver clears it, and goes
//! directly from the sender's buffer to the receiver's. The number of bytes that a peer may send unrequested is
//! bounded.
//!
//! Links open when they are first needed, except those at distance 1, 2, 4 … between hosts, which open at the start:
//! about n·log n connections, over which a death is noticed and passed on.

pub(crate) mod abort_reason;
pub(crate) mod backend;
pub(crate) mod bools;
mod caches;
pub(crate) mod copy;
mod encrypted;
pub(crate) mod engine;
pub(crate) mod exchange;
pub(crate) mod fold;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
pub(crate) mod health;
pub(crate) mod link;
pub(crate) mod net;
pub(crate) mod plan;
pub(crate) mod point_to_point;
pub(crate) mod processors;
pub(crate) mod reduce;
pub(crate) mod scratch;
pub(crate) mod shm;
pub(crate) mod waiting;
