//! Membership: processes join a running job.
//!
//! # Design
//!
//! A newcomer knows the address of one or more members: their recovery listeners (`recovery.rs`). A member opens its
//! listener as a store when it first admits, or when it is asked for its address. The newcomer writes a *request* there
//! (`requests.rs`) and waits. The members look for requests only inside `admit`, so other calls cost nothing more.
//!
//! One admission, in order:
//! 1. Each member reads the requests at its own listener. It refuses a newcomer whose settings differ, with a reason.
//!    The members exchange the numbers of requests that are left. If there are none, that is all.
//! 2. Each member calls its newcomers, and waits for their confirmations for a short while (`CONFIRMED`). So a newcomer
//!    that is stopped or dead holds up the members once, for that time. It is called again only after it has confirmed.
//! 3. The members exchange the confirmed newcomers. Members keep their ranks; newcomers follow, by the rank of the
//!    member that they asked, then in the order of their requests.
//! 4. Members and newcomers connect at rank 0's listener, as at the start of a job. Rank 0 watches whether one is gone. A
//!    rank that does not come calls this off. Then they connect their devices. If that fails on one rank, it fails on all.
//! 5. The members vote over the old communicator. Only if each of them has connected, the new communicator counts. Then
//!    each member *commits*: it publishes at its listener that it continues in the new communicator, and lets its
//!    newcomers in. Otherwise all drop it, and the newcomers wait for the next admission.
//! 6. All ranks of the new communicator meet at a barrier. From then on, it is a communicator like any other.
//!
//! **No rank continues in two communicators, and the ranks do not split.** A member may die during the vote. Then one
//! member may have seen all votes, and another an error. The latter shrinks the old communicator. If it finds that another
//! rank has committed, it commits too. If no rank has, the remaining members continue without newcomers. A
//! rank commits before it returns, and a shrink publishes before it looks, so they cannot miss each other. If a member was
//! held up while the others may have given it up, it looks at their listeners after it has committed. If all members
//! that had committed die before the barrier, the newcomers that they have let in cannot know what the other members
//! decided. So a newcomer that has not passed the barrier continues only with a member, if one is left.
//!
//! If a rank is lost before the barrier, some ranks may have passed it and others not. The next attempt agrees on which
//! ranks are members: those that all ranks consider members.
//!
//! On a communicator that has ended, `admit` shrinks first, then admits over the shrunk one.
//!
//! The tests run the protocol in the simulated world of shrinks. A trait for members (`protocol.rs`) and one for newcomers
//! (`newcomer.rs`) contain everything that an admission needs from its environment.

mod admission;
mod attempt;
mod join_file;
mod members;
mod newcomer;
mod protocol;
mod requests;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::communicator::Communicator;
use admission::Admitted;

/// The result of [`Communicator::admit`] and [`Communicator::join`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Membership {
    /// The communicator of old ranks and newcomers. If there were no newcomers, this is the old communicator.
    pub communicator: Communicator,
    /// The ranks of the newcomers in [`communicator`](Self::communicator). Empty if there were none. If a rank was lost
    /// just after an earlier admission, the newcomers of that admission can be in this range again.
    pub newcomers: Range<usize>,
}

impl From<Admitted<Communicator>> for Membership {
    fn from(Admitted { comm, members }: Admitted<Communicator>) -> Self {
        let newcomers = members..comm.world_size();
        Self { communicator: comm, newcomers }
    }
}
