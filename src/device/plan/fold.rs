//! Reductions that NCCL lacks: exchange, our kernel, exchange, in slabs.
//!
//! Each rank folds a share of the vector: it gets that share from all others and folds the inputs in rank order, in one pass. What was
//! folded then goes to whoever wants it. An all-reduce so has the bytes of a ring on the wire, `2 (n - 1) / n` of the vector for each rank.
//! Small vectors go to whoever wants the result as a whole, which saves a step.
//!
//! A large vector goes through the plane's scratch memory in slabs, by turns in its two halves. The transfers are on the stream of the
//! call, the folds of several slabs on one beside it: while a slab is folded, the next one is under way. Both streams are joined by
//! events, so that this can be captured into a graph.

use super::Job;
use super::algorithm::FoldOp;
use super::slabs::{Region, Slabs, unit};
use super::step::{FoldArguments, Folder, Plan, Ranks, Scratch, Step, StepEvent, StreamRole, Transfer};
use crate::call::{BlockLayout, Collective};
use crate::error::Error;
use crate::job::Operands;
use crate::tuning::device_folds::SMALL_BYTES;
use crate::{DType, Result};

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
    let Operands { source, destination, .. } = job.narrowed(ranks.me);
    let goal = match job.call.kind {
        Collective::AllReduce => Goal::All,
        Collective::Reduce => Goal::Root(job.root()),
        _ => Goal::Own,
    };
    let fold = Fold { source, destination, folding, ranks, scratch, goal };
    match (job.call.kind, &job.layout) {
        (Collective::AllReduce | Collective::Reduce, BlockLayout::Equal(0)) => Ok(Plan::Nothing),
        (Collective::AllReduce | Collective::Reduce, BlockLayout::Equal(bytes)) if fold.is_small(*bytes) => {
            Ok(Plan::Steps(fold.whole(*bytes)))
        }
        (Collective::AllReduce | Collective::Reduce, BlockLayout::Equal(bytes)) => {
            Ok(Plan::Steps(fold.slabs(&Slabs::of_vector(*bytes, folding.element_bytes, ranks.n, fold.chunk_room(job)?))))
        }
        (Collective::ReduceScatter | Collective::ReduceScatterV, layout @ (BlockLayout::Equal(_) | BlockLayout::Blocks(_))) => {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::device::plan::cases::Case;
    use crate::device::plan::combine;
    use crate::random::Random;

    const REDUCING: [Collective; 4] = [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter, Collective::ReduceScatterV];

    fn bytes(random: &mut Random) -> [u8; 4] {
        [0; 4].map(|_| random.below(256) as u8)
    }

    fn numbers(random: &mut Random) -> [u8; 4] {
        (random.below(1 << 20) as f32 / 7.0).to_ne_bytes()
    }

    /// What a fold in rank order leaves.
    fn folded(folding: Folding, inputs: &[Vec<u8>]) -> Vec<u8> {
        let size = folding.element_bytes;
        let multiplied = |input: &Vec<u8>| match folding.multiply {
            Some((scalar, _)) => {
                let product = |value: &[u8]| (f32::from_ne_bytes(value.try_into().unwrap()) * scalar as f32).to_ne_bytes();
                input.chunks_exact(4).flat_map(product).collect()
            }
            None => input.clone(),
        };
        let mut result: Vec<u8> = multiplied(&inputs[0]);
        for input in &inputs[1..] {
            for (a, b) in result.chunks_exact_mut(size).zip(multiplied(input).chunks_exact(size)) {
                combine(folding.folder, a, b);
            }
        }
        if folding.folder == Folder::Ours(FoldOp::Avg, DType::U16) {
            for a in result.chunks_exact_mut(2) {
                let quotient = u16::from_ne_bytes([a[0], a[1]]) / inputs.len() as u16;
                a.copy_from_slice(&quotient.to_ne_bytes());
            }
        }
        result
    }

    /// The folds that the model knows: bitwise, a mean, a sum whose order shows, one after a multiplication, and the caller's.
    fn some_folding(random: &mut Random) -> Folding {
        let ours = |op, dtype: DType, element_bytes| Folding { folder: Folder::Ours(op, dtype), multiply: None, element_bytes };
        match random.below(5) {
            0 => ours(FoldOp::Xor, DType::U64, 1),
            1 => ours(FoldOp::Avg, DType::U16, 2),
            2 => ours(FoldOp::Sum, DType::F32, 4),
            3 => Folding { multiply: Some((0.375, DType::F32)), ..ours(FoldOp::Sum, DType::F32, 4) },
            _ => Folding { folder: Folder::User(0), multiply: None, element_bytes: [1, 3, 8, 12, 20][random.below(5)] },
        }
    }

    #[test]
    fn folds_of_every_size_leave_the_right_bytes_and_no_others() {
        let seed = 40;
        let mut random = Random(seed);
        for round in 0..800 {
            let (kind, folding) = (REDUCING[round % REDUCING.len()], some_folding(&mut random));
            let in_place = random.below(2) == 0;
            let case = Case::some(kind, in_place, folding.element_bytes, 2000, &mut random);
            println!("round {round} of seed {seed}: {folding:?} {case:?}");
            let plan = |ranks: Ranks, scratch| super::plan(&case.job(ranks.me, DType::U8, None), folding, ranks, scratch).unwrap();
            case.run(&mut random, numbers_or(folding, bytes), plan, |inputs| folded(folding, inputs));
        }
    }

    fn numbers_or(folding: Folding, bytes: fn(&mut Random) -> [u8; 4]) -> fn(&mut Random) -> [u8; 4] {
        if matches!(folding.folder, Folder::Ours(FoldOp::Sum, DType::F32)) { numbers } else { bytes }
    }

    #[test]
    fn large_folds_go_in_slabs_through_little_memory() {
        let seed = 41;
        let mut random = Random(seed);
        for round in 0..160 {
            let (kind, folding) = (REDUCING[round % REDUCING.len()], some_folding(&mut random));
            let in_place = random.below(2) == 0;
            let mut case = Case::some(kind, in_place, folding.element_bytes, 2000, &mut random);
            let all = SMALL_BYTES / case.n + random.below(100_000);
            let share = if matches!(kind, Collective::AllReduce | Collective::Reduce) { all } else { all / case.n };
            let block = |random: &mut Random| (share + random.below(7)) / folding.element_bytes * folding.element_bytes;
            let first = block(&mut random);
            case.blocks.iter_mut().for_each(|bytes| *bytes = if kind == Collective::ReduceScatterV { block(&mut random) } else { first });
            case.scratch = 2 * (2 * case.n + 1) * unit(folding.element_bytes) * (1 + random.below(20));
            println!("round {round} of seed {seed}: {folding:?} {case:?}");
            let plan = |ranks: Ranks, scratch| {
                let plan = super::plan(&case.job(ranks.me, DType::U8, None), folding, ranks, scratch).unwrap();
                let on_side = |step: &Step| matches!(step, Step::Fold { role: StreamRole::Side, .. });
                assert!(matches!(&plan, Plan::Steps(steps) if steps.iter().any(on_side)), "it all fits into one slab");
                plan
            };
            let wire = case.run(&mut random, numbers_or(folding, bytes), plan, |inputs| folded(folding, inputs));
            let vector = if matches!(kind, Collective::AllReduce | Collective::Reduce) { first } else { case.blocks.iter().sum() };
            let ring = if kind == Collective::AllReduce { 2 } else { 1 } * (case.n - 1) * vector;
            let most = if kind == Collective::Reduce { 2 * ring } else { ring };
            assert!(wire <= most, "{wire} B sent, and a ring would send {most} B");
        }
    }

    #[test]
    fn small_vectors_take_one_exchange() {
        let mut random = Random(42);
        for kind in REDUCING {
            let mut case = Case::some(kind, false, 1, 100, &mut random);
            case.blocks = vec![1000; case.n];
            case.scratch = 64 << 10;
            let folding = Folding { folder: Folder::Ours(FoldOp::Xor, DType::U8), multiply: None, element_bytes: 1 };
            let scratch = Scratch { address: 0x10_0000, bytes: case.scratch };
            let plan = super::plan(&case.job(0, DType::U8, None), folding, Ranks { me: 0, n: case.n }, scratch).unwrap();
            let Plan::Steps(steps) = plan else { panic!("a fold is more than one call") };
            assert_eq!(steps.iter().filter(|step| matches!(step, Step::Transfer(_))).count(), 1, "{kind:?}: {steps:?}");
        }
    }

    #[test]
    fn too_little_memory_says_how_much_is_needed() {
        let mut random = Random(43);
        let mut case = Case::some(Collective::AllReduce, true, 4, 100, &mut random);
        case.blocks = vec![1 << 20; case.n];
        let folding = Folding { folder: Folder::Ours(FoldOp::Xor, DType::U32), multiply: None, element_bytes: 1 };
        let ranks = Ranks { me: 0, n: case.n };
        let error = super::plan(&case.job(0, DType::U32, None), folding, ranks, Scratch { address: 0x1000, bytes: 40 }).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains(&format!("{} B", 32 * case.n)), "{error}");
    }
}
