//! How communicators are made: from ids, or out of another communicator; each as a control communicator, of which the data communicator is split.

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
    /// Where ranks say that they give up, if anywhere.
    pub(crate) end_notice: Option<&'a Arc<dyn EndNotice>>,
}

/// A new id, which is good for one communicator.
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

/// Rank and size in C's way.
fn numbers(doing: &str, setup: &Setup<'_>) -> Result<(c_int, c_int)> {
    let numbers = c_int::try_from(setup.rank).ok().zip(c_int::try_from(setup.world_size).ok());
    match numbers {
        Some(numbers) if setup.rank < setup.world_size && !setup.ids.is_empty() && setup.ids.len() <= setup.world_size => Ok(numbers),
        _ => {
            let expected = format!("a rank below the size, and one id at least, are expected; there are {}", setup.ids.len());
            Err(Error::config(doing, expected))
        }
    }
}

impl NcclComm {
    /// Makes a communicator together with all its other ranks.
    pub(crate) fn create(setup: Setup<'_>) -> Result<Self> {
        let doing = format!("making a communicator, as rank {} of {}, on device {}", setup.rank, setup.world_size, setup.gpu.ordinal);
        let (rank, world_size) = numbers(&doing, &setup)?;
        let library = setup.library;
        let scalable = setup.ids.len() > 1 && library.has("ncclCommInitRankScalable");
        let mut ids = setup.ids.to_vec();
        let begin = move |_, slot, config| {
            if scalable {
                let count = ids.len() as c_int;
                // SAFETY: slot and configuration are those of `Attempt::begin`; the ids are as many as is said, and are read before the call
                // returns.
                let answer = unsafe { library.ncclCommInitRankScalable(slot, world_size, rank, count, ids.as_mut_ptr(), config) };
                ("ncclCommInitRankScalable", answer)
            } else {
                // SAFETY: slot and configuration are those of `Attempt::begin`.
                ("ncclCommInitRankConfig", unsafe { library.ncclCommInitRankConfig(slot, world_size, ids[0], rank, config) })
            }
        };
        Attempt::new(setup.parts(), setup.config, setup.deadline, doing).create(begin)
    }

    /// Splits a communicator that was revoked, by colour, in the order of keys. Ranks without a colour take part and get nothing.
    ///
    /// Others are not split through NCCL: what is split off the control communicator shares its abort flags, unless that was revoked.
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

    /// Makes a communicator of all ranks but some, which do not take part. NCCL 2.27.3.
    ///
    /// With `abort_parent` this communicator's work is stopped first, and only its end remains for it; without, nothing may be in flight.
    pub(crate) fn shrink(&self, excluded: &[usize], abort_parent: bool, config: &NcclConfig, deadline: &Deadline) -> Result<Self> {
        let doing = format!("shrinking the communicator of rank {} of {}", self.rank(), self.world_size());
        if let Some(wrong) = excluded.iter().find(|rank| **rank >= self.world_size() || **rank == self.rank()) {
            return Err(Error::argument(
                "shrink",
                format!("rank {wrong} cannot be left out by rank {} of {}", self.rank(), self.world_size()),
            ));
        }
        if excluded.is_empty() {
            return Err(Error::argument("shrink", "no rank is left out, which NCCL refuses: split with one colour instead"));
        }
        // A list of our own: NCCL sorts it. What is listed twice would be counted twice.
        let mut list: Vec<c_int> = excluded.iter().map(|rank| *rank as c_int).collect();
        list.sort_unstable();
        list.dedup();
        if !self.library().has("ncclCommShrink") {
            return Err(Error::unsupported(doing, format!("it needs NCCL 2.27.3, and this is {}", self.version())));
        }
        let flags = if abort_parent { nccl_sys::NCCL_SHRINK_ABORT } else { nccl_sys::NCCL_SHRINK_DEFAULT };
        let (library, count) = (self.library(), list.len() as c_int);
        let shrink = move |parent, slot, config| {
            // SAFETY: parent, slot and configuration are those of `Attempt::begin`; the list is as long as is said, and is copied.
            ("ncclCommShrink", unsafe { library.ncclCommShrink(parent, list.as_mut_ptr(), count, slot, config, flags) })
        };
        let attempt = Attempt { ends_work: abort_parent, ..Attempt::new(self.inner().parts(), config, deadline, doing) };
        attempt.descend(self.inner(), shrink).and_then(a_child)
    }
}

/// Of ranks that all are in the new communicator.
fn a_child(made: Option<NcclComm>) -> Result<NcclComm> {
    made.ok_or_else(|| Error::config("making a communicator out of another", "NCCL made none for this rank"))
}

/// What to do where nothing can be made of a communicator.
const WAY_OUT: &str = "nothing can be made of it any more: abort or drop it, and make a new one of the ranks that are left, from a new id";

/// The error of a communicator in which NCCL has lost a rank, with what to do: NCCL makes nothing of it afterwards.
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
    /// Refuses to make anything of a communicator that has ended.
    pub(crate) fn refuse_children_if_ended(&self, doing: &str) -> Result<()> {
        self.inner().refuse_children_if_ended(doing)
    }
}

impl Inner {
    fn refuse_children_if_ended(&self, doing: &str) -> Result<()> {
        if self.is_ended() { Err(self.refuse(&|| format!("{doing} ({WAY_OUT})"))) } else { Ok(()) }
    }

    /// What its descendants share with it.
    fn parts(&self) -> Parts {
        let context = Arc::clone(&self.context);
        // All its ranks are ranks of this one, whose liveness probe knows them. This one's end is not theirs.
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
    fn close(&mut self) {
        drop(self.0.take());
    }

    /// Aborts what was put there.
    fn abort(&self, library: &'static Library) {
        let handle = self.0.as_ref().map_or(NONE, |place| place.swap(NONE, Ordering::AcqRel));
        if !handle.is_null() {
            control::abort(library, handle);
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // NCCL may still write to it: better eight bytes lost than bytes of somebody else's overwritten.
        std::mem::forget(self.0.take());
    }
}

/// A communicator on its way, on the thread that makes it.
struct Attempt {
    parts: Parts,
    config: NcclConfig,
    deadline: Deadline,
    doing: String,
    parent: Option<Arc<Inner>>,
    /// Whether this rank is in the new communicator.
    has_child: bool,
    /// Whether what the parent does is stopped.
    ends_work: bool,
    /// Whether the parent must have been revoked.
    of_revoked: bool,
    /// Whether what is in progress is the parent's.
    parent_works: bool,
    control: Slot,
    data: Slot,
}

/// What the two are configured with, which NCCL may look at until they are made.
type Raws = [RawConfig; 2];

impl Attempt {
    fn new(parts: Parts, config: &NcclConfig, deadline: &Deadline, doing: String) -> Self {
        let (config, deadline, control, data) = (config.clone(), deadline.clone(), Slot::new(), Slot::new());
        let (has_child, ends_work, of_revoked, parent_works) = (true, false, false, false);
        Self { parts, config, deadline, doing, parent: None, has_child, ends_work, of_revoked, parent_works, control, data }
    }

    /// Makes a communicator that has no parent here.
    fn create(self, begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer + Send + 'static) -> Result<NcclComm> {
        nccl::check_environment()?;
        let (deadline, doing) = (self.deadline.clone(), self.doing.clone());
        match self.apart(begin)? {
            Some(made) => made.map_err(|failed| failed.error).and_then(a_child),
            None => Err(late(&doing, &deadline)),
        }
    }

    /// Makes a communicator out of another one. What fails ends that, too, unless it is harmless.
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
            let reason = "it was shrunk with ShrinkMode::Abort, and only dropping it remains: split the communicator that the shrink made";
            return Err(Error::unsupported(words, reason));
        }
        self.parent = Some(Arc::clone(parent));
        if self.ends_work {
            // NCCL raises the flags, waits, and takes them back, all within its call: nobody is told success meanwhile.
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

    /// Makes the two communicators. What `kept` is filled with outlives what is in progress.
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
        // What NCCL found in its files it has put into the environment meanwhile.
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
            let error = Error::io("starting the thread that watches over communicators", error);
            inner.fail(error.clone(), ABORT_WAIT);
            return Err(error.into());
        }
        Ok(Some(NcclComm { inner }))
    }

    /// Makes the call that begins it.
    fn begin(
        &mut self,
        begin: impl FnOnce(ncclComm_t, *mut ncclComm_t, *mut ncclConfig_t) -> Answer,
        raw: &mut RawConfig,
    ) -> Attempted<()> {
        let (library, parent) = (self.parts.library, self.parent_handle()?);
        let Some(_turn) = self.parts.device.turn(self.deadline.remaining()) else { return Err(self.late().into()) };
        let (name, answer) = begin(parent.unwrap_or(NONE), self.control.address(), &mut raw.config);
        let Err(refusal) = nccl::check(library, parent.unwrap_or(NONE), name, answer) else { return Ok(()) };
        // NCCL stops what the parent does before it looks at its arguments.
        let harmless = !self.ends_work && control::is_harmless(library, parent.unwrap_or(NONE), &refusal);
        Err(Failed { error: refusal.into_error(self.doing.clone()), harmless })
    }

    /// Splits the data communicator off.
    fn split(&mut self, control: ncclComm_t, raw: &mut RawConfig) -> Result<()> {
        let library = self.parts.library;
        {
            let Some(_turn) = self.parts.device.turn(self.deadline.remaining()) else { return Err(self.late()) };
            // SAFETY: the control communicator was made by this thread, and is known to nobody else; it is ready. The slot lives until it is
            // written to or for ever, and the configuration until nothing is in progress any more (`make`).
            let answer = unsafe { library.ncclCommSplit(control, 0, 0, self.data.address(), &mut raw.config) };
            let split = nccl::check(library, control, "ncclCommSplit", answer);
            split.map_err(|refusal| refusal.into_error(self.doing.clone()))?;
        }
        self.settle(control)
    }

    /// The parent's control communicator, whose turn this thread has.
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

    /// Why to give up.
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

    /// Aborts what was begun. Whatever works is aborted first, on this thread, which began it; its abort waits for what it works on.
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
