//! The checks of every argument of a collective. Each is made once, and only here.

use crate::call::buffer::{BufferMut, Memory, MemoryMut};
use crate::call::element::Data;
use crate::call::op::Reduction;
use crate::call::{BlockLayout, Collective};
use crate::communicator::Communicator;
use crate::communicator::prepare::prepared::{Prepared, Source};
use crate::error::{Error, Result};

/// Checks that several collectives share.
impl Communicator {
    /// Returns the root, if that rank exists.
    pub(in crate::communicator) fn checked_root(&self, kind: Collective, root: usize) -> Result<Option<u32>> {
        if root < self.world_size() {
            return Ok(Some(root as u32));
        }
        Err(Error::argument(kind.name(), format!("root {root} does not exist: the ranks are 0 to {}", self.world_size() - 1)))
    }

    /// Returns the length of a block if `whole` elements are divided equally among the ranks.
    pub(in crate::communicator) fn block(&self, kind: Collective, what: &str, whole: usize) -> Result<usize> {
        let size = self.world_size();
        if whole.is_multiple_of(size) {
            return Ok(whole / size);
        }
        Err(Error::argument(kind.name(), format!("{what} has {whole} elements, which is not a multiple of the world size {size}")))
    }

    /// Refuses two lengths that should be equal.
    pub(in crate::communicator) fn equal(kind: Collective, what: &str, length: usize, expected: usize, why: &str) -> Result<()> {
        if length == expected {
            return Ok(());
        }
        Err(Error::argument(kind.name(), format!("{what} has {length} elements, but {expected} are needed: {why}")))
    }

    /// Refuses per-rank counts that do not cover a buffer exactly.
    pub(in crate::communicator) fn checked_counts(&self, kind: Collective, what: &str, counts: &[usize], length: usize) -> Result<()> {
        if counts.len() != self.world_size() {
            let reason = format!("{} counts were given for {what}, but the world size is {}", counts.len(), self.world_size());
            return Err(Error::argument(kind.name(), reason));
        }
        let sum = counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
        match sum {
            Some(sum) if sum == length => Ok(()),
            Some(sum) => Err(Error::argument(kind.name(), format!("{what} has {length} elements, but its counts add up to {sum}"))),
            None => Err(Error::argument(kind.name(), format!("the counts of {what} add up to more than memory can hold"))),
        }
    }

    /// Refuses a buffer that is missing at the root, or that another rank passes.
    pub(in crate::communicator) fn only_at_root(&self, kind: Collective, what: &str, given: bool, root: usize) -> Result<()> {
        match (self.rank() == root, given) {
            (true, false) => Err(Error::argument(kind.name(), format!("rank {root} is the root and must pass {what}"))),
            (false, true) => {
                Err(Error::argument(kind.name(), format!("only the root, rank {root}, passes {what}; rank {} must pass None", self.rank())))
            }
            _ => Ok(()),
        }
    }
}

/// Collectives with equal counts.
impl Communicator {
    pub(in crate::communicator) fn prepare_all_reduce<'a, T: Data>(
        &self,
        source: Source<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        op: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::AllReduce;
        if let Source::Separate(source) = &source {
            Self::equal(kind, "the destination", destination.len(), source.len(), "as many as the source has")?;
        }
        let count = destination.len();
        self.reducing(kind, None, count, source, destination, BlockLayout::Equal(count), op)
    }

    pub(in crate::communicator) fn prepare_reduce<'a, T: Data>(
        &self,
        source: Source<Memory<'a, T>>,
        destination: Option<MemoryMut<'a, T>>,
        count: usize,
        root: usize,
        op: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::Reduce;
        let root = self.checked_root(kind, root)?;
        if let Some(destination) = &destination {
            Self::equal(kind, "the destination", destination.len(), count, "as many as the source has")?;
        }
        let layout = BlockLayout::Equal(count);
        self.reducing(kind, root, count, source, destination, layout, op)
    }

    pub(in crate::communicator) fn prepare_broadcast<'a, T: Data>(
        &self,
        source: Source<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let root = self.checked_root(Collective::Broadcast, root)?;
        let count = destination.len();
        self.moving(Collective::Broadcast, root, count, source, destination, BlockLayout::Equal(count))
    }

    pub(in crate::communicator) fn prepare_all_gather<'a, T: Data>(
        &self,
        source: Option<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::AllGather;
        let block = self.block(kind, "the destination", destination.len())?;
        let source = match source {
            Some(source) => {
                Self::equal(kind, "the source", source.len(), block, "the destination's length divided by the world size")?;
                Source::Separate(source)
            }
            None => Source::InPlace,
        };
        self.moving(kind, None, block, source, destination, BlockLayout::Equal(block))
    }

    pub(in crate::communicator) fn prepare_reduce_scatter<'a, T: Data>(
        &self,
        source: Option<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        op: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::ReduceScatter;
        let (source, block) = match source {
            Some(source) => {
                let block = self.block(kind, "the source", source.len())?;
                Self::equal(kind, "the destination", destination.len(), block, "the source's length divided by the world size")?;
                (Source::Separate(source), block)
            }
            None => (Source::InPlace, self.block(kind, "the buffer", destination.len())?),
        };
        self.reducing(kind, None, block, source, destination, BlockLayout::Equal(block), op)
    }

    pub(in crate::communicator) fn prepare_gather<'a, T: Data>(
        &self,
        source: Source<Memory<'a, T>>,
        destination: Option<MemoryMut<'a, T>>,
        block: usize,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::Gather;
        let root_field = self.checked_root(kind, root)?;
        self.only_at_root(kind, "a destination", destination.is_some(), root)?;
        if let Some(destination) = &destination {
            let whole = self.block(kind, "the destination", destination.len())?;
            Self::equal(kind, "the source", block, whole, "the destination's length divided by the world size")?;
        }
        self.moving(kind, root_field, block, source, destination, BlockLayout::Equal(block))
    }

    pub(in crate::communicator) fn prepare_scatter<'a, T: Data>(
        &self,
        source: Source<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        block: usize,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::Scatter;
        let root_field = self.checked_root(kind, root)?;
        match &source {
            Source::Separate(source) => {
                self.only_at_root(kind, "a source", true, root)?;
                let whole = self.block(kind, "the source", source.len())?;
                Self::equal(kind, "the destination", block, whole, "the source's length divided by the world size")?;
            }
            Source::Nothing => self.only_at_root(kind, "a source", false, root)?,
            Source::InPlace => {}
        }
        self.moving(kind, root_field, block, source, destination, BlockLayout::Equal(block))
    }

    pub(in crate::communicator) fn prepare_all_to_all<'a, T: Data>(
        &self,
        source: Source<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::AllToAll;
        let block = self.block(kind, "the destination", destination.len())?;
        if let Source::Separate(source) = &source {
            Self::equal(kind, "the destination", destination.len(), source.len(), "as many as the source has")?;
        }
        self.moving(kind, None, block, source, destination, BlockLayout::Equal(block))
    }

    pub(in crate::communicator) fn prepare_reduce_into<'a, T: Data>(
        &self,
        source: Memory<'a, T>,
        destination: Option<MemoryMut<'a, T>>,
        root: usize,
        op: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        self.only_at_root(Collective::Reduce, "a destination", destination.is_some(), root)?;
        let count = source.len();
        self.prepare_reduce(Source::Separate(source), destination, count, root, op)
    }

    pub(in crate::communicator) fn prepare_broadcast_into<'a, T: Data>(
        &self,
        source: Option<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::Broadcast;
        self.checked_root(kind, root)?;
        self.only_at_root(kind, "a source", source.is_some(), root)?;
        if let Some(source) = &source {
            Self::equal(kind, "the destination", destination.len(), source.len(), "as many as the source has")?;
        }
        self.prepare_broadcast(source.map_or(Source::Nothing, Source::Separate), destination, root)
    }

    pub(in crate::communicator) fn prepare_gather_into<'a, T: Data>(
        &self,
        source: Memory<'a, T>,
        destination: Option<MemoryMut<'a, T>>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let block = source.len();
        self.prepare_gather(Source::Separate(source), destination, block, root)
    }

    pub(in crate::communicator) fn prepare_scatter_into<'a, T: Data>(
        &self,
        source: Option<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let block = destination.len();
        self.prepare_scatter(source.map_or(Source::Nothing, Source::Separate), destination, block, root)
    }

    pub(in crate::communicator) fn prepare_gather_in_place<'a, B: BufferMut + ?Sized>(
        &self,
        buffer: &'a mut B,
        root: usize,
    ) -> Result<Prepared<'a>> {
        if self.rank() == root {
            let buffer = (*buffer).memory_mut();
            let block = self.block(Collective::Gather, "the buffer", buffer.len())?;
            return self.prepare_gather(Source::InPlace, Some(buffer), block, root);
        }
        let buffer = (*buffer).memory();
        let block = buffer.len();
        self.prepare_gather(Source::Separate(buffer), None, block, root)
    }

    pub(in crate::communicator) fn prepare_scatter_in_place<'a, T: Data>(
        &self,
        buffer: MemoryMut<'a, T>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        if self.rank() == root {
            let block = self.block(Collective::Scatter, "the buffer", buffer.len())?;
            return self.prepare_scatter(Source::InPlace, buffer, block, root);
        }
        let block = buffer.len();
        self.prepare_scatter(Source::Nothing, buffer, block, root)
    }
}

/// Collectives with a separate count for each rank.
impl Communicator {
    pub(in crate::communicator) fn prepare_all_gather_v<'a, T: Data>(
        &self,
        source: Option<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        counts: &[usize],
    ) -> Result<Prepared<'a>> {
        let kind = Collective::AllGatherV;
        self.checked_counts(kind, "the destination", counts, destination.len())?;
        if let Some(source) = source {
            Self::equal(kind, "the source", source.len(), counts[self.rank()], "this rank's count")?;
        }
        let (total, layout) = (destination.len(), BlockLayout::Blocks(counts.to_vec()));
        self.moving(kind, None, total, source.map_or(Source::InPlace, Source::Separate), destination, layout)
    }

    pub(in crate::communicator) fn prepare_reduce_scatter_v<'a, T: Data>(
        &self,
        source: Option<Memory<'a, T>>,
        destination: MemoryMut<'a, T>,
        counts: &[usize],
        op: &Reduction<T>,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::ReduceScatterV;
        let total = source.map_or(destination.len(), |source| source.len());
        self.checked_counts(kind, "the source", counts, total)?;
        if source.is_some() {
            Self::equal(kind, "the destination", destination.len(), counts[self.rank()], "this rank's count")?;
        }
        let layout = BlockLayout::Blocks(counts.to_vec());
        self.reducing(kind, None, total, source.map_or(Source::InPlace, Source::Separate), destination, layout, op)
    }

    pub(in crate::communicator) fn prepare_gather_v<'a, T: Data>(
        &self,
        source: Memory<'a, T>,
        destination: Option<(MemoryMut<'a, T>, &[usize])>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::GatherV;
        let root_field = self.checked_root(kind, root)?;
        self.only_at_root(kind, "a destination", destination.is_some(), root)?;
        let Some((destination, counts)) = destination else {
            let layout = BlockLayout::Own(source.len());
            return self.moving(kind, root_field, 0, Source::Separate(source), None, layout);
        };
        self.checked_counts(kind, "the destination", counts, destination.len())?;
        Self::equal(kind, "the source", source.len(), counts[self.rank()], "this rank's count")?;
        self.moving(kind, root_field, 0, Source::Separate(source), destination, BlockLayout::Blocks(counts.to_vec()))
    }

    pub(in crate::communicator) fn prepare_scatter_v<'a, T: Data>(
        &self,
        source: Option<(Memory<'a, T>, &[usize])>,
        destination: MemoryMut<'a, T>,
        root: usize,
    ) -> Result<Prepared<'a>> {
        let kind = Collective::ScatterV;
        let root_field = self.checked_root(kind, root)?;
        self.only_at_root(kind, "a source", source.is_some(), root)?;
        let Some((source, counts)) = source else {
            let layout = BlockLayout::Own(destination.len());
            return self.moving(kind, root_field, 0, Source::Nothing, destination, layout);
        };
        self.checked_counts(kind, "the source", counts, source.len())?;
        Self::equal(kind, "the destination", destination.len(), counts[self.rank()], "this rank's count")?;
        self.moving(kind, root_field, 0, Source::Separate(source), destination, BlockLayout::Blocks(counts.to_vec()))
    }

    pub(in crate::communicator) fn prepare_all_to_all_v<'a, T: Data>(
        &self,
        source: Memory<'a, T>,
        send_counts: &[usize],
        destination: MemoryMut<'a, T>,
        receive_counts: &[usize],
    ) -> Result<Prepared<'a>> {
        let kind = Collective::AllToAllV;
        self.checked_counts(kind, "the source", send_counts, source.len())?;
        self.checked_counts(kind, "the destination", receive_counts, destination.len())?;
        let (own, rank) = (send_counts[self.rank()], self.rank());
        Self::equal(kind, "this rank's block in the destination", receive_counts[rank], own, "as many as this rank sends to itself")?;
        let layout = BlockLayout::Pairs { send: send_counts.to_vec(), receive: receive_counts.to_vec() };
        self.moving(kind, None, 0, Source::Separate(source), destination, layout)
    }
}
