//! Calls among the ranks of one host: shared memory alone.

#![expect(unsafe_code, reason = "hands the caller's buffers to the shared-memory collectives")]

use super::HostPlane;
use super::job::Job;
use crate::call::{BlockLayout, Call, Kind};
use crate::deadline::Deadline;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::shm::{Blocks, CallContext, Group, Memory};

/// Where each block begins, for blocks side by side.
pub(super) fn offsets(lengths: &[usize]) -> Vec<usize> {
    let next = |start: &mut usize, length: &usize| Some(std::mem::replace(start, *start + length));
    lengths.iter().scan(0, next).collect()
}

impl HostPlane {
    /// Runs a call whose ranks all share this host; local indices are ranks then.
    #[inline]
    pub(super) fn run_intra_host(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let Some(group) = self.group.as_mut() else { return Err(AbortReason::Failed { rank: self.rank as u32 }.into()) };
        let context = CallContext { call, deadline, health: &self.health, recorder: &self.recorder };
        if call.kind == Kind::AllReduce
            && let (BlockLayout::Equal(bytes), Some(kernel)) = (&job.layout, &job.kernel)
            && !job.is_too_large_to_share()
        {
            let memory = Memory { source: job.memory.source, destination: job.memory.destination };
            // SAFETY: an all-reduce of `BlockLayout::Equal(bytes)` was made of two buffers of so many bytes, whole elements, aligned, borrowed
            // until it has run: two borrows, which are apart, or one for both, or one and the contribution multiplied.
            return unsafe { group.all_reduce(memory, *bytes, kernel, true, &context) };
        }
        if matches!(call.kind, Kind::GatherV | Kind::ScatterV | Kind::AllToAllV) || job.is_too_large_to_share() {
            // The counts are known in part on each rank, or an element does not fit: streams carry them, once everyone is known to
            // make this call.
            group.barrier(&context)?;
            return self.run_inter_host(job, call, deadline);
        }
        run_others(group, job, self.rank, &context)
    }

    /// Lets the ranks of this host agree on a call before it goes on between hosts.
    pub(super) fn agree_within_host(&mut self, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        match self.group.as_mut() {
            Some(group) => group.barrier(&CallContext { call, deadline, health: &self.health, recorder: &self.recorder }),
            None => Ok(()),
        }
    }
}

/// The collectives other than all-reduce.
fn run_others(group: &mut Group, job: &Job, rank: usize, context: &CallContext<'_>) -> Result<(), Interrupted> {
    let narrowed = job.narrowed(rank);
    let memory = Memory { source: narrowed.source, destination: narrowed.destination };
    let root = context.call.root.unwrap_or_default() as usize;
    let failed = || Err(AbortReason::Failed { rank: rank as u32 }.into());
    let (lengths, starts);
    let (bytes, blocks) = match &job.layout {
        BlockLayout::Equal(bytes) => (*bytes, Blocks::Equal(*bytes)),
        BlockLayout::Blocks(blocks) => {
            (lengths, starts) = (&blocks[..], offsets(blocks));
            (0, Blocks::Varied { lengths, offsets: &starts })
        }
        BlockLayout::Own(_) | BlockLayout::Pairs { .. } => return failed(),
    };
    if context.call.kind == Kind::Barrier {
        return group.barrier(context);
    }
    // SAFETY: for each, that the job's buffers are as long as its layout says, of whole elements, aligned, was checked when it was made
    // (`prepare`); they are borrowed until it has run. A rank that the collective reads nothing of, or writes nothing to, may have
    // passed none, and none is used. Two borrows are apart; in place they are one buffer, or that block of it that is the rank's own
    // (`Job::narrowed`), which is what each of the collectives asks of them.
    unsafe {
        match (context.call.kind, &job.kernel) {
            (Kind::Broadcast, _) => group.broadcast(memory, bytes, root, context),
            (Kind::AllGather | Kind::AllGatherV, _) => group.all_gather(memory, blocks, context),
            (Kind::Gather, _) => group.gather(memory, bytes, root, context),
            (Kind::Scatter, _) => group.scatter(memory, bytes, root, context),
            (Kind::AllToAll, _) => group.all_to_all(memory, bytes, context),
            (Kind::Reduce, Some(kernel)) => group.reduce(memory, bytes, root, kernel, true, context),
            (Kind::ReduceScatter | Kind::ReduceScatterV, Some(kernel)) => group.reduce_scatter(memory, blocks, kernel, true, context),
            _ => failed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::offsets;

    #[test]
    fn blocks_lie_side_by_side() {
        assert_eq!(offsets(&[3, 0, 2]), [0, 3, 3]);
        assert!(offsets(&[]).is_empty());
    }
}
