//! Reductions that NCCL lacks: an exchange, a kernel of this crate, and another exchange, in slabs.
//!
//! Each rank folds a share of the vector: it receives that share from all others and folds the inputs in rank order, in
//! one pass. The results then go to the ranks that need them. So an all-reduce moves as many bytes as a ring:
//! `2 (n - 1) / n` of the vector for each rank. Small vectors go as a whole to the ranks that need the result, which
//! saves a step.
//!
//! A large vector goes through the backend's scratch memory in slabs, alternately in its two halves. The transfers run
//! on the stream of the call. If there are several slabs, their folds run on a second stream: while a slab is folded,
//! the next slab is in transit. Events join both streams, so that the fold can be captured into a graph.
//!
//! The results of a slab are sent in the same NCCL group in which the slab after the next one arrives, since both must
//! wait for the fold of the first slab. So an all-reduce of `s` slabs takes `s + 2` groups. Unless there is only one
//! slab, every fold is hidden behind such a group; the last fold is hidden behind the sending of the previous slab's
//! results. So larger slabs cost nothing as long as a device folds a slab faster than its link moves one.
//!
//! This crate's kernels read and write 16 bytes at once if all addresses have the same remainder modulo 16. Inputs from
//! other ranks are put at multiples of 16, because at other addresses NCCL also moves single bytes. So this rank's own
//! input and its output are copied unless they are at a multiple of 16.

#[cfg(test)]
mod tests;

use super::Job;
use super::algorithm::FoldOp;
use super::slabs::{ALIGNMENT, Region, Slabs, unit};
use super::step::{FoldArguments, Folder, Plan, Ranks, Scratch, Step, StepEvent, StreamRole, Transfer};
use crate::base::tuning::device_folds::{SMALL_BYTES, STAGED_BYTES};
use crate::call::element::DType;
use crate::call::job::Operands;
use crate::call::{BlockLayout, Collective};
use crate::error::Error;
use crate::error::Result;

/// How elements are folded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Folding {
    pub(crate) folder: Folder,
    /// Contributions are multiplied by this scalar first.
    pub(crate) multiply: Option<(f64, DType)>,
    /// The size, in bytes, of the units that the kernel counts.
    pub(crate) element_bytes: usize,
}

impl Folding {
    /// Creates a fold by one of this crate's kernels. If there is a scalar, the elements are multiplied first.
    pub(crate) fn by(op: FoldOp, dtype: DType, multiply: Option<f64>) -> Self {
        // Bitwise kernels count bytes.
        let element_bytes = if op.is_bitwise() { 1 } else { dtype.size_bytes() };
        Self { folder: Folder::Ours(op, dtype), multiply: multiply.map(|scalar| (scalar, dtype)), element_bytes }
    }

    /// Creates a fold by one of the custom kernels.
    pub(crate) fn by_user(place: usize, element_bytes: usize) -> Self {
        Self { folder: Folder::User(place), multiply: None, element_bytes }
    }
}

/// Plans a fold between two ranks or more.
///
/// # Errors
///
/// `Unsupported` if the backend's scratch memory is too small; `InvalidArgument` for a layout that the kind of the call
/// does not have.
pub(crate) fn plan(job: &Job, folding: Folding, ranks: Ranks, scratch: Scratch) -> Result<Plan> {
    let fold = Fold::of(job, folding, ranks, scratch);
    Ok(match fold.way(job)? {
        Way::Nothing => Plan::Nothing,
        Way::Whole(bytes) => Plan::Steps(fold.whole(bytes)),
        Way::Slabs(slabs) => Plan::Steps(fold.slabs(&slabs)),
    })
}

/// Returns how much scratch memory, in bytes, the fold uses if it may use `most`; the same on every rank.
pub(crate) fn room(job: &Job, folding: Folding, ranks: Ranks, most: usize) -> usize {
    let fold = Fold::of(job, folding, ranks, Scratch { address: 0, bytes: most });
    match fold.way(job) {
        Ok(Way::Whole(bytes)) => ranks.n * fold.stride_of_whole(bytes),
        Ok(Way::Slabs(slabs)) => fold.chunks(slabs.count()) * slabs.chunk(),
        Ok(Way::Nothing) | Err(_) => 0,
    }
}

/// The ranks that get the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Every rank gets everything.
    All,
    /// This rank gets everything.
    Root(usize),
    /// Every rank keeps its share.
    Own,
}

/// How the vector is exchanged.
#[derive(Debug)]
enum Way {
    Nothing,
    /// As a whole, with this many bytes.
    Whole(usize),
    Slabs(Slabs),
}

/// One fold on this rank.
///
/// If the vector goes in slabs, the scratch memory consists of chunks. Each half holds the inputs in rank order; this
/// rank's own chunk is free for a copy of its contribution. If one rank gets everything, each half also holds the
/// result for that rank. After both halves comes the room for products that are sent to others.
#[derive(Debug, Clone, Copy)]
struct Fold {
    source: u64,
    destination: u64,
    folding: Folding,
    ranks: Ranks,
    scratch: Scratch,
    goal: Goal,
}

impl Fold {
    fn of(job: &Job, folding: Folding, ranks: Ranks, scratch: Scratch) -> Self {
        let Operands { source, destination, .. } = job.narrowed(ranks.me);
        let goal = match job.call.kind {
            Collective::AllReduce => Goal::All,
            Collective::Reduce => Goal::Root(job.root()),
            _ => Goal::Own,
        };
        Self { source, destination, folding, ranks, scratch, goal }
    }

    fn way(&self, job: &Job) -> Result<Way> {
        let (element_bytes, n) = (self.folding.element_bytes, self.ranks.n);
        match (job.call.kind, &job.layout) {
            (Collective::AllReduce | Collective::Reduce, BlockLayout::Equal(0)) => Ok(Way::Nothing),
            (Collective::AllReduce | Collective::Reduce, BlockLayout::Equal(bytes)) if self.is_small(*bytes) => Ok(Way::Whole(*bytes)),
            (Collective::AllReduce | Collective::Reduce, BlockLayout::Equal(bytes)) => {
                Ok(Way::Slabs(Slabs::of_vector(*bytes, element_bytes, n, self.chunk_room(job)?)))
            }
            (Collective::ReduceScatter | Collective::ReduceScatterV, layout @ (BlockLayout::Equal(_) | BlockLayout::Blocks(_))) => {
                Ok(Way::Slabs(Slabs::of_blocks(layout, element_bytes, n, self.chunk_room(job)?)))
            }
            (kind, layout) => Err(Error::argument(kind.name(), format!("on a device, this call does not support the layout {layout:?}"))),
        }
    }

    /// Whether it is better to gather the vector as a whole.
    fn is_small(&self, bytes: usize) -> bool {
        let padded = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|bytes| bytes.checked_mul(self.ranks.n));
        padded.is_some_and(|all| all <= SMALL_BYTES.min(self.scratch.bytes))
    }

    /// Returns the distance between vectors that are gathered as a whole.
    fn stride_of_whole(&self, bytes: usize) -> usize {
        // An all-gather leaves no space between the vectors.
        if matches!(self.goal, Goal::Root(_)) { bytes.next_multiple_of(ALIGNMENT) } else { bytes }
    }

    /// Returns the number of chunks in half the scratch memory.
    fn half(&self) -> usize {
        self.ranks.n + usize::from(matches!(self.goal, Goal::Root(_)))
    }

    /// Returns the number of chunks that this many slabs use. Products for others are written and sent on one stream,
    /// so they need room for one slab only.
    fn chunks(&self, slabs: usize) -> usize {
        let multiplied = if self.folding.multiply.is_some() { self.ranks.n - 1 } else { 0 };
        self.half() * slabs.min(2) + multiplied
    }

    /// Returns the most bytes that a rank can fold in a slab.
    fn chunk_room(&self, job: &Job) -> Result<usize> {
        let (unit, chunks) = (unit(self.folding.element_bytes), self.chunks(2));
        let most = self.scratch.bytes / chunks / unit * unit;
        if most != 0 {
            return Ok(most);
        }
        let reason = format!("it needs at least {} B of scratch memory, but there are only {} B", chunks * unit, self.scratch.bytes);
        Err(Error::unsupported(format!("{} between {} ranks by our kernels", job.call.kind.name(), self.ranks.n), reason))
    }

    /// Returns the address of a rank's input in the half of a slab.
    fn input(&self, slabs: &Slabs, slab: usize, rank: usize) -> u64 {
        self.scratch.address + ((slab % 2 * self.half() + rank) * slabs.chunk()) as u64
    }

    /// Sends the whole vector to the ranks that need the result, which fold it.
    fn whole(&self, bytes: usize) -> Vec<Step> {
        let Ranks { me, n } = self.ranks;
        debug_assert!(n > 1, "a single rank has no peer to fold with");
        let stride = self.stride_of_whole(bytes);
        let slot = |rank: usize| self.scratch.address + (rank * stride) as u64;
        let mut steps = Vec::with_capacity(3);
        let mut source = self.source;
        if self.folding.multiply.is_some() {
            source = slot(me);
            self.multiply(self.source, source, bytes, &mut steps);
        }
        let transfers = match self.goal {
            Goal::Root(root) if root != me => vec![Transfer::Send { address: source, bytes, peer: root }],
            Goal::Root(_) => self.ranks.others().map(|peer| Transfer::Receive { address: slot(peer), bytes, peer }).collect(),
            _ => vec![Transfer::AllGather { source, destination: slot(0), bytes }],
        };
        steps.push(Step::Transfer(transfers));
        if !matches!(self.goal, Goal::Root(root) if root != me) {
            let region = Region { offset: 0, bytes };
            let own = if self.goal == Goal::All { None } else { Some((source, me as u32)) };
            let arguments = self.arguments(slot(0), stride, own, self.destination, region);
            steps.push(self.fold(StreamRole::Call, arguments));
        }
        steps
    }

    /// Folds slab by slab: each rank receives its share from all others and folds it.
    fn slabs(&self, slabs: &Slabs) -> Vec<Step> {
        let count = slabs.count();
        let role = if count > 1 { StreamRole::Side } else { StreamRole::Call };
        let mut steps = Vec::with_capacity(count * 8);
        for next in 0..count + 2 {
            let mut transfers = Vec::with_capacity(2 * self.ranks.n);
            // Once a slab is folded, its result is sent, and the next but one may arrive in its half.
            let done = next.checked_sub(2).filter(|slab| *slab < count);
            if let Some(slab) = done {
                if role == StreamRole::Side {
                    steps.push(Step::Wait(StepEvent::Folded(slab % 2)));
                }
                self.pass_on(slabs, slab, &mut transfers);
            }
            if next < count {
                self.exchange(slabs, next, &mut steps, &mut transfers);
            }
            // Every rank has the same number of groups, even a rank with nothing to move.
            if next < count || (done.is_some() && self.goal != Goal::Own) {
                steps.push(Step::Transfer(transfers));
            }
            if next < count {
                self.start_fold(slabs, next, role, &mut steps);
            }
        }
        steps
    }

    /// Returns the address of this rank's contribution to the part of a slab that `rank` folds.
    fn contribution(&self, slabs: &Slabs, slab: usize, rank: usize) -> u64 {
        let Ranks { me, n } = self.ranks;
        match self.folding.multiply {
            None => self.source + slabs.region(slab, rank).offset as u64,
            Some(_) if rank == me => self.input(slabs, slab, me),
            Some(_) => {
                let place = self.half() * slabs.count().min(2) + (rank + n - me - 1) % n;
                self.scratch.address + (place * slabs.chunk()) as u64
            }
        }
    }

    /// Multiplies elements of this rank by its scalar, from any address to a multiple of 16.
    fn multiply(&self, source: u64, destination: u64, bytes: usize, steps: &mut Vec<Step>) {
        let Some((scalar, dtype)) = self.folding.multiply else { return };
        let mut from = source;
        if !source.is_multiple_of(ALIGNMENT as u64) && bytes >= STAGED_BYTES {
            steps.push(Step::Copy { role: StreamRole::Call, source, destination, bytes });
            from = destination;
        }
        steps.push(Step::Multiply { source: from, destination, count: bytes / dtype.size_bytes(), dtype, scalar });
    }

    /// Sends every rank's share of a slab to that rank.
    fn exchange(&self, slabs: &Slabs, slab: usize, steps: &mut Vec<Step>, transfers: &mut Vec<Transfer>) {
        let Ranks { me, n } = self.ranks;
        for rank in (0..n).filter(|_| self.folding.multiply.is_some()) {
            let Region { offset, bytes } = slabs.region(slab, rank);
            if bytes != 0 {
                self.multiply(self.source + offset as u64, self.contribution(slabs, slab, rank), bytes, steps);
            }
        }
        let mine = slabs.region(slab, me).bytes;
        for peer in self.ranks.others() {
            let theirs = slabs.region(slab, peer).bytes;
            if theirs != 0 {
                transfers.push(Transfer::Send { address: self.contribution(slabs, slab, peer), bytes: theirs, peer });
            }
            if mine != 0 {
                transfers.push(Transfer::Receive { address: self.input(slabs, slab, peer), bytes: mine, peer });
            }
        }
    }

    /// Returns the address of the result of this rank's share of a slab.
    fn output(&self, slabs: &Slabs, slab: usize) -> u64 {
        match self.goal {
            Goal::Root(root) if root != self.ranks.me => self.input(slabs, slab, self.ranks.n),
            Goal::Own => self.destination + (slab * slabs.chunk()) as u64,
            _ => self.destination + slabs.region(slab, self.ranks.me).offset as u64,
        }
    }

    /// Folds this rank's share of a slab, once the inputs have arrived.
    fn start_fold(&self, slabs: &Slabs, slab: usize, role: StreamRole, steps: &mut Vec<Step>) {
        let me = self.ranks.me;
        let region = slabs.region(slab, me);
        if role == StreamRole::Side {
            steps.push(Step::Record(StepEvent::Arrived));
            steps.push(Step::Wait(StepEvent::Arrived));
        }
        if region.bytes != 0 {
            let own = Some((self.contribution(slabs, slab, me), me as u32));
            let inputs = self.input(slabs, slab, 0);
            let arguments = self.arguments(inputs, slabs.chunk(), own, self.output(slabs, slab), region);
            self.fold_staged(role, arguments, region.bytes, steps);
        }
        if role == StreamRole::Side {
            steps.push(Step::Record(StepEvent::Folded(slab % 2)));
        }
    }

    /// Folds with copies of this rank's own input and of its output, in the free chunk among the inputs, if the kernel
    /// would otherwise move single elements. The copies are on the stream of the fold, so that they are hidden in the
    /// same way.
    fn fold_staged(&self, role: StreamRole, mut arguments: FoldArguments, bytes: usize, steps: &mut Vec<Step>) {
        let FoldArguments { inputs, stride, own, output, .. } = arguments;
        let is_ours = matches!(self.folding.folder, Folder::Ours(..));
        if !is_ours || arguments.is_wide() || bytes < STAGED_BYTES {
            return steps.push(self.fold(role, arguments));
        }
        let is_aligned = |address: u64| address.is_multiple_of(ALIGNMENT as u64);
        let place = inputs + self.ranks.me as u64 * stride;
        if let Some((source, index)) = own.filter(|(source, _)| !is_aligned(*source)) {
            steps.push(Step::Copy { role, source, destination: place, bytes });
            arguments.own = Some((place, index));
        }
        if !is_aligned(output) {
            arguments.output = place;
        }
        steps.push(self.fold(role, arguments));
        if !is_aligned(output) {
            steps.push(Step::Copy { role, source: place, destination: output, bytes });
        }
    }

    /// Sends the result of a slab to the ranks that need it.
    fn pass_on(&self, slabs: &Slabs, slab: usize, transfers: &mut Vec<Transfer>) {
        let me = self.ranks.me;
        let place = |rank: usize| {
            let Region { offset, bytes } = slabs.region(slab, rank);
            (self.destination + offset as u64, bytes)
        };
        let (address, bytes) = (self.output(slabs, slab), slabs.region(slab, me).bytes);
        let receive = |peer: usize| {
            let (address, bytes) = place(peer);
            Transfer::Receive { address, bytes, peer }
        };
        let has_bytes = |peer: &usize| slabs.region(slab, *peer).bytes != 0;
        match self.goal {
            Goal::Own => {}
            Goal::All if slabs.is_even(slab) => transfers.push(Transfer::AllGather { source: address, destination: place(0).0, bytes }),
            Goal::All => {
                if bytes != 0 {
                    transfers.extend(self.ranks.others().map(|peer| Transfer::Send { address, bytes, peer }));
                }
                transfers.extend(self.ranks.others().filter(has_bytes).map(receive));
            }
            Goal::Root(root) if root == me => transfers.extend(self.ranks.others().filter(has_bytes).map(receive)),
            Goal::Root(_) if bytes == 0 => {}
            Goal::Root(root) => transfers.push(Transfer::Send { address, bytes, peer: root }),
        }
    }

    /// Returns the kernel's arguments for a region.
    fn arguments(&self, inputs: u64, stride: usize, own: Option<(u64, u32)>, output: u64, region: Region) -> FoldArguments {
        let count = (region.bytes / self.folding.element_bytes) as u64;
        let ranks = self.ranks.n as u32;
        FoldArguments { inputs, stride: stride as u64, own, ranks, output, count, divisor: ranks }
    }

    fn fold(&self, role: StreamRole, arguments: FoldArguments) -> Step {
        Step::Fold { role, folder: self.folding.folder, arguments, element_bytes: self.folding.element_bytes }
    }
}
