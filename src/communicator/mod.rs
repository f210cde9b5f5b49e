//! The public face: checks every argument once, then hands a job to the backend where its buffer lives.
//!
//! `handle/` has the type, and names only what lies below it: `work/` (calls in the background), `progress/` (messages), `recovery.rs`. Each other
//! file adds methods to the type, and is named by none of these.
//!
//! # How a call runs
//!
//! A method of `Communicator` checks its arguments (`communicator/prepare/arguments.rs`) and makes a `Job` (`communicator/prepare/prepared.rs`): what all ranks must
//! agree on (`Call`, 32 bytes), raw buffers, how they are shared out, and the kernel that folds. A blocking call runs the job on the
//! caller's thread. A started call hands it, with the buffers it owns, to a worker thread. Both take turns at the host backend: a ticket lock
//! (`ticket_lock.rs`) serves the threads that share the communicator, and started calls, in the order in which they were called. Messages
//! have a lock of their own (`progress/`), so they wait for no collective. What consists of several collectives (`alloc`, `split`, objects,
//! `close`) holds one turn for all of them. Calls on devices take a turn at the device backend first, from before they are compared until they
//! are queued; so does what makes or closes communicators of NCCL's.
//!
//! `host/backend/` picks one of three routes:
//!
//! - **intra-host**: all ranks on one host: shared memory alone (`host/shm/`);
//! - **inter-host**: no two ranks on one host, or TCP forced: a plan over links (`host/plan/`, `host/engine/`, `host/net/`);
//! - **hierarchical**: ranks of a host agree and reduce in shared memory, hosts exchange (each local rank carrying a share of an all-reduce, one
//!   rank for each host otherwise), then each host shares. Collectives that have no gain from it run as one plan over all links, rings in shared memory
//!   and TCP side by side, after the host has agreed.

#[cfg(feature = "cuda")]
mod device;
mod forms;
mod handle;
mod life;
mod prepare;
mod progress;
mod recovery;
mod run;
#[cfg(test)]
mod tests;
mod work;

#[cfg(feature = "cuda")]
pub use device::{Device, DeviceChoice, NcclGroup, device_count};
pub use forms::group::Group;
pub use forms::shared_buffer::SharedBuffer;
pub use handle::Communicator;
pub use life::bootstrap::Builder;
pub use life::close::AbortHandle;
pub use work::message::{Envelope, Received};
pub use work::{OwnedBuffer, OwnedSource, Work, WorkFuture};

#[cfg(all(feature = "__internals", feature = "serde"))]
pub(crate) use forms::object::fuzz;
