//! A model of the ranks of a communicator. It runs the plans of all ranks over host memory, as devices and NCCL would.

use std::collections::VecDeque;

use super::algorithm::{FoldOp, NcclOp};
use super::step::{FoldArguments, Folder, Plan, Ranks, Scratch, Step, StepEvent, StreamRole, Transfer};
use crate::call::element::DType;

/// The address of every rank's memory. All ranks use the same address, so a mix-up of ranks shows in the content of the
/// memory.
pub(crate) const BASE: u64 = 0x10_0000;

/// One rank's memory, and the work that its side stream has not done yet.
#[derive(Debug)]
struct Rank {
    memory: Vec<u8>,
    steps: VecDeque<Step>,
    side: VecDeque<Step>,
}

/// The ranks of a communicator.
#[derive(Debug)]
pub(crate) struct Model {
    ranks: Vec<Rank>,
    /// The number of bytes sent, over all ranks.
    pub(crate) wire: usize,
}

impl Rank {
    fn range(&mut self, address: u64, bytes: usize) -> &mut [u8] {
        let start = (address - BASE) as usize;
        &mut self.memory[start..start + bytes]
    }

    fn copy(&mut self, source: u64, destination: u64, bytes: usize) {
        let data = self.range(source, bytes).to_vec();
        self.range(destination, bytes).copy_from_slice(&data);
    }

    /// Does this rank's own work up to the next transfers. The side stream runs as late as possible.
    fn advance(&mut self) {
        while let Some(step) = self.steps.pop_front() {
            match step {
                Step::Transfer(_) => return self.steps.push_front(step),
                Step::Fold { role: StreamRole::Side, .. }
                | Step::Copy { role: StreamRole::Side, .. }
                | Step::Record(StepEvent::Folded(_)) => self.side.push_back(step),
                Step::Record(StepEvent::Arrived) | Step::Wait(StepEvent::Arrived) => {}
                Step::Wait(event) => self.catch_up(event),
                step => self.run(&step),
            }
        }
        assert!(self.side.is_empty(), "the call ends before its side stream: {:?}", self.side);
    }

    fn catch_up(&mut self, event: StepEvent) {
        let last = self.side.iter().rposition(|step| *step == Step::Record(event)).expect("no step records the event");
        for step in self.side.drain(..=last).collect::<Vec<_>>() {
            if !matches!(step, Step::Record(_)) {
                self.run(&step);
            }
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Copy { source, destination, bytes, .. } => self.copy(source, destination, bytes),
            Step::Multiply { source, destination, count, dtype, scalar } => {
                assert_eq!(dtype, DType::F32, "the model multiplies f32 alone");
                for index in 0..count as u64 {
                    let value = f32::from_ne_bytes(self.range(source + 4 * index, 4).try_into().unwrap());
                    self.range(destination + 4 * index, 4).copy_from_slice(&(value * scalar as f32).to_ne_bytes());
                }
            }
            Step::Divide { data, count, dtype, divisor } => {
                assert_eq!(dtype, DType::F32, "the model divides f32 alone");
                for index in 0..count as u64 {
                    let value = f32::from_ne_bytes(self.range(data + 4 * index, 4).try_into().unwrap());
                    self.range(data + 4 * index, 4).copy_from_slice(&(value / divisor as f32).to_ne_bytes());
                }
            }
            Step::Truths { data, bytes } => self.range(data, bytes).iter_mut().for_each(|byte| *byte = u8::from(*byte != 0)),
            Step::Fold { folder, arguments, element_bytes, .. } => self.fold(folder, &arguments, element_bytes),
            Step::Transfer(_) | Step::Record(_) | Step::Wait(_) => unreachable!("not work of one rank"),
        }
    }

    fn fold(&mut self, folder: Folder, arguments: &FoldArguments, size: usize) {
        let FoldArguments { inputs, stride, own, ranks, output, count, divisor } = *arguments;
        assert!(count > 0, "an empty fold is not launched");
        let bytes = count as usize * size;
        let input = |rank: u32| match own {
            Some((own, index)) if index == rank => own,
            _ => inputs + u64::from(rank) * stride,
        };
        let mut result = self.range(input(0), bytes).to_vec();
        for rank in 1..ranks {
            let next = self.range(input(rank), bytes).to_vec();
            for (a, b) in result.chunks_exact_mut(size).zip(next.chunks_exact(size)) {
                combine(folder, a, b);
            }
        }
        if folder == Folder::Ours(FoldOp::Avg, DType::U16) {
            for a in result.chunks_exact_mut(2) {
                let value = u16::from_ne_bytes([a[0], a[1]]) / divisor as u16;
                a.copy_from_slice(&value.to_ne_bytes());
            }
        }
        self.range(output, bytes).copy_from_slice(&result);
    }
}

/// Folds one element into another, for the few folds of the model. Custom folds are not commutative.
pub(crate) fn combine(folder: Folder, a: &mut [u8], b: &[u8]) {
    match folder {
        Folder::Ours(FoldOp::Xor, _) => a.iter_mut().zip(b).for_each(|(a, b)| *a ^= b),
        Folder::Ours(FoldOp::Avg | FoldOp::Sum, DType::U16) => {
            let sum = u16::from_ne_bytes([a[0], a[1]]).wrapping_add(u16::from_ne_bytes([b[0], b[1]]));
            a.copy_from_slice(&sum.to_ne_bytes());
        }
        Folder::Ours(FoldOp::Sum, DType::F32) => {
            let (x, y) = (f32::from_ne_bytes(a.try_into().unwrap()), f32::from_ne_bytes(b.try_into().unwrap()));
            a.copy_from_slice(&(x + y).to_ne_bytes());
        }
        Folder::User(_) => a.iter_mut().zip(b).for_each(|(a, b)| *a = a.wrapping_mul(31).wrapping_add(*b)),
        Folder::Ours(..) => panic!("the model does not fold by {folder:?}"),
    }
}

/// Reduces like NCCL, for the few ops of the model.
fn reduce(op: NcclOp, dtype: DType, a: &mut [u8], b: &[u8]) {
    match (op, dtype) {
        (NcclOp::Sum, DType::F32) => combine(Folder::Ours(FoldOp::Sum, DType::F32), a, b),
        (NcclOp::Max, DType::U8 | DType::Bool) => a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b)),
        _ => panic!("the model does not reduce {dtype} by {op:?}"),
    }
}

impl Model {
    /// Creates ranks with the given memories.
    pub(crate) fn new(memories: Vec<Vec<u8>>) -> Self {
        let rank = |memory| Rank { memory, steps: VecDeque::new(), side: VecDeque::new() };
        Self { ranks: memories.into_iter().map(rank).collect(), wire: 0 }
    }

    /// Returns a rank's memory.
    pub(crate) fn memory(&self, rank: usize) -> &[u8] {
        &self.ranks[rank].memory
    }

    /// Runs one plan on each rank. All plans have the same number of groups of transfers.
    pub(crate) fn run(&mut self, plans: Vec<Plan>) {
        for (rank, plan) in self.ranks.iter_mut().zip(plans) {
            rank.steps = match plan {
                Plan::Nothing => VecDeque::new(),
                Plan::One(transfer) => [Step::Transfer(vec![transfer])].into(),
                Plan::Group { transfers, after } => [vec![Step::Transfer(transfers)], after].concat().into(),
                Plan::Steps(steps) => steps.into(),
            };
        }
        loop {
            self.ranks.iter_mut().for_each(Rank::advance);
            let groups: Vec<_> = self.ranks.iter_mut().map(|rank| rank.steps.pop_front()).collect();
            if groups.iter().all(Option::is_none) {
                return;
            }
            let group = |step| match step {
                Some(Step::Transfer(transfers)) => transfers,
                _ => panic!("some ranks are done, and others wait for them"),
            };
            self.transfer(groups.into_iter().map(group).collect());
        }
    }

    /// Runs one group of transfers on every rank.
    fn transfer(&mut self, groups: Vec<Vec<Transfer>>) {
        let n = groups.len();
        let mut mail: Vec<VecDeque<Vec<u8>>> = (0..n * n).map(|_| VecDeque::new()).collect();
        let mut collectives: Vec<Vec<Transfer>> = vec![Vec::new(); n];
        for (me, group) in groups.iter().enumerate() {
            for transfer in group {
                match *transfer {
                    Transfer::Send { address, bytes, peer } => {
                        assert!(bytes > 0 && peer != me);
                        self.wire += bytes;
                        let data = self.ranks[me].range(address, bytes).to_vec();
                        mail[me * n + peer].push_back(data);
                    }
                    Transfer::Receive { .. } => {}
                    collective => collectives[me].push(collective),
                }
            }
        }
        for (me, group) in groups.iter().enumerate() {
            for transfer in group {
                if let Transfer::Receive { address, bytes, peer } = *transfer {
                    let data = mail[peer * n + me].pop_front().expect("no rank has sent what this step receives");
                    self.ranks[me].range(address, bytes).copy_from_slice(&data);
                }
            }
        }
        assert!(mail.iter().all(VecDeque::is_empty), "a message was sent that no rank receives");
        for index in 0..collectives[0].len() {
            let calls: Vec<_> = collectives.iter().map(|calls| calls[index]).collect();
            self.collective(&calls);
        }
        assert!(collectives.iter().all(|calls| calls.len() == collectives[0].len()));
    }

    /// Runs one NCCL collective; every rank reads before any writes.
    fn collective(&mut self, calls: &[Transfer]) {
        let n = calls.len();
        let same = |call: &Transfer| std::mem::discriminant(call) == std::mem::discriminant(&calls[0]);
        assert!(calls.iter().all(same), "ranks call different things: {calls:?}");
        // For each rank: its input, where it writes, and its share of all inputs.
        let inputs: Vec<Vec<u8>> = (0..n).map(|me| self.input(&calls[me], me, n)).collect();
        for (me, call) in calls.iter().enumerate() {
            let all = inputs.concat();
            let column = |bytes: usize| inputs.iter().flat_map(|input| input[me * bytes..(me + 1) * bytes].to_vec()).collect::<Vec<_>>();
            let (destination, result) = match *call {
                Transfer::AllReduce { destination, op, dtype, .. } => (destination, reduced(&inputs, op, dtype)),
                Transfer::Reduce { destination, op, dtype, root, .. } if root == me => (destination, reduced(&inputs, op, dtype)),
                Transfer::ReduceScatter { destination, op, dtype, count, .. } => {
                    let bytes = count * dtype.size_bytes();
                    (destination, reduced(&inputs, op, dtype)[me * bytes..(me + 1) * bytes].to_vec())
                }
                Transfer::Broadcast { destination, root, .. } => (destination, inputs[root].clone()),
                Transfer::AllGather { destination, .. } => (destination, all),
                Transfer::AllToAll { destination, bytes, .. } => (destination, column(bytes)),
                Transfer::Gather { destination, root, .. } if root == me => (destination, all),
                Transfer::Scatter { destination, root, bytes, .. } => (destination, inputs[root][me * bytes..(me + 1) * bytes].to_vec()),
                _ => continue,
            };
            self.ranks[me].range(destination, result.len()).copy_from_slice(&result);
        }
    }

    fn input(&mut self, call: &Transfer, me: usize, n: usize) -> Vec<u8> {
        let (address, bytes) = match *call {
            Transfer::AllReduce { source, count, dtype, .. } | Transfer::Reduce { source, count, dtype, .. } => {
                (source, count * dtype.size_bytes())
            }
            Transfer::ReduceScatter { source, count, dtype, .. } => (source, count * dtype.size_bytes() * n),
            Transfer::Broadcast { source, bytes, .. } | Transfer::Gather { source, bytes, .. } => (source, bytes),
            Transfer::AllGather { source, bytes, .. } => {
                self.wire += bytes * (n - 1);
                (source, bytes)
            }
            Transfer::AllToAll { source, bytes, .. } => (source, bytes * n),
            Transfer::Scatter { source, bytes, root, .. } => (source, if root == me { bytes * n } else { 0 }),
            Transfer::Send { .. } | Transfer::Receive { .. } => unreachable!("not a collective"),
        };
        if bytes == 0 { Vec::new() } else { self.ranks[me].range(address, bytes).to_vec() }
    }
}

fn reduced(inputs: &[Vec<u8>], op: NcclOp, dtype: DType) -> Vec<u8> {
    let size = dtype.size_bytes();
    let mut result = inputs[0].clone();
    for input in &inputs[1..] {
        result.chunks_exact_mut(size).zip(input.chunks_exact(size)).for_each(|(a, b)| reduce(op, dtype, a, b));
    }
    result
}

/// Returns the scratch memory of a rank that has `before` bytes of other memory.
pub(crate) fn scratch(before: usize, bytes: usize) -> Scratch {
    Scratch { address: BASE + before as u64, bytes }
}

/// Returns every rank of `n`.
pub(crate) fn everyone(n: usize) -> impl Iterator<Item = Ranks> {
    (0..n).map(move |me| Ranks { me, n })
}
