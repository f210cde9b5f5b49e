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
//! 3. The members exchange the confirmed newcomers. Rank 0 opens its own listener and gives the address. Members keep
//!    their ranks; newcomers follow, by the rank of the member that they asked, then in the order of their requests.
//! 4. Members and newcomers connect at rank 0's listener, as at the start of a job. Rank 0 watches whether one is gone.
//! 5. The members vote over the old communicator. Only if each of them has connected, the new communicator counts. Then
//!    each member publishes at its listener that it has continued in the new communicator, as a shrink does, and lets
//!    its newcomers go on. Otherwise all drop it, and the newcomers wait for the next admission.
//!
//! **No rank continues in two communicators.** If a member dies during the vote, one member may have seen all votes
//! and other members an error. A member that sees an error shrinks the old communicator, finds what the first member
//! has published, and gets `LeftBehind`. A newcomer continues only after its member has let it in. If that member is
//! gone, the newcomer drops the communicator and asks again; the other ranks then find it lost.
//!
//! On a communicator that has ended, `admit` shrinks first, then admits over the shrunk one.

mod members;
mod newcomer;
mod requests;

use std::ops::Range;

use crate::communicator::Communicator;

/// The result of [`Communicator::admit`] and [`Communicator::join`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Membership {
    /// The communicator of old ranks and newcomers. If there were no newcomers, this is the old communicator.
    pub communicator: Communicator,
    /// The ranks of the newcomers in [`communicator`](Self::communicator). Empty if there were none.
    pub newcomers: Range<usize>,
}

impl Membership {
    /// Makes the result for a communicator whose first `members` ranks were there before.
    fn new(communicator: Communicator, members: usize) -> Self {
        let newcomers = members..communicator.world_size();
        Self { communicator, newcomers }
    }
}
