//! What a communicator consists of, who may use it now, and what became of it.

use std::ffi::CString;
use std::fmt::Debug;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use nccl_sys::{Library, ncclComm, ncclResult_t};

use super::live_graphs::LiveGraphs;
use super::lock::{BackOff, Device, lock_within};
use super::stream_tracker::{StreamTracker, Term};
use super::watched::Watched;
use crate::call::Call;
use crate::deadline::Deadline;
use crate::device::driver;
use crate::device::nccl::{self, Raw, Refusal};
use crate::error::{Error, Peer, Result};
use crate::flight::Flight;

/// What threads that use a communicator and the watchdog share.
#[derive(Debug)]
pub(in crate::device) struct Inner {
    pub(super) library: &'static Library,
    pub(super) device: &'static Device,
    pub(super) context: Arc<CudaContext>,
    /// NCCL's handle; null once it has been given back. Loaded, used and taken away under the lock of the device.
    pub(super) handle: AtomicPtr<ncclComm>,
    /// The order in which several communicators are locked.
    pub(super) number: u64,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Held for the whole of a call, also while it is in progress and nobody is inside NCCL; keeps the tracker of the last call.
    pub(super) gate: Mutex<Option<Arc<StreamTracker>>>,
    trackers: Mutex<Vec<Arc<StreamTracker>>>,
    /// The number of the tracker of the last call.
    pub(super) last_tracker: AtomicU8,
    /// What the calls are recorded in, if they are.
    flight: OnceLock<Arc<Flight>>,
    /// Whether calls are refused for good.
    pub(super) ended: AtomicBool,
    /// Whether NCCL has given everything back, after the end.
    pub(super) gone: AtomicBool,
    /// Whether only splits, shrinks and the end remain.
    pub(super) revoked: AtomicBool,
    pub(super) failure: OnceLock<Arc<Error>>,
    /// How many times a thread has entered NCCL, times two, plus one while one is inside.
    pub(super) entries: AtomicU64,
    /// How long the device may take for the last call and those before it with the same time, in nanoseconds; stored under the lock of the device.
    limit: AtomicU64,
    /// The number of that time: how often another one was set. Stored with it.
    term: AtomicU64,
    /// The fingerprint of the last call; words of two calls may be mixed where one is being made just now.
    label: [AtomicU64; 4],
    /// Who knows more about the other ranks, if anybody does.
    pub(super) liveness_probe: Mutex<Option<Arc<dyn LivenessProbe>>>,
    /// What the watchdog knows.
    pub(super) watched: Watched,
    /// The graphs that calls became part of.
    pub(super) graphs: LiveGraphs,
    /// The configuration's, which NCCL may look at for as long as the communicator lives.
    _strings: [Option<CString>; 2],
}

/// What a communicator is made from.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) library: &'static Library,
    pub(super) device: &'static Device,
    pub(super) context: Arc<CudaContext>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) liveness_probe: Option<Arc<dyn LivenessProbe>>,
}

impl Inner {
    pub(super) fn new(parts: Parts, handle: *mut ncclComm, strings: [Option<CString>; 2]) -> Arc<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let Parts { library, device, context, rank, world_size, liveness_probe } = parts;
        Arc::new(Self {
            library,
            device,
            context,
            handle: AtomicPtr::new(handle),
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            rank,
            world_size,
            gate: Mutex::default(),
            trackers: Mutex::default(),
            last_tracker: AtomicU8::new(NO_TRACKER),
            flight: OnceLock::new(),
            ended: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            failure: OnceLock::new(),
            entries: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            term: AtomicU64::new(0),
            label: Default::default(),
            liveness_probe: Mutex::new(liveness_probe),
            watched: Watched::default(),
            graphs: LiveGraphs::default(),
            _strings: strings,
        })
    }

    /// Whether calls are refused for good.
    pub(in crate::device) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether collectives are refused.
    pub(super) fn is_over(&self) -> bool {
        self.is_ended() || self.revoked.load(Ordering::Acquire)
    }

    /// Whether collectives are refused and the rest is not.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire) && !self.is_ended()
    }

    /// Why calls are refused.
    pub(super) fn cause(&self) -> Arc<Error> {
        let by = Peer::unknown(self.rank);
        let closed = || Arc::new(Error::Aborted { doing: "the communicator was revoked or closed".to_owned(), by });
        self.failure.get().cloned().unwrap_or_else(closed)
    }

    /// The refusal of a call.
    #[cold]
    pub(super) fn refuse(&self, doing: &dyn Fn() -> String) -> Error {
        Error::Poisoned { call: doing(), cause: self.cause() }
    }

    /// Takes the communicator for one call.
    #[inline]
    pub(super) fn enter(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        limit: Duration,
    ) -> Result<MutexGuard<'_, Option<Arc<StreamTracker>>>> {
        let Some(gate) = lock_within(&self.gate, limit) else { return Err(self.expire(doing, limit)) };
        if self.is_over() { Err(self.refuse(doing)) } else { Ok(gate) }
    }

    /// Calls into NCCL; `true` where it is still in progress. What fails ends the communicator, unless it is harmless.
    #[inline]
    pub(super) fn inside(
        self: &Arc<Self>,
        doing: &dyn Fn() -> String,
        limit: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<bool> {
        self.inside_bound(driver::bind, doing, limit, work)
    }

    /// As [`Inner::inside`], with the context made current in one of the driver's ways. For collectives, which bring their device along, it is enough
    /// that some context is.
    #[inline]
    pub(super) fn inside_bound(
        self: &Arc<Self>,
        bind: fn(&CudaContext) -> std::result::Result<(), DriverError>,
        doing: &dyn Fn() -> String,
        limit: Duration,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> Result<bool> {
        let outcome = {
            let Some(_lock) = lock_within(&self.device.lock, limit) else { return Err(self.expire(doing, limit)) };
            let handle = self.handle.load(Ordering::Acquire);
            if handle.is_null() || self.is_ended() {
                return Err(self.refuse(doing));
            }
            self.call(bind, handle, work)
        };
        outcome.map_err(|refusal| self.refused(refusal, doing))
    }

    /// The lock of the device is held, and the handle is alive.
    #[inline]
    pub(super) fn call(
        &self,
        bind: fn(&CudaContext) -> std::result::Result<(), DriverError>,
        handle: *mut ncclComm,
        work: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
    ) -> std::result::Result<bool, Refusal> {
        bind(&self.context).map_err(|error| Refusal::driver("cuCtxSetCurrent", error))?;
        let _entry = Entry::new(&self.entries);
        let raw = Raw::new(self.library, handle);
        work(&raw)?;
        Ok(raw.is_in_progress())
    }

    /// What NCCL says of the communicator now; nothing where the device was not free within the limit.
    pub(super) fn state(&self, limit: Duration) -> Option<std::result::Result<ncclResult_t, Refusal>> {
        const CALL: &str = "ncclCommGetAsyncError";
        // Without the lock: the driver may hold this thread up.
        if let Err(error) = driver::bind(&self.context) {
            return Some(Err(Refusal::driver("cuCtxSetCurrent", error)));
        }
        let _lock = lock_within(&self.device.lock, limit)?;
        let handle = self.handle.load(Ordering::Acquire);
        if handle.is_null() {
            return None;
        }
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the handle is alive while the lock of the device is held, and the answer goes to a variable of ours.
        let answer = unsafe { self.library.ncclCommGetAsyncError(handle, &mut state) };
        let judged = nccl::check(self.library, handle, CALL, answer).and_then(|_| match state {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(state),
            code => Err(nccl::refused(self.library, handle, CALL, code)),
        });
        Some(judged)
    }

    /// Ends the communicator if NCCL says that something went wrong in the background.
    pub(in crate::device) fn look(self: &Arc<Self>) {
        if self.is_ended() {
            return;
        }
        if let Some(Err(refusal)) = self.state(Duration::ZERO) {
            let error = self.explained(refusal.into_error(self.last_call()));
            self.fail(error, Duration::ZERO);
        }
    }

    /// From here on the device may take `limit` for a call. What is on streams already keeps the time that it was given. One thread makes calls.
    #[inline]
    pub(super) fn allow(&self, limit: Duration) -> std::result::Result<(), Refusal> {
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        if self.limit.load(Ordering::Relaxed) == nanoseconds {
            return Ok(());
        }
        self.begin_term(nanoseconds).map_err(|error| Refusal::driver("cuEventRecord", error))
    }

    /// Marks what calls with another limit have put on streams, and sets this one.
    #[cold]
    fn begin_term(&self, nanoseconds: u64) -> std::result::Result<(), DriverError> {
        driver::bind(&self.context)?;
        let noted = self.flight().map_or(0, |flight| flight.device_calls_noted());
        // The driver is asked without the lock of the list, which the timekeeper takes.
        let trackers = self.trackers().clone();
        for tracker in trackers.iter().filter(|tracker| tracker.has_new_calls()) {
            tracker.mark(&self.context, Instant::now(), noted, || self.term())?;
        }
        self.limit.store(nanoseconds, Ordering::Relaxed);
        self.term.store(self.term.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Ok(())
    }

    /// What the device may take for calls that no mark stands behind yet.
    pub(super) fn term(&self) -> Term {
        Term { number: self.term.load(Ordering::Relaxed), limit: self.limit() }
    }

    /// Puts a call on record that is on the stream now.
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

    /// By what the recorder knows a stream, where one of its calls may be on record.
    pub(super) fn known_tracker(&self, stream: &CudaStream) -> Option<u8> {
        self.trackers().iter().find(|tracker| tracker.is(stream)).map(|tracker| tracker.number)
    }

    /// By what the recorder knows the stream of the last call.
    #[inline]
    pub(super) fn last_tracker(&self) -> u8 {
        self.last_tracker.load(Ordering::Relaxed)
    }

    /// Has the calls' progress recorded.
    pub(super) fn record_in(&self, flight: &Arc<Flight>) {
        let _ = self.flight.set(Arc::clone(flight));
    }

    /// What the calls are recorded in, if they are.
    pub(super) fn flight(&self) -> Option<&Arc<Flight>> {
        self.flight.get()
    }

    #[cold]
    fn tracker(&self, stream: &Arc<CudaStream>) -> Arc<StreamTracker> {
        let mut trackers = self.trackers();
        if let Some(known) = trackers.iter().find(|tracker| tracker.is(stream)) {
            return Arc::clone(known);
        }
        // One of the numbers that no tracker has now, where there is one; calls on two of one number are over when those of either are.
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

    /// The last call in words.
    pub(super) fn last_call(&self) -> String {
        self.call_of(self.last_label())
    }

    /// The fingerprint of the last call.
    pub(super) fn last_label(&self) -> [u64; 4] {
        std::array::from_fn(|index| self.label[index].load(Ordering::Relaxed))
    }

    /// The call with this fingerprint in words.
    pub(super) fn call_of(&self, words: [u64; 4]) -> String {
        let who = format!("rank {} of {}", self.rank, self.world_size);
        Call::from_fingerprint(words).map_or_else(|| format!("{who}: the last call"), |call| format!("{who}: {call}"))
    }

    /// How long the device may take for the last call.
    pub(in crate::device) fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit.load(Ordering::Relaxed))
    }
}

/// Waits until no call of these communicators is in progress any more. `stop` is asked now and then whether to go on.
pub(super) fn settle(
    inners: &[&Arc<Inner>],
    doing: &dyn Fn() -> String,
    deadline: &Deadline,
    stop: impl Fn(&Inner) -> bool,
) -> std::result::Result<(), (usize, Error)> {
    let mut back_off = BackOff::default();
    loop {
        let mut in_progress = None;
        for (index, inner) in inners.iter().enumerate() {
            match inner.state(deadline.remaining()) {
                _ if inner.is_ended() || stop(inner) => return Err((index, inner.refuse(doing))),
                Some(Ok(ncclResult_t::ncclSuccess)) => {}
                Some(Ok(_)) | None => in_progress = Some(index),
                Some(Err(refusal)) => return Err((index, refusal.into_error(doing()))),
            }
        }
        let Some(late) = in_progress else { return Ok(()) };
        if deadline.has_passed() {
            return Err((late, inners[late].timeout(doing(), deadline.elapsed())));
        }
        if let Some(error) = inners[late].trouble(doing, deadline.elapsed()) {
            return Err((late, error));
        }
        back_off.rest();
    }
}

/// A thread's stay inside NCCL.
struct Entry<'a>(&'a AtomicU64);

impl<'a> Entry<'a> {
    #[inline]
    fn new(entries: &'a AtomicU64) -> Self {
        // One thread at a time, the one that holds the lock of the device.
        entries.store(entries.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Self(entries)
    }
}

impl Drop for Entry<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// Stands for no tracker.
pub(super) const NO_TRACKER: u8 = u8::MAX;

/// The null handle.
pub(super) const NONE: *mut ncclComm = ptr::null_mut();

/// What others know of the ranks that a device waits for. NCCL says nothing of a peer on the same host that has died or is stopped.
pub(crate) trait LivenessProbe: Debug + Send + Sync {
    /// Why `doing` will not end, where a rank is known to be gone. Whoever waits asks now and then, and says for how long it has waited. The
    /// answer seldom takes some hundred milliseconds.
    fn trouble(&self, doing: &dyn Fn() -> String, waited: Duration) -> Option<Error>;

    /// Which rank is gone, where NCCL says that one is; `None` where all are there.
    fn culprit(&self, doing: &dyn Fn() -> String) -> Option<Error>;

    /// The ranks that are known not to run at the moment. The error of a deadline that passes names them.
    fn standing_still(&self) -> Vec<Peer>;
}
