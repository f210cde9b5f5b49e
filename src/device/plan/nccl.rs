//! Collectives that NCCL implements. If the loaded library is too old for one of them, that collective is composed of
//! sends and receives.

use super::algorithm::NcclOp;
use super::step::{Plan, Ranks, Scratch, Step, StreamRole, Transfer};
use super::{Job, Message};
use crate::call::element::DType;
use crate::call::job::Operands;
use crate::call::{BlockLayout, Collective};
use crate::error::Error;
use crate::error::Result;

/// The functions introduced with NCCL 2.28.3 that the loaded library has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    pub(crate) all_to_all: bool,
    pub(crate) gather: bool,
    pub(crate) scatter: bool,
}

/// Returns the address and the number of bytes of each piece of a job's result on this rank; empty if this rank gets no
/// result.
pub(crate) fn result(job: &Job, rank: usize) -> Vec<(u64, usize)> {
    let Operands { destination, destination_len, .. } = job.narrowed(rank);
    let goes_to_root = matches!(job.call.kind, Collective::Reduce | Collective::Gather | Collective::GatherV);
    if goes_to_root && job.root() != rank {
        return Vec::new();
    }
    let pieces = job.listed_destination().map_or(vec![(destination, destination_len)], |list| list.blocks().collect());
    pieces.into_iter().filter(|(_, bytes)| *bytes != 0).collect()
}

/// Plans a job of a single rank: its contribution is the result, multiplied by the scalar for a `PreMulSum`. A mean of
/// one input is that input.
pub(crate) fn alone(job: &Job, multiply: Option<(f64, DType)>) -> Plan {
    let Operands { mut source, source_len, mut destination, destination_len } = job.narrowed(0);
    if job.lists.is_some() {
        // Its only block is the whole buffer.
        (source, destination) = (job.source_at(0), job.destination_at(0));
    }
    let bytes = source_len.min(destination_len);
    match multiply {
        _ if bytes == 0 => Plan::Nothing,
        Some((scalar, dtype)) => {
            let after = vec![Step::Multiply { source, destination, count: bytes / dtype.size_bytes(), dtype, scalar }];
            Plan::Group { transfers: Vec::new(), after }
        }
        None => with_copy(Vec::new(), source, destination, bytes),
    }
}

/// Plans a job that moves elements between two ranks or more.
///
/// # Errors
///
/// `Unsupported` if the backend's scratch memory is too small; `InvalidArgument` for a layout that the kind of the call
/// does not have.
pub(crate) fn moving(job: &Job, ranks: Ranks, library: Library, scratch: Scratch) -> Result<Plan> {
    let Operands { source, destination, .. } = job.narrowed(ranks.me);
    let root = job.root();
    let block = job.layout.block(ranks.me).1;
    Ok(match (job.call.kind, &job.layout) {
        (Collective::Barrier, _) => Plan::Nothing,
        (
            Collective::Broadcast | Collective::AllGather | Collective::Gather | Collective::Scatter | Collective::AllToAll,
            BlockLayout::Equal(0),
        ) => Plan::Nothing,
        (Collective::Broadcast, BlockLayout::Equal(bytes)) => {
            // Only the root has a source, and NCCL requires an address from all ranks.
            let source = if ranks.me == root { source } else { destination };
            Plan::One(Transfer::Broadcast { source, destination, bytes: *bytes, root })
        }
        (Collective::AllGather, BlockLayout::Equal(bytes)) => Plan::One(Transfer::AllGather { source, destination, bytes: *bytes }),
        (Collective::AllGatherV, BlockLayout::Blocks(blocks)) => all_gather_v(source, destination, blocks, &job.layout, ranks),
        (Collective::Gather, BlockLayout::Equal(bytes)) if library.gather => {
            Plan::One(Transfer::Gather { source, destination, bytes: *bytes, root })
        }
        (Collective::Scatter, BlockLayout::Equal(bytes)) if library.scatter => {
            Plan::One(Transfer::Scatter { source, destination, bytes: *bytes, root })
        }
        (Collective::Gather | Collective::GatherV, _) => gather(job, source, ranks, block),
        (Collective::Scatter | Collective::ScatterV, _) => scatter(job, destination, ranks, block),
        (Collective::AllToAll, BlockLayout::Equal(bytes)) if job.in_place => swap(destination, *bytes, ranks, scratch)?,
        (Collective::AllToAll, BlockLayout::Equal(bytes)) if library.all_to_all => {
            Plan::One(Transfer::AllToAll { source, destination, bytes: *bytes })
        }
        (Collective::AllToAll, BlockLayout::Equal(bytes)) => {
            let blocks = vec![*bytes; ranks.n];
            exchange(job, &blocks, &blocks, ranks)
        }
        (Collective::AllToAllV, BlockLayout::Pairs { send, receive }) if !job.in_place => exchange(job, send, receive, ranks),
        (kind, layout) => {
            return Err(Error::argument(kind.name(), format!("on a device, this call does not support the layout {layout:?}")));
        }
    })
}

/// Plans a reduction that NCCL does itself, between two ranks or more.
///
/// # Errors
///
/// `InvalidArgument` for a layout that the kind of the call does not have.
pub(crate) fn reducing(job: &Job, op: NcclOp, dtype: DType, ranks: Ranks) -> Result<Plan> {
    let Operands { source, destination, .. } = job.narrowed(ranks.me);
    let size = dtype.size_bytes();
    Ok(match (job.call.kind, &job.layout) {
        (Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter, BlockLayout::Equal(0)) => Plan::Nothing,
        (Collective::AllReduce, BlockLayout::Equal(bytes)) => {
            Plan::One(Transfer::AllReduce { source, destination, count: bytes / size, dtype, op })
        }
        (Collective::Reduce, BlockLayout::Equal(bytes)) => {
            let root = job.root();
            Plan::One(Transfer::Reduce { source, destination, count: bytes / size, dtype, op, root })
        }
        (Collective::ReduceScatter, BlockLayout::Equal(bytes)) => {
            Plan::One(Transfer::ReduceScatter { source, destination, count: bytes / size, dtype, op })
        }
        (Collective::ReduceScatterV, BlockLayout::Blocks(blocks)) => reduce_scatter_v(source, destination, blocks, op, dtype, ranks),
        (kind, layout) => {
            return Err(Error::argument(kind.name(), format!("on a device, this call does not support the layout {layout:?}")));
        }
    })
}

/// Returns the total number of bytes on which a switch could do the job; 0 if switches do not do this kind.
pub(crate) fn in_switch(job: &Job, n: usize) -> usize {
    match (job.call.kind, &job.layout) {
        (Collective::AllReduce, BlockLayout::Equal(bytes)) => *bytes,
        (Collective::ReduceScatter, BlockLayout::Equal(bytes)) => bytes.saturating_mul(n),
        _ => 0,
    }
}

/// Plans a sum by NCCL, then the division of this rank's part of the result.
///
/// # Errors
///
/// The errors of [`reducing`].
pub(crate) fn dividing(job: &Job, dtype: DType, ranks: Ranks) -> Result<Plan> {
    let (transfers, mut after) = match reducing(job, NcclOp::Sum, dtype, ranks)? {
        Plan::One(transfer) => (vec![transfer], Vec::new()),
        Plan::Group { transfers, after } => (transfers, after),
        plan => return Ok(plan),
    };
    let has_result = job.call.kind != Collective::Reduce || job.root() == ranks.me;
    let (data, count) = (job.narrowed(ranks.me).destination, job.layout.block(ranks.me).1 / dtype.size_bytes());
    if has_result && count != 0 {
        after.push(Step::Divide { data, count, dtype, divisor: ranks.n as u32 });
    }
    Ok(Plan::Group { transfers, after })
}

/// Returns messages as transfers. Empty messages are left out, on both ends; messages to this rank itself become
/// copies. Bytes that are received as truth values are made valid.
///
/// # Errors
///
/// `InvalidArgument` if the messages that this rank sends to itself do not match those that it receives from itself.
/// The rank would otherwise wait forever, or write an invalid value.
pub(crate) fn messages(messages: &[Message], me: usize) -> Result<(Vec<Transfer>, Vec<Step>)> {
    let (mut transfers, mut truths, mut sent, mut received) = (Vec::with_capacity(messages.len()), Vec::new(), Vec::new(), Vec::new());
    for message in messages.iter().filter(|message| message.bytes != 0) {
        let Message { peer, sends, address, bytes, element } = *message;
        match sends {
            _ if peer == me => if sends { &mut sent } else { &mut received }.push(message),
            true => transfers.push(Transfer::Send { address, bytes, peer }),
            false => transfers.push(Transfer::Receive { address, bytes, peer }),
        }
        if !sends && element.is_bool() {
            truths.push(Step::Truths { data: address, bytes });
        }
    }
    let like = |message: &&Message| (message.bytes, message.element);
    if !sent.iter().map(like).eq(received.iter().map(like)) {
        let reason = format!(
            "in one group, rank {me} sends itself {} messages and receives {} messages from itself: the numbers, lengths and types \
             must be equal",
            sent.len(),
            received.len()
        );
        return Err(Error::argument("messages on a device", reason));
    }
    let copy = |(from, to): (&Message, &Message)| Step::Copy {
        role: StreamRole::Call,
        source: from.address,
        destination: to.address,
        bytes: from.bytes,
    };
    Ok((transfers, sent.into_iter().zip(received).map(copy).chain(truths).collect()))
}

/// Plans the sending of every rank's block to every rank.
fn all_gather_v(source: u64, destination: u64, blocks: &[usize], layout: &BlockLayout, ranks: Ranks) -> Plan {
    if blocks.iter().all(|block| *block == blocks[0]) {
        let bytes = blocks[0];
        return if bytes == 0 { Plan::Nothing } else { Plan::One(Transfer::AllGather { source, destination, bytes }) };
    }
    let broadcasts = (0..ranks.n).filter(|rank| blocks[*rank] != 0).map(|root| {
        let (offset, bytes) = layout.block(root);
        let destination = destination + offset as u64;
        Transfer::Broadcast { source: if root == ranks.me { source } else { destination }, destination, bytes, root }
    });
    Plan::Group { transfers: broadcasts.collect(), after: Vec::new() }
}

/// Plans the reduction of every rank's block of the result to that rank.
fn reduce_scatter_v(source: u64, destination: u64, blocks: &[usize], op: NcclOp, dtype: DType, ranks: Ranks) -> Plan {
    let size = dtype.size_bytes();
    if blocks.iter().all(|block| *block == blocks[0]) {
        let count = blocks[0] / size;
        return if count == 0 { Plan::Nothing } else { Plan::One(Transfer::ReduceScatter { source, destination, count, dtype, op }) };
    }
    let mut at = source;
    let mut reduces = Vec::with_capacity(ranks.n);
    for (root, bytes) in blocks.iter().enumerate() {
        if *bytes != 0 {
            reduces.push(Transfer::Reduce { source: at, destination, count: bytes / size, dtype, op, root });
        }
        at += *bytes as u64;
    }
    Plan::Group { transfers: reduces, after: Vec::new() }
}

/// Plans the sending of every rank's block to the root.
fn gather(job: &Job, source: u64, ranks: Ranks, own: usize) -> Plan {
    let root = job.root();
    if ranks.me != root {
        return Plan::Group { transfers: some(own, Transfer::Send { address: source, bytes: own, peer: root }), after: Vec::new() };
    }
    let mut transfers = Vec::with_capacity(ranks.n);
    for peer in ranks.others() {
        let (offset, bytes) = job.layout.block(peer);
        transfers.extend(some(bytes, Transfer::Receive { address: job.destination_at(offset), bytes, peer }));
    }
    with_copy(transfers, source, job.destination_at(job.layout.block(root).0), own)
}

/// Plans the sending of every rank's block from the root.
fn scatter(job: &Job, destination: u64, ranks: Ranks, own: usize) -> Plan {
    let root = job.root();
    if ranks.me != root {
        return Plan::Group { transfers: some(own, Transfer::Receive { address: destination, bytes: own, peer: root }), after: Vec::new() };
    }
    let mut transfers = Vec::with_capacity(ranks.n);
    for peer in ranks.others() {
        let (offset, bytes) = job.layout.block(peer);
        transfers.extend(some(bytes, Transfer::Send { address: job.source_at(offset), bytes, peer }));
    }
    with_copy(transfers, job.source_at(job.layout.block(root).0), destination, own)
}

/// Plans the sending of every rank's block for every rank, from one buffer into another.
fn exchange(job: &Job, send: &[usize], receive: &[usize], ranks: Ranks) -> Plan {
    let start = |blocks: &[usize], rank: usize| blocks[..rank].iter().sum::<usize>();
    let mut transfers = Vec::with_capacity(2 * ranks.n);
    for peer in ranks.others() {
        transfers.extend(some(send[peer], Transfer::Send { address: job.source_at(start(send, peer)), bytes: send[peer], peer }));
        let address = job.destination_at(start(receive, peer));
        transfers.extend(some(receive[peer], Transfer::Receive { address, bytes: receive[peer], peer }));
    }
    let own = send[ranks.me].min(receive[ranks.me]);
    with_copy(transfers, job.source_at(start(send, ranks.me)), job.destination_at(start(receive, ranks.me)), own)
}

/// Returns how much scratch memory, in bytes, a job that moves elements uses if it may use `most`; the same on every
/// rank.
pub(crate) fn room(job: &Job, ranks: Ranks, most: usize) -> usize {
    match (job.call.kind, &job.layout) {
        (Collective::AllToAll, BlockLayout::Equal(bytes)) if job.in_place => ranks.n * swap_stride(*bytes, ranks.n, most),
        _ => 0,
    }
}

/// Returns how much of each block is exchanged at a time, in place.
fn swap_stride(block: usize, n: usize, scratch: usize) -> usize {
    let most = scratch / n;
    // Whole chunks, so that the next one begins where the device reads fast.
    let most = if most > 256 { most & !255 } else { most };
    most.min(block.saturating_add(255) & !255)
}

/// Plans an exchange of every rank's block for every rank, in place. At a time, it exchanges as much of each block as
/// fits into scratch memory.
fn swap(buffer: u64, block: usize, ranks: Ranks, scratch: Scratch) -> Result<Plan> {
    let most = swap_stride(block, ranks.n, scratch.bytes);
    if most == 0 {
        let reason = format!("it needs at least {} B of scratch memory, but there are only {} B", ranks.n, scratch.bytes);
        return Err(Error::unsupported("all_to_all in place", reason));
    }
    let mut steps = Vec::new();
    for start in (0..block).step_by(most) {
        let bytes = most.min(block - start);
        let at = |rank: usize| buffer + (rank * block + start) as u64;
        let slot = |rank: usize| scratch.address + (rank * most) as u64;
        let transfers = ranks
            .others()
            .flat_map(|peer| [Transfer::Send { address: at(peer), bytes, peer }, Transfer::Receive { address: slot(peer), bytes, peer }]);
        steps.push(Step::Transfer(transfers.collect()));
        steps.extend(ranks.others().map(|peer| Step::Copy { role: StreamRole::Call, source: slot(peer), destination: at(peer), bytes }));
    }
    Ok(Plan::Steps(steps))
}

/// Returns a transfer of `bytes`, if there are any.
fn some(bytes: usize, transfer: Transfer) -> Vec<Transfer> {
    if bytes == 0 { Vec::new() } else { vec![transfer] }
}

/// Plans a group of transfers, and a copy of this rank's own block unless it is there already.
fn with_copy(transfers: Vec<Transfer>, source: u64, destination: u64, bytes: usize) -> Plan {
    let copies = bytes != 0 && source != destination;
    let after = if copies { vec![Step::Copy { role: StreamRole::Call, source, destination, bytes }] } else { Vec::new() };
    Plan::Group { transfers, after }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::base::random::Random;
    use crate::call::element::TypeTag;
    use crate::device::plan::cases::Case;
    use crate::device::plan::{FoldOp, Folder, combine};

    const MOVING: [Collective; 9] = [
        Collective::Broadcast,
        Collective::AllGather,
        Collective::AllGatherV,
        Collective::Gather,
        Collective::GatherV,
        Collective::Scatter,
        Collective::ScatterV,
        Collective::AllToAll,
        Collective::AllToAllV,
    ];

    const REDUCING: [Collective; 4] = [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter, Collective::ReduceScatterV];

    fn bytes(random: &mut Random) -> [u8; 4] {
        [0; 4].map(|_| random.below(256) as u8)
    }

    /// Small whole numbers, whose sums are the same in any order.
    fn numbers(random: &mut Random) -> [u8; 4] {
        (random.below(1000) as f32).to_ne_bytes()
    }

    fn can_be_in_place(kind: Collective) -> bool {
        !matches!(kind, Collective::GatherV | Collective::ScatterV | Collective::AllToAllV)
    }

    #[test]
    fn every_collective_that_moves_leaves_the_right_bytes_and_no_others() {
        let seed = 30;
        let mut random = Random(seed);
        for round in 0..600 {
            let kind = MOVING[round % MOVING.len()];
            let in_place = can_be_in_place(kind) && random.below(2) == 0;
            let mut case = Case::some(kind, in_place, 1 + random.below(8), 2000, &mut random);
            case.scratch = 50 + random.below(5000);
            let library = Library { all_to_all: random.below(2) == 0, gather: random.below(2) == 0, scatter: random.below(2) == 0 };
            let plan = |ranks: Ranks, scratch| moving(&case.job(ranks.me, DType::U8, None), ranks, library, scratch).unwrap();
            println!("round {round} of seed {seed}: {case:?}");
            case.run(&mut random, bytes, plan, |_| unreachable!("nothing is folded"));
        }
    }

    #[test]
    fn every_reduction_of_ncclss_leaves_the_right_bytes_and_no_others() {
        let seed = 31;
        let mut random = Random(seed);
        for round in 0..200 {
            let kind = REDUCING[round % REDUCING.len()];
            let in_place = random.below(2) == 0;
            let case = Case::some(kind, in_place, 4, 2000, &mut random);
            let plan = |ranks: Ranks, _| reducing(&case.job(ranks.me, DType::F32, None), NcclOp::Sum, DType::F32, ranks).unwrap();
            println!("round {round} of seed {seed}: {case:?}");
            case.run(&mut random, numbers, plan, sum);
        }
    }

    #[test]
    fn a_mean_divides_the_sum_once_and_nothing_else() {
        let seed = 32;
        let mut random = Random(seed);
        for round in 0..200 {
            let kind = REDUCING[round % REDUCING.len()];
            let in_place = random.below(2) == 0;
            let case = Case::some(kind, in_place, 4, 2000, &mut random);
            let plan = |ranks: Ranks, _| dividing(&case.job(ranks.me, DType::F32, None), DType::F32, ranks).unwrap();
            println!("round {round} of seed {seed}: {case:?}");
            let mean = |inputs: &[Vec<u8>]| {
                let quotient = |sum: &[u8]| (f32::from_ne_bytes(sum.try_into().unwrap()) / inputs.len() as f32).to_ne_bytes();
                sum(inputs).chunks_exact(4).flat_map(quotient).collect()
            };
            case.run(&mut random, numbers, plan, mean);
        }
    }

    fn sum(inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut result = inputs[0].clone();
        for input in &inputs[1..] {
            for (a, b) in result.chunks_exact_mut(4).zip(input.chunks_exact(4)) {
                combine(Folder::Ours(FoldOp::Sum, DType::F32), a, b);
            }
        }
        result
    }

    #[test]
    fn an_only_rank_copies_or_multiplies() {
        let mut random = Random(33);
        for kind in MOVING.into_iter().chain(REDUCING) {
            for in_place in [false, can_be_in_place(kind)] {
                let mut case = Case::some(kind, in_place, 4, 100, &mut random);
                (case.n, case.root) = (1, 0);
                case.blocks = vec![40];
                case.pairs = vec![vec![40]];
                let plan = |_: Ranks, _| alone(&case.job(0, DType::F32, None), None);
                case.run(&mut random, numbers, plan, |inputs| inputs[0].clone());
                if REDUCING.contains(&kind) {
                    let plan = |_: Ranks, _| alone(&case.job(0, DType::F32, None), Some((0.5, DType::F32)));
                    let half = |value: &[u8]| (f32::from_ne_bytes(value.try_into().unwrap()) * 0.5).to_ne_bytes();
                    case.run(&mut random, numbers, plan, |inputs| inputs[0].chunks_exact(4).flat_map(half).collect());
                }
            }
        }
    }

    #[test]
    fn one_call_of_nccls_needs_no_list() {
        let mut random = Random(34);
        let mut case = Case::some(Collective::AllReduce, true, 4, 100, &mut random);
        case.blocks = vec![64; case.n];
        let ranks = Ranks { me: 1, n: case.n };
        let plan = reducing(&case.job(1, DType::F32, None), NcclOp::Max, DType::F32, ranks).unwrap();
        assert!(matches!(plan, Plan::One(Transfer::AllReduce { count: 16, op: NcclOp::Max, .. })), "{plan:?}");
    }

    #[test]
    fn an_exchange_in_place_without_memory_says_how_much_it_needs() {
        let mut random = Random(35);
        let mut case = Case::some(Collective::AllToAll, true, 1, 100, &mut random);
        (case.n, case.blocks) = (4, vec![100; 4]);
        let library = Library { all_to_all: true, gather: true, scatter: true };
        let scratch = Scratch { address: 0x1000, bytes: 3 };
        let error = moving(&case.job(0, DType::U8, None), Ranks { me: 0, n: 4 }, library, scratch).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("4 B"), "{error}");
    }

    #[test]
    fn messages_to_oneself_are_copied_or_refused() {
        let message = |peer, sends, address, bytes| Message { peer, sends, address, bytes, element: TypeTag::Scalar(DType::U8) };
        let list = [
            message(1, true, 10, 4),
            message(0, true, 20, 8),
            message(2, false, 30, 0),
            message(0, false, 40, 8),
            message(1, false, 50, 4),
        ];
        let (transfers, copies) = messages(&list, 0).unwrap();
        assert_eq!(transfers, [Transfer::Send { address: 10, bytes: 4, peer: 1 }, Transfer::Receive { address: 50, bytes: 4, peer: 1 }]);
        assert_eq!(copies, [Step::Copy { role: StreamRole::Call, source: 20, destination: 40, bytes: 8 }]);
        assert!(messages(&list[..2], 0).is_err());
        assert!(messages(&[message(0, true, 20, 8), message(0, false, 40, 4)], 0).is_err());
    }
}
