//! Calls among several hosts of which some have several ranks: agree and reduce on each host, exchange between hosts, share.

#![expect(unsafe_code, reason = "hands parts of the caller's buffers and scratch memory to the shared-memory collectives")]

use std::sync::Arc;

use super::HostPlane;
use super::chooser::Participants;
use super::intra_host::offsets;
use super::job::{Job, Operands};
use crate::call::{BlockLayout, Call, Kind};
use crate::deadline::Deadline;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::fold::Fold;
use crate::host::reduce::Kernel;
use crate::host::shm::{Blocks, CallContext, Memory};

/// Cuts `bytes` into `shares` parts of whole elements; the ranks of the host beyond them get nothing.
fn cut(bytes: usize, element_bytes: usize, shares: usize, ranks: usize) -> Vec<usize> {
    let count = bytes / element_bytes;
    let share = |rank: usize| if rank < shares { (count / shares + usize::from(rank < count % shares)) * element_bytes } else { 0 };
    (0..ranks).map(share).collect()
}

impl HostPlane {
    /// Runs a call over shared memory and links together.
    pub(super) fn run_hierarchical(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let by_links = self.chooser.in_rank_order(job.kernel.as_ref()) || job.is_too_large_to_share();
        match (call.kind, &job.kernel, &job.layout) {
            (Kind::AllReduce, Some(kernel), BlockLayout::Equal(bytes)) if !by_links => {
                self.hierarchical_all_reduce(job, *bytes, kernel, call, deadline)
            }
            (Kind::Reduce, Some(kernel), BlockLayout::Equal(bytes)) if !by_links => {
                self.hierarchical_reduce(job, *bytes, kernel, call, deadline)
            }
            (Kind::Broadcast, _, BlockLayout::Equal(bytes)) => self.hierarchical_broadcast(job, *bytes, call, deadline),
            (Kind::Barrier, ..) => self.hierarchical_barrier(call, deadline),
            _ => {
                self.agree_within_host(call, deadline)?;
                self.run_inter_host(job, call, deadline)
            }
        }
    }

    /// One rank of each host: the root for its own, the first elsewhere.
    fn representatives(&self, root: usize) -> Arc<[usize]> {
        let mut representatives = self.topology.share_owners(0).to_vec();
        representatives[self.topology.place(root).0] = root;
        representatives.into()
    }

    /// Reduce-scatter on the host, all-reduce of each share between hosts, all-gather on the host. The caller's destination is
    /// written last, when every rank is known to make the same call.
    fn hierarchical_all_reduce(
        &mut self,
        job: &Job,
        bytes: usize,
        kernel: &Kernel,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let (shares, local, ranks) = (self.topology.shares(), self.topology.local(), self.topology.local_ranks().len());
        let Operands { source, destination, .. } = job.memory;
        if self.group.is_none() {
            // Alone on this host, so there is one share, and it is everything.
            let participants = Participants { ranks: self.topology.share_owners(0), me: self.topology.host(), kernel: Some(kernel) };
            return self.run_leg(&participants, job.memory, bytes, 0, call, deadline);
        }
        let lengths = cut(bytes, kernel.element_bytes(), shares, ranks);
        let starts = offsets(&lengths);
        let blocks = Blocks::Varied { lengths: &lengths, offsets: &starts };
        let scratch = self.reserve(lengths[local])?;
        let (health, recorder) = (Arc::clone(&self.health), Arc::clone(&self.recorder));
        let context = CallContext { call, deadline, health: &health, recorder: &recorder };
        if let Some(group) = self.group.as_mut() {
            // SAFETY: the source holds all shares (`cut` makes them add up to its length, in whole elements), the scratch memory this rank's;
            // they are apart, and aligned to the element or to 64 bytes.
            unsafe { group.reduce_scatter(Memory { source, destination: scratch }, blocks, kernel, false, &context) }?;
        }
        if local < shares {
            let part = Operands { source: scratch, source_len: lengths[local], destination: scratch, destination_len: lengths[local] };
            let participants = Participants { ranks: self.topology.share_owners(local), me: self.topology.host(), kernel: Some(kernel) };
            self.run_leg(&participants, part, lengths[local], 0, call, deadline)?;
        }
        match self.group.as_mut() {
            // SAFETY: the scratch memory holds this rank's share, the destination room for all of them.
            Some(group) => unsafe { group.all_gather(Memory { source: scratch, destination }, blocks, &context) },
            None => Ok(()),
        }
    }

    /// Reduce to one rank of each host, then between those to the root.
    fn hierarchical_reduce(
        &mut self,
        job: &Job,
        bytes: usize,
        kernel: &Kernel,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let root = call.root.unwrap_or_default() as usize;
        let representatives = self.representatives(root);
        let representative = representatives[self.topology.host()];
        let mut part = job.memory;
        if self.group.is_some() {
            let scratch = self.reserve(bytes)?;
            let local = self.topology.place(representative).1;
            let context = CallContext { call, deadline, health: &self.health, recorder: &self.recorder };
            if let Some(group) = self.group.as_mut() {
                // SAFETY: the source (the job's, or its contribution multiplied) and the scratch memory hold `bytes` bytes of whole elements
                // each, aligned to them or to 64 bytes, and are apart: the plane owns the latter, and reserves no more before this returns.
                unsafe { group.reduce(Memory { source: part.source, destination: scratch }, bytes, local, kernel, false, &context) }?;
            }
            part.source = scratch;
        }
        if self.rank == representative {
            let participants = Participants { ranks: representatives, me: self.topology.host(), kernel: Some(kernel) };
            self.run_leg(&participants, part, bytes, self.topology.place(root).0, call, deadline)?;
        }
        // So that everyone on the host hears of a disagreement between hosts.
        self.agree_within_host(call, deadline)
    }

    /// From the root to one rank of each host, and from those to their host. The hosts agree first.
    fn hierarchical_broadcast(&mut self, job: &Job, bytes: usize, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let root = call.root.unwrap_or_default() as usize;
        self.agree_within_host(call, deadline)?;
        let representatives = self.representatives(root);
        let representative = representatives[self.topology.host()];
        let mut memory = Memory { source: job.memory.source, destination: job.memory.destination };
        if self.rank == representative {
            let participants = Participants { ranks: representatives, me: self.topology.host(), kernel: None };
            self.run_leg(&participants, job.memory, bytes, self.topology.place(root).0, call, deadline)?;
            if self.rank != root {
                memory.source = memory.destination;
            }
        }
        let local = self.topology.place(representative).1;
        let context = CallContext { call, deadline, health: &self.health, recorder: &self.recorder };
        match self.group.as_mut() {
            // SAFETY: the representative's source is the root's own, or what it has just received into its destination; every
            // destination holds `bytes` bytes.
            Some(group) => unsafe { group.broadcast(memory, bytes, local, &context) },
            None => Ok(()),
        }
    }

    /// Everyone on the host, then one of each host, then everyone on the host again.
    fn hierarchical_barrier(&mut self, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        self.agree_within_host(call, deadline)?;
        if self.topology.local() == 0 {
            let participants = Participants { ranks: self.topology.share_owners(0), me: self.topology.host(), kernel: None };
            let nothing = Operands { source: std::ptr::null(), source_len: 0, destination: std::ptr::null_mut(), destination_len: 0 };
            self.run_leg(&participants, nothing, 0, 0, call, deadline)?;
        }
        self.agree_within_host(call, deadline)
    }

    /// Scratch memory of the plane's own.
    fn reserve(&mut self, bytes: usize) -> Result<*mut u8, Interrupted> {
        if self.scratch.reserve(bytes) {
            return Ok(self.scratch.as_mut_ptr());
        }
        crate::event::error!(bytes, "no scratch memory for a hierarchical call");
        Err(AbortReason::Failed { rank: self.rank as u32 }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn shares_cover_everything_on_element_boundaries() {
        for (bytes, element, shares, ranks) in [(0, 4, 2, 3), (4, 4, 3, 3), (40, 4, 3, 5), (36, 12, 2, 2), (7, 1, 1, 4)] {
            let lengths = cut(bytes, element, shares, ranks);
            assert_eq!(lengths.iter().sum::<usize>(), bytes);
            assert!(lengths.iter().all(|length| length % element == 0));
            assert!(lengths[shares..].iter().all(|length| *length == 0));
        }
    }
}
