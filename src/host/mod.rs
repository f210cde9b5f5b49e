//! The host plane: collectives on ordinary memory, over shared memory inside a host and TCP between hosts.

pub(crate) mod abort_reason;
pub(crate) mod bools;
pub(crate) mod bootstrap;
pub(crate) mod copy;
pub(crate) mod engine;
pub(crate) mod fold;
#[cfg(feature = "internals")]
pub(crate) mod fuzz;
pub(crate) mod health;
pub(crate) mod link;
pub(crate) mod net;
pub(crate) mod plan;
pub(crate) mod plane;
pub(crate) mod point_to_point;
pub(crate) mod reduce;
pub(crate) mod scratch;
#[cfg(feature = "internals")]
mod script;
pub(crate) mod shm;
pub(crate) mod waiting;
