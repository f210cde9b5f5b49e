//! Collectives that fold: all-reduce, reduce and reduce-scatter.
//!
//! Every fold takes the inputs of all ranks at once, in local order, so that the bits are the same on every rank,
//! however the vector is cut.

#![expect(unsafe_code, reason = "folds the caller's raw memory and the mapped areas")]

use super::chunking::{Area, Chunking, Shares, in_shares, streams};
use super::group::{CallContext, Group};
use super::layout::MAX_ELEMENT_BYTES;
use super::moves::{Blocks, Memory, copy_out, is_large, within};
use crate::base::tuning::shm::DIRECT_FROM_BYTES;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::copy::copy;
use crate::host::fold::Fold;

// Common to every function below. The caller vouches for its own memory. Areas lie in the mapping, are as long as the
// chunking states, and are aligned to the element or to 64 bytes, whichever is less (tested in `chunking`). A rank
// writes its own area before it publishes the step, and reads the others' after `meet` and before its next `publish`,
// as `flags` requires. The areas are initialised from the beginning (a file's pages), and hold what the others have
// written for this call; a fold requires no more.
impl Group {
    /// Folds all ranks' vectors, and gives the result to every rank. `last`: nothing more is folded into the result
    /// elsewhere.
    ///
    /// # Safety
    ///
    /// Source and destination are the same, or share no byte. Both hold `bytes` bytes of whole elements, aligned to the
    /// element.
    #[inline]
    pub(crate) unsafe fn all_reduce<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        bytes: usize,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        let area = Area::for_fold(bytes, 1, fold.element_bytes());
        if area == Area::Slot {
            // SAFETY: this function's caller promised what the callee requires.
            return unsafe { self.fold_large(memory, bytes, None, fold, last, context) };
        }
        let fingerprint = self.enter(context)?;
        let step = self.next_step();
        // SAFETY: the caller's source; this rank's area of a step that it has not published, which no rank reads now.
        unsafe { copy(memory.source, self.area(self.me, step, area), bytes) };
        self.meet(step, fingerprint, context)?;
        for rank in 0..self.ranks {
            self.inputs[rank] = self.area(rank, step, area);
        }
        if bytes > 0 {
            // SAFETY: the inputs are areas of a step that all ranks have published. They hold valid elements, and are
            // left alone until this rank goes on. The destination is the caller's, and does not overlap them.
            unsafe { fold.fold(memory.destination, &self.inputs, bytes, last) };
        }
        Ok(())
    }

    /// Folds all ranks' vectors, and gives the result to the root. The other ranks' destinations are not touched.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_reduce`]; for the destination, only at the root.
    pub(crate) unsafe fn reduce<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: usize,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { self.fold_large(memory, bytes, Some(root), fold, last, context) }
    }

    /// Chooses which ranks fold: every rank that wants the result, or each rank a share of it.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_reduce`]; with a root, only its destination is used.
    unsafe fn fold_large<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: Option<usize>,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        self.check_element(fold.element_bytes(), context)?;
        if root.is_none()
            && bytes >= DIRECT_FROM_BYTES
            // SAFETY: this function's caller promised what the callee requires.
            && let Some(()) = unsafe { self.all_reduce_directly(memory, bytes, fold, last, context)? }
        {
            return Ok(());
        }
        if in_shares(bytes) {
            // SAFETY: this function's caller promised what the callee requires.
            unsafe { self.fold_shares(memory, bytes, root, fold, last, context) }
        } else {
            // SAFETY: this function's caller promised what the callee requires.
            unsafe { self.fold_whole(memory, bytes, root, fold, last, context) }
        }
    }

    /// Folds everything on every rank that wants the result.
    ///
    /// # Safety
    ///
    /// As for [`Group::fold_large`].
    unsafe fn fold_whole<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: Option<usize>,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        let fingerprint = self.enter(context)?;
        let chunking = Chunking::folds(bytes, 1, fold.element_bytes(), self.step_sizes.fold);
        for range in chunking.pieces() {
            let step = self.next_step_of(&chunking);
            let source = memory.source.wrapping_add(range.start);
            if root != Some(self.me) {
                // SAFETY: the caller's source; this rank's area of a step that it has not published, which no rank
                // reads now.
                unsafe { self.stores.copy(source, self.area(self.me, step, chunking.area), range.len()) };
            }
            self.meet(step, fingerprint, context)?;
            if range.is_empty() || root.is_some_and(|root| root != self.me) {
                continue;
            }
            self.set_inputs(step, chunking.area, 0, source);
            // SAFETY: the others' inputs are areas of a step that all ranks have published, and left alone until this
            // rank goes on. This rank's is its own source, which may be the destination.
            unsafe { fold.fold(memory.destination.add(range.start), &self.inputs, range.len(), last) };
        }
        Ok(())
    }

    /// Folds this rank's share of every piece into its area of the next step. The ranks that want it copy it from
    /// there.
    ///
    /// # Safety
    ///
    /// As for [`Group::fold_large`].
    unsafe fn fold_shares<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: Option<usize>,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        let fingerprint = self.enter(context)?;
        let chunking = Chunking::folds(bytes, 1, fold.element_bytes(), self.step_sizes.fold);
        let streams = streams(bytes) && memory.source != memory.destination.cast_const() && !self.stores.passes_cache();
        let keeps = root.is_none_or(|root| root == self.me);
        for range in chunking.pieces() {
            let shares = Shares::new(range.len(), self.ranks, fold.element_bytes());
            let mine = shares.of(self.me);
            let source = memory.source.wrapping_add(range.start);
            let destination = memory.destination.wrapping_add(range.start);

            let step = self.next_step_of(&chunking);
            let area = self.area(self.me, step, Area::Slot);
            // SAFETY: the caller's source; this rank's area of a step that it has not published, which no rank reads
            // now. The part that is not copied is this rank's own share, which no other rank reads at all.
            unsafe {
                self.stores.copy(source, area, mine.start);
                self.stores.copy(source.wrapping_add(mine.end), area.add(mine.end), range.len() - mine.end);
            }
            self.meet(step, fingerprint, context)?;

            self.set_inputs(step, Area::Slot, mine.start, source.wrapping_add(mine.start));
            let step = self.next_step_of(&chunking);
            let result = self.area(self.me, step, Area::Slot).wrapping_add(mine.start);
            if !mine.is_empty() {
                let kept = destination.wrapping_add(mine.start);
                // SAFETY: the others' inputs are areas of a step that all ranks have published, and left alone until
                // this rank publishes the next. This rank's is its own source, which may be where the result is kept.
                // The result lies in this rank's area of the next step, which no rank reads before it is published.
                unsafe {
                    if keeps && !streams {
                        fold.fold_to_two((kept, result), self.stores.way(), &self.inputs, mine.len(), last);
                    } else {
                        fold.fold(result, &self.inputs, mine.len(), last);
                    }
                }
            }
            self.publish(step, fingerprint);
            if keeps && streams {
                // SAFETY: the caller's destination; this rank's own area, which it alone writes. If the source is the
                // same memory, this share of it has been folded.
                unsafe { copy_out(result, destination.wrapping_add(mine.start), mine.len(), true) };
            }
            self.arrive(step, fingerprint, context)?;
            for rank in (0..self.ranks).filter(|rank| keeps && *rank != self.me) {
                let share = shares.of(rank);
                let from = self.area(rank, step, Area::Slot).wrapping_add(share.start);
                // SAFETY: the caller's destination; an area whose owner has published it for this step, and leaves it
                // alone until this rank goes on.
                unsafe { copy_out(from, destination.wrapping_add(share.start), share.len(), streams) };
            }
        }
        Ok(())
    }

    /// Folds all ranks' vectors, and delivers block `r` of the result to rank `r`. `blocks` describes the source. In
    /// place, the destination is this rank's block of the source.
    ///
    /// # Safety
    ///
    /// The source holds every block, and the destination holds this rank's. All blocks consist of whole elements and
    /// are aligned to them, and an element's alignment is at most a page. The two share no byte, or the destination is
    /// this rank's block of the source.
    pub(crate) unsafe fn reduce_scatter<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        blocks: Blocks<'_>,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        self.check_element(fold.element_bytes(), context)?;
        if is_large(&blocks, self.ranks)
            // SAFETY: this function's caller promised what the callee requires.
            && let Some(()) = unsafe { self.reduce_scatter_directly(memory, blocks, fold, last, context)? }
        {
            return Ok(());
        }
        let fingerprint = self.enter(context)?;
        let chunking = Chunking::folds(blocks.longest(), self.ranks, fold.element_bytes(), self.step_sizes.reduce_scatter);
        for range in chunking.pieces() {
            // All owners in one step, unless elements are so large that their pieces do not fit into a slot together.
            for first in (0..self.ranks).step_by(chunking.width) {
                let owners = first..self.ranks.min(first + chunking.width);
                let step = self.next_step_of(&chunking);
                let area = self.area(self.me, step, chunking.area);
                for owner in owners.clone().filter(|owner| *owner != self.me) {
                    let (start, len) = within(&range, blocks.len(owner));
                    let from = memory.source.wrapping_add(blocks.offset(owner) + start);
                    // SAFETY: the caller's source; this rank's area of a step that it has not published, which no rank
                    // reads now.
                    unsafe { self.stores.copy(from, area.add((owner - first) * chunking.piece), len) };
                }
                self.meet(step, fingerprint, context)?;
                let (start, len) = within(&range, blocks.len(self.me));
                if !owners.contains(&self.me) || len == 0 {
                    continue;
                }
                let own = memory.source.wrapping_add(blocks.offset(self.me) + start);
                self.set_inputs(step, chunking.area, (self.me - first) * chunking.piece, own);
                // SAFETY: the others' inputs are areas of a step that all ranks have published, and left alone until
                // this rank goes on. This rank's is its own source, of which the destination may be this very block.
                unsafe { fold.fold(memory.destination.add(start), &self.inputs, len, last) };
            }
        }
        Ok(())
    }

    /// Sets the inputs of a fold: what each rank published at `offset` of its area, and this rank's own in place.
    fn set_inputs(&mut self, step: u64, area: Area, offset: usize, own: *const u8) {
        for rank in 0..self.ranks {
            self.inputs[rank] = self.area(rank, step, area).wrapping_add(offset);
        }
        self.inputs[self.me] = own;
    }

    /// Refuses elements that do not fit into a slot. The outcome is the same on every rank that makes the same call.
    fn check_element(&mut self, element_bytes: usize, context: &CallContext<'_>) -> Result<(), Interrupted> {
        if element_bytes <= MAX_ELEMENT_BYTES {
            return Ok(());
        }
        crate::base::event::error!(element_bytes, limit = MAX_ELEMENT_BYTES, "an element is too large to be folded in shared memory");
        let stop = AbortReason::Failed { rank: self.globals[self.me] }.into();
        Err(self.fail(stop, context.call.fingerprint(), context))
    }
}
