//! Large collectives on windows: ranks read and write each other's buffers where they lie, and copy nothing into slots.
//!
//! Once a group has had a window, every large call begins with a step in which each rank offers its buffers: which windows they lie in,
//! and where. The call is done directly if all buffers that are needed lie in one window each, which every rank then has mapped, since
//! it offers a part of it. Otherwise it goes on as any other. A last step says that everybody is done with everybody's buffers.

#![expect(unsafe_code, reason = "reads and writes the buffers of peers")]

use super::cut::{Shares, streams};
use super::group::Group;
use super::lane::{Area, Fingerprint};
use super::layout::HEAD_BYTES;
use super::moves::{Blocks, Memory, deliver};
use super::steps::Terms;
use super::window::Place;
use crate::host::copy::{copy, copy_streaming};
use crate::host::fold::Fold;
use crate::host::notice::{Notice, Stop};

/// How much of a share is folded before it goes to the other ranks: what stays in the first-level cache.
const BLOCK_BYTES: usize = 16 << 10;

/// What a rank says of its source and its destination: the windows they lie in, 0 for none, and where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Offer {
    windows: [u32; 2],
    offsets: [u64; 2],
}

const _: () = assert!(size_of::<Offer>() == HEAD_BYTES, "an offer travels in a lane's header");

/// One of a rank's two buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
enum Side {
    Source = 0,
    Destination = 1,
}

impl Offer {
    fn new(source: Option<Place>, destination: Option<Place>) -> Self {
        let places = [source, destination];
        Self {
            windows: places.map(|place| place.map_or(0, |place| place.window)),
            offsets: places.map(|place| place.map_or(0, |place| place.offset as u64)),
        }
    }

    fn window(&self, side: Side) -> u32 {
        self.windows[side as usize]
    }
}

/// A rank's buffers, as lengths in bytes; 0 for one that the call does not need.
#[derive(Debug, Clone, Copy)]
struct Lengths {
    source: usize,
    destination: usize,
}

// Common to every function below. The caller vouches for its own memory. A peer's buffer is one that the peer has offered for this very
// call (all have published the same fingerprint), so that it is borrowed there until the call ends, which it does not before this rank
// has published the last step. Who writes what is said at each.
impl Group {
    /// As [`Group::all_reduce`]: each rank folds its share of all sources, and writes it to all destinations. `None` where the buffers
    /// are not all offered.
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
        terms: &Terms<'_>,
    ) -> Result<Option<()>, Stop> {
        if !self.has_had_windows() {
            return Ok(None);
        }
        let fingerprint = self.offer(memory, Lengths { source: bytes, destination: bytes }, terms)?;
        if !self.all_offer(Side::Source) || !self.all_offer(Side::Destination) {
            return Ok(None);
        }
        let (ranks, me) = (self.ranks, self.me);
        let mine = Shares::new(bytes, ranks, fold.element_bytes()).of(me);
        let block = (BLOCK_BYTES / fold.element_bytes()).max(1) * fold.element_bytes();
        // One that is also a source is in the cache when it is written.
        let streams = streams(bytes) && memory.source != memory.destination.cast_const();
        for start in mine.clone().step_by(block) {
            let len = block.min(mine.end - start);
            for rank in 0..ranks {
                self.inputs[rank] = self.reach(rank, Side::Source, start, len, terms)?;
            }
            // The first result is made where it stays in the cache, for the copies to the others.
            let made = if streams { self.area(self.me, self.step, Area::Slot) } else { memory.destination.wrapping_add(start) };
            // SAFETY: this rank alone reads or writes this share of anybody's buffers; made is the own destination, which is the own
            // source or apart from all, or the own slot, of which nobody reads in this call.
            unsafe { fold.fold(made, &self.inputs, len, last) };
            for rank in (0..ranks).filter(|rank| streams || *rank != me) {
                let to = self.reach(rank, Side::Destination, start, len, terms)?;
                // SAFETY: as above.
                unsafe { if streams { copy_streaming(made, to, len) } else { copy(made, to, len) } };
            }
        }
        self.close_directly(fingerprint, terms)
    }

    /// As [`Group::reduce_scatter`]: each rank folds its block of all sources.
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
        terms: &Terms<'_>,
    ) -> Result<Option<()>, Stop> {
        if !self.has_had_windows() {
            return Ok(None);
        }
        let whole = (0..self.ranks).map(|rank| blocks.offset(rank) + blocks.len(rank)).max().unwrap_or(0);
        let fingerprint = self.offer(memory, Lengths { source: whole, destination: 0 }, terms)?;
        if !self.all_offer(Side::Source) {
            return Ok(None);
        }
        let (offset, len) = (blocks.offset(self.me), blocks.len(self.me));
        for rank in 0..self.ranks {
            self.inputs[rank] = self.reach(rank, Side::Source, offset, len, terms)?;
        }
        if len > 0 {
            // SAFETY: nobody writes to this block of anybody's source but this rank to its own, in place, where it is an input; the
            // destination is apart otherwise.
            unsafe { fold.fold(memory.destination, &self.inputs, len, last) };
        }
        self.close_directly(fingerprint, terms)
    }

    /// As [`Group::broadcast`]: everyone copies from the root. Those beside the root offer their destination, to show that they have the
    /// root's window.
    ///
    /// # Safety
    ///
    /// As for [`Group::broadcast`].
    pub(super) unsafe fn broadcast_directly(
        &mut self,
        memory: Memory,
        bytes: usize,
        root: usize,
        terms: &Terms<'_>,
    ) -> Result<Option<()>, Stop> {
        if !self.has_had_windows() {
            return Ok(None);
        }
        let source = if self.me == root { memory.source } else { memory.destination.cast_const() };
        let fingerprint = self.offer(Memory { source, ..memory }, Lengths { source: bytes, destination: 0 }, terms)?;
        if !self.all_offer(Side::Source) {
            return Ok(None);
        }
        let from = self.reach(root, Side::Source, 0, bytes, terms)?;
        let from = if self.me == root { memory.source } else { from.cast_const() };
        // SAFETY: nobody writes to the root's source; the destination is this rank's own.
        unsafe { deliver(from, memory.destination, bytes, streams(bytes)) };
        self.close_directly(fingerprint, terms)
    }

    /// As [`Group::all_gather`]: everyone copies from everyone.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_gather`].
    pub(super) unsafe fn all_gather_directly(&mut self, memory: Memory, blocks: Blocks<'_>, terms: &Terms<'_>) -> Result<Option<()>, Stop> {
        if !self.has_had_windows() {
            return Ok(None);
        }
        let fingerprint = self.offer(memory, Lengths { source: blocks.len(self.me), destination: 0 }, terms)?;
        if !self.all_offer(Side::Source) {
            return Ok(None);
        }
        let streams = streams(blocks.longest().saturating_mul(self.ranks));
        let (ranks, me) = (self.ranks, self.me);
        for rank in (0..ranks).map(|distance| (me + distance) % ranks) {
            let own = rank == self.me;
            let theirs = self.reach(rank, Side::Source, 0, blocks.len(rank), terms)?;
            let from = if own { memory.source } else { theirs.cast_const() };
            // SAFETY: nobody writes to a source; the destination is this rank's own, where its own block may be the source.
            unsafe { deliver(from, memory.destination.wrapping_add(blocks.offset(rank)), blocks.len(rank), streams) };
        }
        self.close_directly(fingerprint, terms)
    }

    /// As [`Group::all_to_all`], where source and destination are apart on this rank.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_to_all`].
    pub(super) unsafe fn all_to_all_directly(&mut self, memory: Memory, bytes: usize, terms: &Terms<'_>) -> Result<Option<()>, Stop> {
        if !self.has_had_windows() {
            return Ok(None);
        }
        // In place a block would be overwritten before its reader has come.
        let offered = if memory.source == memory.destination.cast_const() { 0 } else { bytes * self.ranks };
        let fingerprint = self.offer(memory, Lengths { source: offered, destination: 0 }, terms)?;
        if !self.all_offer(Side::Source) {
            return Ok(None);
        }
        let streams = streams(bytes.saturating_mul(self.ranks));
        let (ranks, me) = (self.ranks, self.me);
        for rank in (0..ranks).map(|distance| (me + distance) % ranks) {
            let theirs = self.reach(rank, Side::Source, bytes * self.me, bytes, terms)?;
            // SAFETY: nobody writes to a source; the destination is this rank's own and apart.
            unsafe { deliver(theirs, memory.destination.wrapping_add(bytes * rank), bytes, streams) };
        }
        self.close_directly(fingerprint, terms)
    }

    /// The first step: says where this rank's buffers lie, and hears where the others' do.
    fn offer(&mut self, memory: Memory, lengths: Lengths, terms: &Terms<'_>) -> Result<Fingerprint, Stop> {
        let place = |group: &Self, address, bytes| if bytes == 0 { None } else { group.find_window(address, bytes) };
        let source = place(self, memory.source, lengths.source);
        let offer = Offer::new(source, place(self, memory.destination, lengths.destination));
        let fingerprint = self.enter(terms)?;
        let step = self.next_step();
        // SAFETY: this rank's own header, aligned to 8 bytes, with room for an offer (asserted above).
        unsafe { self.area(self.me, step, Area::Head).cast::<Offer>().write(offer) };
        self.meet(step, fingerprint, terms)?;
        for rank in 0..self.ranks {
            // SAFETY: all have published this step of the same call, hence an offer, valid for any bytes.
            self.offers[rank] = unsafe { self.area(rank, step, Area::Head).cast::<Offer>().read() };
        }
        Ok(fingerprint)
    }

    /// Whether this buffer of every rank lies in the same window. Every rank comes to the same answer.
    fn all_offer(&self, side: Side) -> bool {
        let window = self.offers[0].window(side);
        window != 0 && self.offers.iter().all(|offer| offer.window(side) == window)
    }

    /// Where a part of a rank's buffer lies here. A place that does not fit ends the group: the peer's memory is broken.
    fn reach(&mut self, rank: usize, side: Side, start: usize, bytes: usize, terms: &Terms<'_>) -> Result<*mut u8, Stop> {
        let Offer { windows, offsets } = self.offers[rank];
        let offset = usize::try_from(offsets[side as usize]).ok().and_then(|offset| offset.checked_add(start));
        let found = offset.and_then(|offset| self.in_window(rank, Place { window: windows[side as usize], offset }, bytes));
        match found {
            Some(address) => Ok(address),
            None => Err(self.fail(Notice::Failed { rank: self.globals[rank] }.into(), terms.call.fingerprint(), terms)),
        }
    }

    /// The last step: everyone is done with everyone's buffers.
    fn close_directly(&mut self, fingerprint: Fingerprint, terms: &Terms<'_>) -> Result<Option<()>, Stop> {
        let step = self.next_step();
        self.meet(step, fingerprint, terms).map(Some)
    }
}
