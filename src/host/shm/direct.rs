//! Large collectives on windows: ranks read each other's buffers where they lie, and copy nothing into slots.
//!
//! Once a group has had a window, every large call begins with a step in which each rank offers its buffers: which windows they lie in,
//! and where. The call is done directly if all buffers that are needed lie in one window each, which every rank then has mapped, since
//! it offers a part of it. Otherwise it goes on as any other. A last step says that everybody is done with everybody's buffers.

#![expect(unsafe_code, reason = "reads the buffers of peers")]

use std::sync::atomic::{Ordering, fence};

use super::cut::{Cut, Shares, streams};
use super::group::Group;
use super::lane::{Area, Fingerprint};
use super::layout::HEAD_BYTES;
use super::moves::{Blocks, Memory, deliver};
use super::steps::Terms;
use super::window::Place;
use crate::host::fold::Fold;
use crate::host::notice::{Notice, Stop};

/// How much is copied or folded before a rank looks whether the communicator has ended.
const TURN_BYTES: usize = 1 << 20;

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

// Common to every function below. The caller vouches for its own memory, which is reached by the caller's own pointers. A peer's buffer is
// one that the peer has offered for this very call (all have published the same fingerprint), and it is only read: nobody writes to
// another's. What a rank reads there was written before the step in which it was offered, or before a later one that this rank has met.
// A peer whose call fails gets its buffer back while this rank may be reading it; what is read then is of no consequence, since this
// rank's call fails too: either the peer has not published the last step, or it says there that it has left.
impl Group {
    /// As [`Group::all_reduce`]: of each piece a rank folds its share of all sources, and copies the other shares from whoever has folded
    /// them. `None` where the buffers are not all offered.
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
        let Some(fingerprint) = self.offer(memory, Lengths { source: bytes, destination: bytes }, terms)? else { return Ok(None) };
        let streams = streams(bytes) && memory.source != memory.destination.cast_const();
        for range in Cut::folds(bytes, 1, fold.element_bytes(), self.pace.fold).pieces() {
            self.go_on(terms)?;
            let shares = Shares::new(range.len(), self.ranks, fold.element_bytes());
            let mine = shares.of(self.me);
            self.reach_all(range.start + mine.start, mine.len(), memory.source, terms)?;
            if !mine.is_empty() {
                let into = memory.destination.wrapping_add(range.start + mine.start);
                // SAFETY: nobody writes to this share of any source but this rank to its own, in place, where it is an input; the
                // destination is apart otherwise. Its other readers wait for the next step.
                unsafe { fold.fold(into, &self.inputs, mine.len(), last) };
            }
            let step = self.next_step();
            self.meet(step, fingerprint, terms)?;
            for rank in 0..self.ranks {
                let share = shares.of(rank);
                let start = range.start + share.start;
                let from = self.reach(rank, Side::Destination, start, share.len(), terms)?;
                if rank != self.me {
                    // SAFETY: its owner has folded this share, and writes to it no more; here, whoever folds it has read the source, which
                    // may be the same memory.
                    unsafe { deliver(from, memory.destination.wrapping_add(start), share.len(), streams) };
                }
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
        let whole = (0..self.ranks).map(|rank| blocks.offset(rank) + blocks.len(rank)).max().unwrap_or(0);
        let Some(fingerprint) = self.offer(memory, Lengths { source: whole, destination: 0 }, terms)? else { return Ok(None) };
        let (offset, len) = (blocks.offset(self.me), blocks.len(self.me));
        for range in Cut::folds(len, 1, fold.element_bytes(), TURN_BYTES).pieces().filter(|range| !range.is_empty()) {
            self.go_on(terms)?;
            self.reach_all(offset + range.start, range.len(), memory.source, terms)?;
            // SAFETY: nobody writes to this block of any source but this rank to its own, in place, where it is an input; the destination
            // is apart otherwise.
            unsafe { fold.fold(memory.destination.wrapping_add(range.start), &self.inputs, range.len(), last) };
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
        let source = if self.me == root { memory.source } else { memory.destination.cast_const() };
        let Some(fingerprint) = self.offer(Memory { source, ..memory }, Lengths { source: bytes, destination: 0 }, terms)? else {
            return Ok(None);
        };
        let from = self.reach(root, Side::Source, 0, bytes, terms)?;
        let from = if self.me == root { memory.source } else { from.cast_const() };
        // SAFETY: nobody writes to the root's source; the destination is this rank's own.
        unsafe { self.pull(from, memory.destination, bytes, false, terms)? };
        self.close_directly(fingerprint, terms)
    }

    /// As [`Group::all_gather`]: everyone copies from everyone.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_gather`].
    pub(super) unsafe fn all_gather_directly(&mut self, memory: Memory, blocks: Blocks<'_>, terms: &Terms<'_>) -> Result<Option<()>, Stop> {
        let Some(fingerprint) = self.offer(memory, Lengths { source: blocks.len(self.me), destination: 0 }, terms)? else {
            return Ok(None);
        };
        let streams = streams(blocks.longest().saturating_mul(self.ranks));
        let (ranks, me) = (self.ranks, self.me);
        for rank in (0..ranks).map(|distance| (me + distance) % ranks) {
            let own = rank == self.me;
            let theirs = self.reach(rank, Side::Source, 0, blocks.len(rank), terms)?;
            let from = if own { memory.source } else { theirs.cast_const() };
            // SAFETY: nobody writes to a source; the destination is this rank's own, where its own block may be the source.
            unsafe { self.pull(from, memory.destination.wrapping_add(blocks.offset(rank)), blocks.len(rank), streams, terms)? };
        }
        self.close_directly(fingerprint, terms)
    }

    /// As [`Group::all_to_all`], where source and destination are apart on this rank.
    ///
    /// # Safety
    ///
    /// As for [`Group::all_to_all`].
    pub(super) unsafe fn all_to_all_directly(&mut self, memory: Memory, bytes: usize, terms: &Terms<'_>) -> Result<Option<()>, Stop> {
        // In place a block would be overwritten before its reader has come.
        let offered = if memory.source == memory.destination.cast_const() { 0 } else { bytes * self.ranks };
        let Some(fingerprint) = self.offer(memory, Lengths { source: offered, destination: 0 }, terms)? else { return Ok(None) };
        let streams = streams(bytes.saturating_mul(self.ranks));
        let (ranks, me) = (self.ranks, self.me);
        for rank in (0..ranks).map(|distance| (me + distance) % ranks) {
            let theirs = self.reach(rank, Side::Source, bytes * self.me, bytes, terms)?;
            // SAFETY: nobody writes to a source; the destination is this rank's own and apart.
            unsafe { self.pull(theirs, memory.destination.wrapping_add(bytes * rank), bytes, streams, terms)? };
        }
        self.close_directly(fingerprint, terms)
    }

    /// The first step: says where this rank's buffers lie, and hears where the others' do. `None` where those that the call needs do not
    /// all lie in one window, which every rank finds alike: a source, and a destination where there is a length.
    fn offer(&mut self, memory: Memory, lengths: Lengths, terms: &Terms<'_>) -> Result<Option<Fingerprint>, Stop> {
        if !self.has_had_windows() {
            return Ok(None);
        }
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
        let is_direct = self.all_offer(Side::Source) && (lengths.destination == 0 || self.all_offer(Side::Destination));
        Ok(is_direct.then_some(fingerprint))
    }

    /// Whether this buffer of every rank lies in the same window. Every rank comes to the same answer.
    fn all_offer(&self, side: Side) -> bool {
        let window = self.offers[0].window(side);
        window != 0 && self.offers.iter().all(|offer| offer.window(side) == window)
    }

    /// Copies what may be so long that something else ends the communicator meanwhile.
    ///
    /// # Safety
    ///
    /// As [`deliver`].
    unsafe fn pull(&mut self, from: *const u8, to: *mut u8, bytes: usize, streams: bool, terms: &Terms<'_>) -> Result<(), Stop> {
        for start in (0..bytes).step_by(TURN_BYTES) {
            self.go_on(terms)?;
            // SAFETY: a part of what the caller vouches for.
            unsafe { deliver(from.wrapping_add(start), to.wrapping_add(start), TURN_BYTES.min(bytes - start), streams) };
        }
        Ok(())
    }

    /// Ends the call where the communicator has ended meanwhile.
    fn go_on(&mut self, terms: &Terms<'_>) -> Result<(), Stop> {
        match terms.health.notice().copied().or_else(|| self.region.notice()) {
            None => Ok(()),
            Some(notice) => Err(self.fail(notice.into(), terms.call.fingerprint(), terms)),
        }
    }

    /// The inputs of a fold: this part of every source, the own one by the caller's pointer.
    fn reach_all(&mut self, start: usize, bytes: usize, own: *const u8, terms: &Terms<'_>) -> Result<(), Stop> {
        for rank in 0..self.ranks {
            self.inputs[rank] = self.reach(rank, Side::Source, start, bytes, terms)?;
        }
        self.inputs[self.me] = own.wrapping_add(start);
        Ok(())
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

    /// The last step: everyone is done with everyone's buffers. A rank that gives up waiting there says so before it returns, since its
    /// buffer is its caller's again while others may still be reading it: they look for it after the step.
    fn close_directly(&mut self, fingerprint: Fingerprint, terms: &Terms<'_>) -> Result<Option<()>, Stop> {
        let step = self.next_step();
        if let Err(stop) = self.meet(step, fingerprint, terms) {
            self.region.member(self.me).leave_at(step);
            return Err(stop);
        }
        // What was read of a buffer before this comes before the look, and a peer's word before whatever its caller writes.
        fence(Ordering::Acquire);
        match (0..self.ranks).find(|rank| self.region.member(*rank).has_left_at(step)) {
            None => Ok(Some(())),
            Some(rank) => {
                let notice = self.region.notice().unwrap_or(Notice::Failed { rank: self.globals[rank] });
                Err(self.fail(notice.into(), fingerprint, terms))
            }
        }
    }
}
