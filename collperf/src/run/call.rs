//! The calls that are measured.

use collectives::{Communicator, ReduceOp, Result};

use super::plane::Memory;
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

    /// How many elements of a buffer it may touch.
    pub(super) fn whole(&self) -> usize {
        self.whole
    }

    /// With two buffers.
    pub(super) fn out_of_place<T: Sample>(&self, root: usize, source: &impl Memory<T>, target: &mut impl Memory<T>) -> Result<()> {
        let (comm, op, whole, counts) = (self.comm, self.op, self.whole, &self.counts[..]);
        let (one, mine) = (self.count, counts[self.rank]);
        let is_root = self.rank == root;
        match self.collective {
            Collective::AllReduce => comm.all_reduce_into(&source.part(one), &mut target.part_mut(one), op),
            Collective::Reduce => comm.reduce_into(&source.part(one), is_root.then(|| target.part_mut(one)).as_mut(), root, op),
            Collective::Broadcast => comm.broadcast_into(is_root.then(|| source.part(one)).as_ref(), &mut target.part_mut(one), root),
            Collective::AllGather => comm.all_gather_into(&source.part(one), &mut target.part_mut(whole)),
            Collective::ReduceScatter => comm.reduce_scatter_into(&source.part(whole), &mut target.part_mut(one), op),
            Collective::Gather => comm.gather_into(&source.part(one), is_root.then(|| target.part_mut(whole)).as_mut(), root),
            Collective::Scatter => comm.scatter_into(is_root.then(|| source.part(whole)).as_ref(), &mut target.part_mut(one), root),
            Collective::AllToAll => comm.all_to_all_into(&source.part(whole), &mut target.part_mut(whole)),
            Collective::AllGatherV => comm.all_gather_v_into(&source.part(mine), &mut target.part_mut(whole), counts),
            Collective::ReduceScatterV => comm.reduce_scatter_v_into(&source.part(whole), &mut target.part_mut(mine), counts, op),
            Collective::GatherV => {
                let mut target = is_root.then(|| target.part_mut(whole));
                comm.gather_v_into(&source.part(mine), target.as_mut().map(|target| (target, counts)), root)
            }
            Collective::ScatterV => {
                let source = is_root.then(|| source.part(whole));
                comm.scatter_v_into(source.as_ref().map(|source| (source, counts)), &mut target.part_mut(mine), root)
            }
            Collective::AllToAllV => comm.all_to_all_v_into(&source.part(whole), counts, &mut target.part_mut(whole), counts),
            Collective::SendRecv => {
                let (source, mut target) = (source.part(one), target.part_mut(one));
                let received = comm.group(|group| {
                    group.send(&source, self.next)?;
                    group.recv(&mut target, self.previous)
                });
                received.map(drop)
            }
            Collective::Barrier => comm.barrier(),
        }
    }

    /// With one buffer, where the collective has such a form.
    pub(super) fn in_place<T: Sample>(&self, root: usize, buffer: &mut impl Memory<T>) -> Result<()> {
        let (comm, count, whole) = (self.comm, self.count, self.whole);
        let is_root = self.rank == root;
        match self.collective {
            Collective::AllReduce => comm.all_reduce(&mut buffer.part_mut(count), self.op),
            Collective::Reduce => comm.reduce(&mut buffer.part_mut(count), root, self.op),
            Collective::Broadcast => comm.broadcast(&mut buffer.part_mut(count), root),
            Collective::AllGather => comm.all_gather(&mut buffer.part_mut(whole)),
            Collective::ReduceScatter => comm.reduce_scatter(&mut buffer.part_mut(whole), self.op),
            Collective::Gather => comm.gather(&mut buffer.part_mut(if is_root { whole } else { count }), root),
            Collective::Scatter => comm.scatter(&mut buffer.part_mut(if is_root { whole } else { count }), root),
            Collective::AllToAll => comm.all_to_all(&mut buffer.part_mut(whole)),
            // The others have no such form; `Collective::has_in_place` keeps them away.
            _ => comm.barrier(),
        }
    }

    /// A message from rank 0 to rank 1 and back; nothing on the others.
    pub(super) fn ping_pong<T: Sample>(&self, source: &impl Memory<T>, target: &mut impl Memory<T>) -> Result<()> {
        let (source, mut target) = (source.part(self.count), target.part_mut(self.count));
        match self.rank {
            0 => {
                self.comm.send(&source, 1)?;
                self.comm.recv(&mut target, 1)?;
            }
            1 => {
                self.comm.recv(&mut target, 0)?;
                self.comm.send(&source, 0)?;
            }
            _ => {}
        }
        Ok(())
    }
}
