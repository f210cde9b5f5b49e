//! One collective of the model's ranks. The memory afterwards is compared byte by byte with the expected contents.

use super::model::{BASE, Model, everyone, scratch};
use super::step::{Plan, Ranks, Scratch};
use super::{Job, Reduction};
use crate::base::random::Random;
use crate::call::element::DType;
use crate::call::element::TypeTag;
use crate::call::job::Operands;
use crate::call::{BlockLayout, Call, Collective};

/// A collective. It is the same on all ranks, except for arguments that only some ranks have.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) kind: Collective,
    pub(crate) n: usize,
    pub(crate) root: usize,
    pub(crate) in_place: bool,
    /// The bytes of each rank's block; for calls without blocks, of the vector. For `all_to_all_v`, see `pairs`.
    pub(crate) blocks: Vec<usize>,
    /// The number of bytes that each rank sends to each other rank.
    pub(crate) pairs: Vec<Vec<usize>>,
    pub(crate) element_bytes: usize,
    pub(crate) scratch: usize,
    /// The offsets of source and destination from a multiple of 16.
    pub(crate) shifts: (usize, usize),
}

/// The bytes between buffers, which must not change.
const GUARD: usize = 48;

impl Case {
    /// Creates a case of a kind; `element_bytes` divide every block.
    pub(crate) fn some(kind: Collective, in_place: bool, element_bytes: usize, most: usize, random: &mut Random) -> Self {
        let n = [2, 3, 4, 8][random.below(4)];
        let mut length = || [0, 1, 2, 5, 16, 17, 64, 100, 1023][random.below(9)].min(most) * element_bytes;
        let varies = matches!(kind, Collective::AllGatherV | Collective::ReduceScatterV | Collective::GatherV | Collective::ScatterV);
        let first = length();
        let blocks = (0..n).map(|_| if varies { length() } else { first }).collect();
        let pairs = (0..n).map(|_| (0..n).map(|_| length()).collect()).collect();
        let scratch = [0, 1, 2, 7][random.below(4)] * 1000 + 16 * 1024;
        Self { kind, n, root: random.below(n), in_place, blocks, pairs, element_bytes, scratch, shifts: (0, 0) }
    }

    /// Returns the numbers of bytes that this rank reads and writes, in separate buffers.
    fn lengths(&self, me: usize) -> (usize, usize) {
        let (own, all) = (self.blocks[me], self.blocks.iter().sum());
        let at_root = |bytes: usize| if me == self.root { bytes } else { 0 };
        match self.kind {
            Collective::Barrier => (0, 0),
            Collective::Broadcast => (at_root(own), own),
            Collective::AllReduce => (own, own),
            Collective::Reduce => (own, at_root(own)),
            Collective::AllGather | Collective::AllGatherV => (own, all),
            Collective::ReduceScatter | Collective::ReduceScatterV => (all, own),
            Collective::Gather | Collective::GatherV => (own, at_root(all)),
            Collective::Scatter | Collective::ScatterV => (at_root(all), own),
            Collective::AllToAll => (all, all),
            Collective::AllToAllV => (self.pairs[me].iter().sum(), self.pairs.iter().map(|pairs| pairs[me]).sum()),
        }
    }

    fn layout(&self, me: usize) -> BlockLayout {
        match self.kind {
            Collective::AllGatherV | Collective::ReduceScatterV => BlockLayout::Blocks(self.blocks.clone()),
            Collective::GatherV | Collective::ScatterV if me == self.root => BlockLayout::Blocks(self.blocks.clone()),
            Collective::GatherV | Collective::ScatterV => BlockLayout::Own(self.blocks[me]),
            Collective::AllToAllV => {
                BlockLayout::Pairs { send: self.pairs[me].clone(), receive: self.pairs.iter().map(|pairs| pairs[me]).collect() }
            }
            _ => BlockLayout::Equal(self.blocks[me]),
        }
    }

    /// Whether this rank has one buffer for reading and writing.
    fn shares(&self, me: usize) -> bool {
        self.in_place && (me == self.root || !matches!(self.kind, Collective::Broadcast | Collective::Gather | Collective::Scatter))
    }

    /// Returns the addresses and lengths that this rank's job reads and writes.
    fn buffers(&self, me: usize) -> ((u64, usize), (u64, usize)) {
        let (source_len, destination_len) = self.lengths(me);
        let source = BASE + (GUARD + self.shifts.0) as u64;
        if self.shares(me) {
            let length = source_len.max(destination_len);
            return ((source, length), (source, length));
        }
        let between = (source_len + GUARD).next_multiple_of(256);
        let destination = BASE + (GUARD + between + GUARD + self.shifts.1) as u64;
        let known = |address: u64, length: usize| if length == 0 { (0, 0) } else { (address, length) };
        (known(source, source_len), known(destination, destination_len))
    }

    /// Returns the number of bytes of a rank's memory, without the backend's memory.
    pub(crate) fn memory_len(&self) -> usize {
        let end = |me: usize| {
            let ((source, length), (destination, destination_len)) = self.buffers(me);
            (source + length as u64).max(destination + destination_len as u64).max(BASE) - BASE
        };
        ((0..self.n).map(end).max().unwrap_or(0) as usize + GUARD).next_multiple_of(256)
    }

    /// Returns this rank's job.
    pub(crate) fn job(&self, me: usize, dtype: DType, reduction: Option<Reduction>) -> Job {
        let ((source, source_len), (destination, destination_len)) = self.buffers(me);
        let rooted = matches!(
            self.kind,
            Collective::Broadcast
                | Collective::Reduce
                | Collective::Gather
                | Collective::GatherV
                | Collective::Scatter
                | Collective::ScatterV
        );
        let element = TypeTag::Scalar(dtype);
        let root = rooted.then_some(self.root as u32);
        Job {
            call: Call { kind: self.kind, op: 0, element, count: 0, root, counts_hash: 0, sequence: 1 },
            memory: Operands { source, source_len, destination, destination_len },
            layout: self.layout(me),
            element_bytes: self.element_bytes,
            lists: None,
            reduction,
            in_place: self.shares(me),
        }
    }

    /// Runs the plans of all ranks over the model and compares memory. `fold` folds the vectors of all ranks into one.
    /// Returns the number of bytes sent.
    pub(crate) fn run(
        &self,
        random: &mut Random,
        fill: impl Fn(&mut Random) -> [u8; 4],
        plan: impl Fn(Ranks, Scratch) -> Plan,
        fold: impl Fn(&[Vec<u8>]) -> Vec<u8>,
    ) -> usize {
        let before = self.memory_len();
        let memory = |_| (0..(before + self.scratch).div_ceil(4)).flat_map(|_| fill(random)).take(before + self.scratch).collect();
        let memories: Vec<Vec<u8>> = (0..self.n).map(memory).collect();
        let expected = self.expected(&memories, &fold);
        let mut model = Model::new(memories);
        model.run(everyone(self.n).map(|ranks| plan(ranks, scratch(before, self.scratch))).collect());
        for (me, expected) in expected.iter().enumerate() {
            self.compare(me, &model.memory(me)[..before], &expected[..before]);
        }
        model.wire
    }

    /// Returns the memory of each rank after the collective.
    pub(crate) fn expected(&self, memories: &[Vec<u8>], fold: &impl Fn(&[Vec<u8>]) -> Vec<u8>) -> Vec<Vec<u8>> {
        let mut expected = memories.to_vec();
        let contributions: Vec<Vec<u8>> = (0..self.n).map(|me| self.contribution(me, &memories[me])).collect();
        for (me, memory) in expected.iter_mut().enumerate() {
            let result = self.result(me, &contributions, fold);
            let (_, (mut address, length)) = self.buffers(me);
            if length == 0 || result.is_empty() {
                continue;
            }
            if self.shares(me) && matches!(self.kind, Collective::ReduceScatter | Collective::ReduceScatterV | Collective::Scatter) {
                address += self.blocks[..me].iter().sum::<usize>() as u64;
            }
            let start = (address - BASE) as usize;
            memory[start..start + result.len()].copy_from_slice(&result);
        }
        expected
    }

    /// Panics if memory differs from the expected contents.
    pub(crate) fn compare(&self, me: usize, got: &[u8], expected: &[u8]) {
        if let Some(wrong) = got.iter().zip(expected).position(|(a, b)| a != b) {
            let (_, (destination, _)) = self.buffers(me);
            let place = wrong as i64 - destination.saturating_sub(BASE) as i64;
            let (end, len) = ((wrong + 16).min(got.len()), got.len());
            let (got, expected) = (&got[wrong..end], &expected[wrong..end]);
            panic!(
                "rank {me}: from byte {place} of the destination on (byte {wrong} of {len}): {got:x?}, expected {expected:x?}: {self:?}"
            );
        }
    }

    /// Returns a rank's contribution to the collective.
    fn contribution(&self, me: usize, memory: &[u8]) -> Vec<u8> {
        let (length, _) = self.lengths(me);
        let ((mut address, known), _) = self.buffers(me);
        if known == 0 || length == 0 {
            return Vec::new();
        }
        if self.shares(me) && matches!(self.kind, Collective::AllGather | Collective::AllGatherV | Collective::Gather) {
            address += self.blocks[..me].iter().sum::<usize>() as u64;
        }
        let start = (address - BASE) as usize;
        memory[start..start + length].to_vec()
    }

    /// Returns a rank's result; empty if it gets none.
    fn result(&self, me: usize, inputs: &[Vec<u8>], fold: &impl Fn(&[Vec<u8>]) -> Vec<u8>) -> Vec<u8> {
        let start = |blocks: &[usize], rank: usize| blocks[..rank].iter().sum::<usize>();
        let own = start(&self.blocks, me)..start(&self.blocks, me) + self.blocks[me];
        match self.kind {
            Collective::Barrier => Vec::new(),
            Collective::Broadcast => inputs[self.root].clone(),
            Collective::AllReduce => fold(inputs),
            Collective::ReduceScatter | Collective::ReduceScatterV => fold(inputs)[own].to_vec(),
            Collective::AllGather | Collective::AllGatherV => inputs.concat(),
            Collective::Scatter | Collective::ScatterV => inputs[self.root][own].to_vec(),
            Collective::Reduce if me == self.root => fold(inputs),
            Collective::Gather | Collective::GatherV if me == self.root => inputs.concat(),
            Collective::Reduce | Collective::Gather | Collective::GatherV => Vec::new(),
            Collective::AllToAll => inputs.iter().flat_map(|input| input[own.clone()].to_vec()).collect(),
            Collective::AllToAllV => (0..self.n)
                .flat_map(|peer| {
                    let from = start(&self.pairs[peer], me);
                    inputs[peer][from..from + self.pairs[peer][me]].to_vec()
                })
                .collect(),
        }
    }
}
