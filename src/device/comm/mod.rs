//! One NCCL communicator: its creation, its calls, its abort and its closing. A call starts no thread and needs no
//! later NCCL call, and nothing waits forever.
//!
//! With NCCL alone, either calls start threads or a wait may never end. A communicator that *blocks* launches its calls
//! on the calling thread, but aborting it frees memory that a thread still inside an NCCL call uses. A communicator
//! that does *not block* can be aborted, but starts a thread for every call (from 2.23.4 on). So two NCCL communicators
//! are used together:
//!
//! - the **control communicator** does not block, and nothing is ever launched on it. It is created from ids, and all
//!   others are created from it;
//! - the **data communicator** is split off it, and blocks. Calls go to it, on the calling thread. The control
//!   communicator is configured to share its resources with its children (`splitShare`). So both have the same abort
//!   flags, in host and device memory, and the shared resources are reference-counted.
//!
//! This design is sound for the following reasons, according to NCCL's sources from 2.20.5 to 2.30.7:
//!
//! - *An abort* of the control communicator sets the flags before it does anything that may wait for the device.
//!   Kernels then end. A thread inside the data communicator, for example a thread that waits for ranks to which it
//!   connects, returns with an error. The data communicator's own memory is not touched before no thread is inside it
//!   ([`state::InCallGuard`]). Then the data communicator is aborted too. Until then its handle is valid.
//! - *When a deadline passes*, another thread aborts (`watchdog.rs`), and the thread inside the call gets its error.
//! - *Captured graphs* hold only the data communicator, so they cannot delay the abort of the control communicator,
//!   which releases the streams. The abort of the data communicator waits until the graphs are dropped, on a thread
//!   that no other thread waits for. A close is refused while graphs exist.
//! - *Children* would also share the flags, and end with their parent. So each child starts as a new control
//!   communicator: from a new id, or by the calls for which NCCL creates separate flags (`ncclCommShrink`,
//!   `ncclCommGrow`, splits of a revoked communicator).
//! - *All other calls* may take as long as other ranks do. They run on separate threads, for which the caller waits
//!   until its deadline (`control.rs`).
//! - *`ncclCommRevoke`* frees memory that a call in progress uses (up to 2.30.7). During a revocation, the control
//!   communicator has no call in progress, because the revocation holds its turn. A lock, the *gate* (`state.rs`),
//!   keeps threads out of the data communicator.
//!
//! Two ranks may make the first calls of two communicators of one device in different orders; each rank then waits
//! inside NCCL for the other. So no thread waits long for the lock of a device, which serialises launches
//! ([`lock::Device::turn`]). A communicator's own locks decide which threads may be inside it.

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

/// An NCCL communicator. Any thread may use it; one call is made at a time.
///
/// An error other than a wrong argument ends the communicator. It is aborted, so that work on streams that waits for
/// other ranks ends. All later calls are refused, with the first error as the cause.
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

    /// Returns the library of the communicator.
    pub(crate) fn library(&self) -> &'static Library {
        self.inner.library
    }

    /// Returns the release of the library.
    pub(crate) fn version(&self) -> Version {
        self.inner.library.version()
    }

    /// Returns the context in which the communicator uses its device.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Returns NCCL's own handle of the data communicator; null once the communicator has ended.
    pub(crate) fn handle(&self) -> ncclComm_t {
        self.inner.data.load(Ordering::Acquire)
    }

    /// Whether collectives are refused, but splits and shrinks are not.
    pub(crate) fn is_revoked(&self) -> bool {
        self.inner.is_revoked()
    }

    /// Returns the reason why queued work may not be done: the cause that later calls would report, or the end that
    /// another rank reported. To get a valid answer for a call, ask after the driver has reported the call as done.
    pub(crate) fn failure(&self) -> Option<Error> {
        let error = self.inner.cut_off(&|| self.inner.last_call(), Duration::ZERO)?;
        Some(if self.inner.is_over() { (*self.inner.cause()).clone() } else { error })
    }

    /// Records the progress of calls in `flight`.
    pub(crate) fn record_in(&self, flight: &Arc<Flight>) {
        self.inner.record_in(flight);
    }

    /// Returns the recorder's number for the stream of the last call.
    #[inline]
    pub(crate) fn last_tracker(&self) -> u8 {
        self.inner.last_tracker()
    }

    /// Asks NCCL whether something went wrong in the background. If so, ends the communicator and returns the reason.
    pub(crate) fn async_error(&self) -> Option<Error> {
        self.inner.look();
        self.failure()
    }

    /// Remembers the current call for the watchdog's error text, which may be needed long after the call.
    #[inline]
    pub(crate) fn label(&self, call: &Call) {
        self.inner.label(call.fingerprint());
    }

    /// Sets the announcement that the other ranks got about the next calls: whether they become part of a graph. Until
    /// `None` is set, a call for which the announcement turns out wrong is refused.
    pub(crate) fn announce_capture(&self, is_captured: Option<bool>) {
        self.inner.announced.set(is_captured);
    }

    /// Ends the communicator because other ranks rely on work that this rank has not queued.
    pub(crate) fn fail(&self, error: &Error) {
        self.inner.fail(error.clone(), ABORT_WAIT);
    }

    /// Sets the error that will be reported as the cause of the communicator's end, whatever ends it. This rank is
    /// about to end it.
    pub(crate) fn will_fail(&self, error: &Error) {
        // The first error counts, as for the errors that end the communicator.
        let _ = self.inner.known_end.set(error.clone());
    }

    /// Waits until the device has completed all calls that were made; returns `false` if the deadline passed first. A
    /// communicator that has ended has nothing to wait for.
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

/// One communicator's part of a group: the stream that all its calls use, and the function that makes them.
pub(crate) type Part<'a> = (&'a NcclComm, &'a Arc<CudaStream>, &'a mut dyn FnMut(&Raw<'_>) -> std::result::Result<(), Refusal>);

impl NcclComm {
    /// Puts work on the stream, on this thread. Returns when the work is there. This waits for other ranks only if NCCL
    /// first has to connect to them.
    ///
    /// `timeout` limits the time of NCCL and of other threads' earlier calls, and then separately that of the device.
    /// The device's time begins when it has completed earlier calls with another timeout. Exceeding the timeout ends
    /// the communicator. Streams of the kind "the calling thread's own" are not watched.
    ///
    /// # Safety
    ///
    /// `work` uses only this stream, and meets the requirements of [`Raw`].
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
/// An error ends all of the communicators, because some of the work may already be on its stream.
///
/// # Safety
///
/// Each part's work uses only its stream, and meets the requirements of [`Raw`]. The parts' calls form one NCCL group,
/// and must be valid as one.
pub(crate) unsafe fn grouped(parts: &mut [Part<'_>], doing: &dyn Fn() -> String, timeout: Duration) -> Result<()> {
    match parts {
        [] => Ok(()),
        [(comm, stream, work)] => {
            // SAFETY: the part's work uses this stream alone and meets the requirements of `Raw`: this function's
            // contract.
            unsafe { comm.enqueue(doing, stream, timeout, |raw| group(raw, || work(raw))) }
        }
        parts => several(parts, doing, timeout),
    }
}

/// Runs `work` as one group, which is always ended.
fn group(raw: &Raw<'_>, work: impl FnOnce() -> std::result::Result<(), Refusal>) -> std::result::Result<(), Refusal> {
    raw.group_start()?;
    let open = Open(raw);
    let made = work();
    std::mem::forget(open);
    let ended = raw.group_end();
    made.and(ended).map_err(Refusal::in_group)
}

/// An open group, which is ended if `work` panics.
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
        return Err(Error::argument("group", "the communicators use two different NCCL libraries, but a group can use only one"));
    }
    let mut gates = Vec::with_capacity(inners.len());
    for inner in &inners {
        gates.push(inner.enter(doing, timeout)?);
    }
    let everyone: Vec<&Arc<Inner>> = inners.iter().collect();
    let mut captured = Vec::with_capacity(parts.len());
    if let Err((culprit, error)) = launch(parts, &everyone, &mut captured, doing, timeout) {
        // While the gates are held: some of the work may already be on its stream without being counted.
        everyone.iter().for_each(|inner| inner.tell(Some(&error)));
        for inner in everyone.iter().filter(|inner| !Arc::ptr_eq(inner, everyone[culprit])) {
            inner.fail(error.clone(), Duration::ZERO);
        }
        let ended = everyone[culprit].is_ended();
        return Err(if ended { error } else { everyone[culprit].end(error, doing) });
    }
    // Even after an error: calls that are on a stream are counted.
    let mut outcome = Ok(());
    for ((comm, stream, _), captured) in parts.iter().zip(captured) {
        let place = inners.iter().position(|inner| Arc::ptr_eq(inner, comm.inner()));
        if let Some(gate) = place.and_then(|place| gates.get_mut(place)) {
            outcome = outcome.and(comm.inner().conclude(captured, gate, stream, doing));
        }
    }
    outcome
}

/// Makes the calls of all parts, inside all communicators. An error comes with the index of its communicator.
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
    // Held until the group has ended, because the group uses all of the communicators.
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
