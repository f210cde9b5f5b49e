//! How communicators are made: from ids, or out of another communicator.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use nccl_sys::{Library, MissingSymbol, ncclComm, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};

use super::NcclComm;
use super::lock::{BackOff, Device, lock_within};
use super::state::{Inner, LivenessProbe, NONE, Parts};
use super::watchdog;
use crate::deadline::Deadline;
use crate::device::driver::{self, Gpu};
use crate::device::nccl::{self, RawConfig, Refusal};
use crate::error::{Error, Result};
use crate::nccl_config::NcclConfig;

/// What a rank needs to take part in a new communicator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) library: &'static Library,
    pub(crate) gpu: &'a Gpu,
    /// One, or several, which spread the work of starting up; the same in the same order on all ranks. Releases before 2.23 use the first.
    pub(crate) ids: &'a [ncclUniqueId],
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) config: &'a NcclConfig,
    pub(crate) deadline: &'a Deadline,
    /// Who knows more about the other ranks, if anybody does.
    pub(crate) liveness_probe: Option<&'a Arc<dyn LivenessProbe>>,
}

/// A new id, which is good for one communicator.
pub(crate) fn unique_id(library: &'static Library) -> Result<ncclUniqueId> {
    nccl::unique_id(library).map_err(|refusal| refusal.into_error("making an id for a communicator".to_owned()))
}

/// Joins a communicator that is being grown, as a new rank; `id` is the one that [`NcclComm::grow_id`] made. NCCL 2.29.2.
pub(crate) fn join(setup: Setup<'_>) -> Result<NcclComm> {
    let doing = || format!("joining a communicator as rank {} of {}", setup.rank, setup.world_size);
    let (rank, world_size) = numbers(&doing, &setup)?;
    let ids = setup.ids;
    // SAFETY: slot and configuration are those of `create`, and the id is read before the call returns.
    create(&setup, &doing, |slot, config| unsafe {
        ("ncclCommGrow", setup.library.ncclCommGrow(NONE, world_size, ids.as_ptr(), rank, slot, config))
    })
}

impl Setup<'_> {
    fn parts(&self) -> Parts {
        let context = Arc::clone(&self.gpu.context);
        let liveness_probe = self.liveness_probe.map(Arc::clone);
        Parts { library: self.library, device: Device::of(self.gpu), context, rank: self.rank, world_size: self.world_size, liveness_probe }
    }
}

/// Rank and size in C's way.
fn numbers(doing: &dyn Fn() -> String, setup: &Setup<'_>) -> Result<(c_int, c_int)> {
    let numbers = c_int::try_from(setup.rank).ok().zip(c_int::try_from(setup.world_size).ok());
    match numbers {
        Some(numbers) if setup.rank < setup.world_size && !setup.ids.is_empty() && setup.ids.len() <= setup.world_size => Ok(numbers),
        _ => {
            Err(Error::config(doing(), format!("a rank below the size, and one id at least, are expected; there are {}", setup.ids.len())))
        }
    }
}

impl NcclComm {
    /// Makes a communicator together with all its other ranks.
    pub(crate) fn create(setup: Setup<'_>) -> Result<Self> {
        let doing = || format!("making a communicator, as rank {} of {}, on device {}", setup.rank, setup.world_size, setup.gpu.ordinal);
        let (rank, world_size) = numbers(&doing, &setup)?;
        let Setup { library, ids, .. } = setup;
        let scalable = ids.len() > 1 && library.has("ncclCommInitRankScalable");
        let mut ids = ids.to_vec();
        create(&setup, &doing, |slot, config| {
            if scalable {
                let count = ids.len() as c_int;
                // SAFETY: slot and configuration are those of `create`; the ids are as many as is said, and are read before the call returns.
                let answer = unsafe { library.ncclCommInitRankScalable(slot, world_size, rank, count, ids.as_mut_ptr(), config) };
                ("ncclCommInitRankScalable", answer)
            } else {
                // SAFETY: slot and configuration are those of `create`.
                ("ncclCommInitRankConfig", unsafe { library.ncclCommInitRankConfig(slot, world_size, ids[0], rank, config) })
            }
        })
    }

    /// Splits the communicator by colour, in the order of keys. Ranks without a colour take part and get nothing.
    pub(crate) fn split(&self, color: Option<u32>, key: i32, config: &NcclConfig, deadline: &Deadline) -> Result<Option<Self>> {
        let doing = || format!("splitting the communicator of rank {} of {}", self.rank(), self.world_size());
        let number = match color {
            None => nccl_sys::NCCL_SPLIT_NOCOLOR,
            Some(color) => c_int::try_from(color)
                .map_err(|_| Error::argument("split", format!("colour {color} is too large: NCCL takes colours up to {}", c_int::MAX)))?,
        };
        let parent = self.inner();
        let library = parent.library;
        // SAFETY: slot and configuration are those of `conceive`, which also sees to it that the parent is alive.
        let split = |parent, slot, config| unsafe { ("ncclCommSplit", library.ncclCommSplit(parent, number, key, slot, config)) };
        if color.is_none() {
            conceive(parent, config, deadline, &doing, split)?;
            return Ok(None);
        }
        self.descend(config, deadline, &doing, split).map(Some)
    }

    /// Makes a communicator of all ranks but some, which do not take part. NCCL 2.27.3.
    ///
    /// With `abort_parent` this communicator's work is stopped first, and only closing remains for it; without, nothing may be in flight.
    pub(crate) fn shrink(&self, excluded: &[usize], abort_parent: bool, config: &NcclConfig, deadline: &Deadline) -> Result<Self> {
        let doing = || format!("shrinking the communicator of rank {} of {}", self.rank(), self.world_size());
        if let Some(wrong) = excluded.iter().find(|rank| **rank >= self.world_size() || **rank == self.rank()) {
            return Err(Error::argument(
                "shrink",
                format!("rank {wrong} cannot be left out by rank {} of {}", self.rank(), self.world_size()),
            ));
        }
        // A list of our own: NCCL sorts it. What is listed twice would be counted twice.
        let mut list: Vec<c_int> = excluded.iter().map(|rank| *rank as c_int).collect();
        list.sort_unstable();
        list.dedup();
        let flags = if abort_parent { nccl_sys::NCCL_SHRINK_ABORT } else { nccl_sys::NCCL_SHRINK_DEFAULT };
        let library = self.inner().library;
        let count = list.len() as c_int;
        // SAFETY: slot and configuration are those of `conceive`, which also sees to it that the parent is alive; the list is as long as is said.
        let shrink = |parent, slot, config| unsafe {
            ("ncclCommShrink", library.ncclCommShrink(parent, list.as_mut_ptr(), count, slot, config, flags))
        };
        self.descend(config, deadline, &doing, shrink)
    }

    /// An id for the next [`NcclComm::grow`], which one rank makes and gives to all new ranks. NCCL 2.29.2.
    pub(crate) fn grow_id(&self) -> Result<ncclUniqueId> {
        let inner = self.inner();
        let doing = || format!("making an id to grow the communicator of rank {} of {}", self.rank(), self.world_size());
        let _gate = inner.enter(&doing, inner.limit())?;
        let mut id = ncclUniqueId { internal: [0; nccl_sys::NCCL_UNIQUE_ID_BYTES] };
        inner.inside(&doing, inner.limit(), |raw| {
            // SAFETY: the handle is alive, and the id is a variable of ours.
            let answer = unsafe { raw.library.ncclCommGetUniqueId(raw.handle, &mut id) };
            nccl::check(raw.library, raw.handle, "ncclCommGetUniqueId", answer).map(|_| ())
        })?;
        Ok(id)
    }

    /// Makes a communicator of these ranks and new ones, which [`join`] it. The rank that made the id passes it. NCCL 2.29.2.
    pub(crate) fn grow(&self, new_size: usize, id: Option<&ncclUniqueId>, config: &NcclConfig, deadline: &Deadline) -> Result<Self> {
        let doing = || format!("growing the communicator of rank {} of {} to {new_size} ranks", self.rank(), self.world_size());
        let Some(size) = c_int::try_from(new_size).ok().filter(|_| new_size > self.world_size()) else {
            return Err(Error::argument("grow", format!("{new_size} ranks are not more than the {} there are", self.world_size())));
        };
        let library = self.inner().library;
        let id = id.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: slot and configuration are those of `conceive`, which also sees to it that the parent is alive; the id is read before the
        // call returns. A rank of -1 is what old ranks pass.
        let grow = |parent, slot, config| unsafe { ("ncclCommGrow", library.ncclCommGrow(parent, size, id, -1, slot, config)) };
        self.descend(config, deadline, &doing, grow)
    }

    /// Makes a communicator out of this one.
    fn descend(
        &self,
        config: &NcclConfig,
        deadline: &Deadline,
        doing: &dyn Fn() -> String,
        call: impl FnMut(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer,
    ) -> Result<Self> {
        let (slot, raw) = conceive(self.inner(), config, deadline, doing, call)?;
        finish(slot, raw, &self.inner().parts(), deadline, doing)
    }
}

impl Inner {
    /// What its descendants share with it.
    fn parts(&self) -> Parts {
        let context = Arc::clone(&self.context);
        // All its ranks are ranks of this one, whose liveness probe knows them.
        let liveness_probe = self.liveness_probe();
        Parts { library: self.library, device: self.device, context, rank: self.rank, world_size: self.world_size, liveness_probe }
    }

    /// Its rank and size, of which only NCCL knows after a split.
    fn numbers(self: &Arc<Self>, doing: &dyn Fn() -> String, deadline: &Deadline) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        self.inside(doing, deadline.remaining(), |raw| {
            // SAFETY: the handle is alive, and the answer goes to a variable of ours.
            let answer = unsafe { raw.library.ncclCommUserRank(raw.handle, &mut rank) };
            nccl::check(raw.library, raw.handle, "ncclCommUserRank", answer)?;
            // SAFETY: the handle is alive, lent by `inside`, and the answer goes to another variable of ours.
            let answer = unsafe { raw.library.ncclCommCount(raw.handle, &mut size) };
            nccl::check(raw.library, raw.handle, "ncclCommCount", answer).map(|_| ())
        })?;
        let number = |number: c_int| usize::try_from(number).unwrap_or(usize::MAX);
        Ok((number(rank), number(size)))
    }
}

/// The function that was called, and what it answered.
type Answer = (&'static str, std::result::Result<ncclResult_t, MissingSymbol>);

/// Where NCCL puts the handle of a new communicator: at once, or later from a thread of its own.
struct Slot(Option<Box<AtomicPtr<ncclComm>>>);

impl Slot {
    fn new() -> Self {
        Self(Some(Box::new(AtomicPtr::new(NONE))))
    }

    fn address(&self) -> *mut ncclComm_t {
        self.0.as_ref().map_or(std::ptr::null_mut(), |place| place.as_ptr())
    }

    fn handle(&self) -> ncclComm_t {
        self.0.as_ref().map_or(NONE, |place| place.load(Ordering::Acquire))
    }

    /// Nothing will be put there any more.
    fn close(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // NCCL may still write to it: better eight bytes lost than bytes of somebody else's overwritten.
        std::mem::forget(self.0.take());
    }
}

/// Makes a communicator that has no parent here.
fn create(
    setup: &Setup<'_>,
    doing: &dyn Fn() -> String,
    call: impl FnOnce(*mut ncclComm_t, *mut ncclConfig_t) -> Answer,
) -> Result<NcclComm> {
    let (parts, deadline) = (setup.parts(), setup.deadline);
    let mut raw = RawConfig::new(setup.config)?;
    let slot = Slot::new();
    let begun = {
        let _lock = lock_within(&parts.device.lock, deadline.remaining()).ok_or_else(|| late(doing, deadline))?;
        let bound = driver::bind(&parts.context).map_err(|error| Refusal::driver("cuCtxSetCurrent", error));
        bound.and_then(|()| {
            let (name, answer) = call(slot.address(), &mut raw.config);
            nccl::check(parts.library, NONE, name, answer)
        })
    };
    match begun {
        Ok(_) => finish(slot, raw, &parts, deadline, doing),
        Err(refusal) => Err(discard(slot, raw, &parts, refusal.into_error(doing()))),
    }
}

/// Makes a call on the parent that begins a new communicator, and waits until the parent is done with it.
fn conceive(
    parent: &Arc<Inner>,
    config: &NcclConfig,
    deadline: &Deadline,
    doing: &dyn Fn() -> String,
    mut call: impl FnMut(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer,
) -> Result<(Slot, RawConfig)> {
    let mut raw = RawConfig::new(config)?;
    let slot = Slot::new();
    let Some(_gate) = lock_within(&parent.gate, deadline.remaining()) else { return Err(parent.expire(doing, deadline.elapsed())) };
    let begun = parent.inside(doing, deadline.remaining(), |lent| {
        let (name, answer) = call(lent.handle, slot.address(), &mut raw.config);
        nccl::check(lent.library, lent.handle, name, answer).map(|_| ())
    });
    match begun.and_then(|_| parent.settled(doing, deadline)) {
        Ok(()) => Ok((slot, raw)),
        Err(error) => Err(discard(slot, raw, &parent.parts(), error)),
    }
}

/// Gives up a communicator that was not made: some failures leave a handle behind, and peers that wait.
fn discard(slot: Slot, config: RawConfig, parts: &Parts, error: Error) -> Error {
    Inner::new(parts.clone(), slot.handle(), config.strings).fail(error.clone(), Duration::ZERO);
    error
}

/// Waits until a new communicator is ready, and has it watched.
fn finish(slot: Slot, config: RawConfig, parts: &Parts, deadline: &Deadline, doing: &dyn Fn() -> String) -> Result<NcclComm> {
    let mut back_off = BackOff::default();
    while slot.handle().is_null() {
        let trouble = parts.liveness_probe.as_ref().and_then(|liveness_probe| liveness_probe.trouble(doing, deadline.elapsed()));
        if let Some(error) = trouble.or_else(|| deadline.has_passed().then(|| late(doing, deadline))) {
            return Err(error);
        }
        back_off.rest();
    }
    let mut inner = Inner::new(parts.clone(), slot.handle(), config.strings);
    inner.settled(doing, deadline)?;
    slot.close();
    let (rank, world_size) = inner.numbers(doing, deadline)?;
    if let Some(alone) = Arc::get_mut(&mut inner) {
        (alone.rank, alone.world_size) = (rank, world_size);
    }
    let unwatched = |error| inner.end(Error::io("starting the thread that watches over communicators", error), doing);
    watchdog::watch(&inner).map_err(unwatched)?;
    Ok(NcclComm { inner })
}

fn late(doing: &dyn Fn() -> String, deadline: &Deadline) -> Error {
    Error::Timeout { doing: doing(), elapsed: deadline.elapsed(), missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
}
