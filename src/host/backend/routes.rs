//! The three routes of a call: inside a host over shared memory, between hosts over links by a plan, and both together.

#![expect(unsafe_code, reason = "hands the caller's buffers, and scratch memory, to the engine and to the shared-memory collectives")]

use std::sync::Arc;

use super::HostBackend;
use super::job::{Job, Operands};
use super::plans::Participants;
use crate::base::deadline::Deadline;
use crate::call::algorithm::Algorithm;
use crate::call::element::{DType, TypeTag};
use crate::call::op::ReduceOp;
use crate::call::{BlockLayout, Call, Collective};
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::engine::{self, Execution};
use crate::host::fold::Fold;
use crate::host::plan::{self, Shape};
use crate::host::reduce::Kernel;
use crate::host::shm::{Blocks, CallContext, Group, Memory};

impl HostBackend {
    // Inside a host.

    /// Runs a call whose ranks all share this host, so that local indices are ranks.
    #[inline]
    pub(super) fn run_intra_host(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let Some(group) = self.group.as_mut() else { return Err(AbortReason::Failed { rank: self.rank as u32 }.into()) };
        let context = CallContext { call, deadline, health: &self.health, recorder: &self.recorder };
        if call.kind == Collective::AllReduce
            && let (BlockLayout::Equal(bytes), Some(kernel)) = (&job.layout, job.kernel())
            && !job.is_too_large_to_share()
        {
            let memory = Memory { source: job.memory.source, destination: job.memory.destination };
            // SAFETY: an all-reduce of `BlockLayout::Equal(bytes)` was made from two buffers of that many bytes: whole
            // elements, aligned, borrowed until it has run. They are two borrows, which do not overlap; or one borrow
            // for both; or one borrow and the multiplied contribution.
            return unsafe { group.all_reduce(memory, *bytes, kernel, true, &context) };
        }
        if call.kind.is_pairwise() {
            return self.run_pairwise(job, call, deadline);
        }
        if job.is_too_large_to_share() {
            // An element does not fit into shared memory. Links carry such elements once all ranks are known to make
            // this call.
            group.barrier(&context)?;
            return self.run_inter_host(job, call, deadline);
        }
        run_others(group, job, self.rank, &context)
    }

    /// Lets the ranks of this host agree on a call before it goes on between hosts.
    fn agree_within_host(&mut self, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        match self.group.as_mut() {
            Some(group) => group.barrier(&CallContext { call, deadline, health: &self.health, recorder: &self.recorder }),
            None => Ok(()),
        }
    }

    // Between hosts.

    /// Runs a call in which each rank knows only some of the counts. Links carry the data once all counts are known to
    /// match.
    pub(super) fn run_pairwise(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        self.compare_counts(job, call, deadline)?;
        self.run_inter_host(job, call, deadline)
    }

    /// Runs a call over links between all ranks.
    pub(super) fn run_inter_host(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let participants = Participants { ranks: self.topology.everyone(), me: self.rank, kernel: job.kernel() };
        let operands = job.narrowed(self.rank);
        let own = job.layout.block(self.rank).1;
        let bytes = match call.kind {
            Collective::AllGather | Collective::AllGatherV => operands.destination_len,
            Collective::ReduceScatter | Collective::ReduceScatterV => operands.source_len,
            _ => own,
        };
        let (blocks, receives) = match &job.layout {
            BlockLayout::Equal(bytes) => (plan::Blocks::Equal(*bytes), None),
            BlockLayout::Blocks(blocks) => (plan::Blocks::Each(blocks), None),
            BlockLayout::Own(len) => (plan::Blocks::Own { rank: self.rank, len: *len }, None),
            BlockLayout::Pairs { send, receive, .. } => (plan::Blocks::Each(send), Some(&receive[..])),
        };
        let in_place = job.in_place && call.kind == Collective::AllToAll;
        let root = call.root.unwrap_or_default() as usize;
        let kind = if is_agreement_alone(job) { Collective::Barrier } else { call.kind };
        let shape = Shape { blocks, receives, in_place, ..self.shape(kind, &participants, bytes, root) };
        // Dropped last.
        let _bools = job.listed_bools();
        self.execute(&shape, &participants, operands, job.lists.as_deref(), call, deadline)
    }

    /// Sums words over all ranks, however these reach each other, as a part of another call.
    pub(super) fn sum_words(&mut self, words: &mut [u64; 2], call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let kernel = Kernel::of(&crate::call::op::Reduction::<u64>::from(ReduceOp::Sum), TypeTag::Scalar(DType::U64), self.peers.len())
            .map_err(|_| AbortReason::Failed { rank: self.rank as u32 })?;
        let bytes = size_of_val(words);
        let start = words.as_mut_ptr().cast::<u8>();
        let operands = Operands { source: start.cast_const(), source_len: bytes, destination: start, destination_len: bytes };
        match self.group.as_mut() {
            Some(group) if self.topology.is_one_host() => {
                let context = CallContext { call, deadline, health: &self.health, recorder: &self.recorder };
                let memory = Memory { source: operands.source, destination: operands.destination };
                // SAFETY: both are the same two words, borrowed while this runs.
                unsafe { group.all_reduce(memory, bytes, &kernel, true, &context) }
            }
            _ if self.topology.is_scattered() => {
                let participants = Participants { ranks: self.topology.everyone(), me: self.rank, kernel: Some(&kernel) };
                // Sums of words are the same in any order, and this takes the fewest messages.
                let shape = Shape { algorithm: Algorithm::Doubling, ..self.shape(Collective::AllReduce, &participants, bytes, 0) };
                self.execute(&shape, &participants, operands, None, call, deadline)
            }
            _ => self.hierarchical_all_reduce(operands, bytes, &kernel, call, deadline),
        }
    }

    /// Exchanges words with every rank over links (`AllToAll`), or gathers the words of every rank (`AllGather`), as a
    /// part of another call.
    pub(super) fn exchange_words(
        &mut self,
        kind: Collective,
        mine: &[u64],
        theirs: &mut [u64],
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let participants = Participants { ranks: self.topology.everyone(), me: self.rank, kernel: None };
        let (source_len, destination_len) = (size_of_val(mine), size_of_val(theirs));
        let (source, destination) = (mine.as_ptr().cast(), theirs.as_mut_ptr().cast());
        let blocks = plan::Blocks::Equal(destination_len / self.peers.len());
        let shape = Shape { blocks, ..self.shape(kind, &participants, destination_len, 0) };
        self.execute(&shape, &participants, Operands { source, source_len, destination, destination_len }, None, call, deadline)
    }

    /// Returns the shape of a call on `bytes` in total. `root`: the number of the root among the participants, if there
    /// is one.
    pub(super) fn shape(&self, kind: Collective, participants: &Participants<'_>, bytes: usize, root: usize) -> Shape<'static> {
        Shape {
            kind,
            algorithm: self.chooser.algorithm(kind, bytes, participants),
            n: participants.ranks.len(),
            me: participants.me,
            root,
            blocks: plan::Blocks::Equal(bytes),
            receives: None,
            element: participants.element_bytes(),
            segment: self.chooser.segment(),
            in_place: false,
        }
    }

    /// Runs the plan of a shape.
    fn execute(
        &mut self,
        shape: &Shape<'_>,
        participants: &Participants<'_>,
        operands: Operands,
        lists: Option<&engine::Lists>,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let Operands { source, source_len, destination, destination_len } = operands;
        let Self { plans, engine, links, group, health, recorder, .. } = self;
        let mut interrupted = || group.as_ref().and_then(Group::abort_reason);
        plans.run(shape, |plan| {
            let request = Execution {
                plan,
                participants: &participants.ranks,
                // SAFETY: these are a job's buffers, scratch memory of the backend, words that a caller has borrowed,
                // or null and of length 0. Both are initialised over their lengths until this call returns: a job's
                // come from borrows (`prepare`), and nothing reserves scratch meanwhile. They are aligned to their
                // elements: borrows of these, blocks of whole elements of them, or 64 bytes, which is what folds
                // require of scratch. In place, one is the other or a block of it (`Job::narrowed`). Nothing but the
                // engine uses either meanwhile. The blocks of lists come from borrows in the same way, one for each
                // rank, and have that length in total.
                memory: unsafe { engine::Memory::new(source, source_len, destination, destination_len, lists) },
                call,
                fold: participants.kernel.map(|kernel| kernel as &dyn Fold),
                deadline,
                health,
                recorder,
                interrupted: &mut interrupted,
            };
            engine.run(request, links)
        })
    }

    // Both: several hosts, of which some have several ranks.

    /// Runs a call over shared memory and links together.
    pub(super) fn run_hierarchical(&mut self, job: &Job, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let by_links = self.chooser.in_rank_order(job.kernel()) || job.is_too_large_to_share();
        match (call.kind, job.kernel(), &job.layout) {
            (Collective::AllReduce, Some(kernel), BlockLayout::Equal(bytes)) if !by_links => {
                self.hierarchical_all_reduce(job.memory, *bytes, kernel, call, deadline)
            }
            (Collective::Reduce, Some(kernel), BlockLayout::Equal(bytes)) if !by_links => {
                self.hierarchical_reduce(job, *bytes, kernel, call, deadline)
            }
            (Collective::Broadcast, _, BlockLayout::Equal(bytes)) => self.hierarchical_broadcast(job, *bytes, call, deadline),
            _ if is_agreement_alone(job) => self.hierarchical_barrier(call, deadline),
            _ => {
                self.agree_within_host(call, deadline)?;
                self.run_inter_host(job, call, deadline)
            }
        }
    }

    /// Returns one rank of each host: the root on its own host, the first rank elsewhere.
    fn representatives(&self, root: usize) -> Arc<[usize]> {
        let mut representatives = self.topology.share_owners(0).to_vec();
        representatives[self.topology.place(root).0] = root;
        representatives.into()
    }

    /// Runs a reduce-scatter on the host, an all-reduce of each share between hosts, and an all-gather on the host. The
    /// caller's destination is written last, when every rank is known to make the same call.
    fn hierarchical_all_reduce(
        &mut self,
        operands: Operands,
        bytes: usize,
        kernel: &Kernel,
        call: &Call,
        deadline: &Deadline,
    ) -> Result<(), Interrupted> {
        let (shares, local, ranks) = (self.topology.shares(), self.topology.local(), self.topology.local_ranks().len());
        let Operands { source, destination, .. } = operands;
        if self.group.is_none() {
            // This rank is alone on its host, so there is one share, which is everything.
            let participants = Participants { ranks: self.topology.share_owners(0), me: self.topology.host(), kernel: Some(kernel) };
            let shape = self.shape(Collective::AllReduce, &participants, bytes, 0);
            return self.execute(&shape, &participants, operands, None, call, deadline);
        }
        let lengths = cut(bytes, kernel.element_bytes(), shares, ranks);
        let starts = offsets(&lengths);
        let blocks = Blocks::Varied { lengths: &lengths, offsets: &starts };
        let scratch = self.reserve(lengths[local])?;
        let (health, recorder) = (Arc::clone(&self.health), Arc::clone(&self.recorder));
        let context = CallContext { call, deadline, health: &health, recorder: &recorder };
        if let Some(group) = self.group.as_mut() {
            // SAFETY: the source holds all shares (`cut` makes them add up to its length, in whole elements), and the
            // scratch memory holds this rank's. They do not overlap, and are aligned to the element or to 64 bytes.
            unsafe { group.reduce_scatter(Memory { source, destination: scratch }, blocks, kernel, false, &context) }?;
        }
        if local < shares {
            let part = Operands { source: scratch, source_len: lengths[local], destination: scratch, destination_len: lengths[local] };
            let participants = Participants { ranks: self.topology.share_owners(local), me: self.topology.host(), kernel: Some(kernel) };
            let shape = self.shape(Collective::AllReduce, &participants, lengths[local], 0);
            self.execute(&shape, &participants, part, None, call, deadline)?;
        }
        match self.group.as_mut() {
            // SAFETY: the scratch memory holds this rank's share, and the destination has room for all shares.
            Some(group) => unsafe { group.all_gather(Memory { source: scratch, destination }, blocks, &context) },
            None => Ok(()),
        }
    }

    /// Reduces to one rank of each host, and from these ranks to the root.
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
                // SAFETY: the source (the job's, or its contribution multiplied) and the scratch memory hold `bytes`
                // bytes of whole elements each, aligned to them or to 64 bytes. They do not overlap: the backend owns
                // the scratch memory, and reserves no more before this returns.
                unsafe { group.reduce(Memory { source: part.source, destination: scratch }, bytes, local, kernel, false, &context) }?;
            }
            part.source = scratch;
        }
        if self.rank == representative {
            let participants = Participants { ranks: representatives, me: self.topology.host(), kernel: Some(kernel) };
            let shape = self.shape(Collective::Reduce, &participants, bytes, self.topology.place(root).0);
            self.execute(&shape, &participants, part, None, call, deadline)?;
        }
        // So that every rank of the host is notified of a disagreement between hosts.
        self.agree_within_host(call, deadline)
    }

    /// Sends the vector from the root to one rank of each host, and from each of these ranks to the others of its host.
    /// The ranks of a host agree first.
    fn hierarchical_broadcast(&mut self, job: &Job, bytes: usize, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        let root = call.root.unwrap_or_default() as usize;
        self.agree_within_host(call, deadline)?;
        let representatives = self.representatives(root);
        let representative = representatives[self.topology.host()];
        let mut memory = Memory { source: job.memory.source, destination: job.memory.destination };
        if self.rank == representative {
            let participants = Participants { ranks: representatives, me: self.topology.host(), kernel: None };
            let shape = self.shape(Collective::Broadcast, &participants, bytes, self.topology.place(root).0);
            self.execute(&shape, &participants, job.memory, None, call, deadline)?;
            if self.rank != root {
                memory.source = memory.destination;
            }
        }
        let local = self.topology.place(representative).1;
        let context = CallContext { call, deadline, health: &self.health, recorder: &self.recorder };
        match self.group.as_mut() {
            // SAFETY: the representative's source is the root's own, or what it has just received into its destination.
            // Every destination holds `bytes` bytes.
            Some(group) => unsafe { group.broadcast(memory, bytes, local, &context) },
            None => Ok(()),
        }
    }

    /// Runs a barrier on the host, then a barrier among one rank of each host, then another on the host.
    fn hierarchical_barrier(&mut self, call: &Call, deadline: &Deadline) -> Result<(), Interrupted> {
        self.agree_within_host(call, deadline)?;
        if self.topology.local() == 0 {
            let participants = Participants { ranks: self.topology.share_owners(0), me: self.topology.host(), kernel: None };
            let nothing = Operands { source: std::ptr::null(), source_len: 0, destination: std::ptr::null_mut(), destination_len: 0 };
            let shape = self.shape(Collective::Barrier, &participants, 0, 0);
            self.execute(&shape, &participants, nothing, None, call, deadline)?;
        }
        self.agree_within_host(call, deadline)
    }

    /// Reserves the backend's scratch memory.
    fn reserve(&mut self, bytes: usize) -> Result<*mut u8, Interrupted> {
        if self.scratch.reserve(bytes) {
            return Ok(self.scratch.as_mut_ptr());
        }
        crate::base::event::error!(bytes, "cannot allocate scratch memory for a hierarchical call");
        Err(AbortReason::Failed { rank: self.rank as u32 }.into())
    }
}

/// Runs the collectives other than all-reduce inside a host.
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
    if is_agreement_alone(job) {
        return group.barrier(context);
    }
    // SAFETY: this holds for each of the collectives. When the job was made (`prepare`), it was checked that its
    // buffers are as long as its layout states, of whole elements, and aligned; they are borrowed until it has run. If
    // the collective reads nothing from a rank, or writes nothing to it, the rank may have passed no buffer, and none
    // is used. Two borrows do not overlap. In place, they are one buffer, or the block of it that belongs to the rank
    // (`Job::narrowed`), which is what each of the collectives requires.
    unsafe {
        match (context.call.kind, job.kernel()) {
            (Collective::Broadcast, _) => group.broadcast(memory, bytes, root, context),
            (Collective::AllGather | Collective::AllGatherV, _) => group.all_gather(memory, blocks, context),
            (Collective::Gather, _) => group.gather(memory, bytes, root, context),
            (Collective::Scatter, _) => group.scatter(memory, bytes, root, context),
            (Collective::AllToAll, _) => group.all_to_all(memory, bytes, context),
            (Collective::Reduce, Some(kernel)) => group.reduce(memory, bytes, root, kernel, true, context),
            (Collective::ReduceScatter | Collective::ReduceScatterV, Some(kernel)) => {
                group.reduce_scatter(memory, blocks, kernel, true, context)
            }
            _ => failed(),
        }
    }
}

/// Whether the ranks only agree on a call: a barrier, or a reduction of no buffer.
fn is_agreement_alone(job: &Job) -> bool {
    job.call.kind == Collective::Barrier || (job.call.kind.reduces() && job.kernel().is_none())
}

/// Returns where each block begins, for blocks side by side.
fn offsets(lengths: &[usize]) -> Vec<usize> {
    let next = |start: &mut usize, length: &usize| Some(std::mem::replace(start, *start + length));
    lengths.iter().scan(0, next).collect()
}

/// Cuts `bytes` into `shares` parts of whole elements, one for each of the host's first ranks; the other ranks get
/// nothing.
fn cut(bytes: usize, element_bytes: usize, shares: usize, ranks: usize) -> Vec<usize> {
    let count = bytes / element_bytes;
    let share = |rank: usize| if rank < shares { (count / shares + usize::from(rank < count % shares)) * element_bytes } else { 0 };
    (0..ranks).map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::{cut, offsets};

    #[test]
    fn blocks_lie_side_by_side() {
        assert_eq!(offsets(&[3, 0, 2]), [0, 3, 3]);
        assert!(offsets(&[]).is_empty());
    }

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
