//! Creates communicators, from ids or from another communicator. Each starts as a control communicator, from which the
//! data communicator is split off.

use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, MutexGuard};

use nccl_sys::{Library, MissingSymbol, ncclComm, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};

use super::control::{Attempted, Failed};
use super::lock::{BackOff, Device, lock_within};
use super::state::{EndNotice, Handles, Inner, LivenessProbe, NONE, Parts};
use super::{NcclComm, control, watchdog};
use crate::base::deadline::Deadline;
use crate::base::tuning::device::ABORT_WAIT;
use crate::config::nccl::NcclConfig;
use crate::device::driver::{self, Gpu};
use crate::device::nccl::{self, Purpose, RawConfig, Refusal};
use crate::error::{Error, Result};

/// The arguments with which a rank takes part in a new communicator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) library: &'static Library,
    pub(crate) gpu: &'a Gpu,
    /// One id, or several to spread the work of starting. All ranks pass the same ids in the same order. NCCL before
    /// 2.23 uses only the first.
    pub(crate) ids: &'a [ncclUniqueId],
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) config: &'a NcclConfig,
    pub(crate) deadline: &'a Deadline,
    /// The source of knowledge about the other ranks, if there is one.
    pub(crate) liveness_probe: Option<&'a Arc<dyn LivenessProbe>>,
    /// The channel on which ranks report that they give up, if there is one.
    pub(crate) end_notice: Option<&'a Arc<dyn EndNotice>>,
}

/// Creates a new id, which is valid for one communicator.
pub(crate) fn unique_id(library: &'static Library) -> Result<ncclUniqueId> {
    nccl::unique_id(library).map_err(|refusal| refusal.into_error("making an id for a communicator".to_owned()))
}

impl Setup<'_> {
    fn parts(&self) -> Parts {
        let (context, device) = (Arc::clone(&self.gpu.context), Device::of(self.gpu));
        let (liveness_probe, end_notice) = (self.liveness_probe.map(Arc::clone), self.end_notice.map(Arc::clone));
        Parts { library: self.library, device, context, rank: self.rank, world_size: self.world_size, liveness_probe, end_notice }
    }
}

/// Returns rank and size as C's type.
fn numbers(doing: &str, setup: &Setup<'_>) -> Result<(c_int, c_int)> {
    let numbers = c_int::try_from(setup.rank).ok().zip(c_int::try_from(setup.world_size).ok());
    match numbers {
        Some(numbers) if setup.rank < setup.world_size && !setup.ids.is_empty() && setup.ids.len() <= setup.world_size => Ok(numbers),
        _ => {
            let expected = format!(
                "the rank must be below the world size, and the number of ids must be from 1 to the world size; {} ids were given",
                setup.ids.len()
            );
            Err(Error::config(doing, expected))
        }
    }
}

impl NcclComm {
    /// Creates a communicator together with all its other ranks.
    pub(crate) fn create(setup: Setup<'_>) -> Result<Self> {
        let doing = format!("making a communicator, as rank {} of {}, on device {}", setup.rank, setup.world_size, setup.gpu.ordinal);
        let (rank, world_size) = numbers(&doing, &setup)?;
        let library = setup.library;
        let scalable = setup.ids.len() > 1 && library.has("ncclCommInitRankScalable");
        let mut ids = setup.ids.to_vec();
        let begin = move |_, slot, config| {
            if scalable {
                let count = ids.len() as c_int;
                // SAFETY: slot and configuration are those of `Attempt::begin`; there are as many ids as stated, and
                // they are read before the call returns.
                let answer = unsafe { library.ncclCommInitRankScalable(slot, world_size, rank, count, ids.as_mut_ptr(), config) };
                ("ncclCommInitRankScalable", answer)
            } else {
                // SAFETY: slot and configuration are those of `Attempt::begin`.
                ("ncclCommInitRankConfig", unsafe { library.ncclCommInitRankConfig(slot, world_size, ids[0], rank, config) })
            }
        };
        Attempt::new(setup.parts(), setup.config, setup.deadline, doing).create(begin)
    }

    /// Splits a revoked communicator by colour, in the order of keys. Ranks without a colour take part and get nothing.
    ///
    /// Other communicators are not split through NCCL: a communicator that is split off the control communicator shares
    /// its abort flags, unless the latter was revoked.
    pub(crate) fn split_revoked(&self, color: Option<u32>, key: i32, config: &NcclConfig, deadline: &Deadline) -> Result<Option<Self>> {
        let doing = format!("splitting the communicator of rank {} of {}", self.rank(), self.world_size());
        let number = color.map_or(Ok(nccl_sys::NCCL_SPLIT_NOCOLOR), |color| {
            c_int::try_from(color)
                .map_err(|_| Error::argument("split", format!("colour {color} is too large: NCCL takes colours up to {}", c_int::MAX)))
        })?;
        let library = self.library();
        // SAFETY: parent, slot and configuration are those of `Attempt::begin`.
        let split = move |parent, slot, config| unsafe { ("ncclCommSplit", library.ncclCommSplit(parent, number, key, slot, config)) };
        let attempt = Attempt::new(self.inner().parts(), config, deadline, doing);
        Attempt { has_child: color.is_some(), of_revoked: true, ..attempt }.descend(self.inner(), split)
    }

    /// Creates a communicator of all ranks except some, which do not take part. Needs NCCL 2.27.3.
    ///
    /// With `abort_parent`, this communicator's work is stopped first, and the communicator can only be ended
    /// afterwards. Without `abort_parent`, nothing may be in flight.
    pub(crate) fn shrink(&self, excluded: &[usize], abort_parent: bool, config: &NcclConfig, deadline: &Deadline) -> Result<Self> {
        let doing = format!("shrinking the communicator of rank {} of {}", self.rank(), self.world_size());
        if let Some(wrong) = excluded.iter().find(|rank| **rank >= self.world_size() || **rank == self.rank()) {
            return Err(Error::argument(
                "shrink",
                format!(
                    "rank {wrong} cannot be left out: it is either this rank (rank {}) or not below the world size ({})",
                    self.rank(),
                    self.world_size()
                ),
            ));
        }
        if excluded.is_empty() {
            return Err(Error::argument(
                "shrink",
                "the list of excluded ranks is empty, but NCCL must leave out at least one rank; to keep all ranks, use split with one \
                 colour",
            ));
        }
        // A separate list, because NCCL sorts it. A rank listed twice would count twice.
        let mut list: Vec<c_int> = excluded.iter().map(|rank| *rank as c_int).collect();
        list.sort_unstable();
        list.dedup();
        if !self.library().has("ncclCommShrink") {
            return Err(Error::unsupported(doing, format!("it needs NCCL 2.27.3 or later, but this is {}", self.version())));
        }
        let flags = if abort_parent { nccl_sys::NCCL_SHRINK_ABORT } else { nccl_sys::NCCL_SHRINK_DEFAULT };
        let (library, count) = (self.library(), list.len() as c_int);
        let shrink = move |parent, slot, config| {
            // SAFETY: parent, slot and configuration are those of `Attempt::begin`; the list has the stated length, and
            // is copied.
            ("ncclCommShrink", unsafe { library.ncclCommShrink(parent, list.as_mut_ptr(), count, slot, config, flags) })
        };
        let attempt = Attempt { ends_work: abort_parent, ..Attempt::new(self.inner().parts(), config, deadline, doing) };
        attempt.descend(self.inner(), shrink).and_then(a_child)
    }
}

/// Returns the child of a call for ranks that are all in the new communicator.
fn a_child(made: Option<NcclComm>) -> Result<NcclComm> {
    made.ok_or_else(|| Error::config("making a communicator out of another", "NCCL made no communicator for this rank"))
}

/// The advice for a communicator from which nothing can be created.
const WAY_OUT: &str = "no communicator can be created from this one any more: abort or drop it, and create a new communicator for the \
                       surviving ranks, with a new id";

/// Returns the error of a communicator in which NCCL has lost a rank, with advice: NCCL creates nothing from such a
/// communicator.
fn with_way_out(mut error: Error) -> Error {
    if let Error::Nccl { code, text, .. } = &mut error
        && *code == ncclResult_t::ncclRemoteError.0
    {
        *text += "; ";
        *text += WAY_OUT;
    }
    error
}

impl NcclComm {
    /// Refuses to create anything from a communicator that has ended.
    pub(crate) fn refuse_children_if_ended(&self, doing: &str) -> Result<()> {
        self.inner().refuse_children_if_ended(doing)
    }
}

impl Inner {
    fn refuse_children_if_ended(&self, doing: &str) -> Result<()> {
        if self.is_ended() { Err(self.refuse(&|| format!("{doing} ({WAY_OUT})"))) } else { Ok(()) }
    }

    /// Returns the parts that this communicator shares with its descendants.
    fn parts(&self) -> Parts {
        let context = Arc::clone(&self.context);
        // All ranks of the descendants are ranks of this communicator, so its liveness probe knows them. They do not
        // end with this communicator.
        let (liveness_probe, end_notice) = (self.liveness_probe.clone(), None);
        Parts {
            library: self.library,
            device: self.device,
            context,
            rank: self.rank,
            world_size: self.world_size,
            liveness_probe,
            end_notice,
        }
    }
}

/// The function that was called, and its answer.
type Answer = (&'static str, std::result::Result<ncclResult_t, MissingSymbol>);

/// The place where NCCL puts the handle of a new communicator: at once, or later from one of its threads.
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

    /// Frees the place: NCCL no longer writes to it.
    fn close(&mut self) {
        drop(self.0.take());
    }

    /// Aborts the communicator that was put there.
    fn abort(&self, library: &'static Library) {
        let handle = self.0.as_ref().map_or(NONE, |place| place.swap(NONE, Ordering::AcqRel));
        if !handle.is_null() {
            control::abort(library, handle);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // NCCL may still write to it: leaking eight bytes is better than overwriting other memory.
        std::mem::forget(self.0.take());
    }
}

/// A communicator being created, on the thread that creates it.
struct Attempt {
    parts: Parts,
    config: NcclConfig,
    deadline: Deadline,
    doing: String,
    parent: Option<Arc<Inner>>,
    /// Whether this rank is in the new communicator.
    has_child: bool,
    /// Whether the parent's work is stopped.
    ends_work: bool,
    /// Whether the parent must have been revoked.
    of_revoked: bool,
    /// Whether the work in progress is the parent's.
    parent_works: bool,
    control: Slot,
    data: Slot,
}

/// The configurations of the control and the data communicator, which NCCL may read until both are created.
type Raws = [RawConfig; 2];

impl Attempt {
    fn new(parts: Parts, config: &NcclConfig, deadline: &Deadline, doing: String) -> Self {
        let (config, deadline, control, data) = (config.clone(), deadline.clone(), Slot::new(), Slot::new());
        let (has_child, ends_work, of_revoked, parent_works) = (true, false, false, false);
        Self { parts, config, deadline, doing, parent: None, has_child, ends_work, of_revoked, parent_works, control, data }
    }

    /// Creates a communicator without a parent.
    fn create(self, begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer + Send + 'static) -> Result<NcclComm> {
        nccl::check_environment()?;
        let (deadline, doing) = (self.deadline.clone(), self.doing.clone());
        match self.apart(begin)? {
            Some(made) => made.map_err(|failed| failed.error).and_then(a_child),
            None => Err(late(&doing, &deadline)),
        }
    }

    /// Creates a communicator from another one. An error ends the parent too, unless it is harmless.
    fn descend(
        mut self,
        parent: &Arc<Inner>,
        begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer + Send + 'static,
    ) -> Result<Option<NcclComm>> {
        let (deadline, words) = (self.deadline.clone(), self.doing.clone());
        let doing = || words.clone();
        let _gate = if self.ends_work {
            parent.gate_or_abort(&words, &deadline)?
        } else {
            lock_within(&parent.gate, deadline.remaining()).ok_or_else(|| parent.expire(&doing, deadline.elapsed()))?
        };
        parent.refuse_children_if_ended(&words)?;
        if self.of_revoked && !parent.revoked_by_nccl.load(Ordering::Acquire) {
            // NCCL itself would let the two share abort flags.
            let reason =
                "it was shrunk with ShrinkMode::Abort, and can only be dropped now: split the communicator that the shrink created";
            return Err(Error::unsupported(words, reason));
        }
        self.parent = Some(Arc::clone(parent));
        if self.ends_work {
            // NCCL raises the flags, waits, and clears them, all within its call: no wait reports success meanwhile.
            parent.refuse_collectives();
        }
        let ends_work = self.ends_work;
        let attempted = self.apart(begin).map_err(|error| if ends_work { parent.end(error, &doing) } else { error })?;
        match attempted {
            Some(Ok(made)) => Ok(made),
            Some(Err(Failed { error, harmless: true })) => Err(error),
            Some(Err(Failed { error, .. })) => Err(parent.end(with_way_out(error), &doing)),
            None => Err(parent.expire(&doing, deadline.elapsed())),
        }
    }

    fn apart(
        mut self,
        begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer + Send + 'static,
    ) -> Result<Option<Attempted<Option<NcclComm>>>> {
        let (deadline, doing) = (self.deadline.clone(), self.doing.clone());
        let work = move |answer: &dyn Fn(Attempted<Option<NcclComm>>)| {
            let parent = self.parent.clone();
            let turn = parent.as_ref().map(|parent| lock_within(&parent.control_turn, self.deadline.remaining()));
            let mut raws = None;
            let made = match &turn {
                Some(None) => Err(self.late().into()),
                _ => self.make(begin, &mut raws),
            };
            if let (Err(failed), Some(parent)) = (&made, parent.as_ref().filter(|_| self.parent_works)) {
                parent.tell(Some(&failed.error));
            }
            let failed = made.is_err();
            answer(made);
            if failed {
                self.give_up(turn.flatten());
            }
        };
        control::apart(&deadline, work).map_err(|error| Error::io(format!("{doing}: starting a thread"), error))
    }

    /// Creates the two communicators. Values that must outlive the work in progress are put into `kept`.
    fn make(
        &mut self,
        begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer,
        kept: &mut Option<Raws>,
    ) -> Attempted<Option<NcclComm>> {
        let library = self.parts.library;
        let raws = kept.insert([RawConfig::new(&self.config, Purpose::Control)?, RawConfig::new(&self.config, Purpose::Data)?]);
        driver::bind(&self.parts.context).map_err(|error| driver::cuda_error(self.doing.clone(), error))?;
        self.begin(begin, &mut raws[0])?;
        if let Some(parent) = self.parent_handle()? {
            self.parent_works = true;
            self.settle(parent)?;
            self.parent_works = false;
        }
        if !self.has_child {
            self.control.close();
            self.data.close();
            return Ok(None);
        }
        let control = self.handle_of(|attempt| &attempt.control)?;
        self.settle(control)?;
        // By now NCCL has put the settings from its files into the environment.
        nccl::check_environment()?;
        self.split(control, &mut raws[1])?;
        let data = self.handle_of(|attempt| &attempt.data)?;
        let refused = |refusal: Refusal| refusal.into_error(self.doing.clone());
        let (rank, world_size) = (control::rank(library, data).map_err(refused)?, control::size(library, data).map_err(refused)?);
        let parts = Parts { rank, world_size, ..self.parts.clone() };
        let strings = raws.each_mut().map(|raw| std::mem::take(&mut raw.strings));
        let inner = Arc::new(Inner::new(parts, Handles { control, data }, strings));
        self.control.close();
        self.data.close();
        if let Err(error) = watchdog::watch(&inner) {
            let error = Error::io("starting the thread that watches communicators", error);
            inner.fail(error.clone(), ABORT_WAIT);
            return Err(error.into());
        }
        Ok(Some(NcclComm { inner }))
    }

    /// Makes the first call.
    fn begin(
        &mut self,
        begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer,
        raw: &mut RawConfig,
    ) -> Attempted<()> {
        let (library, parent) = (self.parts.library, self.parent_handle()?);
        let Some(_turn) = self.parts.device.turn(self.deadline.remaining()) else { return Err(self.late().into()) };
        let (name, answer) = begin(parent.unwrap_or(NONE), self.control.address(), &mut raw.config);
        let Err(refusal) = nccl::check(library, parent.unwrap_or(NONE), name, answer) else { return Ok(()) };
        // NCCL stops the parent's work before it checks its arguments.
        let harmless = !self.ends_work && control::is_harmless(library, parent.unwrap_or(NONE), &refusal);
        Err(Failed { error: refusal.into_error(self.doing.clone()), harmless })
    }

    /// Splits the data communicator off.
    fn split(&mut self, control: ncclComm_t, raw: &mut RawConfig) -> Result<()> {
        let library = self.parts.library;
        {
            let Some(_turn) = self.parts.device.turn(self.deadline.remaining()) else { return Err(self.late()) };
            // SAFETY: the control communicator was created by this thread, is unknown to others, and is ready. The slot
            // lives until it is written to or forever, and the configuration until nothing is in progress any longer
            // (`make`).
            let answer = unsafe { library.ncclCommSplit(control, 0, 0, self.data.address(), &mut raw.config) };
            let split = nccl::check(library, control, "ncclCommSplit", answer);
            split.map_err(|refusal| refusal.into_error(self.doing.clone()))?;
        }
        self.settle(control)
    }

    /// Returns the parent's control communicator, whose turn this thread has.
    fn parent_handle(&self) -> Result<Option<ncclComm_t>> {
        let Some(parent) = &self.parent else { return Ok(None) };
        let handle = parent.control.load(Ordering::Acquire);
        if handle.is_null() { Err(parent.refuse(&|| self.doing.clone())) } else { Ok(Some(handle)) }
    }

    fn settle(&self, handle: ncclComm_t) -> Result<()> {
        control::settle(self.parts.library, handle, &self.doing, &|| self.stop())
    }

    /// Waits for a handle that NCCL puts into its slot.
    fn handle_of(&self, slot: impl Fn(&Self) -> &Slot) -> Result<ncclComm_t> {
        let mut back_off = BackOff::default();
        while slot(self).handle().is_null() {
            if let Some(error) = self.stop() {
                return Err(error);
            }
            back_off.rest();
        }
        Ok(slot(self).handle())
    }

    /// Returns a reason to give up, if there is one.
    fn stop(&self) -> Option<Error> {
        if let Some(parent) = self.parent.as_ref().filter(|parent| parent.is_ended()) {
            return Some(parent.refuse(&|| self.doing.clone()));
        }
        let probe = self.parts.liveness_probe.as_ref();
        let trouble = probe.and_then(|probe| probe.trouble(&|| self.doing.clone(), self.deadline.elapsed()));
        trouble.or_else(|| self.deadline.has_passed().then(|| self.late()))
    }

    fn late(&self) -> Error {
        match &self.parent {
            Some(parent) => parent.timeout(self.doing.clone(), self.deadline.elapsed()),
            None => late(&self.doing, &self.deadline),
        }
    }

    /// Aborts what was begun. The communicator at work is aborted first, on this thread, because this thread began the
    /// work; the abort waits for that work.
    fn give_up(&mut self, turn: Option<MutexGuard<'_, ()>>) {
        if self.parent_works
            && let Some(parent) = self.parent.as_ref().filter(|_| turn.is_some())
        {
            parent.abort_control();
        }
        self.control.abort(self.parts.library);
        self.data.abort(self.parts.library);
    }
}

fn late(doing: &str, deadline: &Deadline) -> Error {
    Error::Timeout { doing: doing.to_owned(), elapsed: deadline.elapsed(), missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() }
}
