//! One NCCL communicator: made, used, split and ended without ever blocking for longer than a deadline.
//!
//! All calls into NCCL are made in the non-blocking way, under the lock of the device, for no longer than NCCL takes to answer; a call that is
//! still in progress is looked at again and again, and the lock is free between two looks. So ranks of one process never wait for each
//! other with a lock held, and whoever aborts finds a moment to.

#![expect(unsafe_code, reason = "NCCL is C")]

mod captures;
mod graph_memory;
mod init;
mod live_graphs;
mod lock;
mod prober;
mod state;
mod stream_tracker;
mod teardown;
#[cfg(test)]
mod tests;
mod timekeeper;
mod watchdog;
mod watched;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use nccl_sys::{Library, Version, ncclComm_t};

use self::live_graphs::Captured;
use self::lock::lock_within;
use self::state::settle;
use crate::call::Call;
use crate::deadline::Deadline;
use crate::device::driver;
use crate::device::nccl::{Raw, Refusal};
use crate::error::{Error, Result};
use crate::flight::Flight;
use crate::tuning::device::{ABORT_WAIT, COMMUNICATOR_DROP_WAIT};

pub(crate) use self::init::{Setup, join, unique_id};
pub(crate) use self::lock::BackOff;
pub(in crate::device) use self::state::Inner;
pub(crate) use self::state::LivenessProbe;

/// A communicator of NCCL. Any thread may use it; one call is made at a time.
///
/// An error other than a wrong argument ends it: it is aborted, so that work on streams which waits for other ranks returns, and all
/// later calls are refused with the first error as the cause.
#[derive(Debug)]
pub(crate) struct NcclComm {
    inner: Arc<Inner>,
}

impl NcclComm {
    pub(crate) fn rank(&self) -> usize {
        self.inner.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.inner.world_size
    }

    /// The library that it belongs to.
    pub(crate) fn library(&self) -> &'static Library {
        self.inner.library
    }

    /// The release of the library.
    pub(crate) fn version(&self) -> Version {
        self.inner.library.version()
    }

    /// The context in which it uses its device.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// NCCL's own handle; null once it has ended.
    pub(crate) fn handle(&self) -> ncclComm_t {
        self.inner.handle.load(Ordering::Acquire)
    }

    /// What later calls would give as the cause of their refusal; nothing where they would not be refused.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.inner.is_over().then(|| (*self.inner.cause()).clone())
    }

    /// Has the progress of calls recorded there.
    pub(crate) fn record_in(&self, flight: &Arc<Flight>) {
        self.inner.record_in(flight);
    }

    /// By what the recorder knows the stream of the last call.
    #[inline]
    pub(crate) fn last_tracker(&self) -> u8 {
        self.inner.last_tracker()
    }

    /// How many calls are on record.
    pub(in crate::device) fn calls_noted(&self) -> u64 {
        self.inner.flight().map_or(0, |flight| flight.device_calls_noted())
    }

    /// Notes that a stream has done what it was given of the first so many calls on record.
    pub(in crate::device) fn has_done(&self, stream: &CudaStream, noted: u64) {
        if let (Some(flight), Some(tracker)) = (self.inner.flight(), self.inner.known_tracker(stream)) {
            flight.device_has_done(tracker, noted);
        }
    }

    /// Sets the liveness probe, which knows more about the other ranks than NCCL does.
    pub(crate) fn set_liveness_probe(&self, liveness_probe: Arc<dyn LivenessProbe>) {
        self.inner.set_liveness_probe(liveness_probe);
    }

    /// Asks NCCL whether something went wrong in the background. Where it did, the communicator is ended, and this is why.
    pub(crate) fn async_error(&self) -> Option<Error> {
        self.inner.look();
        self.failure()
    }

    /// Remembers what is being done, for the watchdog's words, which it may have to find long after the call.
    #[inline]
    pub(crate) fn label(&self, call: &Call) {
        self.inner.label(call.fingerprint());
    }

    /// Waits for an event, which was recorded behind this communicator's work. A deadline that passes ends the communicator, so that the
    /// stream comes free.
    ///
    /// # Errors
    ///
    /// `Timeout` when the deadline passes; `Poisoned` when the communicator ends first; `Cuda`.
    pub(crate) fn wait(&self, event: &CudaEvent, deadline: &Deadline) -> Result<()> {
        let doing = || format!("waiting on the device for {}", self.inner.last_call());
        let mut back_off = lock::BackOff::default();
        loop {
            let complete = crate::device::driver::is_complete(event);
            match (complete, self.failure()) {
                (_, Some(_)) => return Err(self.inner.refuse(&doing)),
                (Ok(true), None) => return Ok(()),
                (Ok(false), None) if deadline.has_passed() => return Err(self.time_out(&doing, deadline)),
                (Ok(false), None) => back_off.rest(),
                (Err(error), None) => return Err(crate::device::driver::cuda_error(doing(), error)),
            }
        }
    }

    /// Ends the communicator because somebody's deadline passed, and says so.
    pub(crate) fn time_out(&self, doing: &dyn Fn() -> String, deadline: &Deadline) -> Error {
        self.inner.expire(doing, deadline.elapsed())
    }

    /// Ends the communicator because others count on what this rank has not queued.
    pub(crate) fn fail(&self, error: &Error) {
        self.inner.fail(error.clone(), ABORT_WAIT);
    }

    /// Waits until the device has done all calls that were made; `false` where the deadline passed first. A communicator that has ended
    /// has nothing to wait for.
    pub(in crate::device) fn quiesce(&self, deadline: &Deadline) -> std::result::Result<bool, DriverError> {
        self.inner.quiesce(deadline)
    }

    /// Makes a call that puts nothing on a stream, and waits for its end.
    pub(in crate::device) fn manage(
        &self,
        doing: &dyn Fn() -> String,
        deadline: &Deadline,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        let _gate = self.inner.enter(doing, deadline.remaining())?;
        self.inner.inside(doing, deadline.remaining(), work)?;
        self.inner.settled(doing, deadline)
    }

    pub(in crate::device) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if self.handle().is_null() {
            return;
        }
        let deadline = Deadline::after(COMMUNICATOR_DROP_WAIT);
        let healthy = !self.inner.is_ended() && matches!(self.quiesce(&deadline), Ok(true));
        if !(healthy && self.finalize(&deadline).is_ok()) {
            if !self.inner.is_ended() {
                crate::event::error!(
                    rank = self.rank(),
                    "dropped with calls that other ranks have not made: it is aborted, their results are worth nothing"
                );
            }
            self.abort();
        }
    }
}

/// One communicator's share of a group: the stream that all its calls use, and what makes them.
pub(crate) type Part<'a> = (&'a NcclComm, &'a Arc<CudaStream>, &'a mut dyn FnMut(&Raw<'_>) -> std::result::Result<(), Refusal>);

impl NcclComm {
    /// Puts work on the stream. Returns when it is there, which takes other ranks only where NCCL has to connect to them first.
    ///
    /// NCCL may take `timeout` for it, and so may other threads' calls before it, and then the device, from when it has done what calls with
    /// another timeout had queued before; what takes longer ends the communicator. Streams of the kind "the calling thread's own" are not watched.
    ///
    /// # Safety
    ///
    /// `work` uses no stream but this one, and keeps to what [`Raw`] asks.
    #[inline]
    pub(crate) unsafe fn enqueue(
        &self,
        doing: &dyn Fn() -> String,
        stream: &Arc<CudaStream>,
        timeout: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        let inner = self.inner();
        let mut last = inner.enter(doing, timeout)?;
        let mut captured = None;
        let in_time = |raw: &Raw<'_>| {
            captured = inner.begin(stream, timeout)?;
            work(raw)
        };
        if inner.inside_bound(driver::bind_once, doing, timeout, in_time)? {
            let settled = settle(&[inner], doing, &Deadline::after(timeout), Inner::is_over);
            // Whoever revokes it goes on with splits and shrinks of it.
            settled.map_err(|(_, error)| if inner.is_revoked() { error } else { inner.end(error, doing) })?;
        }
        inner.conclude(captured, &mut last, stream, doing)
    }
}

/// Puts the work of several calls, of one or several communicators, on their streams together.
///
/// What fails ends all of the communicators: some of the work may be on its way.
///
/// # Safety
///
/// Each part's work uses its stream alone, and keeps to what [`Raw`] asks. What the parts make become one group of NCCL's, and must make sense as one.
pub(crate) unsafe fn grouped(parts: &mut [Part<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    match parts {
        [] => Ok(()),
        [(comm, stream, work)] => {
            // SAFETY: the part's work uses this stream alone and keeps to what `Raw` asks: this function's contract.
            unsafe { comm.enqueue(doing, stream, timeout, |raw| group(raw, || work(raw))) }
        }
        parts => several(parts, doing, timeout),
    }
}

/// Runs `work` as one group. The group is ended whatever happens.
fn group(raw: &Raw<'_>, work: impl FnOnce() -> std::result::Result<(), Refusal>) -> std::result::Result<(), Refusal> {
    raw.group_start()?;
    let open = Open(raw);
    let made = work();
    std::mem::forget(open);
    let ended = raw.group_end();
    made.and(ended).map_err(Refusal::in_group)
}

/// A group that is open, and is ended when `work` panics.
struct Open<'a>(&'a Raw<'a>);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        drop(self.0.group_end());
    }
}

fn several(parts: &mut [Part<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    let mut inners: Vec<Arc<Inner>> = parts.iter().map(|(comm, ..)| Arc::clone(comm.inner())).collect();
    inners.sort_unstable_by_key(|inner| inner.number);
    inners.dedup_by_key(|inner| inner.number);
    if inners.iter().any(|inner| !std::ptr::eq(inner.library, inners[0].library)) {
        return Err(Error::argument("group", "the communicators belong to two different NCCL libraries, and a group is made by one"));
    }
    let mut gates = Vec::with_capacity(inners.len());
    for inner in &inners {
        gates.push(inner.enter(doing, timeout)?);
    }
    let everyone: Vec<&Arc<Inner>> = inners.iter().collect();
    let mut captured = Vec::with_capacity(parts.len());
    let made = launch(parts, &everyone, &mut captured, doing, timeout);
    let settled = made.and_then(|()| settle(&everyone, doing, &Deadline::after(timeout), Inner::is_over));
    if let Err((culprit, error)) = settled {
        if everyone[culprit].is_revoked() {
            return Err(error);
        }
        for inner in everyone.iter().filter(|inner| !Arc::ptr_eq(inner, everyone[culprit])) {
            inner.fail(error.clone(), Duration::ZERO);
        }
        return Err(everyone[culprit].end(error, doing));
    }
    for ((comm, stream, _), captured) in parts.iter().zip(captured) {
        let place = inners.iter().position(|inner| Arc::ptr_eq(inner, comm.inner()));
        if let Some(gate) = place.and_then(|place| gates.get_mut(place)) {
            comm.inner().conclude(captured, gate, stream, doing)?;
        }
    }
    Ok(())
}

/// Makes the calls of all parts, with the locks of all their devices. An error comes with the place of the communicator that it is about.
fn launch(
    parts: &mut [Part<'_>],
    inners: &[&Arc<Inner>],
    captured: &mut Vec<Option<Captured>>,
    doing: &dyn Fn() -> String,
    timeout: Duration,
) -> std::result::Result<(), (usize, Error)> {
    let mut devices: Vec<_> = inners.iter().map(|inner| inner.device).collect();
    devices.sort_unstable_by_key(|device| device.number);
    devices.dedup_by_key(|device| device.number);
    let mut locks = Vec::with_capacity(devices.len());
    for device in devices {
        let late =
            || (0, Error::Timeout { doing: doing(), elapsed: timeout, missing: Vec::new(), arrived: Vec::new(), meanwhile: Vec::new() });
        locks.push(lock_within(&device.lock, timeout).ok_or_else(late)?);
    }
    if let Some(index) = inners.iter().position(|inner| inner.is_over()) {
        return Err((index, inners[index].refuse(doing)));
    }
    let mut culprit = 0;
    let mut all = parts.iter_mut();
    let first = Raw::new(inners[0].library, inners[0].handle.load(Ordering::Acquire));
    let made = group(&first, || {
        all.try_for_each(|(comm, stream, work)| {
            let inner = comm.inner();
            culprit = inners.iter().position(|known| Arc::ptr_eq(known, inner)).unwrap_or(0);
            let in_time = |raw: &Raw<'_>| {
                captured.push(inner.begin(stream, timeout)?);
                work(raw)
            };
            inner.call(driver::bind, inner.handle.load(Ordering::Acquire), in_time).map(|_| ())
        })
    });
    made.map_err(|refusal| (culprit, refusal.into_error(doing())))
}
