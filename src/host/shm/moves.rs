//! Collectives that move bytes: barrier, broadcast, gathers, scatter and all-to-all.

#![expect(unsafe_code, reason = "copies between the caller's raw memory and the mapped areas")]

use super::chunking::{Area, Chunking, streams};
use super::group::{CallContext, Group, GroupState};
use super::layout::LINES_BYTES;
use crate::host::abort_reason::Interrupted;
use crate::host::copy::{copy, copy_streaming};

/// The memory that a call reads and writes. The pointers are raw, since in the in-place forms they point to the same
/// memory. Either may be null or dangling if this rank does not use it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) source: *const u8,
    pub(crate) destination: *mut u8,
}

/// The blocks of a vector, one per rank, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks<'a> {
    /// Blocks of equal length, side by side.
    Equal(usize),
    /// Blocks that each have their own length and offset; no two share a byte.
    Varied { lengths: &'a [usize], offsets: &'a [usize] },
}

impl Blocks<'_> {
    /// Returns the length of a rank's block.
    pub(super) fn len(&self, rank: usize) -> usize {
        match self {
            Blocks::Equal(bytes) => *bytes,
            Blocks::Varied { lengths, .. } => lengths[rank],
        }
    }

    /// Returns where a rank's block begins.
    pub(super) fn offset(&self, rank: usize) -> usize {
        match self {
            Blocks::Equal(bytes) => bytes * rank,
            Blocks::Varied { offsets, .. } => offsets[rank],
        }
    }

    /// Returns the length of the longest block.
    pub(super) fn longest(&self) -> usize {
        match self {
            Blocks::Equal(bytes) => *bytes,
            Blocks::Varied { lengths, .. } => lengths.iter().copied().max().unwrap_or(0),
        }
    }
}

/// Copies to the caller's destination, with stores that bypass the cache if the call `streams`.
///
/// # Safety
///
/// As [`copy`].
#[inline]
pub(super) unsafe fn copy_out(from: *const u8, to: *mut u8, bytes: usize, streams: bool) {
    // SAFETY: this function's caller promised what the callees require.
    unsafe { if streams { copy_streaming(from, to, bytes) } else { copy(from, to, bytes) } }
}

/// Whether blocks are so large that the call looks for windows.
#[inline]
pub(super) fn is_large(blocks: &Blocks<'_>, ranks: usize) -> bool {
    blocks.longest().saturating_mul(ranks) > LINES_BYTES
}

/// Returns the part of `range` that lies in a block of `len` bytes: its start and its length.
pub(super) fn within(range: &std::ops::Range<usize>, len: usize) -> (usize, usize) {
    let start = range.start.min(len);
    (start, range.end.min(len) - start)
}

// Common to every function below. The caller vouches for its own memory. Areas lie in the mapping and are as long as
// the chunking states (tested in `chunking`). A rank writes its own before it publishes the step, and reads the others'
// after `meet` and before its next `publish`, as `flags` requires.
impl Group {
    /// Returns once every rank has entered. After a deadline, the same barrier may be retried, or another call made.
    pub(crate) fn barrier(&mut self, context: &CallContext<'_>) -> Result<(), Interrupted> {
        if self.state == GroupState::Unfinished(context.call.fingerprint()) {
            return self.resume(context);
        }
        let fingerprint = self.enter(context)?;
        let step = self.next_step();
        self.meet(step, fingerprint, context)
    }

    /// Copies the root's `bytes` to every rank.
    ///
    /// # Safety
    ///
    /// The root's source is readable and every destination writable for `bytes` bytes; the root's source and
    /// destination may be the same.
    pub(crate) unsafe fn broadcast(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: usize,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        if bytes > LINES_BYTES
            // SAFETY: this function's caller promised what the callee requires.
            && let Some(()) = unsafe { self.broadcast_directly(memory, bytes, root, context)? }
        {
            return Ok(());
        }
        let fingerprint = self.enter(context)?;
        let chunking = Chunking::moves(bytes, 1, self.step_sizes.broadcast(bytes));
        for range in chunking.pieces() {
            let step = self.next_step_of(&chunking);
            let area = self.area(root, step, chunking.area);
            if self.me == root {
                // SAFETY: the caller's source; this rank's area of a step that it has not published, which no rank
                // reads now.
                unsafe { self.stores.copy(memory.source.wrapping_add(range.start), area, range.len()) };
            }
            let destination = memory.destination.wrapping_add(range.start);
            let keep = |me| {
                if me == root {
                    // SAFETY: the caller's source and destination at the root, which are the same or do not overlap.
                    unsafe { copy(memory.source.wrapping_add(range.start), destination, range.len()) };
                }
            };
            self.meet_meanwhile(step, fingerprint, context, range.start > 0, keep)?;
            if self.me != root {
                // SAFETY: the caller's destination; the root's area, which it has published for this step, and leaves
                // alone until this rank goes on.
                unsafe { copy(area, destination, range.len()) };
            }
        }
        Ok(())
    }

    /// Copies every rank's block to every rank. `blocks` describes the destination. In place, the source is this rank's
    /// block of the destination.
    ///
    /// # Safety
    ///
    /// The source is readable for this rank's block, and the destination writable for every block. The two share no
    /// byte, or the source is this rank's block of the destination.
    pub(crate) unsafe fn all_gather(&mut self, memory: Memory, blocks: Blocks<'_>, context: &CallContext<'_>) -> Result<(), Interrupted> {
        if is_large(&blocks, self.ranks)
            // SAFETY: this function's caller promised what the callee requires.
            && let Some(()) = unsafe { self.all_gather_directly(memory, blocks, context)? }
        {
            return Ok(());
        }
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { self.gather_to(None, memory, blocks, context) }
    }

    /// Copies every rank's block of `bytes` to the root, in rank order. The other ranks' destinations are not touched.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_gather`]; for the destination, only at the root.
    pub(crate) unsafe fn gather(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: usize,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { self.gather_to(Some(root), memory, Blocks::Equal(bytes), context) }
    }

    /// Copies every rank's block to the root, or to every rank.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_gather`]; with a root, only its destination is used.
    unsafe fn gather_to(
        &mut self,
        root: Option<usize>,
        memory: Memory,
        blocks: Blocks<'_>,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        let fingerprint = self.enter(context)?;
        let streams = streams(blocks.longest().saturating_mul(self.ranks));
        let chunking = Chunking::moves(blocks.longest(), 1, self.step_sizes.gather(blocks.longest()));
        let keeps = root.is_none_or(|root| root == self.me);
        for range in chunking.pieces() {
            let step = self.next_step_of(&chunking);
            let (start, len) = within(&range, blocks.len(self.me));
            let source = memory.source.wrapping_add(start);
            if root != Some(self.me) {
                // SAFETY: the caller's source; this rank's area of a step that it has not published, which no rank
                // reads now.
                unsafe { self.stores.copy(source, self.area(self.me, step, chunking.area), len) };
            }
            let keep = |me| {
                if keeps {
                    // SAFETY: the caller's destination, in which this rank's own block is the source or does not
                    // overlap it.
                    unsafe { copy_out(source, memory.destination.wrapping_add(blocks.offset(me) + start), len, streams) };
                }
            };
            self.meet_meanwhile(step, fingerprint, context, range.start > 0, keep)?;
            for rank in (0..self.ranks).filter(|rank| keeps && *rank != self.me) {
                let (start, len) = within(&range, blocks.len(rank));
                let destination = memory.destination.wrapping_add(blocks.offset(rank) + start);
                // SAFETY: the caller's destination; an area whose owner has published it for this step, and leaves it
                // alone until this rank goes on.
                unsafe { copy_out(self.area(rank, step, chunking.area), destination, len, streams) };
            }
        }
        Ok(())
    }

    /// Copies the root's block of `bytes` for each rank to that rank. In place, the root's destination is its block of
    /// the source.
    ///
    /// # Safety
    ///
    /// The root's source is readable for a block per rank; every destination is writable for one.
    pub(crate) unsafe fn scatter(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: usize,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { self.scatter_from(Some(root), memory, bytes, context) }
    }

    /// Copies block `j` of rank `i` to block `i` of rank `j`, in blocks of `bytes`. Source and destination may be the
    /// same.
    ///
    /// # Safety
    ///
    /// The source is readable, and the destination writable, for a block per rank.
    pub(crate) unsafe fn all_to_all(&mut self, memory: Memory, bytes: usize, context: &CallContext<'_>) -> Result<(), Interrupted> {
        if is_large(&Blocks::Equal(bytes), self.ranks)
            // SAFETY: this function's caller promised what the callee requires.
            && let Some(()) = unsafe { self.all_to_all_directly(memory, bytes, context)? }
        {
            return Ok(());
        }
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { self.scatter_from(None, memory, bytes, context) }
    }

    /// Copies a block to each rank, from the root or from every rank. This is correct in place: a step first publishes
    /// one range of every block of this rank, and only then overwrites that range in any block.
    ///
    /// # Safety
    ///
    /// As for [`Group::scatter`] with a root, for [`Group::all_to_all`] without.
    unsafe fn scatter_from(
        &mut self,
        root: Option<usize>,
        memory: Memory,
        bytes: usize,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        let fingerprint = self.enter(context)?;
        let streams = streams(bytes.saturating_mul(self.ranks));
        let chunking = Chunking::moves(bytes, self.ranks, self.step_sizes.scatter);
        for range in chunking.pieces() {
            let step = self.next_step_of(&chunking);
            let sends = root.is_none_or(|root| root == self.me);
            // The destination of a rank's piece: blocks lie side by side, unless there is only the root's.
            let destination = |from| memory.destination.wrapping_add(if root.is_some() { 0 } else { bytes * from } + range.start);
            if sends {
                // SAFETY: the caller's source holds a block for each rank, and the step is published further down.
                unsafe { self.publish_blocks(memory.source, bytes, &range, &chunking, step) };
            }
            let keep = |me| {
                if sends {
                    let own = memory.source.wrapping_add(bytes * me + range.start);
                    // SAFETY: the caller's own memory, which is the same or does not overlap. Of this range, all blocks
                    // for others have been copied.
                    unsafe { copy_out(own, destination(me), range.len(), streams) };
                }
            };
            self.meet_meanwhile(step, fingerprint, context, range.start > 0, keep)?;
            for from in root.map_or(0..self.ranks, |root| root..root + 1).filter(|from| *from != self.me) {
                let piece = self.area(from, step, chunking.area).wrapping_add(chunking.piece * self.me);
                // SAFETY: the caller's destination; an area whose owner has published it for this step, and leaves it
                // alone until this rank goes on.
                unsafe { copy_out(piece, destination(from), range.len(), streams) };
            }
        }
        Ok(())
    }

    /// Writes a range of the block for each other rank to this rank's area, side by side.
    ///
    /// # Safety
    ///
    /// `source` is readable for a block of `bytes` per rank; `step` is not published yet.
    unsafe fn publish_blocks(&mut self, source: *const u8, bytes: usize, range: &std::ops::Range<usize>, chunking: &Chunking, step: u64) {
        let area: *mut u8 = self.area(self.me, step, chunking.area);
        debug_assert!(chunking.width == self.ranks && (chunking.area == Area::Slot || chunking.piece == bytes));
        for to in (0..self.ranks).filter(|to| *to != self.me) {
            // SAFETY: the source lies inside the caller's block for that rank, and the target inside this rank's area,
            // which has room for all ranks' pieces.
            unsafe { self.stores.copy(source.add(bytes * to + range.start), area.add(chunking.piece * to), range.len()) };
        }
    }
}
