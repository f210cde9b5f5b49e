//! The state of a communicator: its parts, the thread that may use it now, and the cause of its end.

use std::ffi::CString;
use std::fmt::Debug;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use nccl_sys::{Library, ncclComm};

use super::announced_capture::AnnouncedCapture;
use super::control;
use super::live_graphs::LiveGraphs;
use super::lock::{Device, lock_within, try_lock};
use super::stream_tracker::{StreamTracker, Term};
use super::watched::Watched;
use crate::call::Call;
use crate::device::driver;
use crate::device::nccl::{Raw, Refusal};
use crate::error::{Error, Peer, Result};
use crate::flight::Flight;

/// The state shared by the watchdog and the threads that use a communicator.
#[derive(Debug)]
pub(in crate::device) struct Inner {
    pub(super) library: &'static Library,
    pub(super) device: &'static Device,
    pub(super) context: Arc<CudaContext>,
    /// The data communicator; null once it has been given back. It is used while an [`InCallGuard`] exists, and taken
    /// away when none does.
    pub(super) data: AtomicPtr<ncclComm>,
    /// The control communicator; null once it has been given back. Only the holder of `control_turn` uses or takes it.
    pub(super) control: AtomicPtr<ncclComm>,
    pub(super) control_turn: Mutex<()>,
    /// The number that gives the order in which several communicators are locked.
    pub(super) number: u64,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Held for the whole of a call, even while the call is in progress and no thread is inside NCCL. Holds the tracker
    /// of the last call.
    pub(super) gate: Mutex<Option<Arc<StreamTracker>>>,
    trackers: Mutex<Vec<Arc<StreamTracker>>>,
    /// The number of the tracker of the last call.
    pub(super) last_tracker: AtomicU8,
    /// The recorder of the calls, if they are recorded.
    flight: OnceLock<Arc<Flight>>,
    /// Whether calls are refused permanently.
    pub(super) ended: AtomicBool,
    /// Whether a thread is aborting the communicator, or has done so.
    pub(super) aborting: AtomicBool,
    /// Whether streams and threads that waited for other ranks have been released, after an abort.
    pub(super) freed: AtomicBool,
    /// Whether NCCL has reported that it gave all resources back: those of the data communicator, and those of the
    /// control communicator. Set by the thread that got the answer.
    pub(super) data_gone: AtomicBool,
    pub(super) control_gone: AtomicBool,
    /// Whether only splits, shrinks and the end remain.
    pub(super) revoked: AtomicBool,
    /// Whether NCCL knows that the communicator is revoked: a communicator split off it then has separate abort flags.
    pub(super) revoked_by_nccl: AtomicBool,
    pub(super) failure: OnceLock<Arc<Error>>,
    /// The error that is reported as the cause of the end, whatever ends the communicator, if that is known in advance.
    pub(super) known_end: OnceLock<Error>,
    /// In the low bits ([`INSIDE`]), the number of threads inside the data communicator; above them, the number of
    /// entries.
    pub(super) entries: AtomicU64,
    /// The time that the thread that is inside, or was inside last, may take, in nanoseconds.
    entry_limit: AtomicU64,
    /// The time that the device may take for the last call, and for those before it with the same limit, in
    /// nanoseconds. Stored under the lock of the device.
    limit: AtomicU64,
    /// The number of that limit: how often the limit was changed. Stored together with the limit.
    term: AtomicU64,
    /// The fingerprint of the last call. During a call it may mix words of two calls.
    label: [AtomicU64; 4],
    /// The announcement to the other ranks about the calls that are being made.
    pub(super) announced: AnnouncedCapture,
    /// The source of knowledge about the other ranks, if there is one.
    pub(super) liveness_probe: Option<Arc<dyn LivenessProbe>>,
    /// The channel on which ranks report that they give up, if there is one.
    pub(super) end_notice: Option<Arc<dyn EndNotice>>,
    /// The state that the watchdog keeps.
    pub(super) watched: Watched,
    /// The graphs that calls became part of.
    pub(super) graphs: LiveGraphs,
    /// The strings of the configurations, which NCCL may read as long as the communicators live.
    _strings: [[Option<CString>; 2]; 2],
}

/// The two NCCL communicators behind one of ours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handles {
    pub(super) control: *mut ncclComm,
    pub(super) data: *mut ncclComm,
}

/// The parts from which a communicator is created.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) library: &'static Library,
    pub(super) device: &'static Device,
    pub(super) context: Arc<CudaContext>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) liveness_probe: Option<Arc<dyn LivenessProbe>>,
    pub(super) end_notice: Option<Arc<dyn EndNotice>>,
}

impl Inner {
    pub(super) fn new(parts: Parts, handles: Handles, strings: [[Option<CString>; 2]; 2]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let Parts { library, device, context, rank, world_size, liveness_probe, end_notice } = parts;
        Self {
            library,
            device,
            context,
            data: AtomicPtr::new(handles.data),
            control: AtomicPtr::new(handles.control),
            control_turn: Mutex::default(),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            rank,
            world_size,
            gate: Mutex::default(),
            trackers: Mutex::default(),
            last_tracker: AtomicU8::new(NO_TRACKER),
            flight: OnceLock::new(),
            ended: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            freed: AtomicBool::new(false),
            data_gone: AtomicBool::new(false),
            control_gone: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            revoked_by_nccl: AtomicBool::new(false),
            failure: OnceLock::new(),
            known_end: OnceLock::new(),
            entries: AtomicU64::new(0),
            entry_limit: AtomicU64::new(u64::MAX),
            limit: AtomicU64::new(u64::MAX),
            term: AtomicU64::new(0),
            label: Default::default(),
            announced: AnnouncedCapture::default(),
            liveness_probe,
            end_notice,
            watched: Watched::default(),
            graphs: LiveGraphs::default(),
            _strings: strings,
        }
    }

    /// Whether calls are refused permanently.
    pub(in crate::device) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether NCCL has given all resources back after the end.
    pub(super) fn is_gone(&self) -> bool {
        self.data_gone.load(Ordering::Acquire) && self.control_gone.load(Ordering::Acquire)
    }

    /// Whether collectives are refused.
    pub(super) fn is_over(&self) -> bool {
        self.is_ended() || self.revoked.load(Ordering::Acquire)
    }

    /// Whether collectives are refused but splits and shrinks are not.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire) && !self.is_ended()
    }

    /// Refuses collectives from now on. Their work is about to be cut off, after which NCCL and the driver report it as
    /// done. So from here on waits fail, and unfinished calls are recorded as failed. The gate is held.
    pub(super) fn refuse_collectives(&self) {
        self.revoked.store(true, Ordering::SeqCst);
        self.tell(None);
        if let Some(flight) = self.flight() {
            flight.device_has_failed(&self.cause());
        }
    }

    /// Notifies other ranks that this rank's work is about to be cut off, with the error that ends the communicator.
    /// This happens before NCCL's flags are raised: after that, kernels continue without waiting, and the data that
    /// they send may make other ranks' calls end as if successful.
    ///
    /// A rank without such work cannot mislead any other rank, and sends no notification: others may have completed the
    /// same calls, and these must count as successful.
    pub(super) fn tell(&self, error: Option<&Error>) {
        let Some(end_notice) = &self.end_notice else { return };
        // The thread that holds the gate may have launched a call that is not counted yet. A thread that revokes holds
        // the gate itself, and has not launched one.
        let may_launch = error.is_some() && try_lock(&self.gate).is_none();
        if may_launch || self.graphs.count() > 0 || self.trackers().iter().any(|tracker| tracker.may_be_at_work()) {
            end_notice.post(error);
        }
    }

    /// Returns the reason why a wait for work that the device has done, or will do, must fail: the communicator has
    /// ended here, or on another rank that reported its end. Call it after querying the driver, so that a report from
    /// before the work was cut off is seen.
    #[inline]
    pub(super) fn cut_off(self: &Arc<Self>, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        if self.is_over() { Some(self.refuse(doing)) } else { self.told(doing, waited) }
    }

    /// Returns the error that another rank has reported and that ends waits here.
    pub(super) fn told(self: &Arc<Self>, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error> {
        match self.end_notice.as_ref()?.read(doing, waited)? {
            Notice::Ended(error) => {
                let first = self.fail(error.clone(), Duration::ZERO);
                Some(if first { error } else { self.refuse(doing) })
            }
            Notice::Revoked(error) => Some(error),
        }
    }

    /// Returns the reason why calls are refused.
    pub(super) fn cause(&self) -> Arc<Error> {
        let by = Peer::unknown(self.rank);
        let closed = || Arc::new(Error::Aborted { doing: "the communicator was revoked or closed".to_owned(), by });
        self.failure.get().cloned().unwrap_or_else(closed)
    }

    /// Returns the refusal of a call.
    #[cold]
    pub(super) fn refuse(&self, doing: &dyn Fn() -> String) -> Error {
        Error::Poisoned { call: doing(), cause: self.cause() }
    }

    /// Locks the communicator for one call.
    #[inline]
    pub(super) fn enter(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        limit: Duration,
    ) -> Result<MutexGuard<'_, Option<Arc<StreamTracker>>>> {
        let Some(gate) = lock_within(&self.gate, limit) else { return Err(self.expire(doing, limit)) };
        if self.is_over() { Err(self.refuse(doing)) } else { Ok(gate) }
    }

    /// Calls into the data communicator, on this thread. An error ends the communicator, unless the error is harmless.
    /// The gate is held.
    #[inline]
    pub(super) fn inside(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        limit: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        self.inside_bound(driver::bind, doing, limit, work)
    }

    /// Calls like [`Inner::inside`], after making the context current in one of the driver's ways. Collectives name
    /// their device, so for them any current context is enough.
    #[inline]
    pub(super) fn inside_bound(
        self: &Arc<Self>,
        bind: fn(&CudaContext) -> std::result::Result<(), DriverError>,
        doing: &dyn Fn() -> String,
        limit: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<()> {
        let outcome = {
            let Some(_turn) = self.device.turn(limit) else { return Err(self.expire(doing, limit)) };
            let Some(guard) = self.begin_call(limit) else { return Err(self.refuse(doing)) };
            self.call(bind, &guard, work)
        };
        match outcome {
            // An abort may have made NCCL return. The launches of this call are not counted, so others are notified
            // while the gate is held.
            _ if self.is_ended() => {
                self.tell(Some(&self.cause()));
                Err(self.interruption(doing))
            }
            outcome => outcome.map_err(|refusal| self.refused(refusal, doing)),
        }
    }

    /// Enters the data communicator on this thread; returns `None` if it has ended. The gate is held.
    #[inline]
    pub(super) fn begin_call(&self, limit: Duration) -> Option<InCallGuard<'_>> {
        self.entry_limit.store(nanoseconds(limit), Ordering::Relaxed);
        // Either this thread sees the end, or the thread that ends it sees the entry and waits: both orders are total.
        self.entries.fetch_add(ENTRY, Ordering::SeqCst);
        let guard = InCallGuard(self);
        (!self.ended.load(Ordering::SeqCst)).then_some(guard)
    }

    /// Makes a call under a guard.
    #[inline]
    pub(super) fn call(
        &self,
        bind: fn(&CudaContext) -> std::result::Result<(), DriverError>,
        guard: &InCallGuard<'_>,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> std::result::Result<(), Refusal> {
        bind(&self.context).map_err(|error| Refusal::driver("cuCtxSetCurrent", error))?;
        let raw = guard.raw();
        work(&raw)?;
        raw.check_done()
    }

    /// Whether no thread is inside the data communicator. Once the communicator has ended, none enters again.
    pub(super) fn is_left(&self) -> bool {
        self.entries.load(Ordering::SeqCst) & INSIDE == 0
    }

    /// Returns the number of the last entry into the data communicator, if a thread is inside.
    pub(super) fn last_entry(&self) -> Option<u64> {
        let entries = self.entries.load(Ordering::Relaxed);
        (entries & INSIDE != 0).then_some(entries >> INSIDE.trailing_ones())
    }

    /// Returns the time that the thread inside NCCL may take.
    pub(super) fn entry_limit(&self) -> Duration {
        Duration::from_nanos(self.entry_limit.load(Ordering::Relaxed))
    }

    /// Returns the error of the thread whose call ended with the communicator. A passed deadline and a lost peer are
    /// reported as this call's own errors.
    #[cold]
    pub(super) fn interruption(&self, doing: &dyn Fn() -> String) -> Error {
        let mut error = (*self.cause()).clone();
        match &mut error {
            Error::Timeout { doing: what, .. } => *what = doing(),
            Error::Aborted { .. } | Error::Poisoned { .. } => return self.refuse(doing),
            _ => {}
        }
        error
    }

    /// Ends the communicator if NCCL reports that something went wrong in the background. The control communicator is
    /// asked. It knows as much as the data communicator, because both share the part that watches the network.
    pub(in crate::device) fn look(self: &Arc<Self>) {
        if self.is_ended() {
            return;
        }
        let said = {
            let Some(_turn) = try_lock(&self.control_turn) else { return };
            let handle = self.control.load(Ordering::Acquire);
            if handle.is_null() {
                return;
            }
            control::state(self.library, handle)
        };
        if let Err(refusal) = said {
            let error = self.explained(refusal.into_error(self.last_call()));
            self.fail(error, Duration::ZERO);
        }
    }

    /// Sets the time that the device may take for each call from here on. Calls already on streams keep their limit.
    /// Only one thread makes calls at a time.
    #[inline]
    pub(super) fn allow(&self, limit: Duration) -> std::result::Result<(), Refusal> {
        let nanoseconds = nanoseconds(limit);
        if self.limit.load(Ordering::Relaxed) == nanoseconds {
            return Ok(());
        }
        self.begin_term(nanoseconds).map_err(|error| Refusal::driver("cuEventRecord", error))
    }

    /// Marks the calls with another limit on their streams, and sets this one.
    #[cold]
    fn begin_term(&self, nanoseconds: u64) -> std::result::Result<(), DriverError> {
        driver::bind(&self.context)?;
        let noted = self.flight().map_or(0, |flight| flight.device_calls_noted());
        // The driver is called without the lock of the list, which the timekeeper takes.
        let trackers = self.trackers().clone();
        for tracker in trackers.iter().filter(|tracker| tracker.has_new_calls()) {
            tracker.mark(&self.context, Instant::now(), noted, || self.term())?;
        }
        self.limit.store(nanoseconds, Ordering::Relaxed);
        self.term.store(self.term.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the limit of the device for calls that are not followed by a mark yet.
    pub(super) fn term(&self) -> Term {
        Term { number: self.term.load(Ordering::Relaxed), limit: self.limit() }
    }

    /// Records a call that is on the stream now.
    #[inline]
    pub(super) fn note(&self, last: &mut Option<Arc<StreamTracker>>, stream: &Arc<CudaStream>) {
        match last {
            Some(tracker) if tracker.is(stream) => tracker.count(),
            _ => {
                let tracker = last.insert(self.tracker(stream));
                self.last_tracker.store(tracker.number, Ordering::Relaxed);
                tracker.count();
            }
        }
    }

    /// Returns the tracker of a stream, if one of its calls may be under way.
    pub(super) fn tracker_of(&self, stream: &CudaStream) -> Option<Arc<StreamTracker>> {
        self.trackers().iter().find(|tracker| tracker.is(stream)).map(Arc::clone)
    }

    /// Returns the recorder's number for the stream of the last call.
    #[inline]
    pub(super) fn last_tracker(&self) -> u8 {
        self.last_tracker.load(Ordering::Relaxed)
    }

    /// Records the progress of calls in `flight`.
    pub(super) fn record_in(&self, flight: &Arc<Flight>) {
        let _ = self.flight.set(Arc::clone(flight));
    }

    /// Returns the recorder of the calls, if they are recorded.
    pub(super) fn flight(&self) -> Option<&Arc<Flight>> {
        self.flight.get()
    }

    #[cold]
    fn tracker(&self, stream: &Arc<CudaStream>) -> Arc<StreamTracker> {
        let mut trackers = self.trackers();
        if let Some(known) = trackers.iter().find(|tracker| tracker.is(stream)) {
            return Arc::clone(known);
        }
        // A number that no tracker has now, if possible. If two trackers have the same number, calls on both count as
        // ended when those on either have ended.
        let is_free = |number: &u8| trackers.iter().all(|tracker| tracker.number != *number);
        let number = (0..NO_TRACKER).find(is_free).unwrap_or(0);
        let tracker = Arc::new(StreamTracker::new(stream, number));
        trackers.push(Arc::clone(&tracker));
        tracker
    }

    pub(super) fn trackers(&self) -> MutexGuard<'_, Vec<Arc<StreamTracker>>> {
        self.trackers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn label(&self, words: [u64; 4]) {
        for (kept, word) in self.label.iter().zip(words) {
            kept.store(word, Ordering::Relaxed);
        }
    }

    /// Describes the last call.
    pub(super) fn last_call(&self) -> String {
        self.call_of(self.last_label())
    }

    /// Returns the fingerprint of the last call.
    pub(super) fn last_label(&self) -> [u64; 4] {
        std::array::from_fn(|index| self.label[index].load(Ordering::Relaxed))
    }

    /// Describes the call with this fingerprint.
    pub(super) fn call_of(&self, words: [u64; 4]) -> String {
        let who = format!("rank {} of {}", self.rank, self.world_size);
        Call::from_fingerprint(words).map_or_else(|| format!("{who}: the last call"), |call| format!("{who}: {call}"))
    }

    /// Returns the time that the device may take for the last call.
    pub(in crate::device) fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Relaxed))
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A thread inside the data communicator, whose handle is valid as long as this lives.
pub(super) struct InCallGuard<'a>(&'a Inner);

impl InCallGuard<'_> {
    /// Returns the interface that calls NCCL.
    #[inline]
    pub(super) fn raw(&self) -> Raw<'_> {
        Raw::new(self.0.library, self.0.data.load(Ordering::Acquire))
    }
}

impl Drop for InCallGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.entries.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The bits of [`Inner::entries`] that count the threads inside: the gate admits one, but safety does not depend on
/// that.
const INSIDE: u64 = 0xffff;

/// The amount that an entry adds to [`Inner::entries`]: one more entry, and one more thread inside.
const ENTRY: u64 = (INSIDE + 1) | 1;

/// Stands for no tracker.
pub(super) const NO_TRACKER: u8 = u8::MAX;

/// The null handle.
pub(super) const NONE: *mut ncclComm = ptr::null_mut();

/// The channel on which a communicator's ranks report that their work on devices is about to be cut off.
pub(crate) trait EndNotice: Debug + Send + Sync {
    /// Reports that this rank's work on devices is about to be cut off. `error` is the error that ends the
    /// communicator. `None` means that the communicator does not end, and only its work in flight is stopped. Does not
    /// block. Every reader sees the report before it sees the effects of this thread's next actions.
    fn post(&self, error: Option<&Error>);

    /// Returns the first report that a rank made. `waited` is the time for which the caller has waited. If there is no
    /// report, this method takes only a few nanoseconds.
    fn read(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Notice>;
}

/// A rank's report of its end, as the error of the thread that waits here.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The rank has ended the communicator.
    Ended(Error),
    /// The rank has stopped work in flight, and the communicator can still be shrunk.
    Revoked(Error),
}

/// Knowledge, from outside NCCL, about the ranks that a device waits for. If a peer on the same host has died or is
/// stopped, NCCL does not report it.
pub(crate) trait LivenessProbe: Debug + Send + Sync {
    /// Returns the reason why `doing` will not end, if a rank is known to be gone. A waiting thread calls this from
    /// time to time, and passes the time for which it has waited as `waited`. In rare cases this method takes a few
    /// hundred milliseconds.
    fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error>;

    /// Returns an error that names the rank that is gone. The caller calls this method after NCCL has reported that a
    /// rank is gone. Returns `None` if all ranks are alive.
    fn culprit(&self, doing: &dyn Fn() -> String) -> Option<Error>;

    /// Returns the ranks that are known not to run at the moment. The error for a passed deadline names these ranks.
    fn standing_still(&self) -> Vec<Peer>;
}
