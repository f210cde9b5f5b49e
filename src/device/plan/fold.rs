//! Reductions that NCCL lacks: exchange, our kernel, exchange, in slabs.
//!
//! Each rank folds a share of the vector: it gets that share from all others and folds the inputs in rank order, in one pass. What was
//! folded then goes to whoever wants it. An all-reduce so has the bytes of a ring on the wire, `2 (n - 1) / n` of the vector for each rank.
//! Small vectors go to whoever wants the result as a whole, which saves a step.
//!
//! A large vector goes through the plane's scratch memory in slabs, by turns in its two halves. The transfers are on the stream of the
//! call, the folds of several slabs on one beside it: while a slab is folded, the next one is under way. Both streams are joined by
//! events, so that this can be captured into a graph.

#[cfg(test)]
mod tests;

use super::algorithm::FoldOp;
use super::arguments::FoldArguments;
use super::job::Job;
use super::nccl::{narrowed, root};
use super::slabs::{Region, Slabs, unit};
use super::step::{Folder, Plan, Ranks, Scratch, Step, StepEvent, StreamRole, Transfer};
use crate::call::{BlockLayout, Kind};
use crate::error::Error;
use crate::{DType, Result};

/// Up to so many bytes from all ranks together, everything is gathered and then folded.
const SMALL_BYTES: usize = 256 << 10;

/// How elements are folded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Folding {
    pub(crate) folder: Folder,
    /// Contributions are multiplied first.
    pub(crate) multiply: Option<(f64, DType)>,
    /// What the kernel counts, in bytes.
    pub(crate) element_bytes: usize,
}

impl Folding {
    /// A fold by one of our kernels, of elements that are multiplied first where it says so.
    pub(crate) fn by(op: FoldOp, dtype: DType, multiply: Option<(f64, DType)>) -> Self {
        // Bitwise kernels count bytes.
        let element_bytes = if op.is_bitwise() { 1 } else { dtype.size_bytes() };
        Self { folder: Folder::Ours(op, dtype), multiply, element_bytes }
    }
}

/// The steps of a fold between two ranks or more.
///
/// # Errors
///
/// `Unsupported` where the plane's scratch memory is too small, `InvalidArgument` for a layout that its kind does not have.
pub(crate) fn plan(job: &Job, folding: Folding, ranks: Ranks, scratch: Scratch) -> Result<Plan> {
    let (source, destination) = narrowed(job, ranks.me);
    let goal = match job.call.kind {
        Kind::AllReduce => Goal::All,
        Kind::Reduce => Goal::Root(root(job)),
        _ => Goal::Own,
    };
    let fold = Fold { source, destination, folding, ranks, scratch, goal };
    match (job.call.kind, &job.layout) {
        (Kind::AllReduce | Kind::Reduce, BlockLayout::Equal(0)) => Ok(Plan::Nothing),
        (Kind::AllReduce | Kind::Reduce, BlockLayout::Equal(bytes)) if fold.is_small(*bytes) => Ok(Plan::Steps(fold.whole(*bytes))),
        (Kind::AllReduce | Kind::Reduce, BlockLayout::Equal(bytes)) => {
            Ok(Plan::Steps(fold.slabs(&Slabs::of_vector(*bytes, folding.element_bytes, ranks.n, fold.chunk_room(job)?))))
        }
        (Kind::ReduceScatter | Kind::ReduceScatterV, layout @ (BlockLayout::Equal(_) | BlockLayout::Blocks(_))) => {
            Ok(Plan::Steps(fold.slabs(&Slabs::of_blocks(layout, folding.element_bytes, ranks.n, fold.chunk_room(job)?))))
        }
        (kind, layout) => Err(Error::argument(kind.name(), format!("this call has no such layout on a device: {layout:?}"))),
    }
}

/// Who gets what was folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Every rank gets everything.
    All,
    /// This rank gets everything.
    Root(usize),
    /// Every rank keeps its share.
    Own,
}

/// One fold on this rank.
#[derive(Debug, Clone, Copy)]
struct Fold {
    source: u64,
    destination: u64,
    folding: Folding,
    ranks: Ranks,
    scratch: Scratch,
    goal: Goal,
}

/// Where the parts of half the scratch memory are.
#[derive(Debug, Clone, Copy)]
struct Half {
    /// The inputs, in rank order, `chunk` bytes apart; this rank's own place is free.
    inputs: u64,
    /// What was folded for another rank.
    result: u64,
    /// This rank's contribution to the slab, multiplied.
    multiplied: u64,
}

impl Fold {
    /// Whether the vector is better gathered as a whole.
    fn is_small(&self, bytes: usize) -> bool {
        bytes.checked_mul(self.ranks.n).is_some_and(|all| all <= SMALL_BYTES.min(self.scratch.bytes))
    }

    /// How many chunks are in half the scratch memory.
    fn chunks(&self) -> usize {
        let (n, multiplies) = (self.ranks.n, self.folding.multiply.is_some());
        n + usize::from(matches!(self.goal, Goal::Root(_))) + if multiplies { n } else { 0 }
    }

    /// The most that a rank can fold in a slab, in bytes.
    fn chunk_room(&self, job: &Job) -> Result<usize> {
        let (unit, chunks) = (unit(self.folding.element_bytes), self.chunks());
        let most = self.scratch.bytes / 2 / chunks / unit * unit;
        if most != 0 {
            return Ok(most);
        }
        let reason = format!("it needs at least {} B of scratch memory, and there are {} B", 2 * chunks * unit, self.scratch.bytes);
        Err(Error::unsupported(format!("{} between {} ranks by our kernels", job.call.kind.name(), self.ranks.n), reason))
    }

    /// One half of the scratch memory.
    fn half(&self, slab: usize, chunk: usize) -> Half {
        let at = |chunks: usize| self.scratch.address + ((slab % 2 * self.chunks() + chunks) * chunk) as u64;
        let n = self.ranks.n;
        Half { inputs: at(0), multiplied: at(n), result: at(self.chunks() - 1) }
    }

    /// The whole vector goes to whoever wants the result, and is folded there.
    fn whole(&self, bytes: usize) -> Vec<Step> {
        let Ranks { me, n } = self.ranks;
        let slot = |rank: usize| self.scratch.address + (rank * bytes) as u64;
        let mut steps = Vec::with_capacity(3);
        let mut source = self.source;
        if let Some((scalar, dtype)) = self.folding.multiply {
            source = slot(me);
            steps.push(Step::Multiply { source: self.source, destination: source, count: bytes / dtype.size_bytes(), dtype, scalar });
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
            let arguments = self.arguments(slot(0), bytes, own, self.destination, region);
            steps.push(self.fold(StreamRole::Call, arguments));
        }
        debug_assert!(n > 1, "an only rank has nobody to fold with");
        steps
    }

    /// Slab by slab: each rank gets its share from all others and folds it.
    fn slabs(&self, slabs: &Slabs) -> Vec<Step> {
        let count = slabs.count();
        let role = if count > 1 { StreamRole::Side } else { StreamRole::Call };
        let mut steps = Vec::with_capacity(count * 8);
        for next in 0..=count {
            if next < count {
                self.exchange(slabs, next, &mut steps);
                self.start_fold(slabs, next, role, &mut steps);
            }
            // While the next slab is under way, what was folded before is passed on. After that its half may be written again.
            if let Some(slab) = next.checked_sub(1) {
                if role == StreamRole::Side {
                    steps.push(Step::Wait(StepEvent::Folded(slab % 2)));
                }
                self.pass_on(slabs, slab, &mut steps);
            }
        }
        steps
    }

    /// Where this rank's contribution to a region is.
    fn contribution(&self, slabs: &Slabs, slab: usize, rank: usize) -> u64 {
        if self.folding.multiply.is_some() {
            return self.half(slab, slabs.chunk()).multiplied + (rank * slabs.chunk()) as u64;
        }
        self.source + slabs.region(slab, rank).offset as u64
    }

    /// Every rank's share of a slab to that rank.
    fn exchange(&self, slabs: &Slabs, slab: usize, steps: &mut Vec<Step>) {
        let Ranks { me, n } = self.ranks;
        if let Some((scalar, dtype)) = self.folding.multiply {
            for rank in 0..n {
                let Region { offset, bytes } = slabs.region(slab, rank);
                if bytes != 0 {
                    let (source, destination) = (self.source + offset as u64, self.contribution(slabs, slab, rank));
                    steps.push(Step::Multiply { source, destination, count: bytes / dtype.size_bytes(), dtype, scalar });
                }
            }
        }
        let inputs = self.half(slab, slabs.chunk()).inputs;
        let mine = slabs.region(slab, me).bytes;
        let mut transfers = Vec::with_capacity(2 * n);
        for peer in self.ranks.others() {
            let theirs = slabs.region(slab, peer).bytes;
            if theirs != 0 {
                transfers.push(Transfer::Send { address: self.contribution(slabs, slab, peer), bytes: theirs, peer });
            }
            if mine != 0 {
                transfers.push(Transfer::Receive { address: inputs + (peer * slabs.chunk()) as u64, bytes: mine, peer });
            }
        }
        steps.push(Step::Transfer(transfers));
    }

    /// Where this rank's share of a slab is folded into.
    fn output(&self, slabs: &Slabs, slab: usize) -> u64 {
        match self.goal {
            Goal::Root(root) if root != self.ranks.me => self.half(slab, slabs.chunk()).result,
            Goal::Own => self.destination + (slab * slabs.chunk()) as u64,
            _ => self.destination + slabs.region(slab, self.ranks.me).offset as u64,
        }
    }

    /// This rank's share of a slab, once the inputs have come.
    fn start_fold(&self, slabs: &Slabs, slab: usize, role: StreamRole, steps: &mut Vec<Step>) {
        let me = self.ranks.me;
        let region = slabs.region(slab, me);
        if role == StreamRole::Side {
            steps.push(Step::Record(StepEvent::Arrived));
            steps.push(Step::Wait(StepEvent::Arrived));
        }
        if region.bytes != 0 {
            let own = Some((self.contribution(slabs, slab, me), me as u32));
            let inputs = self.half(slab, slabs.chunk()).inputs;
            let arguments = self.arguments(inputs, slabs.chunk(), own, self.output(slabs, slab), region);
            steps.push(self.fold(role, arguments));
        }
        if role == StreamRole::Side {
            steps.push(Step::Record(StepEvent::Folded(slab % 2)));
        }
    }

    /// What was folded of a slab to whoever wants it.
    fn pass_on(&self, slabs: &Slabs, slab: usize, steps: &mut Vec<Step>) {
        let Ranks { me, n } = self.ranks;
        let place = |rank: usize| {
            let Region { offset, bytes } = slabs.region(slab, rank);
            (self.destination + offset as u64, bytes)
        };
        let (output, mine) = (self.output(slabs, slab), slabs.region(slab, me).bytes);
        let receive = |peer: usize| {
            let (address, bytes) = place(peer);
            Transfer::Receive { address, bytes, peer }
        };
        let has_bytes = |peer: &usize| slabs.region(slab, *peer).bytes != 0;
        let transfers = match self.goal {
            Goal::Own => return,
            Goal::All if slabs.is_even(slab) => vec![Transfer::AllGather { source: output, destination: place(0).0, bytes: mine }],
            Goal::All => {
                let mut transfers = Vec::with_capacity(2 * n);
                if mine != 0 {
                    transfers.extend(self.ranks.others().map(|peer| Transfer::Send { address: output, bytes: mine, peer }));
                }
                transfers.extend(self.ranks.others().filter(has_bytes).map(receive));
                transfers
            }
            Goal::Root(root) if root == me => self.ranks.others().filter(has_bytes).map(receive).collect(),
            Goal::Root(_) if mine == 0 => Vec::new(),
            Goal::Root(root) => vec![Transfer::Send { address: output, bytes: mine, peer: root }],
        };
        steps.push(Step::Transfer(transfers));
    }

    /// What the kernel is told about a region.
    fn arguments(&self, inputs: u64, stride: usize, own: Option<(u64, u32)>, output: u64, region: Region) -> FoldArguments {
        let count = (region.bytes / self.folding.element_bytes) as u64;
        let ranks = self.ranks.n as u32;
        FoldArguments { inputs, stride: stride as u64, own, ranks, output, count, divisor: ranks }
    }

    fn fold(&self, role: StreamRole, arguments: FoldArguments) -> Step {
        Step::Fold { role, folder: self.folding.folder, arguments, element_bytes: self.folding.element_bytes }
    }
}
