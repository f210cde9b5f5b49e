//! The public face: checks every argument once, then hands a job to the plane where its buffer lives.
//!
//! `handle` has the type, and names only what lies below it: the state that threads share, the worker, the progress engine. Each other
//! file adds methods to the type, and is named by none of these.
//!
//! # How a call runs
//!
//! A method of `Communicator` checks its arguments (`communicator/arguments.rs`) and makes a `Job` (`communicator/prepare.rs`): what all ranks must
//! agree on (`Call`, 32 bytes), raw buffers, how they are shared out, and the kernel that folds. A blocking call runs the job on the
//! caller's thread. A started call hands it, with the buffers it owns, to a worker thread. Both take turns at the host plane: a ticket lock
//! (`ticket_lock.rs`) serves the threads that share the communicator, and started calls, in the order in which they were called. Messages
//! have a lock of their own (`progress/`), so they wait for no collective. What consists of several collectives (`alloc`, `split`, objects,
//! `close`) holds one turn for all of them. Calls on devices take a turn at the device plane first, from before they are compared until they
//! are queued; so does what makes or closes communicators of NCCL's.
//!
//! `host/plane/` picks one of three routes:
//!
//! - **intra-host**: all ranks on one host: shared memory alone (`host/shm/`);
//! - **inter-host**: no two ranks on one host, or TCP forced: a plan over links (`host/plan/`, `host/engine/`, `host/net/`);
//! - **hierarchical**: ranks of a host agree and reduce in shared memory, hosts exchange (each local rank carrying a share of an all-reduce, one
//!   rank for each host otherwise), then each host shares. Collectives that have no gain from it run as one plan over all links, rings in shared memory
//!   and TCP side by side, after the host has agreed.

mod arguments;
mod barrier;
mod bootstrap;
mod close;
mod collectives;
mod completion;
#[cfg(feature = "cuda")]
mod device;
mod dissemination;
mod group;
mod handle;
mod kept_store;
mod list;
mod many;
mod message;
mod messages;
#[cfg(feature = "serde")]
mod object;
#[cfg(feature = "serde")]
mod object_messages;
mod pinned;
mod prepare;
mod progress;
mod records;
mod run;
mod shared;
mod shrink;
mod split;
mod started;
mod state;
mod store;
#[cfg(test)]
mod tests;
mod thread;
mod variable;
mod work;
mod worker;

pub use bootstrap::Builder;
pub use close::AbortHandle;
#[cfg(feature = "cuda")]
pub use device::{Device, DeviceChoice, NcclGroup, device_count};
pub use group::Group;
pub use handle::Communicator;
pub use message::{Envelope, Received};
pub use shared::SharedBuffer;
pub use work::{OwnedBuffer, OwnedSource, Work, WorkFuture};

#[cfg(all(feature = "__internals", feature = "serde"))]
pub(crate) use object::fuzz;
