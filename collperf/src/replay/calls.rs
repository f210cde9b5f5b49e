//! Makes the calls of a replay: blocking, or in the background.

use collectives::{Collective, Communicator, Envelope, Result, TypedBytes, Work};

use super::buffers::{Buffers, touched};
use super::recording::Kind;
use super::shape::{Amount, Shape};

/// A background call; its buffers are freed with it.
pub(super) type Started = Work<Box<dyn std::any::Any + Send>>;

/// Makes a call and waits for its end. The buffers are exactly as long as the call needs.
pub(super) fn perform(comm: &Communicator, shape: &Shape, buffers: Buffers<&mut [u8]>) -> Result<()> {
    let (dtype, op, root) = (shape.dtype(), shape.op(), shape.root);
    let is_root = comm.rank() == root;
    let Some(data) = shape.kind.data() else { return message(comm, shape, buffers) };
    let blocks = shape.amount.blocks();
    if shape.kind == Kind::ALL_GATHER_LIST {
        let source = TypedBytes::new(dtype, buffers.source)?;
        let mut rest = buffers.destination;
        let mut destinations = Vec::with_capacity(blocks.len());
        for count in blocks {
            let (block, others) = rest.split_at_mut(count * dtype.size_bytes());
            destinations.push(TypedBytes::new(dtype, block)?);
            rest = others;
        }
        return comm.all_gather_list(&source, &mut destinations);
    }
    let source = TypedBytes::new(dtype, buffers.source)?;
    let mut destination = TypedBytes::new(dtype, buffers.destination)?;
    if shape.kind.is_many() {
        return match data {
            Collective::AllReduce => comm.all_reduce_many(&mut [destination], op),
            Collective::Broadcast => comm.broadcast_many(&mut [destination], root),
            Collective::AllGather => comm.all_gather_many_into(&[source], &mut [destination]),
            _ => comm.reduce_scatter_many_into(&[source], &mut [destination], op),
        };
    }
    match data {
        Collective::Barrier => comm.barrier(),
        Collective::Broadcast => comm.broadcast(&mut destination, root),
        Collective::AllReduce => comm.all_reduce(&mut destination, op),
        Collective::Reduce => comm.reduce(&mut destination, root, op),
        Collective::AllGather => comm.all_gather_into(&source, &mut destination),
        Collective::AllGatherV => comm.all_gather_v_into(&source, &mut destination, blocks),
        Collective::ReduceScatter => comm.reduce_scatter_into(&source, &mut destination, op),
        Collective::ReduceScatterV => comm.reduce_scatter_v_into(&source, &mut destination, blocks, op),
        Collective::Gather => comm.gather_into(&source, is_root.then_some(&mut destination), root),
        Collective::GatherV => comm.gather_v_into(&source, is_root.then_some((&mut destination, blocks)), root),
        Collective::Scatter => comm.scatter_into(is_root.then_some(&source), &mut destination, root),
        Collective::ScatterV => comm.scatter_v_into(is_root.then_some((&source, blocks)), &mut destination, root),
        Collective::AllToAllV => {
            let (send, receive) = pairs(shape);
            comm.all_to_all_v_into(&source, send, &mut destination, receive)
        }
        _ => comm.all_to_all_into(&source, &mut destination),
    }
}

fn message(comm: &Communicator, shape: &Shape, buffers: Buffers<&mut [u8]>) -> Result<()> {
    let envelope = Envelope::rank(shape.peer).tag(shape.tag);
    if shape.kind == Kind::SEND {
        return comm.send(&TypedBytes::new(shape.dtype(), buffers.source)?, envelope);
    }
    comm.recv(&mut TypedBytes::new(shape.dtype(), buffers.destination)?, envelope).map(drop)
}

fn pairs(shape: &Shape) -> (&[usize], &[usize]) {
    if let Amount::Pairs { send, receive } = &shape.amount { (send, receive) } else { (&[], &[]) }
}

/// Starts a call in the background.
pub(super) fn start(comm: &Communicator, shape: &Shape, buffers: Buffers<Vec<u8>>) -> Result<Started> {
    let (dtype, op, root) = (shape.dtype(), shape.op(), shape.root);
    let is_root = comm.rank() == root;
    let blocks = shape.amount.blocks();
    let Some(data) = shape.kind.data() else { return start_message(comm, shape, buffers) };
    let source = TypedBytes::new(dtype, buffers.source)?;
    if shape.kind == Kind::ALL_GATHER_LIST {
        // The blocks take its place, and are not to need memory beside it.
        drop(buffers.destination);
        let block = |count: &usize| TypedBytes::new(dtype, touched(count * dtype.size_bytes()));
        let destinations = blocks.iter().map(block).collect::<Result<Vec<_>>>()?;
        return Ok(comm.start_all_gather_list(source, destinations)?.erased());
    }
    let destination = TypedBytes::new(dtype, buffers.destination)?;
    if shape.kind.is_many() {
        return Ok(match data {
            Collective::AllReduce => comm.start_all_reduce_many(vec![destination], op)?.erased(),
            Collective::Broadcast => comm.start_broadcast_many(vec![destination], root)?.erased(),
            Collective::AllGather => comm.start_all_gather_many_into(vec![source], vec![destination])?.erased(),
            _ => comm.start_reduce_scatter_many_into(vec![source], vec![destination], op)?.erased(),
        });
    }
    Ok(match data {
        Collective::Barrier => comm.start_barrier()?.erased(),
        Collective::Broadcast => comm.start_broadcast(destination, root)?.erased(),
        Collective::AllReduce => comm.start_all_reduce(destination, op)?.erased(),
        Collective::Reduce => comm.start_reduce(destination, root, op)?.erased(),
        Collective::AllGather => comm.start_all_gather_into(source, destination)?.erased(),
        Collective::AllGatherV => comm.start_all_gather_v_into(source, destination, blocks)?.erased(),
        Collective::ReduceScatter => comm.start_reduce_scatter_into(source, destination, op)?.erased(),
        Collective::ReduceScatterV => comm.start_reduce_scatter_v_into(source, destination, blocks, op)?.erased(),
        Collective::Gather => comm.start_gather_into(source, is_root.then_some(destination), root)?.erased(),
        Collective::GatherV => comm.start_gather_v_into(source, is_root.then_some((destination, blocks)), root)?.erased(),
        Collective::Scatter => comm.start_scatter_into(is_root.then_some(source), destination, root)?.erased(),
        Collective::ScatterV => comm.start_scatter_v_into(is_root.then_some((source, blocks)), destination, root)?.erased(),
        Collective::AllToAllV => {
            let (send, receive) = pairs(shape);
            comm.start_all_to_all_v_into(source, send, destination, receive)?.erased()
        }
        _ => comm.start_all_to_all_into(source, destination)?.erased(),
    })
}

fn start_message(comm: &Communicator, shape: &Shape, buffers: Buffers<Vec<u8>>) -> Result<Started> {
    let envelope = Envelope::rank(shape.peer).tag(shape.tag);
    if shape.kind == Kind::SEND {
        return Ok(comm.start_send(TypedBytes::new(shape.dtype(), buffers.source)?, envelope)?.erased());
    }
    Ok(comm.start_recv(TypedBytes::new(shape.dtype(), buffers.destination)?, envelope)?.erased())
}
