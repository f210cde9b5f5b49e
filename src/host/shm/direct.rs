//! Large collectives on windows: ranks read each other's buffers in place, and copy nothing into slots.
//!
//! Once a group has had a window, every large call begins with a step in which each rank offers its buffers: the
//! windows that hold them, and their positions in those windows. The call is done directly if the sources of all ranks
//! lie in one window, and likewise the destinations, as far as the call needs them. Every rank has mapped such a
//! window, since it offers a part of it. Otherwise the call goes on like any other. A last step confirms that all ranks
//! are done with all buffers. [`lent`](super::lent) describes what happens to the buffers of a rank that does not reach
//! this step.

#![expect(unsafe_code, reason = "reads the buffers of peers")]

use super::chunking::{Area, Chunking, Shares, streams};
use super::group::{CallContext, Group};
use super::lent::Lent;
use super::moves::{Blocks, Memory, copy_out};
use super::window::{Offer, Side};
use crate::base::tuning::shm::TURN_BYTES;
use crate::host::abort_reason::{AbortReason, Interrupted};
use crate::host::fold::Fold;

/// The lengths of a rank's buffers in bytes; 0 for one that the call does not need.
#[derive(Debug, Clone, Copy)]
struct Lengths {
    source: usize,
    destination: usize,
}

// Common to every function below. The caller vouches for its own memory, which is accessed through the caller's own
// pointers: each rank writes to its own destination alone. A peer's buffer is one that the peer has lent for this very
// call (all have published the same fingerprint). So it stays mapped here, and holds what it held when this rank met
// its owner, for as long as this rank reads it, whatever happens to its owner (see `lent`). All ranks have agreed on
// the element type, so it holds valid elements if the peer's own are.
impl Group {
    /// Runs [`Group::all_reduce`] directly: of each piece, a rank folds its share of all sources, and copies the other
    /// shares from the ranks that have folded them. Returns `None` if not all buffers are offered.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_reduce`].
    pub(super) unsafe fn all_reduce_directly<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        bytes: usize,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<Option<()>, Interrupted> {
        let Some(mut lent) = self.offer(memory, Lengths { source: bytes, destination: bytes }, context)? else { return Ok(None) };
        let streams = streams(bytes) && memory.source != memory.destination.cast_const();
        for range in Chunking::folds(bytes, 1, fold.element_bytes(), lent.step_sizes.fold).pieces() {
            lent.go_on(context)?;
            let shares = Shares::new(range.len(), lent.ranks, fold.element_bytes());
            let mine = shares.of(lent.me);
            lent.reach_all(range.start + mine.start, mine.len(), memory.source, context)?;
            if !mine.is_empty() {
                let into = memory.destination.wrapping_add(range.start + mine.start);
                // SAFETY: no other rank writes to this share of any source. This rank writes only to its own source, if
                // that is its destination: then that input has the same address. Ranks that want the result wait for
                // the next step.
                unsafe { fold.fold(into, &lent.inputs, mine.len(), last) };
            }
            let (step, fingerprint) = (lent.next_step(), lent.fingerprint);
            lent.meet(step, fingerprint, context)?;
            for rank in 0..lent.ranks {
                let share = shares.of(rank);
                let start = range.start + share.start;
                let from = lent.reach(rank, Side::Destination, start, share.len(), context)?;
                if rank != lent.me {
                    // SAFETY: its owner has folded this share, has been met since, and no longer writes to it. It has
                    // also read this share of this rank's source, which may be the same memory as the destination.
                    unsafe { copy_out(from, memory.destination.wrapping_add(start), share.len(), streams) };
                }
            }
        }
        lent.close(context).map(Some)
    }

    /// Runs [`Group::reduce_scatter`] directly: each rank folds its block of all sources.
    ///
    /// # Safety
    ///
    /// As for [`Group::reduce_scatter`].
    pub(super) unsafe fn reduce_scatter_directly<F: Fold + ?Sized>(
        &mut self,
        memory: Memory,
        blocks: Blocks<'_>,
        fold: &F,
        last: bool,
        context: &CallContext<'_>,
    ) -> Result<Option<()>, Interrupted> {
        let whole = (0..self.ranks).map(|rank| blocks.offset(rank) + blocks.len(rank)).max().unwrap_or(0);
        let Some(mut lent) = self.offer(memory, Lengths { source: whole, destination: 0 }, context)? else { return Ok(None) };
        let (offset, len) = (blocks.offset(lent.me), blocks.len(lent.me));
        for range in Chunking::folds(len, 1, fold.element_bytes(), TURN_BYTES).pieces().filter(|range| !range.is_empty()) {
            lent.go_on(context)?;
            lent.reach_all(offset + range.start, range.len(), memory.source, context)?;
            // SAFETY: no other rank writes to this block of any source. This rank writes only to its own source, if
            // that is its destination: then that input has the same address.
            unsafe { fold.fold(memory.destination.wrapping_add(range.start), &lent.inputs, range.len(), last) };
        }
        lent.close(context).map(Some)
    }

    /// Runs [`Group::broadcast`] directly: every rank copies from the root. The other ranks offer their destination, to
    /// show that they have the root's window.
    ///
    /// # Safety
    ///
    /// As for [`Group::broadcast`].
    pub(super) unsafe fn broadcast_directly(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: usize,
        context: &CallContext<'_>,
    ) -> Result<Option<()>, Interrupted> {
        let source = if self.me == root { memory.source } else { memory.destination.cast_const() };
        let Some(mut lent) = self.offer(Memory { source, ..memory }, Lengths { source: bytes, destination: 0 }, context)? else {
            return Ok(None);
        };
        let from = lent.reach(root, Side::Source, 0, bytes, context)?;
        let from = if lent.me == root { memory.source } else { from.cast_const() };
        // SAFETY: the root's source is lent. The root writes to its destination alone, which does not overlap the
        // source, or is the same and left unchanged. The destination is this rank's own.
        unsafe { lent.pull(from, memory.destination, bytes, false, context)? };
        lent.close(context).map(Some)
    }

    /// Runs [`Group::all_gather`] directly: every rank copies from every rank.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_gather`].
    pub(super) unsafe fn all_gather_directly(
        &mut self,
        memory: Memory,
        blocks: Blocks<'_>,
        context: &CallContext<'_>,
    ) -> Result<Option<()>, Interrupted> {
        let Some(mut lent) = self.offer(memory, Lengths { source: blocks.len(self.me), destination: 0 }, context)? else {
            return Ok(None);
        };
        let streams = streams(blocks.longest().saturating_mul(lent.ranks));
        let (ranks, me) = (lent.ranks, lent.me);
        for rank in (0..ranks).map(|distance| (me + distance) % ranks) {
            let own = rank == me;
            let theirs = lent.reach(rank, Side::Source, 0, blocks.len(rank), context)?;
            let from = if own { memory.source } else { theirs.cast_const() };
            // SAFETY: the source of another rank is lent. If it is a block of its owner's destination, the owner writes
            // only the others. The destination is this rank's, and its own block of that may be its source.
            unsafe { lent.pull(from, memory.destination.wrapping_add(blocks.offset(rank)), blocks.len(rank), streams, context)? };
        }
        lent.close(context).map(Some)
    }

    /// Runs [`Group::all_to_all`] directly, if source and destination do not overlap on this rank.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_to_all`].
    pub(super) unsafe fn all_to_all_directly(
        &mut self,
        memory: Memory,
        bytes: usize,
        context: &CallContext<'_>,
    ) -> Result<Option<()>, Interrupted> {
        // In place, a block would be overwritten before its reader has read it.
        let offered = if memory.source == memory.destination.cast_const() { 0 } else { bytes * self.ranks };
        let Some(mut lent) = self.offer(memory, Lengths { source: offered, destination: 0 }, context)? else { return Ok(None) };
        let streams = streams(bytes.saturating_mul(lent.ranks));
        let (ranks, me) = (lent.ranks, lent.me);
        for rank in (0..ranks).map(|distance| (me + distance) % ranks) {
            let theirs = lent.reach(rank, Side::Source, bytes * me, bytes, context)?;
            // SAFETY: the source is lent by a rank that writes to another buffer (what is in place is not offered). The
            // destination is this rank's own, and does not overlap it.
            unsafe { lent.pull(theirs, memory.destination.wrapping_add(bytes * rank), bytes, streams, context)? };
        }
        lent.close(context).map(Some)
    }

    /// Runs the first step: publishes where this rank's buffers lie, and reads where the others' do. Returns `None`
    /// unless all sources lie in one window, and all destinations too if they have a length. Every rank gets the same
    /// answer.
    fn offer(&mut self, memory: Memory, lengths: Lengths, context: &CallContext<'_>) -> Result<Option<Lent<'_>>, Interrupted> {
        if !self.has_had_windows() {
            return Ok(None);
        }
        let place = |group: &Self, address, bytes| if bytes == 0 { None } else { group.find_window(address, bytes) };
        let source = place(self, memory.source, lengths.source);
        let offer = Offer::new(source, place(self, memory.destination, lengths.destination));
        let fingerprint = self.enter(context)?;
        let step = self.next_step();
        // SAFETY: this rank's own header of this step. No rank reads it before it is published, and none still reads it
        // for the step before last, which it also serves (see `flags`). It is aligned to 8 bytes, with room for an
        // offer (asserted above).
        unsafe { self.area(self.me, step, Area::Head).cast::<Offer>().write(offer) };
        let mut lent = Lent::new(self, offer, fingerprint);
        lent.meet(step, fingerprint, context)?;
        let (ranks, me) = (lent.ranks, lent.me);
        for rank in (0..ranks).filter(|rank| *rank != me) {
            // SAFETY: this rank has met the other one in this step, so its header was written before and is left alone
            // until this rank publishes another step. An offer consists of integers, so any bytes are valid; `reach`
            // checks them.
            lent.offers[rank] = unsafe { lent.area(rank, step, Area::Head).cast::<Offer>().read() };
        }
        if lent.all_offer(Side::Source) && (lengths.destination == 0 || lent.all_offer(Side::Destination)) {
            return Ok(Some(lent));
        }
        lent.unread();
        Ok(None)
    }

    /// Whether this buffer of every rank lies in the same window. Every rank gets the same answer.
    fn all_offer(&self, side: Side) -> bool {
        let window = self.offers[0].window(side);
        window != 0 && self.offers.iter().all(|offer| offer.window(side) == window)
    }

    /// Copies in parts, since a copy may be so long that the communicator ends meanwhile.
    ///
    /// # Safety
    ///
    /// As [`copy_out`].
    unsafe fn pull(
        &mut self,
        from: *const u8,
        to: *mut u8,
        bytes: usize,
        streams: bool,
        context: &CallContext<'_>,
    ) -> Result<(), Interrupted> {
        for start in (0..bytes).step_by(TURN_BYTES) {
            self.go_on(context)?;
            // SAFETY: a part of what the caller vouches for.
            unsafe { copy_out(from.wrapping_add(start), to.wrapping_add(start), TURN_BYTES.min(bytes - start), streams) };
        }
        Ok(())
    }

    /// Ends the call if the communicator has ended meanwhile.
    fn go_on(&mut self, context: &CallContext<'_>) -> Result<(), Interrupted> {
        match context.health.abort_reason().copied().or_else(|| self.region.abort_reason()) {
            None => Ok(()),
            Some(abort_reason) => Err(self.fail(abort_reason.into(), context.call.fingerprint(), context)),
        }
    }

    /// Sets the inputs of a fold: this part of every source, with this rank's own through the caller's pointer.
    fn reach_all(&mut self, start: usize, bytes: usize, own: *const u8, context: &CallContext<'_>) -> Result<(), Interrupted> {
        for rank in 0..self.ranks {
            self.inputs[rank] = self.reach(rank, Side::Source, start, bytes, context)?;
        }
        self.inputs[self.me] = own.wrapping_add(start);
        Ok(())
    }

    /// Returns where a part of a rank's buffer lies here. A position that does not fit ends the group: the peer's
    /// memory is corrupt.
    fn reach(&mut self, rank: usize, side: Side, start: usize, bytes: usize, context: &CallContext<'_>) -> Result<*mut u8, Interrupted> {
        match self.offers[rank].place(side, start).and_then(|place| self.in_window(rank, place, bytes)) {
            Some(address) => Ok(address),
            None => Err(self.fail(AbortReason::Failed { rank: self.globals[rank] }.into(), context.call.fingerprint(), context)),
        }
    }
}
