//! The ranks of one host that share a region: how they find it, and the state of one rank.

use std::sync::Arc;

use super::chunking::StepSizes;
#[cfg(feature = "cuda")]
use super::device_end::DeviceEnd;
use super::layout::{CHANNELS, MAX_RANKS, RegionLayout};
use super::region::{self, Region};
use super::ring::{Channel, RingLink};
use super::shared_file::{self, ShareError, ShareResult, SharedFile, Verdicts};
use super::slot_ring::SlotRing;
use super::stores::Stores;
use super::window::{Offer, Segment, Site, WindowOffset, Windows};
use crate::authentication::Secret;
use crate::base::deadline::Deadline;
use crate::base::fork::Process;
use crate::base::tuning::waiting::SHARED_MEMORY;
use crate::call::algorithm::Algorithm;
use crate::call::{Call, Collective};
use crate::config::Waiting;
use crate::error::{Error, Peer, Result};
use crate::flight::Flight;
use crate::host::abort_reason::AbortReason;
use crate::host::exchange::Exchange;
use crate::host::health::Health;
use crate::host::waiting::Patience;

/// A call's fingerprint as words.
pub(super) type Fingerprint = [u64; 4];

/// The context of a call on this host: what it is, how long it may take, and what else may end it.
#[derive(Clone, Copy)]
pub(crate) struct CallContext<'a> {
    pub(crate) call: &'a Call,
    pub(crate) deadline: &'a Deadline,
    pub(crate) health: &'a Health,
    pub(crate) recorder: &'a Flight,
}

/// Whether a group's next call may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupState {
    /// All steps are done.
    Ready,
    /// The deadline of a barrier passed while other ranks were missing. Those ranks will still arrive at this step. So
    /// this rank waits for the step again when the barrier is retried, or before the next call.
    Unfinished(Fingerprint),
    /// The ranks are no longer at the same step, so every further call fails immediately.
    Ended(AbortReason),
}

/// One rank's part in the shared memory of its host. Used by one thread at a time.
pub(crate) struct Group {
    pub(super) region: Arc<Region>,
    /// This rank's local index.
    pub(super) me: usize,
    /// Number of ranks that share the region.
    pub(super) ranks: usize,
    /// The global rank of each local index.
    pub(super) globals: Box<[u32]>,
    /// The step that this rank has published last.
    pub(super) step: u64,
    /// Whether the next call may start right away.
    pub(super) state: GroupState,
    /// Number of looks before the waiting policy begins.
    pub(super) first_looks: u32,
    /// How this rank waits after that, and what it has learnt about waiting.
    pub(super) patience: Patience,
    /// Number of ranks that can run at the same time.
    pub(super) running: usize,
    /// The positions of payloads in the ranks' slot rings.
    pub(super) slot_ring: SlotRing,
    /// The stores with which this rank writes them.
    pub(super) stores: Stores,
    /// How calls are cut into steps.
    pub(super) step_sizes: StepSizes,
    /// What each rank has published about its buffers in the current call.
    pub(super) offers: Box<[Offer]>,
    /// Room for one pointer per rank, so that a fold's inputs need no allocation.
    pub(super) inputs: Box<[*const u8]>,
    /// The windows that the ranks have in common.
    pub(super) windows: Windows,
    links_taken: Box<[bool]>,
    process: Process,
}

// SAFETY: only the pointers in `inputs` prevent `Send`. They are followed only in the call that has stored them, on its
// thread.
#[expect(unsafe_code, reason = "raw pointers as scratch space take Send away")]
unsafe impl Send for Group {}

/// The result of setting up shared memory, on every host.
pub(crate) struct Sharing {
    /// This rank's part; `None` if it is alone on its host, or the ranks of its host do without shared memory.
    pub(crate) group: Option<Group>,
    /// The ranks that cannot share memory, and why. All ranks of their hosts do without it. This list is the same on
    /// every rank.
    pub(crate) refusals: Vec<(usize, String)>,
}

impl Sharing {
    /// Sets up the shared memory of the ranks `members` (global ranks of this host, ascending). Every rank of the
    /// communicator calls it, each with the members of its own host; it takes two rounds of the exchange. A process
    /// that does not know `secret` gets no part. If the system does not let a rank share memory, the ranks of its host
    /// do without, unless shared memory is `required`.
    ///
    /// # Errors
    ///
    /// - `Unsupported` for more than [`MAX_RANKS`] members.
    /// - `Io` if this rank cannot map the region.
    /// - `PeerLost`, which names the rank, if another rank could not.
    /// - The errors of the exchange.
    pub(crate) fn connect(
        exchange: &mut dyn Exchange,
        members: &[usize],
        (my_global_rank, world_size): (usize, usize),
        secret: Option<&Secret>,
        required: bool,
        deadline: &Deadline,
    ) -> Result<Self> {
        let me = check_members(members, my_global_rank, world_size)?;
        let (entered, verdicts) = if members.len() == 1 && !required {
            shared_file::abstain(exchange, Ok(None), deadline)?
        } else {
            enter(exchange, members, me, secret, deadline)?
        };
        let passing = |refusal: &shared_file::Refusal| refusal.can_do_without && !required;
        if verdicts.refusals().next().is_some() && verdicts.refusals().all(|(_, refusal)| passing(refusal)) {
            let refusals: Vec<_> = verdicts.refusals().map(|(rank, refusal)| (rank, refusal.reason.clone())).collect();
            let do_without = refusals.iter().any(|(rank, _)| members.contains(rank));
            let group = entered.ok().flatten().filter(|_| !do_without).map(|region| Group::new(region, members, secret));
            return Ok(Self { group, refusals });
        }
        let entered = shared_file::settle(entered, &verdicts).map_err(|error_of_sharing| match error_of_sharing {
            ShareError::Here(error) | ShareError::Exchange(error) => error,
            ShareError::There(rank, reason) => {
                let doing = "setting up shared memory".to_owned();
                Error::PeerLost { doing, peer: Peer::unknown(rank), elapsed: deadline.elapsed(), reason }
            }
        });
        Ok(Self { group: entered?.map(|region| Group::new(region, members, secret)), refusals: Vec::new() })
    }
}

/// Enters this rank into the region of its host.
fn enter(
    exchange: &mut dyn Exchange,
    members: &[usize],
    me: usize,
    secret: Option<&Secret>,
    deadline: &Deadline,
) -> Result<(ShareResult<Option<Region>>, Verdicts)> {
    let Some(layout) = RegionLayout::new(members.len()) else {
        let error = Error::Unsupported {
            what: format!("shared memory between {} ranks of one host", members.len()),
            reason: format!("the limit is {MAX_RANKS} ranks; use the tcp transport"),
        };
        return shared_file::abstain(exchange, Err(error), deadline);
    };
    let enter = |file| Region::enter(file, layout, me).map(Some).map_err(|error| Error::io(format!("mapping {}", name(&layout)), error));
    let shared_file = SharedFile {
        name: name(&layout),
        make: &|| region::create("collectives", layout.bytes),
        enter: &enter,
        #[cfg(miri)]
        enter_numbered: &|number| Region::numbered(number, layout, me).map(Some),
        secret,
    };
    shared_file.attempt(exchange, me == 0, members[0], deadline)
}

impl Group {
    /// Connects as [`Sharing::connect`] does, for ranks that require shared memory.
    #[cfg(any(test, feature = "__internals"))]
    pub(crate) fn connect(
        exchange: &mut dyn Exchange,
        members: &[usize],
        my_global_rank: usize,
        world_size: usize,
        secret: Option<&Secret>,
        deadline: &Deadline,
    ) -> Result<Self> {
        let sharing = Sharing::connect(exchange, members, (my_global_rank, world_size), secret, true, deadline)?;
        sharing.group.ok_or_else(|| Error::argument("connect", "shared memory is required, but it is missing, and no error says why"))
    }

    fn new(region: Region, members: &[usize], secret: Option<&Secret>) -> Self {
        let (ranks, me) = (region.layout().ranks, region.me());
        let processors = region.processors();
        let is_crowded = region.is_crowded();
        Self {
            me,
            ranks,
            globals: members.iter().map(|rank| *rank as u32).collect(),
            step: 0,
            state: GroupState::Ready,
            first_looks: SHARED_MEMORY.first_looks[usize::from(is_crowded)],
            patience: Patience::new(&SHARED_MEMORY, is_crowded),
            running: if is_crowded { processors.max(1) } else { ranks },
            slot_ring: SlotRing::new(region.layout().slot_ring_bytes(), region.lap()),
            stores: Stores::new(),
            step_sizes: StepSizes::new(region.layout().slot_bytes(), is_crowded),
            offers: vec![Offer::default(); ranks].into(),
            inputs: vec![std::ptr::null(); ranks].into(),
            windows: Windows::new(secret),
            links_taken: vec![false; ranks * CHANNELS].into(),
            region: Arc::new(region),
            process: Process::this(),
        }
    }

    /// Sets how this rank waits for the others.
    pub(crate) fn set_waiting(&mut self, waiting: Waiting) {
        self.patience.set_waiting(waiting);
    }

    /// Returns this rank's index among the ranks of its host.
    #[cfg(test)]
    pub(crate) fn local_index(&self) -> usize {
        self.me
    }

    /// Returns how many ranks this host has.
    #[cfg(test)]
    pub(crate) fn size(&self) -> usize {
        self.ranks
    }

    /// Returns the byte stream to and from another rank of this host; `None` if it was taken before, and for this rank
    /// itself.
    pub(crate) fn link(&mut self, local_peer: usize, channel: Channel) -> Option<RingLink> {
        if local_peer == self.me || local_peer >= self.ranks {
            return None;
        }
        let taken = &mut self.links_taken[local_peer * CHANNELS + channel as usize];
        if std::mem::replace(taken, true) {
            return None;
        }
        Some(RingLink::new(Arc::clone(&self.region), local_peer, channel))
    }

    /// Returns the next window of this group. Every rank of the host asks for it at the same point, so that all use the
    /// same number. Returns `None` once the numbers are exhausted.
    pub(crate) fn site(&mut self) -> Option<Site> {
        self.windows.site(self.me, self.ranks, self.globals[0] as usize)
    }

    /// Adds a window that all ranks of the host have opened.
    pub(crate) fn admit(&mut self, segment: &Segment) {
        self.windows.insert(segment);
    }

    /// Unmaps what was dropped since the last call. This happens only between calls, since they take `&mut self` as
    /// well.
    #[inline]
    pub(crate) fn forget_dropped(&mut self) {
        self.windows.forget_dropped();
    }

    /// Whether there has ever been a window: between calls, the same on all ranks.
    #[inline]
    pub(super) fn has_had_windows(&self) -> bool {
        self.windows.has_had_any()
    }

    /// Forwards to [`Windows::find`].
    #[inline]
    pub(super) fn find_window(&self, address: *const u8, bytes: usize) -> Option<WindowOffset> {
        self.windows.find(address, bytes)
    }

    /// Forwards to [`Windows::address`].
    #[inline]
    pub(super) fn in_window(&self, rank: usize, place: WindowOffset, bytes: usize) -> Option<*mut u8> {
        self.windows.address(rank, place, bytes)
    }

    /// Describes how payloads are written.
    pub(crate) fn explain(&self) -> String {
        format!("payloads: laps of {} KiB, {}", self.slot_ring.lap() >> 10, self.stores)
    }

    /// Returns the algorithm of a call on `bytes` in total, on ordinary memory, for reports; `None` for calls that go
    /// over links.
    pub(crate) fn way(&self, kind: Collective, bytes: usize, element_bytes: usize) -> Option<Algorithm> {
        self.step_sizes.way(kind, self.ranks, bytes, element_bytes)
    }

    /// Records for the ranks of this host why the communicator ended, and wakes the sleepers, unless a rank already
    /// has.
    pub(crate) fn propagate(&self, abort_reason: &AbortReason) {
        self.region.propagate(abort_reason);
    }

    /// Returns the word in which the ranks of this host record that they give up on their devices.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_end(&self) -> DeviceEnd {
        DeviceEnd::new(Arc::clone(&self.region))
    }

    /// Returns why the communicator ended, if a rank of this host has recorded it.
    pub(crate) fn abort_reason(&self) -> Option<AbortReason> {
        self.region.abort_reason()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.process.is_foreign() {
            self.region.depart();
        }
    }
}

/// Describes the region.
fn name(layout: &RegionLayout) -> String {
    format!("the shared region of {} bytes", layout.bytes)
}

/// Returns this rank's index among the members, which must be ascending and in the world.
fn check_members(members: &[usize], my_global_rank: usize, world_size: usize) -> Result<usize> {
    let ascending = members.windows(2).all(|pair| pair[0] < pair[1]);
    let inside = members.last().is_some_and(|last| *last < world_size) && u32::try_from(world_size).is_ok();
    let me = members.iter().position(|rank| *rank == my_global_rank);
    me.filter(|_| ascending && inside).ok_or_else(|| Error::Conflict {
        reason: format!("rank {my_global_rank} of {world_size} got an invalid list of the ranks on its host: {members:?}"),
    })
}
