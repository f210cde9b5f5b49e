//! One communicator of NCCL's: made, called, aborted and closed. A call starts no thread and asks NCCL nothing afterwards, and nothing waits for ever.
//!
//! NCCL offers one or the other. Calls of a communicator that *blocks* are launched by their thread, but whoever aborts it frees what a thread inside
//! of it still uses. One that does *not block* can be aborted, but starts a thread for every call (from 2.23.4 on). So there are two:
//!
//! - the **control communicator** does not block, and nothing is ever launched on it. It is made from ids, and all others are made of it;
//! - the **data communicator** is split of it, and blocks. Calls go to it, on their own thread. As the control communicator is told to share its resources
//!   with its children (`splitShare`), both have the same abort flags, in host and device memory, and each holds what is shared by a count.
//!
//! Why that is sound, with NCCL's sources from 2.20.5 to 2.30.7 in mind:
//!
//! - *An abort* of the control communicator raises the flags before anything that may wait for the device. Kernels end, and a thread inside the data
//!   communicator, as one that waits for ranks to connect to, comes back with an error. The data communicator's own memory is not touched: it is aborted
//!   when nobody is inside ([`state::InCallGuard`]). Until it is, its handle is valid.
//! - *The end of a deadline* is somebody else's abort (`watchdog.rs`), and the thread inside gets its error.
//! - *Captured graphs* hold the data communicator alone, so that they cannot hold up what frees streams. NCCL's last abort waits until they are
//!   dropped, on a thread that nobody waits for; closing is refused while they are there.
//! - *Children* would share the flags, too, and end with their parent: each is a new control communicator, from a new id, or by what NCCL gives flags of
//!   its own (`ncclCommShrink`, `ncclCommGrow`, splits of what was revoked).
//! - *All else* may take as long as other ranks do, and is done on threads of its own, for which the caller waits until its deadline (`control.rs`).
//! - *`ncclCommRevoke`* frees what a call in progress uses (up to 2.30.7). The control communicator has none while its turn is held, and the gate keeps
//!   threads out of the data communicator.
//!
//! Two communicators of one device may have their first calls in opposite orders on two ranks, where each waits inside NCCL for the other's: so the lock of
//! a device, under which launches come one after the other, is one that is not waited for for long ([`lock::Device::turn`]). Who may be inside a
//! communicator is the matter of its own locks.

#![expect(unsafe_code, reason = "NCCL is C")]

mod announced_capture;
mod captures;
mod control;
mod graph_memory;
mod init;
mod live_graphs;
mod lock;
mod prober;
mod state;
mod stream_position;
mod stream_tracker;
mod teardown;
#[cfg(test)]
#[cfg(simgpu)]
mod tests;
mod timekeeper;
mod watchdog;
mod watched;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use nccl_sys::{Library, Version, ncclComm_t};

use self::live_graphs::Captured;
use crate::base::deadline::Deadline;
use crate::base::tuning::device::ABORT_WAIT;
use crate::call::Call;
use crate::device::driver;
use crate::device::nccl::{Raw, Refusal};
use crate::error::{Error, Result};
use crate::flight::Flight;

pub(crate) use self::init::{Setup, unique_id};
pub(crate) use self::lock::BackOff;
pub(in crate::device) use self::state::Inner;
pub(crate) use self::state::{EndNotice, LivenessProbe, Notice};
pub(crate) use self::stream_position::StreamPosition;

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

    /// NCCL's own handle, of the data communicator; null once it has ended.
    pub(crate) fn handle(&self) -> ncclComm_t {
        self.inner.data.load(Ordering::Acquire)
    }

    /// Whether collectives are refused, and splits and shrinks are not.
    pub(crate) fn is_revoked(&self) -> bool {
        self.inner.is_revoked()
    }

    /// Why what was queued may not be done: what later calls would give as the cause of their refusal, or what another rank has said of its end.
    /// Whoever wants to know it of a call asks after the driver has said that this is done.
    pub(crate) fn failure(&self) -> Option<Error> {
        let error = self.inner.cut_off(&|| self.inner.last_call(), Duration::ZERO)?;
        Some(if self.inner.is_over() { (*self.inner.cause()).clone() } else { error })
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

    /// Says what the other ranks were told of the calls that come now: whether they become part of a graph. One that turns out otherwise is refused, until
    /// `None` is said.
    pub(crate) fn announce_capture(&self, is_captured: Option<bool>) {
        self.inner.announced.set(is_captured);
    }

    /// Ends the communicator because others count on what this rank has not queued.
    pub(crate) fn fail(&self, error: &Error) {
        self.inner.fail(error.clone(), ABORT_WAIT);
    }

    /// Has it said to have ended by this error, whatever will end it: this rank does so soon.
    pub(crate) fn will_fail(&self, error: &Error) {
        // The first one counts, as of those that end it.
        let _ = self.inner.known_end.set(error.clone());
    }

    /// Waits until the device has done all calls that were made; `false` where the deadline passed first. A communicator that has ended
    /// has nothing to wait for.
    pub(in crate::device) fn quiesce(&self, deadline: &Deadline) -> std::result::Result<bool, DriverError> {
        self.inner.quiesce(deadline)
    }

    /// Makes a call that puts nothing on a stream.
    pub(in crate::device) fn manage(
        &self,
        doing: &dyn Fn() -> String,
        deadline: &Deadline,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        let _gate = self.inner.enter(doing, deadline.remaining())?;
        self.inner.inside(doing, deadline.remaining(), work)
    }

    pub(in crate::device) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

/// One communicator's share of a group: the stream that all its calls use, and what makes them.
pub(crate) type Part<'a> = (&'a NcclComm, &'a Arc<CudaStream>, &'a mut dyn FnMut(&Raw<'_>) -> std::result::Result<(), Refusal>);

impl NcclComm {
    /// Puts work on the stream, on this thread. Returns when it is there, which takes other ranks only where NCCL has to connect to them first.
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
        let bind = if driver::is_nameless(stream) { driver::bind } else { driver::bind_once };
        inner.inside_bound(bind, doing, timeout, in_time)?;
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
    if let Err((culprit, error)) = launch(parts, &everyone, &mut captured, doing, timeout) {
        // While the gates are held: some of the work may be on its way, counted by nobody.
        everyone.iter().for_each(|inner| inner.tell(Some(&error)));
        for inner in everyone.iter().filter(|inner| !Arc::ptr_eq(inner, everyone[culprit])) {
            inner.fail(error.clone(), Duration::ZERO);
        }
        let ended = everyone[culprit].is_ended();
        return Err(if ended { error } else { everyone[culprit].end(error, doing) });
    }
    // Also behind an error: what is on a stream is counted.
    let mut outcome = Ok(());
    for ((comm, stream, _), captured) in parts.iter().zip(captured) {
        let place = inners.iter().position(|inner| Arc::ptr_eq(inner, comm.inner()));
        if let Some(gate) = place.and_then(|place| gates.get_mut(place)) {
            outcome = outcome.and(comm.inner().conclude(captured, gate, stream, doing));
        }
    }
    outcome
}

/// Makes the calls of all parts, inside all communicators. An error comes with the place of the communicator that it is about.
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
    let mut turns = Vec::with_capacity(devices.len());
    for device in devices {
        turns.push(device.turn(timeout).ok_or_else(|| (0, inners[0].timeout(doing(), timeout)))?);
    }
    // Until the group has ended: it uses all of them.
    let mut guards = Vec::with_capacity(inners.len());
    for (index, inner) in inners.iter().enumerate() {
        guards.push(inner.begin_call(timeout).ok_or_else(|| (index, inner.refuse(doing)))?);
    }
    let mut culprit = 0;
    let mut all = parts.iter_mut();
    let first = guards[0].raw();
    let made = group(&first, || {
        all.try_for_each(|(comm, stream, work)| {
            culprit = inners.iter().position(|known| Arc::ptr_eq(known, comm.inner())).unwrap_or(0);
            let in_time = |raw: &Raw<'_>| {
                captured.push(inners[culprit].begin(stream, timeout)?);
                work(raw)
            };
            inners[culprit].call(driver::bind, &guards[culprit], in_time)
        })
    });
    if let Some(index) = inners.iter().position(|inner| inner.is_ended()) {
        return Err((index, inners[index].interruption(doing)));
    }
    made.and_then(|()| first.check_done()).map_err(|refusal| (culprit, refusal.into_error(doing())))
}
