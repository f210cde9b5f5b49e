//! The calls that are measured.

use collectives::{Buffer, BufferMut, Communicator, Group, ReduceOp, Result};

use super::backend::Memory;
use crate::collective::Collective;
use crate::inputs::{Sample, premultiplier};
use crate::layout::Layout;

/// A collective with two buffers, on a communicator or in a group of it: both have methods of the same names.
macro_rules! two_buffers {
    ($on:ident, $call:expr, $root:expr, $source:expr, $target:expr) => {{
        let (op, counts, is_root) = ($call.op, &$call.counts[..], $call.rank == $root);
        match $call.collective {
            Collective::AllReduce => $on.all_reduce_into($source, $target, op),
            Collective::Reduce => $on.reduce_into($source, is_root.then_some($target), $root, op),
            Collective::Broadcast => $on.broadcast_into(is_root.then_some($source), $target, $root),
            Collective::AllGather => $on.all_gather_into($source, $target),
            Collective::ReduceScatter => $on.reduce_scatter_into($source, $target, op),
            Collective::Gather => $on.gather_into($source, is_root.then_some($target), $root),
            Collective::Scatter => $on.scatter_into(is_root.then_some($source), $target, $root),
            Collective::AllToAll => $on.all_to_all_into($source, $target),
            Collective::AllGatherV => $on.all_gather_v_into($source, $target, counts),
            Collective::ReduceScatterV => $on.reduce_scatter_v_into($source, $target, counts, op),
            Collective::GatherV => $on.gather_v_into($source, is_root.then_some(($target, counts)), $root),
            Collective::ScatterV => $on.scatter_v_into(is_root.then_some(($source, counts)), $target, $root),
            Collective::AllToAllV => $on.all_to_all_v_into($source, counts, $target, &$call.received_counts),
            // Made of messages, or without data: their callers handle them.
            Collective::SendRecv | Collective::Barrier | Collective::Hypercube => Ok(()),
        }
    }};
}

/// A collective with one buffer, on a communicator or in a group of it.
macro_rules! one_buffer {
    ($on:ident, $call:expr, $root:expr, $buffer:expr) => {{
        match $call.collective {
            Collective::AllReduce => $on.all_reduce($buffer, $call.op),
            Collective::Reduce => $on.reduce($buffer, $root, $call.op),
            Collective::Broadcast => $on.broadcast($buffer, $root),
            Collective::AllGather => $on.all_gather($buffer),
            Collective::ReduceScatter => $on.reduce_scatter($buffer, $call.op),
            Collective::Gather => $on.gather($buffer, $root),
            Collective::Scatter => $on.scatter($buffer, $root),
            Collective::AllToAll => $on.all_to_all($buffer),
            // The others have no in-place form.
            _ => Ok(()),
        }
    }};
}

/// One collective of one size. Buffers may be longer than it needs.
pub(super) struct Call<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) collective: Collective,
    /// The op that this rank passes; it has no meaning if nothing is reduced.
    op: ReduceOp,
    /// Elements per block, or of the whole vector.
    count: usize,
    /// Elements of all blocks.
    whole: usize,
    /// The shares of the uneven forms; in `all_to_all_v`, the lengths of this rank's blocks to every rank.
    counts: Vec<usize>,
    /// In `all_to_all_v`, the lengths of the blocks from every rank.
    received_counts: Vec<usize>,
    rank: usize,
    next: usize,
    previous: usize,
}

impl<'a> Call<'a> {
    pub(super) fn new(comm: &'a Communicator, collective: Collective, op: Option<ReduceOp>, count: usize, layout: &Layout) -> Self {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let op = match op {
            Some(ReduceOp::PreMulSum(_)) => ReduceOp::PreMulSum(premultiplier(rank)),
            op => op.unwrap_or(ReduceOp::Sum),
        };
        Self {
            comm,
            collective,
            op,
            count,
            whole: layout.largest(),
            counts: layout.counts(rank),
            received_counts: layout.received_counts(rank),
            rank,
            next: (rank + 1) % world_size,
            previous: layout.previous(rank),
        }
    }

    /// Returns how many elements of a buffer the call may touch.
    pub(super) fn whole(&self) -> usize {
        self.whole
    }

    /// Returns the number of elements that a rank contributes, and of those that it receives.
    fn lengths(&self) -> (usize, usize) {
        use Collective::*;
        let (one, whole, mine) = (self.count, self.whole, self.counts[self.rank]);
        match self.collective {
            AllReduce | Reduce | Broadcast | SendRecv | Barrier => (one, one),
            AllGather | Gather | Hypercube => (one, whole),
            ReduceScatter | Scatter => (whole, one),
            AllToAll => (whole, whole),
            AllToAllV => (self.counts.iter().sum(), self.received_counts.iter().sum()),
            AllGatherV | GatherV => (mine, whole),
            ReduceScatterV | ScatterV => (whole, mine),
        }
    }

    /// Calls the collective with two buffers.
    pub(super) fn out_of_place<T: Sample, M: Memory<T>>(&self, root: usize, source: &M, target: &mut M) -> Result<()> {
        if self.collective == Collective::Hypercube {
            return self.hypercube(Some(source), target);
        }
        let (hands_in, gets) = self.lengths();
        let (source, mut target) = (source.part(hands_in), target.part_mut(gets));
        let on = self.comm;
        match self.collective {
            Collective::SendRecv => on.group(|group| self.ring(group, &source, &mut target)).map(drop),
            Collective::Barrier => on.barrier(),
            _ => two_buffers!(on, self, root, &source, &mut target),
        }
    }

    /// Makes `times` such calls, in a group if possible.
    pub(super) fn out_of_place_together<T: Sample, M: Memory<T>>(
        &self,
        times: usize,
        root: usize,
        source: &M,
        target: &mut M,
    ) -> Result<()> {
        let (hands_in, gets) = self.lengths();
        if times == 1 || !M::HAS_GROUPS {
            return (0..times).try_for_each(|_| self.out_of_place(root, source, target));
        }
        let mut targets = target.parts_mut(gets, times);
        let source = source.part(hands_in);
        let recorded = self.comm.group(|group| {
            targets.iter_mut().try_for_each(|target| match self.collective {
                Collective::SendRecv => self.ring(group, &source, target),
                _ => two_buffers!(group, self, root, &source, target),
            })
        });
        recorded.map(drop)
    }

    /// Calls the collective with one buffer, if it has such a form.
    pub(super) fn in_place<T: Sample, M: Memory<T>>(&self, root: usize, buffer: &mut M) -> Result<()> {
        if self.collective == Collective::Hypercube {
            return self.hypercube(None, buffer);
        }
        if !self.collective.has_in_place() {
            return self.comm.barrier();
        }
        let mut buffer = buffer.part_mut(self.length_in_place(root));
        let on = self.comm;
        one_buffer!(on, self, root, &mut buffer)
    }

    /// Makes `times` such calls, in a group if possible.
    pub(super) fn in_place_together<T: Sample, M: Memory<T>>(&self, times: usize, root: usize, buffer: &mut M) -> Result<()> {
        if times == 1 || !M::HAS_GROUPS {
            return (0..times).try_for_each(|_| self.in_place(root, buffer));
        }
        let mut parts = buffer.parts_mut(self.length_in_place(root), times);
        let recorded = self.comm.group(|group| parts.iter_mut().try_for_each(|part| one_buffer!(group, self, root, part)));
        recorded.map(drop)
    }

    /// Returns the number of elements of a rank's one buffer.
    fn length_in_place(&self, root: usize) -> usize {
        match self.collective {
            Collective::AllReduce | Collective::Reduce | Collective::Broadcast => self.count,
            Collective::Gather | Collective::Scatter if self.rank != root => self.count,
            _ => self.whole,
        }
    }

    /// Adds a message to the next rank and one from the previous.
    fn ring<'buffers, S: Buffer, D: BufferMut>(
        &self,
        group: &mut Group<'buffers, '_>,
        source: &'buffers S,
        target: &'buffers mut D,
    ) -> Result<()> {
        group.send(source, self.next)?;
        group.recv(target, self.previous)
    }

    /// Does an all-gather in which each step doubles the data that ranks have. In step k, a rank exchanges messages
    /// with the rank whose number differs in bit k. `target` holds this rank's block if `source` is `None`.
    fn hypercube<T: Sample, M: Memory<T>>(&self, source: Option<&M>, target: &mut M) -> Result<()> {
        if let Some(source) = source {
            target.copy_from(source, self.count, self.rank * self.count)?;
        }
        let steps = self.comm.world_size().trailing_zeros();
        (0..steps).map(|step| 1_usize << step).try_for_each(|blocks| {
            let mine = self.rank & !(blocks - 1);
            let range = |first: usize| first * self.count..(first + blocks) * self.count;
            let (read, mut written) = target.apart(range(mine), range(mine ^ blocks));
            let peer = self.rank ^ blocks;
            let exchanged = self.comm.group(|group| {
                group.send(&read, peer)?;
                group.recv(&mut written, peer)
            });
            exchanged.map(drop)
        })
    }

    /// Sends a message from rank 0 to rank 1 and back; does nothing on the others.
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
