//! Collectives and links between the ranks of one host, in shared memory.
//!
//! Ranks may be processes or threads of one process; the code is the same. A [`Group`] is one rank's part: it maps a
//! [`region`] that all ranks of the host share, runs collectives on it in [`steps`], and hands out byte [`ring`]s between pairs
//! of ranks for everything that is not a collective of the whole host.

mod chunking;
mod control;
mod descriptor_server;
mod direct;
mod flags;
mod folds;
#[cfg(feature = "internals")]
pub(crate) mod fuzz;
mod group;
mod inline_copy;
mod layout;
mod lent;
mod mailbox;
mod moves;
mod offer;
mod pages;
mod presence;
mod region;
mod ring;
mod ring_end;
mod shared_file;
mod state;
mod steps;
mod sync;
mod wait;
mod way;
mod window;

#[cfg(test)]
mod tests;

pub(crate) use group::Group;
pub(crate) use layout::MAX_ELEMENT_BYTES;
pub(crate) use moves::{Blocks, Memory};
pub(crate) use ring::{Channel, RingLink};
pub(crate) use shared_file::ShareError;
pub(crate) use state::CallContext;
pub(crate) use window::{Segment, Site, Size, Storage};
