//! The buffers that a rank lends to the others for one call, and how it gets them back.
//!
//! In a direct call ([`direct`](super::direct)) ranks read each other's buffers in place: the sources and destinations
//! that were offered in the call's first step. From then on a buffer is **lent**. As long as any rank may be reading
//! it, what is read does not change:
//!
//! - Within the call, a rank writes only to its own buffers, and there only to parts that no other rank reads before
//!   the two have met again.
//! - A call that succeeds ends with a step that each rank publishes when it has read all that it needs. A rank that has
//!   met the others there has its buffers back.
//! - A rank that leaves in any other way (an error, an abort, a deadline, the panic of a custom op) does not know which
//!   ranks still read. Nor may it wait to find out: a reader may be in a custom op, which takes as long as it likes and
//!   may wait for this very rank. So before the buffers return to its caller, their segments are made private. A
//!   private view of the same pages, mapped when the window was made, takes the segment's place in this rank's mapping
//!   (`mremap`; readers have mappings of their own). The caller may then write to the buffers, give them back to the
//!   system or end the communicator. The memory that the others read exists until the last mapping of the file is gone.
//!   [`Lent`] does this in its drop, so that every way out of a call passes it.
//!
//! So the bytes that are read can be passed to a custom op as a slice, and can be folded through references. This is
//! sound if all ranks of the host run this crate. Other code in a rank of the job could change the memory, and the
//! mappings do not prevent that.
//!
//! **If a segment cannot be made private**, the rank waits until no rank can be reading: until each other rank has
//! reached the end of the call, has recorded that it left the call, or is gone. A segment cannot be made private if the
//! process has as many mappings as the system allows, or if ranks that are threads share one mapping under Miri and the
//! thread sanitizer. The wait can take as long as a custom op. So after [`READERS_LEAVE_WITHIN`] the process ends, as
//! it does when a small allocation fails: to return would change what others hold references to, and to wait for ever
//! could be a deadlock.

use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use super::group::{CallContext, Fingerprint, Group, GroupState};
use super::window::Offer;
use crate::base::tuning::shm::{READERS_INTERVAL, READERS_LEAVE_WITHIN};
use crate::host::abort_reason::{AbortReason, Interrupted};

/// A call for which this rank has lent its buffers. Its drop takes them back, unless no rank reads them any more.
pub(super) struct Lent<'a> {
    group: &'a mut Group,
    pub(super) fingerprint: Fingerprint,
    /// The step in which they were offered.
    since: u64,
    /// Whether this rank has begun the last step, at which the others may have arrived.
    is_closing: bool,
    /// Whether other ranks may be reading the buffers, now or later.
    is_read: bool,
}

impl<'a> Lent<'a> {
    /// Lends what this rank is about to offer in the step that it has begun.
    pub(super) fn new(group: &'a mut Group, offer: Offer, fingerprint: Fingerprint) -> Self {
        group.offers[group.me] = offer;
        Self { since: group.step, group, fingerprint, is_closing: false, is_read: true }
    }

    /// Ends the loan when every rank has found that no rank reads anything.
    pub(super) fn unread(mut self) {
        self.is_read = false;
    }

    /// Runs the last step, which confirms that all ranks are done with all buffers. Also fails if a rank gave up
    /// waiting in it: as far as the ranks can know, they all end in the same way.
    pub(super) fn close(mut self, context: &CallContext<'_>) -> Result<(), Interrupted> {
        let (step, fingerprint) = (self.next_step(), self.fingerprint);
        self.is_closing = true;
        self.meet(step, fingerprint, context)?;
        self.is_read = false;
        match (0..self.ranks).find(|rank| self.region.member(*rank).has_left_at(step)) {
            None => Ok(()),
            Some(rank) => {
                let abort_reason = self.region.abort_reason().unwrap_or(AbortReason::Failed { rank: self.globals[rank] });
                Err(self.fail(abort_reason.into(), fingerprint, context))
            }
        }
    }

    /// Makes the buffers private to this rank, while other ranks may be reading them.
    #[cold]
    fn take_back(&mut self) {
        if self.state == GroupState::Ready {
            // A panic interrupts the call between two steps.
            let abort_reason = AbortReason::Failed { rank: self.globals[self.me] };
            self.region.propagate(&abort_reason);
            self.state = GroupState::Ended(abort_reason);
        }
        self.region.member(self.me).leave_at(self.step);
        for window in self.offers[self.me].windows() {
            if let Err(error) = self.windows.keep_own(window) {
                crate::base::event::debug!(%error, window, "a shared buffer could not be made private to this rank");
                self.await_readers(&error);
            }
        }
    }

    /// Waits until no rank can be reading, or ends the process.
    fn await_readers(&self, error: &io::Error) {
        let began = Instant::now();
        while let Some(rank) = (0..self.ranks).find(|rank| *rank != self.me && self.may_read(*rank)) {
            if began.elapsed() > READERS_LEAVE_WITHIN {
                let rank = self.globals[rank];
                // If standard error cannot be written to, nothing else can be done.
                let _ = writeln!(
                    io::stderr(),
                    "collectives: rank {rank} may still be reading a shared buffer {READERS_LEAVE_WITHIN:?} after the call failed \
                     here. The buffer cannot be made private to this rank ({error}), so this process can no longer write it safely, and \
                     aborts"
                );
                std::process::abort();
            }
            std::thread::sleep(READERS_INTERVAL);
        }
    }

    /// Whether a rank may be reading, or may begin to: it has not left the call, not reached its end, and is not gone.
    fn may_read(&self, rank: usize) -> bool {
        let member = self.region.member(rank);
        let is_done = member.has_left_since(self.since) || self.is_closing && self.has_reached(rank, self.step);
        !is_done && !member.has_departed() && self.region.lives(rank)
    }
}

impl Drop for Lent<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_read {
            self.take_back();
        }
    }
}

impl Deref for Lent<'_> {
    type Target = Group;

    #[inline]
    fn deref(&self) -> &Group {
        self.group
    }
}

impl DerefMut for Lent<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Group {
        self.group
    }
}
