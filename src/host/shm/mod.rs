//! Collectives and links between the ranks of one host, in shared memory.
//!
//! Ranks may be processes or threads of one process; the code is the same. A [`Group`] is one rank's part. It maps a
//! [`region`] that all ranks of the host share, and runs collectives on it in [`steps`]. For everything that is not a
//! collective of the whole host, it provides byte [`ring`]s between pairs of ranks.
//!
//! # Design
//!
//! There is one region for each host and communicator, from `memfd_create`. Its descriptor is passed over an abstract
//! Unix socket, so nothing has a name that could be left behind. A collective is a sequence of *steps*. In each, a rank
//! writes its own payload, publishes the step's number as its flag (release), waits for every rank's flag (acquire),
//! and reads the others' payloads. The payloads of a rank follow each other in its ring ([`slot_ring`]). A payload is
//! left alone for two steps: no rank can publish step s+2 before all have published s+1, which they do after reading s.
//! The flag, the fingerprint and the first 24 bytes lie in one cache line. Folds take all inputs in rank order in one
//! pass, so rank order costs nothing here.
//!
//! The size of a step depends only on the collective and on whether ranks share processors ([`chunking`]), not on
//! anything that ranks could see differently. With a processor for each rank, steps are small enough to stay in the
//! nearest caches, and copying in overlaps with copying out. With fewer processors, each rank needs a turn on one of
//! them in every step (1 to 3 µs on 2 processors). So steps are as large as a slot: 1 MiB for up to 4 ranks, halved
//! with each doubling of the ranks, and 64 KiB from 33 ranks on. If a vector has 32 KiB or more, each rank folds a
//! share of it and passes it on; otherwise, every rank folds everything. Results of 4 MiB and more that are not written
//! in place bypass the cache. These sizes are in `tuning::shm`.
//!
//! # Caches
//!
//! If a reader's core still holds a line, the line must be taken from it before it can be written again. So writers
//! advance through rings in laps of three second-level caches (1.5 MiB on Zen 3, 3 MiB on Zen 4): by the next lap, the
//! readers' caches have dropped the bytes that were read. This is worthwhile if ranks share a last-level cache. Ranks
//! without a common last-level cache write with stores that bypass the cache. [`stores`] describes how a rank finds out
//! which of the two is better. (`benches/record/rings.md`)
//!
//! A ring has room for six slots: 6 MiB for up to 4 ranks, 24 MiB for all ranks of a host from 4 to 64. Only what a lap
//! touches costs memory: at most half of a fair share of the last-level cache for each rank, and three slots if ranks
//! share processors.
//!
//! # Waiting
//!
//! If there is a core for every rank, a waiter spins briefly, then yields; otherwise it yields at once. Then it sleeps
//! on a shared futex for a bounded time. If other threads want its core (a *crowd*, `host/waiting.rs`), it skips the
//! yielding and sleeps directly. A waiter that no longer spins checks the deadline, the health, the region's abort
//! reason, and whether the ranks it waits for still hold their locks on the region's file. Such a lock belongs to an
//! open file description. It vanishes with its owner, however the owner ends, and works for threads too.
//!
//! # Windows
//!
//! A window (`Communicator::alloc`) is another file from `memfd_create`, with a segment for every rank of the host.
//! Segments are page-aligned, and aligned to 2 MiB if they are at least that large. Every rank maps the whole file. So
//! an address in a buffer becomes a window and an offset (`Group::find_window`, a binary search that costs one branch
//! if there are no windows). With the offset, `Group::in_window` finds the address in any rank's segment, as mapped by
//! this rank.
//!
//! Once a group has had a window, every call of more than 4 KiB (256 KiB for an all-reduce) begins with a step in which
//! each rank publishes where its buffers lie. If all lie in one window (sources, and destinations if results are
//! fetched from them), ranks read each other's buffers in place, and a last step confirms that every rank is done.
//! Otherwise the call goes through slots like any other. The extra step costs a flag each way. Reduce, gather and
//! scatter always go through slots.
//!
//! No rank writes to another rank's buffer: a peer that was given up on could still write long after the call has
//! failed here, when the owner may use the buffer again. Nor does a buffer change while it is read: [`lent`] explains
//! how that holds for a rank that leaves a call early. Calls that succeed pay nothing for it.
//!
//! Each rank populates its own segment's pages with `MADV_POPULATE_WRITE` before the ranks agree, because a lack of
//! memory would be a bus error later. Before that, the leader refuses more than the system has in total. With n ranks
//! and segments of b bytes (rounded up), each rank needs (n + 1)·b bytes of address space, and the host needs n·b bytes
//! of memory. A rank's page tables grow as it accesses others' segments. A group keeps dropped windows mapped until its
//! next call, so an address that `in_window` gave stays valid to the end of the call, whatever another thread drops.
//! The pages of a dropped segment are given back at once (`MADV_REMOVE`). (`benches/record/design-figures.md` has what
//! pages cost.)

mod chunking;
mod control;
mod descriptor_server;
#[cfg(feature = "cuda")]
mod device_end;
mod direct;
mod flags;
mod folds;
#[cfg(feature = "__internals")]
pub(crate) mod fuzz;
mod group;
mod layout;
mod lent;
mod moves;
mod pages;
mod region;
mod ring;
mod ring_end;
mod shared_file;
mod slot_ring;
mod steps;
mod stores;
mod window;

#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use device_end::DeviceEnd;
pub(crate) use group::{CallContext, Group, Sharing};
pub(crate) use layout::MAX_ELEMENT_BYTES;
pub(crate) use moves::{Blocks, Memory};
#[cfg(test)]
pub(in crate::host) use ring::tests::pair as ring_pair;
pub(crate) use ring::{Channel, RingLink};
pub(crate) use shared_file::ShareError;
pub(crate) use window::{Segment, Site, Size, Storage};
