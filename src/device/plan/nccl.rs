//! Collectives as NCCL has them, or composed of sends and receives where the loaded library is older.

use super::algorithm::NcclOp;
use super::job::{Job, Message};
use super::step::{Plan, Ranks, Scratch, Step, Transfer};
use crate::call::{BlockLayout, Kind};
use crate::error::Error;
use crate::{DType, Result};

/// Which of the functions that came with NCCL 2.28.3 the loaded library has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    pub(crate) all_to_all: bool,
    pub(crate) gather: bool,
    pub(crate) scatter: bool,
}

/// The buffers of a job: where a block of one buffer is the other, that block alone.
pub(crate) fn narrowed(job: &Job, rank: usize) -> (u64, u64) {
    if !job.in_place {
        return (job.source, job.destination);
    }
    let offset = || job.layout.block(rank).0 as u64;
    match job.call.kind {
        Kind::AllGather | Kind::AllGatherV | Kind::Gather => (job.source + offset(), job.destination),
        Kind::ReduceScatter | Kind::ReduceScatterV | Kind::Scatter => (job.source, job.destination + offset()),
        _ => (job.source, job.destination),
    }
}

/// Where a job's result comes on this rank, and how many bytes it is; none where this rank gets none.
pub(crate) fn result(job: &Job, rank: usize) -> (u64, usize) {
    let (_, destination) = narrowed(job, rank);
    let bytes = match job.call.kind {
        Kind::Reduce | Kind::Gather | Kind::GatherV if root(job) != rank => 0,
        Kind::ReduceScatter | Kind::ReduceScatterV | Kind::Scatter if job.in_place => job.layout.block(rank).1,
        _ => job.destination_len,
    };
    (destination, bytes)
}

/// The root of a job that has one.
pub(crate) fn root(job: &Job) -> usize {
    job.call.root.unwrap_or_default() as usize
}

/// A job of an only rank: its contribution is the result, for a `PreMulSum` times the scalar. The inputs of a mean are its results, too.
pub(crate) fn alone(job: &Job, multiply: Option<(f64, DType)>) -> Plan {
    let (source, destination) = narrowed(job, 0);
    let bytes = job.source_len.min(job.destination_len);
    match multiply {
        _ if bytes == 0 => Plan::Nothing,
        Some((scalar, dtype)) => {
            let after = vec![Step::Multiply { source, destination, count: bytes / dtype.size_bytes(), dtype, scalar }];
            Plan::Group { transfers: Vec::new(), after }
        }
        None => with_copy(Vec::new(), source, destination, bytes),
    }
}

/// A job that moves elements between two ranks or more.
///
/// # Errors
///
/// `Unsupported` where the plane's scratch memory is too small, `InvalidArgument` for a layout that its kind does not have.
pub(crate) fn moving(job: &Job, ranks: Ranks, library: Library, scratch: Scratch) -> Result<Plan> {
    let (source, destination) = narrowed(job, ranks.me);
    let root = root(job);
    let block = job.layout.block(ranks.me).1;
    Ok(match (job.call.kind, &job.layout) {
        (Kind::Barrier, _) => Plan::Nothing,
        (Kind::Broadcast | Kind::AllGather | Kind::Gather | Kind::Scatter | Kind::AllToAll, BlockLayout::Equal(0)) => Plan::Nothing,
        (Kind::Broadcast, BlockLayout::Equal(bytes)) => {
            // Only the root has a source, and NCCL wants an address from all.
            let source = if ranks.me == root { source } else { destination };
            Plan::One(Transfer::Broadcast { source, destination, bytes: *bytes, root })
        }
        (Kind::AllGather, BlockLayout::Equal(bytes)) => Plan::One(Transfer::AllGather { source, destination, bytes: *bytes }),
        (Kind::AllGatherV, BlockLayout::Blocks(blocks)) => all_gather_v(source, destination, blocks, &job.layout, ranks),
        (Kind::Gather, BlockLayout::Equal(bytes)) if library.gather => {
            Plan::One(Transfer::Gather { source, destination, bytes: *bytes, root })
        }
        (Kind::Scatter, BlockLayout::Equal(bytes)) if library.scatter => {
            Plan::One(Transfer::Scatter { source, destination, bytes: *bytes, root })
        }
        (Kind::Gather | Kind::GatherV, _) => gather(source, destination, &job.layout, ranks, root, block),
        (Kind::Scatter | Kind::ScatterV, _) => scatter(source, destination, &job.layout, ranks, root, block),
        (Kind::AllToAll, BlockLayout::Equal(bytes)) if job.in_place => swap(destination, *bytes, ranks, scratch)?,
        (Kind::AllToAll, BlockLayout::Equal(bytes)) if library.all_to_all => {
            Plan::One(Transfer::AllToAll { source, destination, bytes: *bytes })
        }
        (Kind::AllToAll, BlockLayout::Equal(bytes)) => {
            let blocks = vec![*bytes; ranks.n];
            exchange(source, &blocks, destination, &blocks, ranks)
        }
        (Kind::AllToAllV, BlockLayout::Pairs { send, receive }) if !job.in_place => exchange(source, send, destination, receive, ranks),
        (kind, layout) => return Err(Error::argument(kind.name(), format!("this call has no such layout on a device: {layout:?}"))),
    })
}

/// A reduction that NCCL does itself, between two ranks or more.
///
/// # Errors
///
/// `InvalidArgument` for a layout that its kind does not have.
pub(crate) fn reducing(job: &Job, op: NcclOp, dtype: DType, ranks: Ranks) -> Result<Plan> {
    let (source, destination) = narrowed(job, ranks.me);
    let size = dtype.size_bytes();
    Ok(match (job.call.kind, &job.layout) {
        (Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter, BlockLayout::Equal(0)) => Plan::Nothing,
        (Kind::AllReduce, BlockLayout::Equal(bytes)) => {
            Plan::One(Transfer::AllReduce { source, destination, count: bytes / size, dtype, op })
        }
        (Kind::Reduce, BlockLayout::Equal(bytes)) => {
            let root = root(job);
            Plan::One(Transfer::Reduce { source, destination, count: bytes / size, dtype, op, root })
        }
        (Kind::ReduceScatter, BlockLayout::Equal(bytes)) => {
            Plan::One(Transfer::ReduceScatter { source, destination, count: bytes / size, dtype, op })
        }
        (Kind::ReduceScatterV, BlockLayout::Blocks(blocks)) => reduce_scatter_v(source, destination, blocks, op, dtype, ranks),
        (kind, layout) => return Err(Error::argument(kind.name(), format!("this call has no such layout on a device: {layout:?}"))),
    })
}

/// A sum by NCCL, then the division of what this rank has got of it.
///
/// # Errors
///
/// Those of [`reducing`].
pub(crate) fn dividing(job: &Job, dtype: DType, ranks: Ranks) -> Result<Plan> {
    let (transfers, mut after) = match reducing(job, NcclOp::Sum, dtype, ranks)? {
        Plan::One(transfer) => (vec![transfer], Vec::new()),
        Plan::Group { transfers, after } => (transfers, after),
        plan => return Ok(plan),
    };
    let has_result = job.call.kind != Kind::Reduce || root(job) == ranks.me;
    let (data, count) = (narrowed(job, ranks.me).1, job.layout.block(ranks.me).1 / dtype.size_bytes());
    if has_result && count != 0 {
        after.push(Step::Divide { data, count, dtype, divisor: ranks.n as u32 });
    }
    Ok(Plan::Group { transfers, after })
}

/// Messages as transfers. Those without bytes are left out, which both ends agree on; those to this rank itself are copies. Truth values
/// from other ranks are made some, whatever came.
///
/// # Errors
///
/// `InvalidArgument` where what this rank sends to itself is not what it receives from itself: it would wait for ever, or write what is no
/// value.
pub(crate) fn messages(messages: &[Message], me: usize) -> Result<(Vec<Transfer>, Vec<Step>)> {
    let (mut transfers, mut truths, mut sent, mut received) = (Vec::with_capacity(messages.len()), Vec::new(), Vec::new(), Vec::new());
    for message in messages.iter().filter(|message| message.bytes != 0) {
        let Message { peer, sends, address, bytes, element } = *message;
        match sends {
            _ if peer == me => if sends { &mut sent } else { &mut received }.push(message),
            true => transfers.push(Transfer::Send { address, bytes, peer }),
            false => transfers.push(Transfer::Receive { address, bytes, peer }),
        }
        if !sends && peer != me && element.is_bool() {
            truths.push(Step::Truths { data: address, bytes });
        }
    }
    let like = |message: &&Message| (message.bytes, message.element);
    if !sent.iter().map(like).eq(received.iter().map(like)) {
        let reason = format!(
            "rank {me} sends {} messages to itself in one group and receives {}, or their lengths or types differ",
            sent.len(),
            received.len()
        );
        return Err(Error::argument("messages on a device", reason));
    }
    let copy = |(from, to): (&Message, &Message)| Step::Copy { source: from.address, destination: to.address, bytes: from.bytes };
    Ok((transfers, sent.into_iter().zip(received).map(copy).chain(truths).collect()))
}

/// Every rank's block to every rank.
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

/// Every rank's block of the result to that rank.
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

/// Every rank's block to the root.
fn gather(source: u64, destination: u64, layout: &BlockLayout, ranks: Ranks, root: usize, own: usize) -> Plan {
    if ranks.me != root {
        return Plan::Group { transfers: some(own, Transfer::Send { address: source, bytes: own, peer: root }), after: Vec::new() };
    }
    let mut transfers = Vec::with_capacity(ranks.n);
    for peer in ranks.others() {
        let (offset, bytes) = layout.block(peer);
        transfers.extend(some(bytes, Transfer::Receive { address: destination + offset as u64, bytes, peer }));
    }
    with_copy(transfers, source, destination + layout.block(root).0 as u64, own)
}

/// Every rank's block from the root.
fn scatter(source: u64, destination: u64, layout: &BlockLayout, ranks: Ranks, root: usize, own: usize) -> Plan {
    if ranks.me != root {
        return Plan::Group { transfers: some(own, Transfer::Receive { address: destination, bytes: own, peer: root }), after: Vec::new() };
    }
    let mut transfers = Vec::with_capacity(ranks.n);
    for peer in ranks.others() {
        let (offset, bytes) = layout.block(peer);
        transfers.extend(some(bytes, Transfer::Send { address: source + offset as u64, bytes, peer }));
    }
    with_copy(transfers, source + layout.block(root).0 as u64, destination, own)
}

/// Every rank's block for every rank, from one buffer into another.
fn exchange(source: u64, send: &[usize], destination: u64, receive: &[usize], ranks: Ranks) -> Plan {
    let start = |blocks: &[usize], rank: usize| blocks[..rank].iter().sum::<usize>() as u64;
    let mut transfers = Vec::with_capacity(2 * ranks.n);
    for peer in ranks.others() {
        transfers.extend(some(send[peer], Transfer::Send { address: source + start(send, peer), bytes: send[peer], peer }));
        let address = destination + start(receive, peer);
        transfers.extend(some(receive[peer], Transfer::Receive { address, bytes: receive[peer], peer }));
    }
    let own = send[ranks.me].min(receive[ranks.me]);
    with_copy(transfers, source + start(send, ranks.me), destination + start(receive, ranks.me), own)
}

/// Every rank's block for every rank, in place: as much of each block as scratch memory has room for, then the next.
fn swap(buffer: u64, block: usize, ranks: Ranks, scratch: Scratch) -> Result<Plan> {
    let most = scratch.bytes / ranks.n;
    // Whole chunks, so that what comes after begins where the device reads fast.
    let most = if most > 256 { most & !255 } else { most };
    if most == 0 {
        let reason = format!("it needs at least {} B of scratch memory, and there are {} B", ranks.n, scratch.bytes);
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
        steps.extend(ranks.others().map(|peer| Step::Copy { source: slot(peer), destination: at(peer), bytes }));
    }
    Ok(Plan::Steps(steps))
}

/// A transfer of `bytes` where there are any.
fn some(bytes: usize, transfer: Transfer) -> Vec<Transfer> {
    if bytes == 0 { Vec::new() } else { vec![transfer] }
}

/// A group of transfers, and a copy of this rank's own block where it is not there already.
fn with_copy(transfers: Vec<Transfer>, source: u64, destination: u64, bytes: usize) -> Plan {
    let copies = bytes != 0 && source != destination;
    let after = if copies { vec![Step::Copy { source, destination, bytes }] } else { Vec::new() };
    Plan::Group { transfers, after }
}

#[cfg(test)]
mod tests;
