//! The calls that are measured.

use collectives::{Communicator, ReduceOp, Result};

use crate::collective::Collective;
use crate::inputs::{Sample, premultiplier};
use crate::layout::Layout;

/// One collective of one size. Buffers may be longer than it needs.
pub(super) struct Call<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) collective: Collective,
    /// As this rank calls it; of no meaning where nothing is reduced.
    op: ReduceOp,
    /// Elements per block, or of the whole vector.
    count: usize,
    /// Elements of all blocks.
    whole: usize,
    /// The shares of the uneven forms; of `all_to_all_v`, this rank's to and from each other.
    counts: Vec<usize>,
    rank: usize,
    next: usize,
    previous: usize,
}

impl<'a> Call<'a> {
    pub(super) fn new(comm: &'a Communicator, collective: Collective, op: Option<ReduceOp>, count: usize) -> Self {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let layout = Layout::new(collective, world_size, 0, count);
        let op = match op {
            Some(ReduceOp::PreMulSum(_)) => ReduceOp::PreMulSum(premultiplier(rank)),
            op => op.unwrap_or(ReduceOp::Sum),
        };
        Self {
            comm,
            collective,
            op,
            count,
            whole: collective.bytes(count, 1, world_size),
            counts: layout.counts(rank),
            rank,
            next: (rank + 1) % world_size,
            previous: layout.previous(rank),
        }
    }

    /// With two buffers.
    pub(super) fn out_of_place<T: Sample>(&self, root: usize, source: &[T], target: &mut [T]) -> Result<()> {
        let (comm, count, whole, counts) = (self.comm, self.count, self.whole, &self.counts[..]);
        let is_root = self.rank == root;
        match self.collective {
            Collective::AllReduce => comm.all_reduce_into(&source[..count], &mut target[..count], self.op),
            Collective::Reduce => comm.reduce_into(&source[..count], is_root.then(|| &mut target[..count]), root, self.op),
            Collective::Broadcast => comm.broadcast_into(is_root.then(|| &source[..count]), &mut target[..count], root),
            Collective::AllGather => comm.all_gather_into(&source[..count], &mut target[..whole]),
            Collective::ReduceScatter => comm.reduce_scatter_into(&source[..whole], &mut target[..count], self.op),
            Collective::Gather => comm.gather(&source[..count], is_root.then(|| &mut target[..whole]), root),
            Collective::Scatter => comm.scatter(is_root.then(|| &source[..whole]), &mut target[..count], root),
            Collective::AllToAll => comm.all_to_all_into(&source[..whole], &mut target[..whole]),
            Collective::AllGatherV => comm.all_gather_v_into(&source[..counts[self.rank]], &mut target[..whole], counts),
            Collective::ReduceScatterV => comm.reduce_scatter_v_into(&source[..whole], &mut target[..counts[self.rank]], counts, self.op),
            Collective::GatherV => comm.gather_v(&source[..counts[self.rank]], is_root.then(|| (&mut target[..whole], counts)), root),
            Collective::ScatterV => comm.scatter_v(is_root.then(|| (&source[..whole], counts)), &mut target[..counts[self.rank]], root),
            Collective::AllToAllV => comm.all_to_all_v_into(&source[..whole], counts, &mut target[..whole], counts),
            Collective::SendRecv => {
                let (source, target) = (&source[..count], &mut target[..count]);
                let received = comm.group(|group| {
                    group.send(source, self.next)?;
                    group.recv(target, self.previous)
                });
                received.map(drop)
            }
            Collective::Barrier => comm.barrier(),
        }
    }

    /// With one buffer, where the collective has such a form.
    pub(super) fn in_place<T: Sample>(&self, root: usize, buffer: &mut [T]) -> Result<()> {
        let (comm, count, whole) = (self.comm, self.count, self.whole);
        let is_root = self.rank == root;
        match self.collective {
            Collective::AllReduce => comm.all_reduce(&mut buffer[..count], self.op),
            Collective::Reduce => comm.reduce(&mut buffer[..count], root, self.op),
            Collective::Broadcast => comm.broadcast(&mut buffer[..count], root),
            Collective::AllGather => comm.all_gather(&mut buffer[..whole]),
            Collective::ReduceScatter => comm.reduce_scatter(&mut buffer[..whole], self.op),
            Collective::Gather => comm.gather_in_place(&mut buffer[..if is_root { whole } else { count }], root),
            Collective::Scatter => comm.scatter_in_place(&mut buffer[..if is_root { whole } else { count }], root),
            Collective::AllToAll => comm.all_to_all(&mut buffer[..whole]),
            // The others have no such form; `Collective::has_in_place` keeps them away.
            _ => comm.barrier(),
        }
    }

    /// A message from rank 0 to rank 1 and back; nothing on the others.
    pub(super) fn ping_pong<T: Sample>(&self, source: &[T], target: &mut [T]) -> Result<()> {
        let (source, target) = (&source[..self.count], &mut target[..self.count]);
        match self.rank {
            0 => {
                self.comm.send(source, 1)?;
                self.comm.recv(target, 1)?;
            }
            1 => {
                self.comm.recv(target, 0)?;
                self.comm.send(source, 0)?;
            }
            _ => {}
        }
        Ok(())
    }
}
