//! The public API: checks every argument once, then passes a job to the backend that holds the buffer.
//!
//! `handle/` defines the type `Communicator`. It uses only the modules below it: `work/` (calls in the background),
//! `progress/` (messages) and `recovery.rs`. The other files add methods to the type, and none of these lower modules
//! uses them.
//!
//! # How a call runs
//!
//! A method of `Communicator` checks its arguments (`communicator/prepare/arguments.rs`) and makes a `Job`
//! (`communicator/prepare/prepared.rs`), which contains:
//! - the values on which all ranks must agree (`Call`, 32 bytes),
//! - raw buffers and their layout in blocks,
//! - the kernel that folds.
//!
//! A blocking call runs the job on the caller's thread. A background call passes the job, with the buffers that the
//! call owns, to a worker thread. Both take turns at the host backend: a ticket lock (`ticket_lock.rs`) serves
//! background calls and blocking calls in the order in which they are made. Messages have their own lock (`progress/`),
//! so they do not wait for collectives. A call that consists of several collectives (`alloc`, `split`, objects,
//! `close`) holds one turn for all of them.
//!
//! A call on devices first takes a turn at the device backend. It holds that turn while it is compared and queued.
//! Creating or closing an NCCL communicator also takes such a turn.
//!
//! `host/backend/` picks one of three routes:
//!
//! - **intra-host** (all ranks on one host): shared memory only (`host/shm/`).
//! - **inter-host** (no two ranks on one host, or TCP forced): a plan over links (`host/plan/`, `host/engine/`,
//!   `host/net/`).
//! - **hierarchical**: the ranks of a host agree and reduce in shared memory, the hosts exchange, then each host shares
//!   the result among its ranks. In an all-reduce, each local rank exchanges a share; in other collectives, one rank
//!   per host does the exchange. Collectives that gain nothing from this division run as one plan over all links (rings
//!   in shared memory as well as TCP), after the ranks of each host have agreed.

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
pub use life::membership::Membership;
pub use work::message::{Envelope, Received};
pub use work::{OwnedBuffer, OwnedSource, Work, WorkFuture};

#[cfg(all(feature = "__internals", feature = "serde"))]
pub(crate) use forms::object::fuzz;
